# SPDX-License-Identifier: Apache-2.0
"""What would become of each target in this environment. Nothing of vLLM is imported: its source is read as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from vllm_omni_patch.code import installed
from vllm_omni_patch.ledger import State
from vllm_omni_patch.loading.discover import Choice, Found
from vllm_omni_patch.matrix import forecast, rules
from vllm_omni_patch.patch import Patch, Target


@dataclass(frozen=True)
class Outlook:
    """One target here: a row of ``targets`` in ``vllm-omni-patch status --json``.

    ``target`` is empty for a patch that cannot be loaded. ``asked``: the flag names its patch, and its setting is on.
    ``release``: version of ``distribution`` here; ``None``: not installed. ``like``: the listed release whose code an
    unlisted one has. ``evidence`` and ``devices``: what is proved of a target that applies.
    """

    patch: str
    target: str
    asked: bool
    distribution: str
    release: str | None
    verdict: str
    would_be: State
    reason: str
    evidence: str | None = None
    devices: list[str] = field(default_factory=list)
    like: str | None = None
    optional: bool = False


def targets(found: Sequence[Found], choice: Choice) -> list[Outlook]:
    """Every target of every patch that is installed."""
    owners: dict[str, str] = {}
    rows: list[Outlook] = []
    for one in found:
        asked = one.name in choice.names
        if one.patch is None:
            rows.append(Outlook(one.name, "", asked, one.distribution, None, "failed", "failed", one.error))
            continue
        mine = [_owned(_alone(one.patch, target, asked), owners) for target in one.patch.targets]
        rows += _by_groups(one.patch.targets, mine)
    forecast.forget()
    return rows


def _alone(patch: Patch, target: Target, asked: bool) -> Outlook:
    """One target, without regard to others."""
    found = _package(installed.package_of(target.distribution, target.module))
    row = Outlook(
        patch.name,
        target.name,
        asked,
        target.distribution,
        release=found.release if found else None,
        verdict="absent",
        would_be="skipped",
        reason=f"{target.distribution} is not installed",
        optional=target.optional,
    )
    if found is None:
        return row
    try:
        wanted = target.is_wanted()
        decision = forecast.decide(patch, target, found.release)
    except Exception as error:
        return replace(row, verdict="unknown", reason=f"{type(error).__name__}: {error}")
    proof = forecast.evidence(patch, target, found.release) if decision.verdict == "applies" else None
    return replace(
        row,
        asked=asked and wanted,
        verdict=decision.verdict,
        would_be="applied" if decision.apply else "native" if decision.verdict == "native" else "skipped",
        reason=decision.reason if wanted or target.setting is None else f"only with {target.setting.name}=1",
        evidence=proof.evidence if proof else None,
        devices=list(proof.devices) if proof else [],
        like=decision.like,
    )


@lru_cache(maxsize=16)
def _package(name: str) -> installed.Package | None:
    return installed.find(name)


def _owned(row: Outlook, owners: dict[str, str]) -> Outlook:
    """The first asked-for patch that names an attribute has it; the loader goes through them in the same order."""
    if not row.asked:
        return row
    first = owners.setdefault(row.target, row.patch)
    if first == row.patch or row.would_be != "applied":
        return row
    return replace(row, would_be="skipped", reason=rules.claimed_by(first))


def _by_groups(targets: Sequence[Target], rows: list[Outlook]) -> list[Outlook]:
    """All targets of a group or none."""
    both = list(zip(targets, rows, strict=True))
    off = rules.off((target, row.would_be == "applied", row.verdict, row.reason) for target, row in both)
    return [
        replace(row, would_be="skipped", reason=off[target.group])
        if target.group in off and row.would_be == "applied"
        else row
        for target, row in both
    ]
