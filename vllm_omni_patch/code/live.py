# SPDX-License-Identifier: Apache-2.0
"""A module as it stands in this process: names, classes and parameter lists from its objects.

Wrappers are looked through, ours and other packages', so that the answer is about the code that vLLM shipped.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import tokenize
import types
from collections.abc import Iterator
from typing import Any

from vllm_omni_patch.code.views import Found, Missing, Seen

# What Python itself puts into every module and class; nothing that their code binds.
# fmt: off
_MODULE_IMPLICIT = frozenset((
    "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__builtins__",
    "__path__", "__annotations__", "__annotate__", "__conditional_annotations__",
))
_IMPLICIT = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__type_params__",
    "__parameters__", "__orig_bases__", "__abstractmethods__", "__match_args__", "__dataclass_fields__",
    "__dataclass_params__", "_abc_impl",
))
# fmt: on


def source_text(module: types.ModuleType) -> str | None:
    """Text of the module's file; ``None`` where there is none to read (byte code only, an extension)."""
    path = getattr(module, "__file__", None)
    if not path or not path.endswith(".py"):
        return None
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def innermost(value: Any, name: str) -> tuple[Any, str]:
    """The function or class behind wrappers, and how it is bound: ``""``, ``static``, ``class`` or ``property``.

    ``functools.wraps`` and wrapt wrappers lead on by ``__wrapped__``. A decorator that keeps neither is looked
    through by its closure, if that holds a function called ``name``.
    """
    binding = ""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, staticmethod | classmethod) and not _is_proxy(value):
            binding = binding or ("static" if isinstance(value, staticmethod) else "class")
            value = value.__func__
        elif isinstance(value, property) and not _is_proxy(value):
            return value.fget, "property"
        elif isinstance(value, functools.cached_property):
            return value.func, "property"
        elif issubclass(type(value), type):
            return value, binding
        else:
            value = _inner(value, name)
    return value, binding


def _is_proxy(value: Any) -> bool:
    return type(value) is not value.__class__


def _inner(value: Any, name: str) -> Any:
    try:
        wrapped = value.__wrapped__
    except Exception:
        wrapped = None
    if wrapped is not None:
        return wrapped
    if isinstance(value, types.FunctionType):
        if value.__code__.co_name != name:
            for cell in value.__closure__ or ():
                inside = _cell(cell)
                if callable(inside) and _leads_to(inside, name):
                    return inside
        return value
    if isinstance(value, functools.partial | functools.partialmethod):
        return value
    for inside in _fields(value):
        if _leads_to(inside, name):
            return inside
    return value


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _fields(value: Any) -> list[Any]:
    try:
        return list(vars(value).values())
    except TypeError:
        return []


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


