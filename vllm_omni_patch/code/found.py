# SPDX-License-Identifier: Apache-2.0
"""What a qualified name leads to in a module: :class:`Found`, its parameters, or :class:`Missing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "function", "property", "other"]


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
    """The module does not define the qualified name. ``str()`` is a sentence for users.

    ``elsewhere``: the name is here, but belongs to another module.
    """

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


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
