# SPDX-License-Identifier: Apache-2.0
"""Matrix files: ``matrix.json`` of this package, and those that other packages' patches bring.

They are written by ``vllm-omni-patch matrix --update``, never by hand. A file lists, for each distribution, the
releases that were judged, in order; for each target the ranges of them over which verdict, reason and code are the
same; and for each module that is hooked the digest of its source file, at each release that changed it. A release that
is not in the list is in no range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_omni_patch.matrix.table import VERDICTS, MatrixError, Row, Table, ordered, spans
from vllm_omni_patch.patch import Patch
from vllm_omni_patch.telemetry import log_lines

FORMAT = 1
MATRIX = Path(__file__).with_name("matrix.json")


def read(path: str | Path) -> Table:
    """The table in a matrix file.

    Raises:
        MatrixError: there is no such file, or it is not a matrix.
    """
    to_fix = "To fix: rebuild it with 'vllm-omni-patch matrix --update', or reinstall vllm-omni-patch."
    if Path(path) != MATRIX and not Path(path).exists():
        raise MatrixError(
            f"There is no matrix file {path} yet: 'vllm-omni-patch matrix --update --patch NAME --release vllm==X.Y.Z' "
            "writes it, with one --release for each that the patch is meant for."
        )
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MatrixError(f"The compatibility matrix {path} cannot be read: {error}. {to_fix}") from None
    try:
        if data["format"] != FORMAT:
            raise MatrixError(f"The compatibility matrix {path} has format {data['format']}, not {FORMAT}. {to_fix}")
        releases = {name: ordered(listed) for name, listed in data["releases"].items()}
        rows = list(_expand(data, releases))
        digests = dict(_expand_digests(data.get("files", {}), releases))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MatrixError(f"The compatibility matrix {path} is damaged ({error!r}). {to_fix}") from None
    return Table(rows, releases, digests=digests)


def _expand_digests(
    files: dict[str, Any], releases: dict[str, list[str]]
) -> Iterable[tuple[tuple[str, str, str], str]]:
    for distribution, modules in files.items():
        for module, changes in modules.items():
            digest = ""
            for release in releases[distribution]:
                digest = changes.get(release, digest)
                if digest:
                    yield (distribution, module, release), digest


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
    return _pretty({"format": FORMAT, "releases": releases, "files": _changes(table, releases), "patches": patches})


def _changes(table: Table, releases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, dict[str, str]]]:
    """By distribution and hooked module: the releases that changed its file, with the digest (empty: it went away)."""
    hooked = {(r.distribution, r.target.partition(":")[0]) for r in table.rows() if not r.used}
    files: dict[str, dict[str, dict[str, str]]] = {}
    for distribution, listed in releases.items():
        for module in sorted(module for name, module in hooked if name == distribution):
            before, changes = "", {}
            for release in listed:
                digest = table.digests.get((distribution, module, release), "")
                if digest != before:
                    changes[release] = before = digest
            if changes:
                files.setdefault(distribution, {})[module] = changes
    return files


def _pretty(data: dict[str, Any]) -> str:
    lines = ["{", f' "format": {data["format"]},', ' "releases": {']
    lines.append(",\n".join(f"  {json.dumps(n)}: {json.dumps(listed)}" for n, listed in data["releases"].items()))
    lines += [" },", ' "files": {']
    files = []
    for distribution, modules in data["files"].items():
        changes = ",\n".join(f"   {json.dumps(module)}: {json.dumps(held)}" for module, held in modules.items())
        files.append(f"  {json.dumps(distribution)}: {{\n{changes}\n  }}")
    lines += [*([",\n".join(files)] if files else []), " },", ' "patches": {']
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
    """The table in ``path``; an empty one, with its ``error`` set, if it is unreadable.

    An unreadable matrix lists nothing, so every release is judged as unlisted. That is logged once, as a warning.
    """
    try:
        return read(path)
    except MatrixError as error:
        log_lines.logger("matrix").warning("%s Until then every release counts as unlisted.", error)
        return Table(error=str(error))


def for_patch(patch: Patch) -> Table:
    """The table that holds ``patch``'s rows: its own file where it brings one, ours otherwise."""
    return load(patch.matrix or MATRIX)
