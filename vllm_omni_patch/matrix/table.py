# SPDX-License-Identifier: Apache-2.0
"""The compatibility matrix as data: rows by target and release, and digests of the source files they were read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from packaging.utils import canonicalize_version
from packaging.version import InvalidVersion, Version

from vllm_omni_patch.patch import Target

Verdict = Literal["applies", "native", "absent", "drifted", "unlisted"]
Evidence = Literal["static", "hooked", "live", "documented"]
VERDICTS: tuple[Verdict, ...] = ("applies", "native", "absent", "drifted")  # of a row in a file


@dataclass(frozen=True)
class Row:
    """The verdict for one target on one release. ``fingerprint`` is empty where there is no code to hash.

    Only a forecast is ``unlisted``: the contract holds, and the matrix does not know the code.

    ``used``: the patch calls it and does not hook it. ``devices``: on what runs proved the ``evidence`` (``"cpu"``);
    empty for evidence from source text.
    """

    patch: str
    target: str
    distribution: str
    release: str
    verdict: Verdict
    reason: str = ""
    fingerprint: str = ""
    evidence: Evidence = "static"
    used: bool = False
    devices: tuple[str, ...] = ()

    @property
    def proof(self) -> str:
        """Evidence and devices in words: ``static``, ``live (cpu)``."""
        return f"{self.evidence} ({', '.join(self.devices)})" if self.devices else self.evidence

    def proved_like(self, known: Row | None) -> Row:
        """This row, with the evidence of ``known`` if that is about the same code."""
        if known is None or known.fingerprint != self.fingerprint:
            return self
        return replace(self, evidence=known.evidence, devices=known.devices)

    @property
    def contract(self) -> Literal["ok", "broken", "unknown"]:
        """What is known of the contract: it is not asked where the target is absent, native or cannot be read."""
        if self.evidence == "documented" or self.verdict in ("absent", "native"):
            return "unknown"
        return "ok" if self.verdict in ("applies", "unlisted") else "broken"

    def as_json(self) -> dict[str, Any]:
        """The object that ``vllm-omni-patch matrix --format json`` prints."""
        return {
            "patch": self.patch,
            "target": self.target,
            "distribution": self.distribution,
            "release": self.release,
            "verdict": self.verdict,
            "contract": self.contract,
            "evidence": self.evidence,
            "devices": list(self.devices),
            "reason": self.reason,
            "fingerprint": self.fingerprint,
            "role": "used" if self.used else "hooked",
        }


class MatrixError(RuntimeError):
    """A matrix file cannot be read. The text names the file and what to do."""


@lru_cache(maxsize=512)
def release_key(release: str | None) -> str | None:
    """What ``release`` is looked up by: its number without a local part. ``None`` for what is no release.

    A development build is no release: its number is a guess about the next one, and says nothing about its code.
    """
    try:
        version = Version(release or "")
    except InvalidVersion:
        return None
    return None if version.is_devrelease else canonicalize_version(version.public)


def ordered(releases: Iterable[str]) -> list[str]:
    """Releases from oldest to newest, each once, in the first way of writing it that is given."""
    by_version: dict[Version, str] = {}
    for release in releases:
        by_version.setdefault(Version(release), release)
    return [by_version[version] for version in sorted(by_version)]


Digests = Mapping[tuple[str, str, str], str]


class Table:
    """Rows by patch and target, and the releases that were judged. ``error`` says why a file could not be read.

    ``digests``: (distribution, module, release) to the digest of the module's source file
    (:attr:`.code.text.ModuleText.digest`).
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        releases: Mapping[str, Sequence[str]] | None = None,
        error: str = "",
        digests: Digests | None = None,
    ) -> None:
        self.error = error
        self.digests = dict(digests or {})
        self.releases = {name: ordered(listed) for name, listed in (releases or {}).items()}
        self._rows: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            self._rows.setdefault((row.patch, row.target), {})[release_key(row.release) or row.release] = row

    def targets(self) -> list[tuple[str, str]]:
        """(patch, target) of every target that has rows, one patch after the other."""
        patches = list(dict.fromkeys(patch for patch, _ in self._rows))
        return sorted(self._rows, key=lambda key: patches.index(key[0]))

    def rows(self) -> list[Row]:
        """Every row, by patch and target, from the oldest release to the newest."""
        return [row for key in self.targets() for row in self.target_rows(*key)]

    def lists(self, distribution: str, release: str | None) -> bool:
        """``release`` of ``distribution`` is among those that were judged."""
        return release_key(release) in {release_key(listed) for listed in self.releases.get(distribution, ())}

    def target_rows(self, patch: str, target: str) -> list[Row]:
        """Rows of one target (``"module:qualified.name"``), from the oldest release to the newest."""
        return sorted(self._rows.get((patch, target), {}).values(), key=lambda row: Version(row.release))

    def row(self, patch: str, target: str, release: str | None) -> Row | None:
        """The row for ``release``, whose local part does not count; ``None`` when it is not listed."""
        return self._rows.get((patch, target), {}).get(release_key(release) or "")

    def same_code(self, patch: str, target: str, digest: str) -> Row | None:
        """The newest listed release on which the target applies and has this fingerprint."""
        matching = [r for r in self.target_rows(patch, target) if r.verdict == "applies" and r.fingerprint == digest]
        return matching[-1] if matching and digest else None

    def known(self, patch: str, target: Target, release: str | None, digest: str) -> Row | None:
        """The row that holds for a source file with this ``digest``; ``None`` when the file is of no listed release.

        On a listed release it is that release's row. On another it is the newest of a release with the same file.
        """
        own = self.row(patch, target.name, release)
        rows = self.target_rows(patch, target.name) if own is None else [own]
        same = [r for r in rows if digest and digest == self.digests.get((r.distribution, target.module, r.release))]
        return same[-1] if same and (own or same[-1].verdict in ("applies", "native")) else None

    def newest(self, patch: str, target: str) -> Row | None:
        """The row of the newest listed release."""
        rows = self.target_rows(patch, target)
        return rows[-1] if rows else None

    def merged(self, other: Table) -> Table:
        """This table with ``other``'s rows and releases added, which win."""
        releases = {
            name: [*self.releases.get(name, ()), *other.releases.get(name, ())]
            for name in [*self.releases, *(n for n in other.releases if n not in self.releases)]
        }
        digests = {**self.digests, **other.digests}
        return Table([*self.rows(), *other.rows()], releases, other.error or self.error, digests)


def spans(rows: Sequence[Row], code: bool = True) -> list[list[Row]]:
    """``rows`` cut into runs that differ only in the release; with ``code=False``, only in release, code and reason."""
    runs: list[list[Row]] = []
    for row in rows:
        if runs and _same(runs[-1][-1], row, code):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _same(one: Row, other: Row, code: bool) -> bool:
    if not code:
        return one.verdict == other.verdict
    return replace(one, release="") == replace(other, release="")
