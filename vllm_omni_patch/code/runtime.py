# SPDX-License-Identifier: Apache-2.0
"""Does an imported module still hold what its source file defines? Another package may have replaced it since.

The verdict comes from the file. This is the check of the object that would be hooked: it is there, belongs to the
module, and takes the parameters that the contract asks for. Wrappers are looked through, ours and other packages'.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from vllm_omni_patch.code.contract import check_parameters, native_reason
from vllm_omni_patch.code.found import Found, Missing, Seen
from vllm_omni_patch.patch import Contract, Native


def check(contract: Contract, module: types.ModuleType, qualname: str) -> list[str]:
    """What the object at ``qualname`` lacks, one sentence each.

    Attributes that instances get in their methods are not looked at: only source text shows them.
    """
    try:
        found, owner = _find(module, qualname)
    except Missing as missing:
        return [str(missing)]
    # A class without a constructor of its own is for the text to judge.
    problems = [] if found.kind == "class" and found.parameters is None else check_parameters(contract, found, qualname)
    problems += [f"{found.owner} has no method {name}" for name in contract.base_methods if not hasattr(owner, name)]
    names = contract.module_attributes
    return problems + [f"the module has no {name}" for name in names if name not in vars(module)]


def native(signs: Native | None, module: types.ModuleType, qualname: str) -> str:
    """Why the module already does what the patch brings, as far as objects show it; empty when it does not."""
    if signs is None:
        return ""
    for name in signs.module_attributes:
        if name in vars(module):
            return native_reason(signs, f"the module has {name}")
    try:
        found, owner = _find(module, qualname)
    except Missing:
        return ""
    for name in signs.base_methods if isinstance(owner, type) else ():
        if any(name in vars(cls) for cls in _own_bases(module, owner)):
            return native_reason(signs, f"{found.owner} has {name}")
    return ""


def _find(module: types.ModuleType, qualname: str) -> tuple[Found, Any]:
    """What ``qualname`` leads to behind wrappers, and the class (or module) that a contract's methods belong to.

    Raises:
        Missing: the module does not define it.
    """
    first, *rest = qualname.split(".")
    if first not in vars(module):
        raise Missing(f"{first} is not in the module")
    value, binding = innermost(vars(module)[first], first)
    if isinstance(value, type | types.FunctionType) and value.__module__ != module.__name__:
        raise Missing(f"{first} is defined in another module ({value.__module__})", elsewhere=True)
    owner: Any = value if isinstance(value, type) else module
    holder, path = "", first
    for part in rest:
        if not isinstance(value, type):
            raise Missing(f"{path} is not a class here")
        owner = value
        held = next((cls for cls in _own_bases(module, owner) if part in vars(cls)), None)
        if held is None:
            raise Missing(f"{path} does not define {part}, nor does a base class of the same module")
        value, binding = innermost(vars(held)[part], part)
        holder, path = path if held is owner else held.__qualname__, f"{path}.{part}"
    name, parent = path.rpartition(".")[2], path.rpartition(".")[0]
    if isinstance(value, type):
        return Found("class", qualname, holder, _constructor(module, value)), value
    if binding == "property":
        return Found("property", parent, holder), owner
    if not isinstance(value, types.FunctionType):
        return Found("other", parent, holder), owner
    skip = bool(holder) and (binding != "static" or name == "__new__")
    return Found("function", parent, holder, parameters(value, skip)), owner


def _own_bases(module: types.ModuleType, cls: type) -> Iterator[type]:
    """The class and its bases that the module itself defines."""
    return (one for one in cls.__mro__ if one.__module__ == module.__name__)


def _constructor(module: types.ModuleType, cls: type) -> tuple[Seen, ...] | None:
    held = next((one for one in _own_bases(module, cls) if "__init__" in vars(one)), None)
    value = innermost(vars(held)["__init__"], "__init__")[0] if held else None
    if not isinstance(value, types.FunctionType) or value.__code__.co_filename == "<string>":  # a dataclass's
        return None
    return parameters(value, skip_first=True)


def innermost(value: Any, name: str) -> tuple[Any, str]:
    """The function or class behind wrappers, and how it is bound: ``""``, ``static``, ``class`` or ``property``.

    ``functools.wraps`` and wrapt wrappers lead on by ``__wrapped__``. A decorator that keeps neither is looked
    through by what it holds, if that is a function called ``name``.
    """
    binding = ""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        plain = type(value) is value.__class__  # no proxy
        if plain and isinstance(value, staticmethod | classmethod):
            binding = binding or ("static" if isinstance(value, staticmethod) else "class")
            value = value.__func__
        elif plain and isinstance(value, property | functools.cached_property):
            return value.fget if isinstance(value, property) else value.func, "property"
        elif issubclass(type(value), type):
            return value, binding
        else:
            value = _inner(value, name)
    return value, binding


def _inner(value: Any, name: str) -> Any:
    try:
        if (wrapped := value.__wrapped__) is not None:
            return wrapped
    except Exception:
        pass
    if isinstance(value, types.FunctionType):
        held = [] if value.__code__.co_name == name else [_cell(cell) for cell in value.__closure__ or ()]
    else:
        held = list(getattr(value, "__dict__", {}).values())
    return next((one for one in held if _leads_to(one, name)), value)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _leads_to(value: Any, name: str) -> bool:
    try:
        value = inspect.unwrap(value)
    except Exception:
        return False
    return isinstance(value, types.FunctionType) and value.__code__.co_name == name


def parameters(function: types.FunctionType, skip_first: bool) -> tuple[Seen, ...]:
    """Parameters as the function's code has them, whatever ``__signature__`` says."""
    code = function.__code__
    defaults = len(function.__defaults__ or ())
    names = code.co_varnames
    seen = [
        Seen(
            names[i],
            "positional" if i < code.co_posonlyargcount else "positional_or_keyword",
            i < code.co_argcount - defaults,
        )
        for i in range(code.co_argcount)
    ]
    if skip_first:
        seen = seen[1:]
    end = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        seen.append(Seen(names[end], "var_positional", False))
    for name in names[code.co_argcount : end]:
        seen.append(Seen(name, "keyword_only", name not in (function.__kwdefaults__ or {})))
    if code.co_flags & inspect.CO_VARKEYWORDS:
        seen.append(Seen(names[end + bool(code.co_flags & inspect.CO_VARARGS)], "var_keyword", False))
    return tuple(seen)
