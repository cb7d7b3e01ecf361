# SPDX-License-Identifier: Apache-2.0
"""What a contract may ask of a module, whether it is imported or only read: see :class:`View`.

The two answers come from ``source.py`` (text) and ``live.py`` (objects). Both follow one rule of sight, so that they
agree: what counts is what *this* module defines. A class inherits from classes of the same module; anything that
comes from elsewhere is not seen, because text alone cannot tell what it holds. The one thing they cannot agree on is
imported data: an object does not tell where it was made, as classes and functions do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["class", "function", "property", "other"]

# Decorators and names for which both sides must agree without looking at what they do.
PROPERTY_SUFFIX = "property"
ACCESSORS = ("setter", "getter", "deleter")


@dataclass(frozen=True)
class Seen:
    """A parameter in the code. ``kind``: a ``patch.ParameterKind``. ``required``: the caller must pass it."""

    name: str
    kind: str
    required: bool

    def __str__(self) -> str:
        stars = {"var_positional": "*", "var_keyword": "**"}.get(self.kind, "")
        return f"{stars}{self.name}{'' if self.required or stars else '=...'}"


@dataclass(frozen=True)
class Found:
    """What a qualified name leads to: ``kind``, and for a function its parameters without ``self`` or ``cls``.

    ``owner`` is the qualified name of the class whose methods and attributes a contract asks about: the class itself,
    or the one that owns the method; empty for a function of the module. ``definer`` is the class that really holds
    the method, which differs from ``owner`` when it is inherited.
    """

    kind: Kind
    owner: str
    definer: str = ""
    parameters: tuple[Seen, ...] | None = None


class Missing(LookupError):
    """The qualified name leads nowhere in this module. ``str()`` is a sentence for users.

    ``elsewhere``: the name is here, but belongs to another module.
    """

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


class View(Protocol):
    """A module, seen for a contract."""

    def find(self, qualname: str) -> list[Found]:
        """What ``qualname`` may be: one answer, or several where a condition decides between definitions.

        Raises:
            Missing: this module does not define it.
        """

    def has_method(self, owner: str, name: str) -> bool:
        """The class ``owner``, or a base of it in this module, defines a method, property or class ``name``."""

    def has_class_attribute(self, owner: str, name: str) -> bool:
        """As :meth:`has_method`, for anything bound or annotated there, or assigned on ``self`` in a method."""

    def has_module_attribute(self, name: str) -> bool:
        """The module defines or imports ``name``."""

    def has_string(self, text: str) -> bool:
        """The module's code holds the string constant ``text``; docstrings do not count."""


def signature(parameters: tuple[Seen, ...]) -> str:
    """``(a, b=..., *, c)``: a parameter list for people."""
    parts: list[str] = []
    starred = False
    for index, parameter in enumerate(parameters):
        if parameter.kind == "keyword_only" and not starred:
            parts.append("*")
            starred = True
        starred = starred or parameter.kind == "var_positional"
        parts.append(str(parameter))
        after = parameters[index + 1].kind if index + 1 < len(parameters) else ""
        if parameter.kind == "positional" and after != "positional":
            parts.append("/")
    return f"({', '.join(parts)})"
