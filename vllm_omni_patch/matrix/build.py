# SPDX-License-Identifier: Apache-2.0
"""Builds ``matrix.json``: every target judged on the source text of every release."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_omni_patch.code.releases import Release, fetch
from vllm_omni_patch.matrix.judge import read
from vllm_omni_patch.matrix.table import Row, Table, Verdict, ordered
from vllm_omni_patch.patch import Patch, Target

DOCUMENTED_REASON = "from the public source; the contract is checked when the module is imported"


# Starting two processes takes as long as judging this many releases.
_WORTH_A_POOL = 8


@dataclass(frozen=True)
class Question:
    """One target of one patch: what a worker process needs to know to judge it."""

    patch: str
    target: Target
    used: bool = False


def questions(patches: Iterable[Patch]) -> list[Question]:
    """Everything that ``patches`` hook, and everything that they use."""
    return [
        Question(patch.name, target, used)
        for patch in patches
        for used, targets in ((False, patch.targets), (True, patch.uses))
        for target in targets
    ]


def row_of(question: Question, release: Release) -> Row:
    """The verdict for one target on the text of one release: see :func:`.judge.read`."""
    target = question.target
    found = read(target, release.text(target.module))
    return Row(
        question.patch,
        target.name,
        target.distribution,
        release.release,
        found.verdict,
        found.reason,
        found.fingerprint,
        used=question.used,
    )


def documented(question: Question) -> list[Row]:
    """Rows of a target whose releases cannot be fetched: what its declaration has about them."""
    target = question.target
    rows = []
    for known in target.documented:
        reason = known.reason or target.note or DOCUMENTED_REASON
        rows.append(
            Row(
                question.patch,
                target.name,
                target.distribution,
                known.release,
                known.verdict,
                reason,
                evidence="documented",
            )
        )
    return rows


def mark_gone(rows: Sequence[Row], target: Target) -> list[Row]:
    """``rows`` of one target, oldest first, where a release that no longer has the target is marked as such.

    A target that every release must have has drifted then; an ``optional`` one is absent. The reason names the last
    release that had it.
    """
    last: Row | None = None
    marked = []
    for row in rows:
        if row.verdict == "absent" and last is not None:
            verdict: Verdict = "absent" if target.optional else "drifted"
            row = replace(row, verdict=verdict, reason=f"last in {last.release}; {row.reason}")
        elif row.verdict != "absent":
            last = row
        marked.append(row)
    return marked


def rebuild(
    patches: Sequence[Patch],
    releases: Mapping[str, Sequence[str]],
    cache: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    jobs: int | None = None,
) -> Table:
    """Judge every target on every release of its distribution.

    Args:
        releases: releases by distribution. A distribution without any gets no rows.
        progress: called with one line per release.
        jobs: processes; by default one per core where there are enough releases.

    Raises:
        ReleaseError: a release cannot be fetched.
    """
    asked = questions(patches)
    static = [q for q in asked if q.target.evidence == "static"]
    work = [
        ([q for q in static if q.target.distribution == name], name, release, str(cache) if cache else None)
        for name, listed in releases.items()
        for release in ordered(listed)
        if any(q.target.distribution == name for q in static)
    ]
    # The newest releases take longest, so they start first.
    work.reverse()
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if len(work) >= _WORTH_A_POOL else 1
    if jobs == 1:
        judged = _collect(map(_judge_release, work), progress)
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            judged = _collect(pool.map(_judge_release, work), progress)
    by_target: dict[tuple[str, str], list[Row]] = {}
    for row in judged.rows():
        by_target.setdefault((row.patch, row.target), []).append(row)
    complete: list[Row] = []
    for question in asked:
        found = by_target.get((question.patch, question.target.name), [])
        order = {release: index for index, release in enumerate(ordered(row.release for row in found))}
        found.sort(key=lambda row: order[row.release])
        complete += mark_gone(found, question.target) or documented(question)
    return Table(complete, releases, digests=judged.digests)


Work = tuple[list[Question], str, str, "str | None"]


def _judge_release(work: Work) -> Table:
    asked, distribution, release, cache = work
    source = fetch(distribution, release, cache)
    rows = [row_of(question, source) for question in asked]
    texts = {one.target.module: source.text(one.target.module) for one in asked if not one.used}
    digests = {(distribution, module, release): text.digest for module, text in texts.items() if text is not None}
    return Table(rows, {distribution: [release]}, digests=digests)


def _collect(results: Iterable[Table], progress: Callable[[str], None]) -> Table:
    together = Table()
    for judged in results:
        together = together.merged(judged)
        for distribution, (release,) in judged.releases.items():
            progress(f"{distribution} {release}: {len(judged.rows())} targets judged")
    return together
