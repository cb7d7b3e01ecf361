# SPDX-License-Identifier: Apache-2.0
"""Wrappers around a function: ours are put there with wrapt, other packages' are found, and so are the places where the
bare function can still be reached.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

# Attribute of our wrapper functions that says whose they are: (patch name, target name).
MARK = "_vllm_omni_patch_owner"

# Decorators that vLLM itself uses come from here; they are no sign of another package that patches.
_ORDINARY = frozenset({"torch", "functools", "contextlib", "abc", "typing", "typing_extensions", "numba", "triton"})
_LIMIT = 100
_NOTHING = object()  # a class that inherits the attribute holds nothing itself


def wrap(
    module: ModuleType, qualname: str, owner: Any, wrapper: Callable[..., Any], mark: tuple[str, str]
) -> tuple[Any, Callable[[], None]]:
    """Put ``wrapper(wrapped, instance, args, kwargs)`` around ``module.qualname``, which is an attribute of ``owner``.

    Args:
        mark: (patch name, target name), which :func:`ours` reads back.

    Returns:
        What now stands at the attribute, and the undo. The undo raises RuntimeError where somebody else has wrapped
        or replaced the attribute since.
    """
    import wrapt

    attribute = qualname.rpartition(".")[2]
    before = held(owner, attribute)
    setattr(wrapper, MARK, mark)
    wrapt.wrap_function_wrapper(module, qualname, wrapper)
    installed = vars(owner).get(attribute)

    def undo() -> None:
        if vars(owner).get(attribute) is not installed:
            raise RuntimeError(f"{mark[1]} was wrapped again by somebody else; left as it is")
        put_back(owner, attribute, before)

    return installed, undo


def held(owner: Any, attribute: str) -> Any:
    """What ``owner`` itself holds at ``attribute``, for :func:`put_back`; a mark of its own where it holds nothing."""
    return vars(owner).get(attribute, _NOTHING)


def put_back(owner: Any, attribute: str, before: Any) -> None:
    """Make ``owner`` hold again at ``attribute`` what :func:`held` found."""
    if held(owner, attribute) is before:
        return
    if before is _NOTHING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, before)


def unwrapped(value: Any) -> Iterator[Any]:
    """``value`` and what it wraps, from the outside in; the last one is the innermost function or class."""
    for _ in range(_LIMIT):
        yield value
        inner = _inner(value)
        if inner is None or inner is value:
            return
        value = inner


def ours(value: Any) -> tuple[str, str] | None:
    """(patch, target) of the outermost wrapper of ours around ``value``; ``None`` when there is none."""
    for layer in unwrapped(value):
        mark = getattr(_wrapper(layer), MARK, None)
        if isinstance(mark, tuple):
            return mark
    return None


def depth(value: Any, patch: str) -> int:
    """How many wrappers of ``patch`` stand around ``value``."""
    return sum(getattr(_wrapper(layer), MARK, ("",))[0] == patch for layer in unwrapped(value))


def foreign(value: Any, home: str) -> list[str]:
    """Wrappers and replacements by other packages than the top-level package ``home``, from the outside in."""
    found = []
    everything = list(unwrapped(value))
    for layer in everything:
        wrapper = _wrapper(layer)
        if wrapper is not None and getattr(wrapper, MARK, None) is not None:
            continue
        where = _module_of(wrapper if wrapper is not None else layer)
        if where is None or where.partition(".")[0] in _ORDINARY | {home}:
            continue
        what = "replaced by" if layer is everything[-1] else "wrapped by"
        found.append(f"{what} {where}:{_name(wrapper if wrapper is not None else layer)}")
    return found


def overrides(owner: Any, attribute: str) -> list[str]:
    """Subclasses of ``owner`` that define ``attribute`` themselves without a wrapper of ours."""
    found: list[str] = []
    if not isinstance(owner, type):
        return found
    waiting: list[type] = list(type.__subclasses__(owner))
    seen: set[type] = set()
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        waiting.extend(type.__subclasses__(cls))
        own = vars(cls).get(attribute)
        if own is not None and ours(own) is None:
            found.append(f"{cls.__module__}.{cls.__qualname__} overrides it")
    return sorted(found)


def copies(original: Any, owner: Any, attribute: str) -> list[str]:
    """Imported modules of the same package that hold the bare function under its name."""
    if not isinstance(owner, ModuleType):
        return []
    home = owner.__name__.partition(".")[0]
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != home or not isinstance(module, ModuleType) or module is owner:
            continue
        if vars(module).get(attribute) is original:
            found.append(f"{name} imported it by name before")
    return sorted(found)


def _wrapper(layer: Any) -> Any:
    """The function that a wrapt wrapper calls; ``None`` for anything else."""
    try:
        return layer._self_wrapper if type(layer) is not layer.__class__ else None
    except Exception:
        return None


def _name(value: Any) -> str:
    """The name in the code: ``functools.wraps`` copies ``__name__`` from what is wrapped."""
    code = getattr(value, "__code__", None)
    return str(code.co_name if code is not None else getattr(value, "__qualname__", type(value).__name__))


def _inner(value: Any) -> Any:
    if type(value) in (staticmethod, classmethod):
        return value.__func__
    if type(value) is property:
        return value.fget
    if isinstance(value, functools.partial | functools.partialmethod):
        return value.func
    try:
        if isinstance(value, type) and type(value) is value.__class__:
            return None
        return value.__wrapped__
    except Exception:
        return None


def _module_of(value: Any) -> str | None:
    """Where the code of ``value`` stands. ``functools.wraps`` copies ``__module__``, so the globals are asked first."""
    if isinstance(value, FunctionType) and type(value) is FunctionType:
        return str(value.__globals__.get("__name__", value.__module__))
    if isinstance(value, MethodType) and type(value) is MethodType:
        return _module_of(value.__func__)
    if isinstance(value, type) and type(value) is value.__class__:
        return value.__module__
    where = type(value).__module__
    return None if where == "builtins" else where
