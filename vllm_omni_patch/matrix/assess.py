# SPDX-License-Identifier: Apache-2.0
"""What will happen to each target on a release that was read as text: verdict, contract, and what the loader will do.

The same decision as in a running process (:func:`vllm_omni_patch.matrix.judge.decide_view`), with groups taken into
account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_omni_patch.code.releases import Release
from vllm_omni_patch.matrix import rules
from vllm_omni_patch.matrix.build import Question, judge
from vllm_omni_patch.matrix.judge import Decision, decide_view
from vllm_omni_patch.matrix.table import Row, for_patch
from vllm_omni_patch.matrix.upgrade import Change
from vllm_omni_patch.patch import Patch, Target

Action = Literal["applied", "used", "stands aside", "skipped", "not there", "not installed", "not usable"]


@dataclass(frozen=True)
class Assessment:
    """One target on one release. ``faulty``: it was asked for and will not be applied, and that is not ordinary.

    Ordinary are: upstream has it already; the package is not installed; an optional target that is not there.
    """

    row: Row
    action: Action
    why: str
    faulty: bool
    listed: bool = True
    optional: bool = False
    change: Change | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The object that ``vllm-omni-patch matrix --format json`` prints."""
        told = {**self.row.as_json(), "listed": self.listed, "action": self.action, "why": self.why}
        if self.change is not None:
            told["upgrade"] = {
                "from": self.change.before.release,
                "verdict_before": self.change.before.verdict,
                "same_code": self.change.same_code,
                "matters": self.change.matters,
                "why": self.change.why,
                "differences": self.change.details,
            }
        return told


def assess(patches: Sequence[Patch], open_release: Callable[[Target], Release | None]) -> list[Assessment]:
    """Every target of ``patches`` on the release that ``open_release`` gives for it; ``None``: not installed."""
    found: list[Assessment] = []
    for patch in patches:
        found += _with_groups(patch.targets, [_assess(patch, one, open_release(one)) for one in patch.targets])
        found += [_assess_use(patch, target, open_release(target)) for target in patch.uses]
    return found


def assess_release(patch: Patch, asked: Sequence[Question], release: Release) -> list[Assessment]:
    """What ``asked`` names, all of it from ``patch``, on one release."""
    targets = [question.target for question in asked if not question.used]
    found = [_assess(patch, target, release) for target in targets]
    uses = [_assess_use(patch, question.target, release) for question in asked if question.used]
    return [*_with_groups(targets, found), *uses]


def without_effect(found: Sequence[Assessment]) -> list[str]:
    """Names of patches of which nothing will be applied or stands aside, though no single target is at fault."""
    names = dict.fromkeys(one.row.patch for one in found)
    return [
        name
        for name in names
        if not any(one.row.patch == name and (one.faulty or one.action in ("applied", "stands aside")) for one in found)
    ]


def _assess(patch: Patch, target: Target, release: Release | None) -> Assessment:
    if release is None:
        reason = f"{target.distribution} is not installed"
        row = Row(patch.name, target.name, target.distribution, "", "absent", reason, evidence=target.evidence)
        return Assessment(row, "not installed", reason, False, False, target.optional)
    row = judge(Question(patch.name, target), release)
    known = for_patch(patch).row(patch.name, target.name, release.release)
    try:
        view = release.view(target.module)
    except (SyntaxError, RecursionError, ValueError):
        decision = Decision(row.verdict, False, row.reason, "warning")
    else:
        decision = decide_view(patch, target, release.release, view, lambda: row.fingerprint)
    if decision.verdict != "unlisted" and decision.verdict != row.verdict:
        row = replace(row, verdict=decision.verdict, reason=decision.reason)
    row = replace(row, evidence=target.evidence).proved_like(known)
    action: Action = "applied" if decision.apply else "skipped"
    if decision.verdict == "native":
        action = "stands aside"
    elif decision.verdict == "absent" and target.optional:
        action = "not there"
    return Assessment(row, action, decision.reason, action == "skipped", known is not None, target.optional)


def _assess_use(patch: Patch, target: Target, release: Release | None) -> Assessment:
    """Something that the patch calls: the contract says whether it can; there is no gate in the loader for it."""
    if release is None:
        reason = f"{target.distribution} is not installed"
        row = Row(patch.name, target.name, target.distribution, "", "absent", reason, used=True)
        return Assessment(row, "not installed", reason, False, False, target.optional)
    row = judge(Question(patch.name, target, used=True), release)
    known = for_patch(patch).row(patch.name, target.name, release.release)
    row = row.proved_like(known)
    action: Action = "used" if row.verdict == "applies" else "not usable"
    if row.verdict == "absent" and target.optional:
        action = "not there"
    why = row.reason or "the contract holds"
    return Assessment(row, action, why, action == "not usable", known is not None, target.optional)


def _with_groups(targets: Sequence[Target], found: list[Assessment]) -> list[Assessment]:
    """All targets of a group or none."""
    both = list(zip(targets, found, strict=True))
    off = rules.off((target, one.action == "applied", one.row.verdict, one.why) for target, one in both)
    return [
        replace(one, action="skipped", why=off[target.group], faulty=True)
        if target.group in off and one.action == "applied"
        else one
        for target, one in both
    ]
