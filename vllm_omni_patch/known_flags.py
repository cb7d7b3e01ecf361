# SPDX-License-Identifier: Apache-2.0
"""Make our variables known to vLLM, and keep them out of the key of its torch.compile cache.

``vllm.envs.environment_variables`` is asked in four ways: ``name in …`` (the warning about unknown variables, the
check behind ``--fail-on-environ-validation``), iteration (Ray executors copy those names to workers), ``…[name]()``,
and ``.items()`` (``compile_factors``, the cache key; releases before it hash a list of their own). Ours are entries
like any other, except for the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from vllm_omni_patch.flags import Flag

TABLE = "environment_variables"


class _Variables(dict[str, Callable[[], Any]]):
    """vLLM's table with our names in it, which ``items()`` and ``values()`` leave out."""

    ours: frozenset[str] = frozenset()

    def items(self) -> Any:
        return {name: getter for name, getter in super().items() if name not in self.ours}.items()

    def values(self) -> Any:
        return dict(self.items()).values()


def tell(envs: ModuleType, rows: Iterable[Flag]) -> None:
    """Enter ``rows`` in the table of the module ``vllm.envs``. Names that vLLM has itself stay vLLM's.

    Does nothing where the module has no such table.
    """
    table = vars(envs).get(TABLE)
    if not isinstance(table, dict):
        return
    stock = dict(table.items())  # without ours, should they be in it already
    names = [flag.name for flag in rows if flag.name not in stock]
    known = _Variables(stock)
    known.ours = frozenset(names)
    known.update({name: partial(os.environ.get, name) for name in names})
    setattr(envs, TABLE, known)
