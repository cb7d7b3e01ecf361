# SPDX-License-Identifier: Apache-2.0
"""Add a declaration to an owner class, and read it back. Shared by the family modules.

A class that declares natively (vLLM-Omni 0.30 has four) keeps its own method: its release prints from it, and its lines
stand. Ours goes beside it under ``specs.CORRECTED``, which the collector prefers; so the families never stand aside
for a native declaration, they complete it (residency, storage, the undeclared entries) and correct it where it is
wrong. Each family says where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from ..specs import CORRECTED, METHOD, ModelLocalKVSpec

Declare = Callable[[Any], Sequence[ModelLocalKVSpec]]


def attach(hook: Hook, declare: Declare) -> Undo:
    """Make the class ``hook.original`` answer with ``declare(owner)``; returns the undo.

    Raises:
        TypeError: the target is not a class.
        RuntimeError: (from the undo) other code has replaced the method since.
    """
    owner = hook.original
    if not isinstance(owner, type):
        raise TypeError(f"{hook.target.name} is a {type(owner).__name__}, not a class; nothing was declared")
    present = getattr(owner, METHOD, None)
    name = METHOD if present is None or getattr(present, "__vllm_omni_patch__", False) else CORRECTED

    def specs(self: Any) -> Sequence[ModelLocalKVSpec]:
        hook.note_use()
        return declare(self)

    specs.__name__ = name
    specs.__qualname__ = f"{owner.__qualname__}.{name}"
    specs.__doc__ = declare.__doc__
    specs.__vllm_omni_patch__ = True  # type: ignore[attr-defined]
    setattr(owner, name, specs)

    def undo() -> None:
        if vars(owner).get(name) is not specs:
            raise RuntimeError(f"{hook.target.name}.{name} was replaced by other code and is left in place")
        delattr(owner, name)

    return undo


def declares(hook: Hook) -> bool:
    """Read back: the class answers with our declaration, natively declared or not."""
    owner = hook.original
    return any(getattr(vars(owner).get(name), "__vllm_omni_patch__", False) for name in (CORRECTED, METHOD))


def parameter_dtype(module: Any) -> Any:
    """The ``torch.dtype`` of a module's first parameter: what its release has cast it to.

    Raises:
        ValueError: the module has no parameter.
    """
    for parameter in module.parameters():
        return parameter.dtype
    raise ValueError(f"{type(module).__name__} has no parameters, so the dtype of its cache is unknown")
