# SPDX-License-Identifier: Apache-2.0
"""Make our variables known to vLLM, and keep them out of the key of its torch.compile cache.

``vllm.envs.environment_variables`` is asked in four ways: ``name in …`` (the warning about unknown variables, the
check behind ``--fail-on-environ-validation``), iteration (Ray executors copy those names to workers), ``…[name]()``,
and ``.items()`` (``compile_factors``, the cache key; releases before it hash a list of their own). Ours are entries
like any other, except for the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.loading import discover
from vllm_omni_patch.loading.apply import Refused
from vllm_omni_patch.patch import Hook, Undo


class _Variables(dict[str, Callable[[], Any]]):
    """vLLM's table with our names in it, which ``items()`` and ``values()`` leave out."""

    ours: frozenset[str] = frozenset()

    def items(self) -> Any:
        return {name: getter for name, getter in super().items() if name not in self.ours}.items()

    def values(self) -> Any:
        return dict(self.items()).values()


def install(hook: Hook) -> Undo:
    """Put our names into vLLM's table. Names that vLLM has itself stay vLLM's.

    Raises:
        Refused: it is no table.
    """
    stock = hook.original
    if not isinstance(stock, dict):
        raise Refused(f"{hook.target.name} is {type(stock).__name__}, not a dict")
    found = discover.find()
    # Removed variables too: the loader logs what replaced them, so vLLM need not call them unknown.
    every = [flag.name for flag in discover.all_flags(found)] + [row.name for row in discover.all_removed(found)]
    names = [name for name in every if name not in stock]
    table = _Variables(stock)
    table.ours = frozenset(names)
    table.update({name: partial(os.environ.get, name) for name in names})
    setattr(hook.owner, hook.attribute, table)

    def undo() -> None:
        if vars(hook.owner).get(hook.attribute) is not table:
            raise RuntimeError(f"{hook.target.name} was replaced by somebody else; left as it is")
        stock.update(dict(table.items()))  # what others have entered since
        setattr(hook.owner, hook.attribute, stock)

    return undo


def known(hook: Hook) -> bool:
    """Read back: vLLM's table has our names."""
    table = vars(hook.owner).get(hook.attribute)
    return isinstance(table, _Variables) and all(flag.name in table for flag in flags.CORE)
