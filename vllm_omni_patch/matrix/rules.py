# SPDX-License-Identifier: Apache-2.0
"""From verdicts to states, for the loader and for forecasts: one target, its group, and the attribute it names.

Targets of one group are applied all together or not at all; an attribute belongs to one patch.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_patch.patch import State, Target


def state_of(verdict: str, applies: bool) -> State:
    """The state that a verdict leads to. ``applies``: the target may be installed."""
    return "applied" if applies else "native" if verdict == "native" else "skipped"


def is_ordinary(target: Target, verdict: str) -> bool:
    """Whether it is no fault that ``target`` is not applied: upstream has it, or an optional target is absent."""
    return verdict == "native" or (verdict == "absent" and target.optional)


def keeps_off(target: Target, applies: bool, verdict: str) -> bool:
    """Whether ``target`` keeps its group from being applied. An optional target that is absent does not."""
    return bool(target.group) and not applies and not (target.optional and verdict == "absent")


def off(outcomes: Iterable[tuple[Target, bool, str, str]]) -> dict[str, str]:
    """The groups that cannot be applied, each with the reason.

    Args:
        outcomes: (target, whether it applies by itself, verdict, reason) of the targets of one patch.
    """
    found: dict[str, str] = {}
    for target, applies, verdict, reason in outcomes:
        if keeps_off(target, applies, verdict):
            found.setdefault(target.group, explained(target.group, target.name, reason))
    return found


def explained(group: str, target: str, reason: str) -> str:
    """The reason for every other member of ``group``, where ``target`` cannot be applied for ``reason``."""
    return f"all targets of group {group!r} or none, and one cannot be applied: {target}: {reason}"


def claimed_by(first: str) -> str:
    """The reason for a target whose attribute an earlier patch has."""
    return f"patch {first!r} claims this attribute first; two patches cannot share one"
