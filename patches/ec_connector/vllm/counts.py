# SPDX-License-Identifier: Apache-2.0
"""Counts on their way from the workers to the scheduler, which hands them to vLLM. Imports neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..stats import ECStats

# Counts of the workers; what remains comes from the scheduler.
WORKER_COUNTS = ("hits", "misses", "stored", "dropped", "fallbacks", "bytes_loaded", "bytes_stored", "load_seconds")
SCHEDULER_COUNTS = ("lookups", "lookup_hits")


@dataclass
class Report:
    """What a worker tells the scheduler after a step: counts since its last report."""

    counts: dict[str, float] = field(default_factory=dict)

    def merged(self, other: Report) -> Report:
        """Both reports as one. Ranks of one engine load and encode the same items, so counts are not added up."""
        counts = {key: max(self.counts.get(key, 0.0), value) for key, value in other.counts.items()}
        return Report({**self.counts, **counts})


class Deltas:
    """What an engine's counters have gained from one look to the next. Asked in every step, so cheap."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._counted = 0
        self._last: dict[str, float] = dict.fromkeys(names, 0)

    def take(self, stats: ECStats) -> dict[str, float]:
        """What each counter has gained since the last call; only those that did."""
        if stats.counted == self._counted:
            return {}
        self._counted = stats.counted
        values = stats.values()
        last = self._last
        gained = {name: values[name] - last[name] for name in self._names if values[name] != last[name]}
        if gained:
            self._last = {name: values[name] for name in self._names}
        return gained
