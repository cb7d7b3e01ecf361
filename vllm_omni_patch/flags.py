# SPDX-License-Identifier: Apache-2.0
"""Environment variables: what each one is called, what it accepts, what it does.

``CORE`` holds the loader's own rows; a patch declares its rows in ``Patch.flags``. Nothing in this project reads
``os.environ`` for a setting in any other way than through :func:`read`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRUE = ("1", "true", "yes", "on")
FALSE = ("", "0", "false", "no", "off")


class FlagError(ValueError, RuntimeError):
    """A variable holds a value that it does not accept. The text names variable, value and accepted values.

    It is a ``RuntimeError`` too, because callers of ``determine_available_memory`` expect one for a bad setting.
    """


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    ``type`` is one of ``bool``, ``int``, ``float``, ``choice``, ``path``, ``str``, ``patches``. ``accepts`` is the
    text shown to users for the accepted values; it is made from the type when left empty. ``minimum``/``maximum``
    are inclusive unless ``exclusive_minimum`` is set. An empty value is the same as an unset one. ``removed_choices``
    are (value, what to use instead) of choices that are gone: the default is used and :func:`removed_in` tells it.
    ``internal``: no user sets it for this package's sake. The package sets it itself, or it belongs to another product.
    """

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    accepts: str = ""
    check: Callable[[Any], Any] | None = field(default=None, compare=False)
    removed_choices: tuple[tuple[str, str], ...] = ()
    internal: bool = False

    def accepted(self) -> str:
        """The accepted values, in words."""
        if self.accepts:
            return self.accepts
        if self.type == "bool":
            return f"{', '.join(TRUE)} or {', '.join(v for v in FALSE if v)}"
        if self.type == "choice":
            return ", ".join(self.choices)
        if self.type in ("int", "float"):
            low = "" if self.minimum is None else f"{'>' if self.exclusive_minimum else '>='} {self.minimum:g}"
            high = "" if self.maximum is None else f"<= {self.maximum:g}"
            number = "a whole number" if self.type == "int" else "a finite number"
            return " ".join(part for part in (number, " and ".join(p for p in (low, high) if p)) if part)
        return {"path": "a path", "patches": "0, 1, all, or patch names separated by commas"}.get(self.type, "text")


@dataclass(frozen=True)
class Removed:
    """An environment variable that is gone. ``instead`` is a sentence: what to use in its place."""

    name: str
    instead: str


def removed_in(rows: Iterable[Flag], removed: Iterable[Removed], environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each removed variable, and each removed choice of ``rows``, that ``environ`` still sets."""
    environ = os.environ if environ is None else environ
    told = [
        f"{one.name} is set and no longer exists; it is ignored. {one.instead}"
        for one in removed
        if environ.get(one.name, "").strip()
    ]
    for flag in rows:
        value = environ.get(flag.name, "").strip().lower()
        told += [
            f"{flag.name}={old} no longer exists; {flag.default} is used. {instead}"
            for old, instead in flag.removed_choices
            if value == old
        ]
    return told


def read(flag: Flag, environ: Mapping[str, str] | None = None) -> Any:
    """Value of ``flag`` in ``environ`` (default: ``os.environ``), converted; its default when unset or empty.

    Raises:
        FlagError: the value is not accepted.
    """
    text = (os.environ if environ is None else environ).get(flag.name, "").strip()
    if not text or text.lower() in dict(flag.removed_choices):
        return flag.default
    try:
        value = _CONVERT[flag.type](flag, text)
        return value if flag.check is None else flag.check(value)
    except ValueError:
        raise FlagError(f"{flag.name}={text!r} is not accepted; use {flag.accepted()}.") from None


def _bool(flag: Flag, text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(text)


def _number(flag: Flag, text: str) -> float | int:
    value: float | int = int(text) if flag.type == "int" else float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    if flag.minimum is not None and (value < flag.minimum or (flag.exclusive_minimum and value == flag.minimum)):
        raise ValueError(text)
    if flag.maximum is not None and value > flag.maximum:
        raise ValueError(text)
    return value


def _choice(flag: Flag, text: str) -> str:
    if text.lower() in flag.choices:
        return text.lower()
    raise ValueError(text)


_CONVERT: dict[str, Callable[[Flag, str], Any]] = {
    "bool": _bool,
    "int": _number,
    "float": _number,
    "choice": _choice,
    "path": lambda flag, text: os.path.expanduser(text),
    "str": lambda flag, text: text,
    "patches": lambda flag, text: text,
}

SWITCH = Flag(
    "VLLM_OMNI_PATCH",
    "patches",
    "",
    "The switch. Unset, empty or a false value: nothing of this package runs. A true value or 'all': every patch. "
    "Names separated by commas: those patches.",
    accepts="0, false, no, off; 1, true, yes, on, all; or patch names separated by commas",
)
STRICT = Flag(
    "VLLM_OMNI_PATCH_STRICT",
    "bool",
    False,
    "Stop the engine at start when something that was asked for is not applied.",
)
UNLISTED = Flag(
    "VLLM_OMNI_PATCH_UNLISTED",
    "choice",
    "",
    "What to do on a release that the matrix does not list and whose code is not that of a listed one. Unset: skip, "
    "with a warning.",
    choices=("apply", "skip"),
)
REPORT_DIR = Flag(
    "VLLM_OMNI_PATCH_REPORT_DIR",
    "path",
    "",
    "Folder in which each process writes its reports: ledger-<pid>.json, memory-<pid>.json, model-local-kv-<pid>.json.",
)
RUN_DIR = Flag(
    "VLLM_OMNI_PATCH_RUN_DIR",
    "path",
    "",
    "Folder through which the processes of one engine pass their metrics to the API server. Made by the first process "
    "and inherited by its children; set it only where they do not inherit the environment, and then to a new one for "
    "each run: numbers of an earlier run that are found in it are added up.",
    internal=True,
)

# Variables of the loader's own that are gone; a patch's are in ``Patch.removed``.
CORE_REMOVED = (
    Removed(
        "VLLM_OMNI_PATCH_CACHE_DIR",
        "Use 'vllm-omni-patch matrix --cache DIR', or XDG_CACHE_HOME for the caches of all programs.",
    ),
)
CORE: tuple[Flag, ...] = (SWITCH, STRICT, UNLISTED, REPORT_DIR, RUN_DIR)
