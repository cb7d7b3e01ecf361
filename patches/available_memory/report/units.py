# SPDX-License-Identifier: Apache-2.0
"""Bytes and shares of a device: read, shown, and turned into a utilisation."""

from __future__ import annotations

import math
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


def byte_count(value: Any) -> int | None:
    """``value`` as a number of bytes, or ``None`` for anything that is not a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


def gib(value: int | float | None) -> str:
    """Bytes as GiB with two decimals; ``unknown`` for ``None``. Small values are shown in MiB."""
    if value is None:
        return "unknown"
    if abs(value) < 0.1 * GIB:
        return f"{value / MIB:.2f} MiB"
    return f"{value / GIB:.2f} GiB"


def largest_utilization(total: int, most: int) -> float | None:
    """The largest utilisation of at most four decimals that requests at most ``most`` of ``total`` bytes.

    vLLM requests ``ceil(total * utilization)``. ``None`` when not even 0.0001 does.
    """
    if total <= 0 or most <= 0:
        return None
    steps = min(math.floor(most / total * 10_000) + 1, 10_000)
    while steps > 0 and math.ceil(total * (steps / 10_000)) > most:
        steps -= 1
    return steps / 10_000 if steps > 0 else None
