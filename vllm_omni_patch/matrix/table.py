# SPDX-License-Identifier: Apache-2.0
"""The compatibility matrix as data: ``matrix.json`` (judged on released source) and ``matrix-live.json`` (from runs).

``matrix.json`` is written by ``vllm-omni-patch matrix --update``, never by hand. It lists, for each distribution,
the releases that were judged, in order; and for each target the ranges of them over which verdict, reason and code
are the same. A release that is not in the list is in no range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_version
from packaging.version import InvalidVersion, Version

from vllm_omni_patch.patch import Patch
from vllm_omni_patch.telemetry import log_lines

FORMAT = 1
MATRIX = Path(__file__).with_name("matrix.json")
LIVE = Path(__file__).with_name("matrix-live.json")

Verdict = Literal["applies", "native", "absent", "drifted"]
Evidence = Literal["static", "hooked", "live", "documented"]
VERDICTS: tuple[Verdict, ...] = ("applies", "native", "absent", "drifted")


@dataclass(frozen=True)
class Row:
    """The verdict for one target on one release. ``fingerprint`` is empty where there is no code to hash.

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
        return "ok" if self.verdict == "applies" else "broken"

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
    """A matrix file cannot be read. The text names the file and the way out."""


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


class Table:
    """Rows by patch and target, and the releases that were judged. ``error`` says why a file could not be read."""

    def __init__(
        self, rows: Iterable[Row] = (), releases: Mapping[str, Sequence[str]] | None = None, error: str = ""
    ) -> None:
        self.error = error
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
        return Table([*self.rows(), *other.rows()], releases, other.error or self.error)


# -- files


def read(path: str | Path) -> Table:
    """The table in a matrix file.

    Raises:
        MatrixError: there is no such file, or it is not a matrix.
    """
    way_out = "Rebuild it with 'vllm-omni-patch matrix --update', or reinstall vllm-omni-patch."
    if Path(path) != MATRIX and not Path(path).exists():
        raise MatrixError(
            f"There is no matrix file {path} yet: 'vllm-omni-patch matrix --update --patch NAME --release vllm==X.Y.Z' "
            "writes it, with one --release for each that the patch is meant for."
        )
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MatrixError(f"The compatibility matrix {path} cannot be read: {error}. {way_out}") from None
    try:
        if data["format"] != FORMAT:
            raise MatrixError(f"The compatibility matrix {path} has format {data['format']}, not {FORMAT}. {way_out}")
        releases = {name: ordered(listed) for name, listed in data["releases"].items()}
        rows = list(_expand(data, releases))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MatrixError(f"The compatibility matrix {path} is damaged ({error!r}). {way_out}") from None
    return Table(rows, releases)


def _expand(data: dict[str, Any], releases: dict[str, list[str]]) -> Iterable[Row]:
    for patch, targets in data["patches"].items():
        for target, entry in targets.items():
            listed = entry.get("releases") or releases[entry["distribution"]]
            for span in entry["ranges"]:
                if span["verdict"] not in VERDICTS:
                    raise ValueError(f"verdict {span['verdict']!r}")
                first, last = listed.index(span["from"]), listed.index(span.get("to", span["from"]))
                for release in listed[first : last + 1]:
                    yield Row(
                        patch,
                        target,
                        entry["distribution"],
                        release,
                        span["verdict"],
                        span.get("reason", ""),
                        span.get("fingerprint", ""),
                        entry.get("evidence", "static"),
                        entry.get("role") == "used",
                    )


def dump(table: Table) -> str:
    """The text of a matrix file: neighbouring releases with equal rows are one range, one line each."""
    patches: dict[str, dict[str, Any]] = {}
    for patch, target in table.targets():
        rows = table.target_rows(patch, target)
        listed = table.releases.get(rows[0].distribution, [])
        entry: dict[str, Any] = {"distribution": rows[0].distribution}
        if rows[0].evidence != "static":
            entry["evidence"] = rows[0].evidence
        if rows[0].used:
            entry["role"] = "used"
        own = [row.release for row in rows]
        if own != listed:
            entry["releases"] = own
        entry["ranges"] = [
            {
                key: value
                for key, value in (
                    ("from", span[0].release),
                    ("to", span[-1].release if len(span) > 1 else ""),
                    ("verdict", span[0].verdict),
                    ("fingerprint", span[0].fingerprint),
                    ("reason", span[0].reason),
                )
                if value
            }
            for span in spans(rows)
        ]
        patches.setdefault(patch, {})[target] = entry
    judged = {row.distribution for row in table.rows()}
    releases = {name: listed for name, listed in table.releases.items() if name in judged}
    return _pretty({"format": FORMAT, "releases": releases, "patches": patches})


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


