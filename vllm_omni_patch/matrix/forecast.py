# SPDX-License-Identifier: Apache-2.0
"""What will become of each target: the judge's decision on text that is not imported, then the rules between targets.

For ``status`` and ``matrix``, on what is installed or on any other release; and, one target at a time, for the loader
and strict mode where the module is not imported yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from vllm_omni_patch.code import installed, text
from vllm_omni_patch.code.text import ModuleText
from vllm_omni_patch.matrix import judge, rules
from vllm_omni_patch.matrix.evidence import for_patch
from vllm_omni_patch.matrix.judge import Decision
from vllm_omni_patch.matrix.table import Row, Verdict
from vllm_omni_patch.patch import Patch, Target

if TYPE_CHECKING:
    from vllm_omni_patch.ledger import State


class Source(Protocol):
    """A release whose modules can be read: an installed one, or a fetched :class:`.code.releases.Release`."""

    @property
    def release(self) -> str | None:
        """Its version, as far as it is known."""

    def text(self, module: str) -> ModuleText | None:
        """Source text of ``module``; ``None`` when the release has no such module."""


@dataclass(frozen=True)
class Installed:
    """The package that is installed here."""

    release: str | None

    def text(self, module: str) -> ModuleText | None:
        return text.of_installed(module)


@dataclass(frozen=True)
class Forecast:
    """One target on one release: ``row`` with the verdict and its evidence, and the ``state`` it leads to.

    ``state`` is ``None`` for what a patch uses and does not hook. ``like``: the listed release
    whose code an unlisted one has.
    """

    target: Target
    row: Row
    state: State | None
    reason: str
    installed: bool = True
    listed: bool = True
    like: str | None = None

    @property
    def faulty(self) -> bool:
        """Asked for, not served, and that is not ordinary: strict mode would stop."""
        served = self.state == "applied" if self.state else self.row.verdict == "applies"
        return self.installed and not served and not rules.is_ordinary(self.target, self.row.verdict)

    def as_json(self) -> dict[str, Any]:
        """The object that ``vllm-omni-patch matrix --format json`` prints."""
        return {**self.row.as_json(), "listed": self.listed, "state": self.state, "reason": self.reason}


def decide(patch: Patch, target: Target, release: str | None) -> Decision:
    """Whether ``target`` of ``patch`` would be installed in the package that is here. Imports nothing of it.

    Raises:
        FlagError: ``VLLM_OMNI_PATCH_UNLISTED`` holds a value that it does not accept.
    """
    return judge.decide_text(patch, target, release, text.of_installed(target.module))


def installed_here() -> Callable[[Target], Installed | None]:
    """What gives a target's package as it is installed here, or ``None``. Each package is looked up once."""
    found: dict[str, Installed | None] = {}

    def open_source(target: Target) -> Installed | None:
        name = installed.package_of(target.distribution, target.module)
        if name not in found:
            package = installed.find(name)
            found[name] = Installed(package.release) if package else None
        return found[name]

    return open_source


def forecast(patch: Patch, open_source: Callable[[Target], Source | None], claimed: dict[str, str]) -> list[Forecast]:
    """Every target of ``patch``, then what it uses, on the source that ``open_source`` gives for each.

    Args:
        open_source: ``None``: the target's package is not installed.
        claimed: attribute names to the patch that has each; those that this patch is first to name are added.

    Raises:
        FlagError: as :func:`decide`.
    """
    alone = [_owned(_one(patch, target, open_source(target)), claimed) for target in patch.targets]
    return [*_by_groups(alone), *(_used(patch, target, open_source(target)) for target in patch.uses)]


def without_effect(found: Sequence[Forecast]) -> list[str]:
    """Names of patches of which nothing is applied or native, though no single target is at fault."""
    names = dict.fromkeys(one.row.patch for one in found)
    return [
        name
        for name in names
        if not any(one.row.patch == name and (one.faulty or one.state in ("applied", "native")) for one in found)
    ]


def _one(patch: Patch, target: Target, source: Source | None) -> Forecast:
    """One target, without regard to others."""
    if source is None:
        return _not_installed(patch, target, "skipped")
    decision = judge.decide_text(patch, target, source.release, source.text(target.module))
    known = for_patch(patch).row(patch.name, target.name, source.release)
    row = _row(patch, target, source, decision.verdict, decision.reason, decision.fingerprint, known)
    state = rules.state_of(decision.verdict, decision.apply)
    return Forecast(target, row, state, decision.reason, True, known is not None, decision.like)


def _used(patch: Patch, target: Target, source: Source | None) -> Forecast:
    """Something that the patch calls: the contract shows whether it can; the loader has nothing to decide."""
    if source is None:
        return _not_installed(patch, target, None)
    found = judge.read(target, source.text(target.module))
    known = for_patch(patch).row(patch.name, target.name, source.release)
    row = _row(patch, target, source, found.verdict, found.reason, found.fingerprint, known)
    return Forecast(
        target, replace(row, used=True), None, found.reason or "the contract holds", True, known is not None
    )


def _row(
    patch: Patch, target: Target, source: Source, verdict: Verdict, reason: str, fingerprint: str, known: Row | None
) -> Row:
    release = source.release or ""
    row = Row(patch.name, target.name, target.distribution, release, verdict, reason, fingerprint, target.evidence)
    return row.proved_like(known)


def _not_installed(patch: Patch, target: Target, state: State | None) -> Forecast:
    reason = f"{target.distribution} is not installed"
    row = Row(patch.name, target.name, target.distribution, "", "absent", reason, "", target.evidence, state is None)
    return Forecast(target, row, state, reason, installed=False, listed=False)


def _owned(one: Forecast, claimed: dict[str, str]) -> Forecast:
    """The first asked-for patch that names an attribute has it; the loader goes through them in the same order."""
    first = claimed.setdefault(one.target.name, one.row.patch)
    if first == one.row.patch or one.state != "applied":
        return one
    return replace(one, state="skipped", reason=rules.claimed_by(first))


def _by_groups(found: list[Forecast]) -> list[Forecast]:
    """All targets of a group or none."""
    off = rules.off((one.target, one.state == "applied", one.row.verdict, one.reason) for one in found)
    return [
        replace(one, state="skipped", reason=off[one.target.group])
        if one.target.group in off and one.state == "applied"
        else one
        for one in found
    ]
