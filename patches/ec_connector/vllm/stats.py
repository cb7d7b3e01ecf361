# SPDX-License-Identifier: Apache-2.0
"""The connector's counts in vLLM's own shape, ``ECConnectorStats`` (0.31 and later).

vLLM shows them in its "EC Transfer metrics" log line. Imports vLLM: only used where it is imported already.
"""

from __future__ import annotations

from vllm.distributed.ec_transfer.ec_connector import metrics as upstream


class LMCacheECStats(upstream.ECConnectorStats):
    """Counts since the last report: numbers by name, added up over reports."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: upstream.ECConnectorStats) -> LMCacheECStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown: dict[str, int | float] = {name: value for name, value in self.data.items() if value}
        seconds = shown.pop("load_seconds", 0.0)
        if seconds:
            shown["load_ms_per_hit"] = round(1000 * seconds / max(1, self.data.get("hits", 0)), 3)
        return shown

    def is_empty(self) -> bool:
        return not any(self.data.values())
