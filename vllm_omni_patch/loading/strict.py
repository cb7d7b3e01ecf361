# SPDX-License-Identifier: Apache-2.0
"""Strict mode: stop the engine at start when something that was asked for is not applied.

A target whose module is not imported yet is judged on the text of the module. These are no faults: a target that
upstream has already, a target of a package that is not installed, an optional target that this release does not have.
A patch that is left without any target is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_omni_patch import flags, ledger
from vllm_omni_patch.code import installed, text
from vllm_omni_patch.ledger import Entry
from vllm_omni_patch.matrix import forecast, rules
from vllm_omni_patch.patch import Patch, Target


def check(patches: Sequence[Patch]) -> None:
    """Stop the engine unless everything that was asked for is applied, or can be when its module is imported.

    Raises:
        RuntimeError: something is not; the message lists each target with its reason, and what to do.
    """
    found = faults(patches)
    if not found:
        return
    lines = "\n".join(f"  - {line}" for line in found)
    raise RuntimeError(
        f"{flags.STRICT.name} is set, and {flags.SWITCH.name} asks for {_missing(found)} not applied:\n{lines}\n"
        f"To fix: correct what the reasons name, list only other patches in {flags.SWITCH.name}, or unset "
        f"{flags.STRICT.name} to run without these. 'vllm-omni-patch status --verbose' shows every target."
    )


def _missing(found: Sequence[str]) -> str:
    return "1 target or patch that is" if len(found) == 1 else f"{len(found)} targets or patches that are"


def faults(patches: Sequence[Patch]) -> list[str]:
    """One line for each target, or patch, that was asked for and is not applied."""
    states = {(entry.patch, entry.target): entry for entry in ledger.entries()}
    found = [f"{entry.patch}: {entry.reason}" for (_, target), entry in states.items() if not target]
    try:
        for patch in patches:
            found += _patch_faults(patch, states)
    finally:
        text.forget()
    return found


def _patch_faults(patch: Patch, states: dict[tuple[str, str], Entry]) -> list[str]:
    found, serving = [], 0
    for target in patch.targets:
        fault = _fault(patch, target, states.get((patch.name, target.name)))
        serving += fault is None
        if fault:
            found.append(f"{patch.name}: {target.name}: {fault}")
    if not found and not serving:
        found.append(f"{patch.name}: none of its targets is in the installed packages")
    return found


def _fault(patch: Patch, target: Target, entry: Entry | None) -> str | None:
    """Why ``target`` is not applied; ``None`` when it is or can be; empty when that is no fault."""
    if entry is not None and entry.state in ("applied", "native"):
        return None
    package = installed.package_of(target.distribution, target.module)
    if installed.folder_of(package) is None:
        return ""
    if entry is not None and entry.state in ("skipped", "failed"):
        return "" if rules.is_ordinary(target, entry.verdict) else entry.reason
    decision = forecast.decide(patch, target, installed.running_release(package))
    if decision.apply or decision.verdict == "native":
        return None
    return "" if rules.is_ordinary(target, decision.verdict) else decision.reason
