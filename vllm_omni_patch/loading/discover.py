# SPDX-License-Identifier: Apache-2.0
"""Which patches are installed, and which of them are asked for. Patches are found through the entry-point group
``vllm_omni_patch.patches``, where ours are listed like those of other packages.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_omni_patch.flags import CORE, CORE_REMOVED, FALSE, TRUE, Flag, Removed
from vllm_omni_patch.loading import own
from vllm_omni_patch.patch import Contract, Native, Patch, Target

GROUP = "vllm_omni_patch.patches"
OWN_DISTRIBUTION = "vllm-omni-patch"


@dataclass(frozen=True)
class Found:
    """One entry point. ``patch`` is ``None`` where it could not be used; ``error`` and ``traceback`` then say why."""

    name: str
    distribution: str
    patch: Patch | None
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Choice:
    """What a value of ``VLLM_OMNI_PATCH`` asks for: names that exist, and names that do not."""

    names: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def find() -> tuple[Found, ...]:
    """Every declared patch: the loader's own, then ours, then others'. For one that cannot be imported, or whose
    declaration is wrong, the result says why; nothing raises. Looked up once in a process."""
    from importlib import metadata

    points: dict[tuple[str, str], metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        points.setdefault((point.name, point.value), point)
    found = [Found(own.NAME, OWN_DISTRIBUTION, own.PATCH)]
    for point in sorted(points.values(), key=_order):
        found.append(_load(point, found))
    return tuple(found)


def choose(value: str, found: Sequence[Found]) -> Choice:
    """Read a value of ``VLLM_OMNI_PATCH``: a true or false value, ``all``, or names separated by commas.

    Nothing is guessed: a name that no patch has is returned as unknown, even one that looks like a true value. The
    loader's own patch is chosen with every value that is not false.
    """
    text = value.strip()
    known = tuple(dict.fromkeys(one.name for one in found))
    if text.lower() in FALSE:
        return Choice(())
    if text.lower() in (*TRUE, "all"):
        return Choice(known)
    asked = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    chosen = tuple(n for n in known if n in asked or n == own.NAME)
    return Choice(chosen, tuple(n for n in asked if n not in known))


def unknown_name(name: str, found: Sequence[Found]) -> str:
    """The message for a name that no patch has."""
    import difflib

    names = list(dict.fromkeys(one.name for one in found if one.name != own.NAME))
    close = difflib.get_close_matches(name, names, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    known = ", ".join(names) or "none"
    return f"no patch is called {name!r}{meant}; known: {known}. Or use 1 for all of them, 0 for none."


def commands(found: Sequence[Found]) -> dict[str, str]:
    """Commands that patches add to ``vllm-omni-patch``: ``"module:app"`` by name. The first patch has a name."""
    rows: dict[str, str] = {}
    for one in found:
        for name, app in one.patch.commands if one.patch else ():
            rows.setdefault(name, app)
    return rows


def all_flags(found: Sequence[Found]) -> list[Flag]:
    """The loader's variables and every declared patch's, each name once."""
    rows = {flag.name: flag for flag in CORE}
    for one in found:
        for flag in one.patch.flags if one.patch else ():
            rows.setdefault(flag.name, flag)
    return list(rows.values())


def all_removed(found: Sequence[Found]) -> list[Removed]:
    """The variables that the loader or a declared patch had once and nobody declares any more, each name once."""
    here = {flag.name for flag in all_flags(found)}
    rows = [*CORE_REMOVED, *(row for one in found if one.patch for row in one.patch.removed)]
    return list({row.name: row for row in rows if row.name not in here}.values())


def problems(patch: Any, name: str) -> list[str]:
    """What is wrong with a declaration; empty when it can be used."""
    if not isinstance(patch, Patch):
        return [f"it is {type(patch).__name__}, not vllm_omni_patch.patch.Patch"]
    wrong = []
    if patch.name != name:
        wrong.append(f"the entry point is called {name!r} and the patch {patch.name!r}")
    if not patch.targets:
        wrong.append("it has no targets")
    seen: set[str] = set()
    for target in patch.targets:
        if not isinstance(target, Target):
            wrong.append(f"a target is {type(target).__name__}, not Target")
            continue
        if not _dotted(target.module) or not _dotted(target.qualname):
            wrong.append(f"{target.module!r}:{target.qualname!r} is not a module and a qualified name")
            continue
        if target.name in seen:
            wrong.append(f"{target.name} is listed twice")
        seen.add(target.name)
        for what, text in (("install", target.install), ("verify", target.verify)):
            if (text or what == "install") and not _is_reference(text):
                wrong.append(f"{target.name}: {what}={text!r} is not 'module:function'")
        if not isinstance(target.contract, Contract) or not isinstance(target.native, Native | None):
            wrong.append(f"{target.name}: contract or native is of the wrong type")
    for command in patch.commands:
        if not (isinstance(command, tuple) and len(command) == 2 and _is_reference(command[1])):
            wrong.append(f"command {command!r} is not ('name', 'module:app')")
    for flag in patch.flags:
        if not isinstance(flag, Flag):
            wrong.append(f"a flag is {type(flag).__name__}, not Flag")
    for row in patch.removed:
        if not isinstance(row, Removed):
            wrong.append(f"a removed variable is {type(row).__name__}, not Removed")
    return wrong


def _load(point: Any, earlier: list[Found]) -> Found:
    distribution = _distribution(point)
    try:
        patch = point.load()
        wrong = problems(patch, point.name)
    except (Exception, SystemExit) as error:
        text = f"its declaration {point.value} cannot be imported: {type(error).__name__}: {error}"
        # A folder of that name in the working directory hides an installed package.
        module = sys.modules.get(point.value.partition(":")[0])
        where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        text += f" (found at {where})" if where else ""
        return Found(point.name, distribution, None, text, traceback.format_exc())
    if wrong:
        return Found(point.name, distribution, None, f"its declaration {point.value} is not usable: {'; '.join(wrong)}")
    first = next((one for one in earlier if one.name == point.name and one.patch is not None), None)
    if first is not None:
        text = f"{first.distribution} already brings a patch of this name; rename the one in {distribution}"
        return Found(point.name, distribution, None, text)
    return Found(point.name, distribution, patch)


def _order(point: Any) -> tuple[bool, str, str]:
    name = _distribution(point)
    return name != OWN_DISTRIBUTION, name, point.name


def _distribution(point: Any) -> str:
    try:
        return str(point.dist.name)
    except Exception:
        return "unknown distribution"


def _is_reference(text: Any) -> bool:
    module, _, name = str(text).partition(":")
    return _dotted(module) and _dotted(name)


def _dotted(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and all(part.isidentifier() for part in text.split("."))
