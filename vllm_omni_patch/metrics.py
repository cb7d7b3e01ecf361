# SPDX-License-Identifier: Apache-2.0
"""Gauges and counters named ``vllm_omni_patch_*``, gathered over all processes of an engine.

vLLM serves ``/metrics`` from the API server, while most of what we count happens in the engine core and in workers.
Each process therefore keeps its own numbers and leaves a snapshot in the run folder; in the process that serves
``/metrics`` one collector reads all of them.
"""

from __future__ import annotations

import threading
from typing import Literal

PREFIX = "vllm_omni_patch_"

_lock = threading.Lock()
_families: dict[str, tuple[Literal["gauge", "counter"], str]] = {}
_values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}


def set_gauge(name: str, help: str, value: float, /, **labels: object) -> None:
    """Set gauge ``vllm_omni_patch_<name>`` to ``value``."""
    with _lock:
        _families[name] = ("gauge", help)
        _values[(name, _key(labels))] = float(value)


def add(name: str, help: str, amount: float = 1, /, **labels: object) -> None:
    """Add ``amount`` (>= 0) to counter ``vllm_omni_patch_<name>``; the name ends in ``_total``."""
    with _lock:
        _families[name] = ("counter", help)
        key = (name, _key(labels))
        _values[key] = _values.get(key, 0.0) + amount


def values() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """This process's numbers, by name (without the prefix) and sorted labels."""
    with _lock:
        return dict(_values)


def _key(labels: dict[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in labels.items()))
