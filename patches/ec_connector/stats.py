# SPDX-License-Identifier: Apache-2.0
"""What the encoder cache did: counters for ``/metrics``, the ledger and a log line at intervals."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from vllm_omni_patch import ledger, metrics

_log = ledger.logger("ec")
# Forks between the first process and this one.
_forks = 0

HELP = {
    "hits": "Encoder outputs loaded from the encoder cache.",
    "misses": "Loads that found no usable entry.",
    "stored": "Encoder outputs published in a tier of the encoder cache.",
    "duplicates": "Stores skipped because the entry existed or was being written.",
    "dropped": "Encoder outputs that were not stored: declined, queue full, too large, or the storage failed.",
    "bad_entries": "Stored entries found damaged or incomplete: removed or, where that fails, no longer offered.",
    "read_failures": "Lookups and loads that could not read the disk or shared memory.",
    "errors": "Lookups, loads and stores that failed with an unexpected error.",
    "fallbacks": "Promised encoder outputs that were encoded again because they could not be loaded.",
    "lookups": "Lookups by the scheduler.",
    "lookup_hits": "Lookups by the scheduler that found an entry.",
    "lookup_seconds": "Seconds from a lookup to its entry verified in memory, or to a miss.",
    "remote_failures": "Remote operations that failed or passed their deadline.",
    "bytes_loaded": "Bytes of encoder outputs loaded.",
    "bytes_stored": "Bytes of encoder outputs stored.",
    "load_seconds": "Seconds spent loading encoder outputs.",
}
# All tensor-parallel ranks of an engine load the same items in the same step: the first rank counts for all of them,
# so that a sum over processes is the engine's number, and over engines the deployment's.
ALIKE = ("hits", "misses", "fallbacks", "bytes_loaded", "load_seconds")
_SCHEDULER, _FIRST = "each engine's scheduler", "each engine's first rank, for all its ranks"
_EACH = "each process"
WHO = {
    **dict.fromkeys(HELP, _FIRST),  # the first rank alone stores
    **dict.fromkeys(("lookups", "lookup_hits", "lookup_seconds"), _SCHEDULER),
    **dict.fromkeys(("read_failures", "errors", "remote_failures"), _EACH),
    "bad_entries": "the first process of an engine to find it",
}


@dataclass(frozen=True)
class Snapshot:
    """All counters at one moment; counts, bytes and seconds since the engine was built."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    duplicates: int = 0
    dropped: int = 0
    bad_entries: int = 0
    read_failures: int = 0
    errors: int = 0
    fallbacks: int = 0
    lookups: int = 0
    lookup_hits: int = 0
    lookup_seconds: float = 0.0
    remote_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0


class ECStats:
    """Counters of one engine. ``interval`` seconds lie between log lines at least; 0: no line.

    Every counter also goes to ``vllm_omni_patch_ec_<name>_total``. A forked child counts nothing, because a lock may
    have been held when it was forked. ``speaks`` is set to False on all ranks of an engine but the first: they leave
    what is in ``ALIKE`` to it.
    """

    speaks = True

    def __init__(self, role: str, interval: float = 60.0) -> None:
        self._role = role
        self._born = _forks
        self._interval = interval
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(HELP, 0)
        self._reasons: dict[str, int] = {}
        self._warned: set[str] = set()
        self.counted = 0  # calls of :meth:`add`: whoever has seen this many has seen every number
        self._logged_at = time.monotonic()
        self._logged: dict[str, float] = dict(self._values)

    @property
    def forked(self) -> bool:
        """This process was forked off the one that the engine and its threads live in."""
        return self._born != _forks

    def add(self, name: str, amount: float = 1, reason: str = "") -> None:
        """Count; ``reason`` also keeps a count of its own (why stores were dropped). Never raises."""
        if self.forked or not (self.speaks or name not in ALIKE):
            return
        with self._lock:
            self._values[name] += amount
            self.counted += 1
            if reason:
                self._reasons[reason] = self._reasons.get(reason, 0) + int(amount)
        try:
            metrics.add(f"ec_{name}_total", HELP[name], amount)
        except Exception as error:
            _log.debug("metric ec_%s_total: %s", name, error)

    def fallback(self, count: int = 1) -> None:
        """So many promised items are encoded again."""
        if count:
            self.add("fallbacks", count)

    def read_failure(self, place: str, error: OSError) -> None:
        """``place`` could not be read: counted, and a warning about the first of each kind. Never raises."""
        self.add("read_failures")
        if self._first(f"{place}: {error.errno}"):
            _log.warning(
                "Encoder cache: cannot read from %s: %s. What cannot be read is a miss and is encoded; all such "
                "failures are counted in ec_read_failures_total. Check owner, mode and mount of the folder.",
                place,
                error,
            )

    def unexpected(self, what: str, error: Exception) -> None:
        """``what`` ended in an error that nothing foresees: counted, and a warning about the first of each kind, with
        the place in the code. Never raises."""
        self.add("errors")
        if self._first(f"{what}: {type(error).__name__}"):
            _log.warning(
                "Encoder cache: %s ended in %s: %s. Serving goes on without it; all such errors are counted in "
                "ec_errors_total. Report this text with the lines below.",
                what,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _first(self, kind: str) -> bool:
        """Whether nothing of ``kind`` was warned about in this process."""
        with self._lock:
            before = len(self._warned)
            self._warned.add(kind)
            return not self.forked and len(self._warned) > before

    def snapshot(self) -> Snapshot:
        """All counters now."""
        values: dict[str, Any] = {
            name: value if name == "load_seconds" else int(value) for name, value in self.values().items()
        }
        return Snapshot(**values)

    def values(self) -> dict[str, float]:
        """All counters now, by name."""
        return dict(self._values)

    def reasons(self) -> dict[str, int]:
        """Why stores were dropped: reason to count."""
        return dict(self._reasons)

    def tick(self, last: bool = False) -> None:
        """Log one line when the interval is over and something happened; at once when ``last``. Never raises."""
        now = time.monotonic()
        if self.forked or not (last or self._is_due(now)):
            return  # without the lock: asked several times in every step
        with self._lock:
            if not (last or self._is_due(now)) or self._values == self._logged:
                return
            self._logged_at, self._logged = now, dict(self._values)
        try:
            facts = self.snapshot()
            ledger.publish(f"ec_{self._role}", facts)
            _log.info("%s", self.line(facts))
        except Exception as error:
            _log.debug("encoder cache statistics: %s", error)

    def _is_due(self, now: float) -> bool:
        return 0 < self._interval <= now - self._logged_at

    def line(self, facts: Snapshot) -> str:
        """The log line for ``facts``."""
        text = (
            f"Encoder cache ({self._role}): {facts.hits} hits, {facts.misses} misses, {facts.stored} stored, "
            f"{facts.dropped} dropped, {facts.fallbacks} encoded again after a promise; "
            f"{facts.bytes_loaded / 2**20:.1f} MiB loaded in {facts.load_seconds:.2f} s, "
            f"{facts.bytes_stored / 2**20:.1f} MiB stored"
        )
        if facts.lookups:
            text += f"; {facts.lookup_hits} of {facts.lookups} lookups found"
        if facts.bad_entries:
            text += f"; {facts.bad_entries} bad entries found"
        if facts.read_failures:
            text += f"; {facts.read_failures} times storage could not be read"
        if facts.errors:
            text += f"; {facts.errors} unexpected errors"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons().items()))
        return f"{text} (dropped: {reasons})" if reasons else text


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
