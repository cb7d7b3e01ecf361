# SPDX-License-Identifier: Apache-2.0
"""Rules between targets, for the loader and for what is decided without importing vLLM.

Targets of one group are applied all together or not at all; an attribute belongs to one patch.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_patch.patch import Target


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
