# SPDX-License-Identifier: Apache-2.0
"""The part of storing that need not happen on the model thread: one thread, a bounded queue, patience with storage.

A tier that fails (disk full, read-only or vanished folder) is left alone for a while: one warning when writes to it
pause, one line when they resume, and the outputs of that time are dropped and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_omni_patch import ledger

from ..config import MAX_SECONDS
from ..stats import ECStats
from ..storage.breaker import CircuitBreaker
from ..storage.entry import Entry, FormatError, bytes_of
from ..storage.key import Key
from .staging import Slot, Staging

_log = ledger.logger("ec")
# Seconds that a first output waits in the queue: where cores are scarce, a thread that takes it at once takes the core
# from the model, which is in the middle of its step.
_DELAY = 0.02
# Seconds between two looks at the statistics while nothing is stored.
_REST = 1.0
_TAKEN = ("stored", "present", "busy")


class Tier(Protocol):
    """A place for entries, as the writer needs it."""

    name: str

    def write(self, key: Key, entry: Entry, payload: memoryview, *, force: bool = False) -> str:
        """Store an entry; says what became of it. Raises ``OSError`` when the storage failed."""

    def recover(self) -> None:
        """Called before the first write after a failure."""


@dataclass
class Job:
    """One output on its way. ``ready`` waits until the copy into ``slot`` is complete (a CUDA event), if need be."""

    key: Key
    slot: Slot
    rows: int
    columns: int
    dtype: str
    force: bool = False
    local_only: bool = False
    ready: Callable[[], Any] | None = None


class Writer:
    """The thread and its queue.

    A job goes to the first tier of ``chain`` that takes it and to every tier of ``also``. ``stored`` is told of each
    published job.
    """

    def __init__(
        self,
        staging: Staging,
        chain: Sequence[Tier],
        also: Sequence[Tier],
        about: Mapping[str, str],
        stats: ECStats,
        *,
        queue_entries: int,
        retry_seconds: float,
        stored: Callable[[Key], None],
    ) -> None:
        self._staging = staging
        self._chain = [(tier, _breaker(tier, retry_seconds)) for tier in chain]
        self._also = [(tier, _breaker(tier, retry_seconds)) for tier in also]
        self._about = about
        self._stats = stats
        self._limit = queue_entries
        self._stored = stored
        self._condition = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._pending: dict[str, int] = {}
        self._busy = False
        self._resting = False
        self._hurried = 0  # callers that wait in flush()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ec-writer", daemon=True)
        self._thread.start()

    def pending(self, key: Key) -> bool:
        """Whether a job for ``key`` waits or runs."""
        with self._condition:
            return key.path in self._pending

    def full(self) -> bool:
        """No further job is taken at present."""
        with self._condition:
            return self._closed or len(self._jobs) >= self._limit

    def submit(self, job: Job) -> bool:
        """Queue a job; False when full or closed (the slot is then the caller's to give back)."""
        with self._condition:
            if self._closed or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            self._pending[job.key.path] = self._pending.get(job.key.path, 0) + 1
            if self._resting:
                self._condition.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is queued or being written; False when that takes longer than ``timeout`` seconds."""
        with self._condition:
            self._hurried += 1
            self._condition.notify_all()
            try:
                return self._condition.wait_for(lambda: not self._jobs and not self._busy, min(timeout, MAX_SECONDS))
            finally:
                self._hurried -= 1

    def close(self, timeout: float) -> None:
        """Take no more, write what is queued, end the thread. What is left after ``timeout`` is dropped and counted."""
        try:
            self.flush(timeout)
        finally:
            with self._condition:
                self._closed = True
                left = sum(not job.local_only for job in self._jobs)
                self._jobs.clear()
                self._condition.notify_all()
        if left:
            self._stats.add("dropped", left, "left at shutdown")
            _log.warning(
                "Encoder cache: dropped %d outputs at shutdown that could not be stored within %.1f s.", left, timeout
            )
        if self._thread is not threading.current_thread():
            self._thread.join(min(timeout, 2.0))

    def _run(self) -> None:
        self._staging.populate()
        while True:
            with self._condition:
                self._rest()
                if self._closed and not self._jobs:
                    return
                job = self._jobs.popleft() if self._jobs else None
                self._busy = job is not None
            if job is not None:
                try:
                    self._store(job)
                except Exception as error:
                    self._dropped(job, "error")
                    self._stats.unexpected("writing an output", error)
                finally:
                    self._staging.give_back(job.slot)
                    with self._condition:
                        self._busy = False
                        left = self._pending.get(job.key.path, 1) - 1
                        if left:
                            self._pending[job.key.path] = left
                        else:
                            self._pending.pop(job.key.path, None)
                        self._condition.notify_all()
            self._stats.tick()

    def _rest(self) -> None:
        """Wait for work, and a little longer where it comes after a rest; with the condition held."""
        if self._jobs or self._closed:
            return
        self._resting = True
        self._condition.wait_for(lambda: self._jobs or self._closed, _REST)
        self._resting = False
        if self._jobs:
            self._condition.wait_for(lambda: self._hurried or self._closed, _DELAY)

    def _store(self, job: Job) -> None:
        if job.ready is not None:
            job.ready()
        payload = bytes_of(job.slot.memory)
        try:
            entry = Entry.describe(job.key, job.rows, job.columns, job.dtype, payload, self._about)
        except FormatError as error:
            self._dropped(job, "not storable")
            _log.debug("not stored: %s", error)
            return
        outcomes = []
        for tier, breaker in self._chain:
            outcomes.append(self._write(tier, breaker, job, entry, payload))
            if outcomes[-1] in _TAKEN:
                break
        if not job.local_only:
            outcomes += [self._write(tier, breaker, job, entry, payload) for tier, breaker in self._also]
        if "stored" in outcomes:
            self._stats.add("stored")
            self._stats.add("bytes_stored", payload.nbytes)
            self._stored(job.key)
        elif any(outcome in _TAKEN for outcome in outcomes):
            self._stats.add("duplicates")
        else:
            self._dropped(job, next((o for o in outcomes if o != "paused"), "storage failing"))

    def _dropped(self, job: Job, reason: str) -> None:
        """A copy of what a remote keeps is no loss."""
        if not job.local_only:
            self._stats.add("dropped", 1, reason)

    def _write(self, tier: Tier, breaker: CircuitBreaker, job: Job, entry: Entry, payload: memoryview) -> str:
        if not breaker.allows():
            return "paused"
        try:
            if breaker.failing:
                tier.recover()
            outcome = tier.write(job.key, entry, payload, force=job.force)
        except OSError as error:
            breaker.failed(error)
            return "storage failing"
        if outcome == "stored":
            breaker.worked()
        return outcome


def _breaker(tier: Tier, retry_seconds: float) -> CircuitBreaker:
    return CircuitBreaker(f"Encoder cache writes to {tier.name}", retry_seconds)
