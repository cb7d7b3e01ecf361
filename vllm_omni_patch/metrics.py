# SPDX-License-Identifier: Apache-2.0
"""Gauges and counters named ``vllm_omni_patch_*`` on vLLM's ``/metrics``, gathered over all processes of an engine.

vLLM serves ``/metrics`` from the API server, while most of what we count happens in the engine core and in workers.
Each process therefore keeps its numbers in a file of its own in the run folder (``telemetry/numbers.py``), and the one
that serves the page reads all of them (``telemetry/reading.py``, ``telemetry/exposition.py``). Prometheus' own
multiprocess mode is not used for this: vLLM turns it on only with several API servers, and its child processes import
``prometheus_client`` before it could be set.
"""

from __future__ import annotations

import math

from vllm_omni_patch.telemetry import numbers
from vllm_omni_patch.telemetry.number_file import Key, Number


def set_gauge(name: str, help: str, value: float | None, /, **labels: object) -> None:
    """Set gauge ``vllm_omni_patch_<name>`` to ``value``; ``None``: not known (any more), so it has no sample."""
    numbers.mine.set({_key(name, labels): Number("gauge", help, math.nan if value is None else float(value))})


def add(name: str, help: str, amount: float = 1, /, **labels: object) -> None:
    """Add ``amount`` (>= 0) to counter ``vllm_omni_patch_<name>``; the name ends in ``_total``."""
    numbers.mine.add(_key(name, labels), help, float(amount))


def dp_rank(parallel_config: object) -> int | None:
    """The rank of vLLM's ``ParallelConfig`` among data-parallel engines; ``None`` where an engine is the only one.

    vLLM makes the engines of a dense model look as if each were alone (size 1, rank 0). What still tells is
    ``data_parallel_index`` and the port at which the engines would meet, which one engine does not have.
    """
    size, index = (
        getattr(parallel_config, "data_parallel_size", 1),
        getattr(parallel_config, "data_parallel_index", None),
    )
    if isinstance(size, int) and size > 1:
        index = getattr(parallel_config, "data_parallel_rank", None)
    elif not index and not getattr(parallel_config, "data_parallel_master_port", 0):
        index = None
    return index if isinstance(index, int) else None


def values() -> dict[Key, float]:
    """This process's numbers, by name (without the prefix) and sorted labels."""
    return {key: number.value for key, number in numbers.mine.all().items()}


def _key(name: str, labels: dict[str, object]) -> Key:
    # Text that is not valid UTF-8 would cost the whole page.
    return name, tuple(sorted((k, str(v).encode(errors="replace").decode()) for k, v in labels.items()))
