# SPDX-License-Identifier: Apache-2.0
"""Evidence from runs of real engines: ``matrix-live.json``, which ``scripts/live_matrix.py`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from vllm_omni_patch.matrix import files
from vllm_omni_patch.matrix.files import MATRIX
from vllm_omni_patch.matrix.table import Evidence, MatrixError, Row, Table, release_key
from vllm_omni_patch.patch import Patch
from vllm_omni_patch.telemetry import log_lines

LIVE = Path(__file__).with_name("matrix-live.json")


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


def live_rows(path: str | Path | None = None) -> list[LiveRow]:
    """What the runs in ``path`` proved (default: in our ``matrix-live.json``); nothing when there is no such file.

    The file is a list of objects with ``release``, ``distribution`` (``vllm`` if left out), ``device`` (``cpu`` if left
    out: all runs from before it was recorded) and ``patches``: a mapping of patch names to objects with ``result``
    (``"pass"`` or anything else) and the names of targets that :class:`LiveRow` has, under ``targets`` (applied),
    ``called`` and ``checked``.

    Raises:
        MatrixError: the file is there and is not such a list.
    """
    path = Path(path or LIVE)
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
        raise MatrixError(
            f"{path} cannot be read: {error!r}. To fix: write it again with scripts/live_matrix.py."
        ) from None


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

    return Table([proved(row) for row in table.rows()], dict(table.releases), table.error, table.digests)


def load(path: str | Path = MATRIX) -> Table:
    """:func:`.files.load`, with the evidence of the runs in our ``matrix-live.json``."""
    return _proved(files.load(path))


def for_patch(patch: Patch) -> Table:
    """:func:`.files.for_patch`, with the evidence of the runs in our ``matrix-live.json``."""
    return _proved(files.for_patch(patch))


@lru_cache(maxsize=8)
def _proved(table: Table) -> Table:
    try:
        return with_live(table, live_rows())
    except MatrixError as error:
        log_lines.logger("matrix").warning("%s No row is shown as proved by a run.", error)
        return table