class LiveView:
    """The :class:`~vllm_omni_patch.code.views.View` of an imported module."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self._source: Any = None

    def _is_ours(self, value: Any) -> bool:
        return getattr(value, "__module__", None) == self.module.__name__

    def _bases(self, cls: type) -> Iterator[type]:
        return (klass for klass in cls.__mro__ if self._is_ours(klass))

    def lookup(self, qualname: str) -> tuple[Any, str, str]:
        """What ``qualname`` leads to behind wrappers, its binding, and the name of the class that holds it.

        Raises:
            Missing: the module does not define it.
        """
        first, *rest = qualname.split(".")
        if not self.has_module_attribute(first):
            raise Missing(f"{first} is not in the module")
        value, binding = innermost(vars(self.module)[first], first)
        holder, path = "", first
        if isinstance(value, type | types.FunctionType) and not self._is_ours(value):
            raise Missing(f"{path} is defined in another module and only imported here", elsewhere=True)
        for part in rest:
            if not isinstance(value, type):
                if isinstance(value, types.ModuleType):
                    raise Missing(f"{path} is defined in another module and only imported here", elsewhere=True)
                raise Missing(f"{path} is not a class here")
            for klass in self._bases(value):
                if _binds(klass, part):
                    holder = path if klass is value else klass.__qualname__
                    value, binding = innermost(vars(klass)[part], part)
                    break
            else:
                raise Missing(f"{path} does not define {part}, nor does a base class of the same module")
            path = f"{path}.{part}"
        if isinstance(value, types.ModuleType):
            raise Missing(f"{path} is defined in another module and only imported here", elsewhere=True)
        return value, binding, holder

    def find(self, qualname: str) -> list[Found]:
        owner, _, name = qualname.rpartition(".")
        value, binding, holder = self.lookup(qualname)
        if isinstance(value, type):
            return [Found("class", qualname, holder, self._constructor(qualname))]
        if binding == "property":
            return [Found("property", owner, holder)]
        if not isinstance(value, types.FunctionType):
            return [Found("other", owner, holder)]
        skip = bool(holder) and (binding != "static" or name == "__new__")
        return [Found("function", owner, holder, parameters(value, skip))]

    def _constructor(self, qualname: str) -> tuple[Seen, ...] | None:
        try:
            value, _, holder = self.lookup(f"{qualname}.__init__")
        except Missing:
            return None
        if not isinstance(value, types.FunctionType) or _is_generated(value, "__init__"):
            return None
        return parameters(value, bool(holder))

    def _owners(self, owner: str) -> list[type]:
        try:
            value = self.lookup(owner)[0] if owner else None
        except Missing:
            return []
        return list(self._bases(value)) if isinstance(value, type) else []

    def has_method(self, owner: str, name: str) -> bool:
        return any(_binds(klass, name) and self._is_method(vars(klass)[name], name) for klass in self._owners(owner))

    def _is_method(self, value: Any, name: str) -> bool:
        inner, binding = innermost(value, name)
        if isinstance(inner, type):
            return self._is_ours(inner)
        return bool(binding) or isinstance(inner, types.FunctionType | functools.partialmethod)

    def has_class_attribute(self, owner: str, name: str) -> bool:
        return any(
            _binds(klass, name) or name in _annotations(klass) or _assigned_on_self(klass, name)
            for klass in self._owners(owner)
        )

    def has_module_attribute(self, name: str) -> bool:
        return name in vars(self.module) and name not in _MODULE_IMPLICIT

    def has_string(self, text: str) -> bool:
        from vllm_omni_patch.code.source import SourceView

        if self._source is None:
            self._source = source_text(self.module) or ""
        if isinstance(self._source, str):
            if text not in self._source:
                return False
            try:
                self._source = SourceView(self._source)
            except SyntaxError:
                return False
        return bool(self._source.has_string(text))


def _is_generated(value: Any, name: str) -> bool:
    function = innermost(value, name)[0]
    return isinstance(function, types.FunctionType) and function.__code__.co_filename == "<string>"


def _binds(klass: type, name: str) -> bool:
    if name not in vars(klass) or name in _IMPLICIT:
        return False
    # Python sets __hash__ to None in a class that defines __eq__ alone.
    return not (name == "__hash__" and vars(klass)[name] is None) and not _is_generated(vars(klass)[name], name)


def _annotations(klass: type) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 14):
            import annotationlib

            return annotationlib.get_annotations(klass, format=annotationlib.Format.FORWARDREF)
        return dict(vars(klass).get("__annotations__", {}))
    except Exception:
        return {}


def _assigned_on_self(klass: type, name: str) -> bool:
    for key, value in vars(klass).items():
        accessors = [value.fget, value.fset, value.fdel] if isinstance(value, property) else [value]
        for accessor in accessors:
            function = innermost(accessor, key)[0]
            code = function.__code__ if isinstance(function, types.FunctionType) else None
            if code is not None and code.co_argcount and _stores(code, code.co_varnames[0], name):
                return True
    return False


def _stores(code: types.CodeType, instance: str, name: str) -> bool:
    """The code, or a function within it, assigns ``instance.name``."""
    if name in code.co_names:
        loaded: Any = None
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR" and instruction.argval == name and loaded == instance:
                return True
            if instruction.opname not in ("EXTENDED_ARG", "CACHE", "NOP"):
                loaded = _loaded(instruction)
    return any(_stores(inner, instance, name) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _loaded(instruction: dis.Instruction) -> Any:
    """Name of the local that the instruction leaves on top; newer Pythons handle two locals with one."""
    if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST_LOAD_FAST")):
        return instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
    return None
