# SPDX-License-Identifier: Apache-2.0
"""What would become of each target in this environment. Nothing of vLLM is imported: its source is read as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_omni_patch.code import text
from vllm_omni_patch.flags import FlagError
from vllm_omni_patch.ledger import State
from vllm_omni_patch.loading.discover import Choice, Found
from vllm_omni_patch.matrix.forecast import Forecast, forecast, installed_here
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
    claimed: dict[str, str] = {}
    open_source = installed_here()
    rows: list[Outlook] = []
    for one in found:
        asked = one.name in choice.names
        if one.patch is None:
            rows.append(Outlook(one.name, "", asked, one.distribution, None, "failed", "failed", one.error))
            continue
        mine: dict[str, Outlook] = {}
        wanted, others, broken = _by_setting(one.patch)
        for named, chosen in ((asked, wanted), (False, others)):
            alone = replace(one.patch, targets=chosen, uses=())
            try:
                forecasts = forecast(alone, open_source, claimed if named else {})
            except FlagError as error:
                broken += [(target, error) for target in chosen]
                continue
            mine |= {told.target.name: _row(told, named, chosen is others) for told in forecasts}
        mine |= {target.name: _unknown(one.patch, target, asked, error) for target, error in broken}
        rows += [mine[target.name] for target in one.patch.targets]
    text.forget()
    return rows


def _by_setting(patch: Patch) -> tuple[tuple[Target, ...], tuple[Target, ...], list[tuple[Target, FlagError]]]:
    """The targets whose setting is on (or that have none), those whose setting is off, and unreadable settings."""
    wanted: list[Target] = []
    others: list[Target] = []
    broken: list[tuple[Target, FlagError]] = []
    for target in patch.targets:
        try:
            (wanted if target.is_wanted() else others).append(target)
        except FlagError as error:
            broken.append((target, error))
    return tuple(wanted), tuple(others), broken


def _row(told: Forecast, asked: bool, off: bool) -> Outlook:
    row, setting = told.row, told.target.setting
    proved = row.verdict == "applies"
    return Outlook(
        row.patch,
        row.target,
        asked,
        row.distribution,
        release=row.release if told.installed else None,
        verdict=row.verdict,
        would_be=told.state or "skipped",
        reason=f"only with {setting.name}=1" if off and setting else told.reason,
        evidence=row.evidence if proved else None,
        devices=list(row.devices) if proved else [],
        like=told.like,
        optional=told.target.optional,
    )


def _unknown(patch: Patch, target: Target, asked: bool, error: FlagError) -> Outlook:
    reason = f"{type(error).__name__}: {error}"
    return Outlook(patch.name, target.name, asked, target.distribution, None, "unknown", "skipped", reason)