def _pretty(data: dict[str, Any]) -> str:
    lines = ["{", f' "format": {data["format"]},', ' "releases": {']
    lines.append(",\n".join(f"  {json.dumps(n)}: {json.dumps(listed)}" for n, listed in data["releases"].items()))
    lines += [" },", ' "patches": {']
    patches = []
    for patch, targets in data["patches"].items():
        blocks = []
        for target, entry in targets.items():
            head = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items() if k != "ranges")
            ranges = ",\n".join(f"     {json.dumps(span)}" for span in entry["ranges"])
            blocks.append(f'   {json.dumps(target)}: {{{head}, "ranges": [\n{ranges}\n   ]}}')
        patches.append(f"  {json.dumps(patch)}: {{\n" + ",\n".join(blocks) + "\n  }")
    lines += [",\n".join(patches), " }", "}"]
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=8)
def load(path: str | Path = MATRIX) -> Table:
    """The table in ``path``, with the evidence of live runs; an empty one, with its ``error`` set, if unreadable.

    An unreadable matrix lists nothing, so every release is judged as unlisted. It is said once, as a warning.
    """
    try:
        table = read(path)
    except MatrixError as error:
        log_lines.logger("matrix").warning("%s Until then every release counts as unlisted.", error)
        return Table(error=str(error))
    try:
        return with_live(table, live_rows(LIVE))
    except MatrixError as error:
        log_lines.logger("matrix").warning("%s No row is shown as proved by a run.", error)
        return table


def for_patch(patch: Patch) -> Table:
    """The table that holds ``patch``'s rows: its own file where it brings one, ours otherwise."""
    return load(patch.matrix or MATRIX)


# -- evidence from runs


@dataclass(frozen=True)
class LiveRow:
    """One patch in one run of a real engine on ``device``, by names of targets.

    ``applied``: read back as applied in a process of the run. ``called``: their wrappers saw a call. ``checked``: the
    run's check of the patch looks at their effect. ``passed``: that check passed.
    """

    distribution: str
    release: str
    patch: str
    passed: bool
    applied: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    device: str = "cpu"

    def evidence(self, target: str) -> Literal["static", "hooked", "live"]:
        """What this run proves of ``target``. Rows from before calls were recorded name none: at most ``hooked``."""
        if target not in self.applied:
            return "static"
        return "live" if self.passed and target in self.called and target in self.checked else "hooked"


def live_rows(path: str | Path = LIVE) -> list[LiveRow]:
    """What the runs in a ``matrix-live.json`` proved; nothing when there is no such file.

    The file is a list of objects with ``release``, ``distribution`` (``vllm`` if left out), ``device`` (``cpu`` if left
    out: all runs from before it was recorded) and ``patches``: a mapping of patch names to objects with ``result``
    (``"pass"`` or anything else) and the names of targets that :class:`LiveRow` has, under ``targets`` (applied),
    ``called`` and ``checked``.

    Raises:
        MatrixError: the file is there and is not such a list.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        return [
            LiveRow(
                run.get("distribution", "vllm"),
                run["release"],
                patch,
                result["result"] == "pass",
                tuple(result.get("targets", ())),
                tuple(result.get("called", ())),
                tuple(result.get("checked", ())),
                run.get("device", "cpu"),
            )
            for run in json.loads(path.read_text("utf-8"))
            for patch, result in run["patches"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MatrixError(f"{path} cannot be read: {error!r}. Write it again with scripts/live_matrix.py.") from None


def with_live(table: Table, runs: Iterable[LiveRow]) -> Table:
    """``table`` with the evidence of ``runs``: ``live`` before ``hooked``, and every device that has it."""
    devices: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        for target in run.applied:
            key = (run.patch, target, run.distribution, release_key(run.release), run.evidence(target))
            devices.setdefault(key, set()).add(run.device)

    def proved(row: Row) -> Row:
        words: tuple[Evidence, ...] = ("live", "hooked") if row.verdict == "applies" else ()
        for word in words:
            found = devices.get((row.patch, row.target, row.distribution, release_key(row.release), word))
            if found:
                return replace(row, evidence=word, devices=tuple(sorted(found)))
        return row

    return Table([proved(row) for row in table.rows()], dict(table.releases), table.error)


def contradictions(table: Table, runs: Iterable[LiveRow]) -> list[str]:
    """Where a run and the table say opposite things: applied against not applicable, or not passed against applies."""
    found = []
    for run in runs:
        targets = [target for patch, target in table.targets() if patch == run.patch]
        found_rows = {target: table.row(run.patch, target, run.release) for target in targets}
        rows = {target: row for target, row in found_rows.items() if row is not None}
        for target in run.applied:
            row = rows.get(target)
            if row is None or row.verdict != "applies":
                said = row.verdict if row else "nothing"
                found.append(f"{run.patch} {target} was applied on {run.release}; the matrix says {said}")
        if not run.passed and any(row.verdict == "applies" for row in rows.values()):
            found.append(f"{run.patch} did not pass on {run.release}; the matrix says applies")
    return found
