# SPDX-License-Identifier: Apache-2.0
"""The terms of a KV budget, written beside the compiled programs for the other side to compare.

A compile host and a device never communicate, yet their block counts must be equal, or compiled programs are not
found again (determine_available_memory design, section 4). Each side leaves its figures where the programs are; a side
that finds the other's, and would not arrive at the same count, stops before anything is compiled or served.

One file per program, side and outcome, named after its content and never changed: two writers cannot disturb each
other, and a cache that was compiled for two settings serves both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.ledger import write_json

from .. import flags as settings

FORMAT = 1
PREFIX = "vllm-omni-patch-kv"
DEVICE, COMPILE_HOST = "device", "compile host"
# Where the plugin's releases 0.1 to 0.5 put programs when no folder is named.
PLUGIN_FOLDER = "neuron-compiled-artifacts"


class SidesDifferError(RuntimeError):
    """Compile host and device would not lay out the same KV blocks."""


@dataclass(frozen=True)
class Plan:
    """What one side arrived at. ``available`` and ``total`` (HBM of a logical core) in bytes.

    ``blocks`` is ``None`` where the layers have no common block; ``total`` where the size was set by hand.
    ``settings`` are the further numbers that it was made of, by name.
    """

    side: str
    available: int
    blocks: int | None
    total: int | None
    settings: dict[str, Any]

    def same_as(self, other: Plan) -> bool:
        """Whether both lead to the same KV tensors."""
        if self.blocks is None or other.blocks is None:
            return self.available == other.available
        return self.blocks == other.blocks

    def describe(self) -> str:
        """The plan in one line."""
        total = "set by hand" if self.total is None else f"{self.total} bytes"
        made_of = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        blocks = "" if self.blocks is None else f"{self.blocks} blocks, "
        return f"{blocks}{self.available} bytes of KV; HBM {total}, {made_of}"


@dataclass(frozen=True)
class Outcome:
    """Lines for the log: ``warnings`` say what could not be compared, ``notes`` what was."""

    warnings: list[str]
    notes: list[str]


def place(model: str, environ: Mapping[str, str] | None = None) -> str:
    """The folder or address of the compiled programs of ``model`` (a path or an id); empty where none is known."""
    for flag in (settings.COMPILED_ARTIFACTS, settings.COMPILE_CACHE_URL):
        found = str(flags.read(flag, environ))
        if found:
            return found.removeprefix("file://")
    for parent in (model, os.path.join("local-models", model)):
        folder = os.path.join(parent, PLUGIN_FOLDER)
        if model and os.path.isdir(folder):
            return folder
    return ""


def exchange(plan: Plan, at_total: Callable[[int], int] | None, program: dict[str, Any], where: str) -> Outcome:
    """Compare ``plan`` with what the other side left in ``where`` for the same ``program``, and leave ``plan`` there.

    A device that finds compile hosts needs one that planned the same. A compile host that finds devices needs one whose
    HBM gives the same under the compile host's own settings (``at_total``); that the settings themselves differ is a
    warning there, because a change of them begins on the compile host.

    Raises:
        SidesDifferError: the other side's figures are there and do not fit; the text has both totals and both settings.
    """
    if not where:
        line = f"Neither {settings.COMPILED_ARTIFACTS.name} nor {settings.COMPILE_CACHE_URL.name} names a folder"
        return _not_compared(plan, f"{line} for compiled programs")
    if "://" in where:
        return _not_compared(plan, f"The compiled programs are at {where}, which is no folder")
    name = f"{PREFIX}-{_digest(program)}"
    try:
        others, warnings = _others(Path(where), name, plan.side)
    except OSError as error:
        return _not_compared(plan, f"{where} cannot be read ({error.strerror or error})")
    fitting = [(path, other) for path, other in others if _fits(plan, at_total, other)]
    if others and not fitting:
        raise SidesDifferError(_difference(plan, *others[-1]))
    same = [path for path, other in fitting if plan.same_as(other)]
    notes = [f"The other side planned the same KV blocks ({path})." for path in same[-1:]]
    if fitting and not same:
        warnings.append(_changed(plan, *fitting[-1]))
    payload = {"format": FORMAT, "program": program, **asdict(plan)}
    path = os.path.join(where, f"{name}-{plan.side.replace(' ', '-')}-{_digest(asdict(plan))}.json")
    try:
        write_json(path, payload)
        notes.append(f"Wrote the terms of this KV budget to {path}.")
    except OSError as error:
        line = f"{where} cannot be written ({error.strerror or error}), so the other side cannot compare its KV blocks."
        (warnings if plan.side == COMPILE_HOST else notes).append(line)
    return Outcome(warnings, notes)


def _not_compared(plan: Plan, why: str) -> Outcome:
    """A warning on a compile host, a note on a device, where there may be no compile host."""
    line = f"{why}, so the KV blocks of compile host and device cannot be compared."
    return Outcome([line], []) if plan.side == COMPILE_HOST else Outcome([], [line])


def _others(folder: Path, name: str, side: str) -> tuple[list[tuple[Path, Plan]], list[str]]:
    """The other side's plans for one program, oldest first, and a line for each file that is none.

    Raises:
        OSError: the folder is there and cannot be listed.
    """
    try:
        paths = [path for path in folder.iterdir() if path.name.startswith(f"{name}-") and path.suffix == ".json"]
    except FileNotFoundError:
        return [], []
    found, warnings = [], []
    for path in paths:
        try:
            age = path.stat().st_mtime
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                continue  # of another release of this package
            plan = _plan(data)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            warnings.append(
                f"{path} is not a usable record ({type(error).__name__}: {error}) and is ignored; remove it."
            )
            continue
        if plan.side != side:
            found.append((age, path, plan))
    found.sort(key=lambda item: item[:2])
    return [(path, plan) for _, path, plan in found], warnings


def _plan(data: dict[str, Any]) -> Plan:
    plan = Plan(data["side"], data["available"], data["blocks"], data["total"], data["settings"])
    if plan.side not in (DEVICE, COMPILE_HOST) or not isinstance(plan.settings, dict):
        raise ValueError("it names no side or no settings")
    for number in (plan.available, plan.blocks, plan.total):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise ValueError(f"{number!r} is not a number of bytes or blocks")
    if plan.available is None:
        raise ValueError("it has no budget")
    return plan


def _fits(plan: Plan, at_total: Callable[[int], int] | None, other: Plan) -> bool:
    if plan.side == DEVICE or plan.same_as(other):
        return plan.same_as(other)
    if at_total is None or other.total is None:
        return True
    try:
        there = at_total(other.total)
    except (RuntimeError, ValueError):
        return False
    if not plan.blocks:
        return there == plan.available
    # The same share of the budget makes a block on both sides, whatever rounding left over.
    block = plan.settings.get("block")
    return there // block == plan.blocks if isinstance(block, int) and block > 0 else there == plan.available


def _difference(plan: Plan, path: Path, other: Plan) -> str:
    counts = [one.blocks for one in (plan, other) if one.blocks is not None]
    by_hand = f", or give both --num-gpu-blocks-override {min(counts)}" if len(counts) == 2 else ""
    return (
        f"Compile host and device would not lay out the same KV blocks, so compiled programs would not be found again. "
        f"This {plan.side}: {plan.describe()}. The {other.side}: {other.describe()}. They differ in "
        f"{_names(plan, other)}. Set both sides alike{by_hand}, and compile again; or remove {path}, "
        f"which holds the figures of the {other.side}, where its programs are no longer used."
    )


def _changed(plan: Plan, path: Path, other: Plan) -> str:
    return (
        f"The {other.side} last planned other KV blocks, by {path}: {other.describe()}. This {plan.side}: "
        f"{plan.describe()}. They differ in {_names(plan, other)}. Use the same settings on the {other.side} before it "
        "starts, or it stops."
    )


def _names(plan: Plan, other: Plan) -> str:
    mine, theirs = ({"HBM": one.total, **one.settings} for one in (plan, other))
    names = [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]
    return ", ".join(names) or "the block count"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
