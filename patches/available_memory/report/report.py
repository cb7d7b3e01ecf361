# SPDX-License-Identifier: Apache-2.0
"""The report of a KV cache budget: every number with its source and whether it was measured.

One type from the worker to the log, the JSON file, the gauges and the command ``vllm-omni-patch memory``.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from .units import byte_count

State = Literal["measured", "zero", "unknown", "configured"]
Platform = Literal["gpu", "cpu", "xpu", "neuron"]

# Names of the inputs that every report has. One that a worker did not fill in is reported as unknown.
DEVICE_TOTAL = "device_total"
UTILIZATION = "gpu_memory_utilization"
REQUESTED = "requested"
WEIGHTS = "weights"
ACTIVATION_PEAK = "activation_peak"
NON_TORCH = "non_torch"
GRAPH_ESTIMATE = "graph_estimate"
OTHER_PROCESSES = "other_processes"
# Further names that several workers use.
DEVICE_FREE = "device_free"
OWN_PROCESS = "own_process"
STOCK_BUDGET = "stock_budget"
EXPLICIT_KV = "kv_cache_memory_bytes"
DEVICE_GROWTH = "device_growth"
MULTIMODAL_RESERVATION = "multimodal_reservation"
FREE_SHARE = "free_for_this_worker"

STANDARD: tuple[tuple[str, str], ...] = (
    (DEVICE_TOTAL, "bytes"),
    (UTILIZATION, "ratio"),
    (REQUESTED, "bytes"),
    (WEIGHTS, "bytes"),
    (ACTIVATION_PEAK, "bytes"),
    (NON_TORCH, "bytes"),
    (GRAPH_ESTIMATE, "bytes"),
    (OTHER_PROCESSES, "bytes"),
)
MODEL_LOCAL_KV = "model_local_kv"
SCHEMA = 1


@dataclass(frozen=True)
class Input:
    """One number that the budget was made from, or that helps to understand it.

    ``value`` is in ``unit`` (``"bytes"`` unless said otherwise) and ``None`` exactly when ``state`` is ``"unknown"``.
    ``source`` says in words where it was read. ``zero`` is a measurement that came out as 0, never a missing one.
    """

    name: str
    value: int | float | str | None
    source: str
    state: State = "measured"
    unit: str = "bytes"

    @classmethod
    def measured(cls, name: str, value: int | float | None, source: str, unit: str = "bytes") -> Input:
        """An input that was read somewhere: ``None`` becomes unknown and 0 becomes zero."""
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return cls(name, None, source, "unknown", unit)
        return cls(name, value, source, "zero" if value == 0 else "measured", unit)

    @classmethod
    def unknown(cls, name: str, source: str, unit: str = "bytes") -> Input:
        """An input that could not be read; ``source`` says why."""
        return cls(name, None, source, "unknown", unit)


def configured(name: str, value: Any, source: str, unit: str = "bytes") -> Input:
    """A configured input; unknown where it is ``None``."""
    return Input.unknown(name, source, unit) if value is None else Input(name, value, source, "configured", unit)


@dataclass
class BudgetReport:
    """What one worker's ``determine_available_memory`` returned, and why. All sizes in bytes.

    Attributes:
        policy: the rule that made the number (``stock``, ``process``, ``explicit``, ``cap``...).
        kv_bytes: the number that was returned.
        formula: the rule in one line of text.
        advice: what a user can set, as sentences.
        dp_rank: rank among data-parallel engines; ``None`` where the engine is the only one.
        blocks, block_bytes: ``None`` until the KV cache is laid out.
        linear_in_requested: the budget falls by one byte with every byte by which ``requested`` falls, so a utilisation
            can be computed from a wanted budget.
        size_given: the size itself was set, so no requested share bounds it.
        short_by: how far below 0 the formula came out, where the budget was cut off at 0.
        kv_setting: what sets the size on this worker: the option, ``VLLM_CPU_KVCACHE_SPACE`` (whole GiB) on CPU through
            vLLM 0.19, or empty where nothing does.
        counts_own_process: the budget was made from all memory of this process, so it contains everything in place.
        model_local_kv: what the patch of that name published in this process; ``None`` where it did not run.
    """

    platform: Platform
    worker: str
    policy: str
    kv_bytes: int
    formula: str = ""
    device: str = ""
    rank: int | None = None
    dp_rank: int | None = None
    local_rank: int | None = None
    inputs: list[Input] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    block_bytes: int | None = None
    blocks: int | None = None
    linear_in_requested: bool = True
    size_given: bool = False
    short_by: int = 0
    kv_setting: str = "--kv-cache-memory-bytes"
    counts_own_process: bool = False
    reserved_for_model_local_kv: int = 0
    model_local_kv: dict[str, Any] | None = None
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)

    def get(self, name: str) -> Input | None:
        """The input called ``name``; the newest where it was added twice."""
        return next((item for item in reversed(self.inputs) if item.name == name), None)

    def value(self, name: str) -> Any:
        """Value of the input called ``name``, ``None`` when it is absent or unknown."""
        item = self.get(name)
        return None if item is None else item.value

    def local_kv(self, key: str) -> int | None:
        """``declared_bytes``, ``resident_bytes``, ``uncharged_bytes`` or ``pending_bytes`` of the model-local KV.

        ``None`` when it is not known.
        """
        return byte_count((self.model_local_kv or {}).get(key))

    def to_json(self) -> dict[str, Any]:
        """The document that is written as ``memory-<pid>.json`` (``schema`` 1, sizes in bytes)."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> BudgetReport:
        """The report in a document that :meth:`to_json` made.

        Raises:
            ValueError: it is none, or one of another schema.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise ValueError(f"schema {found!r}, and this version of vllm-omni-patch reads schema {SCHEMA}")
        try:
            known = {name: data[name] for name in _names(cls) & set(data)}
            known["inputs"] = [Input(**{name: item[name] for name in _names(Input)}) for item in data["inputs"]]
            report = cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a memory report ({type(error).__name__}: {error})") from None
        if byte_count(report.kv_bytes) is None:
            raise ValueError(f"not a memory report (kv_bytes is {report.kv_bytes!r})")
        return report


def _names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)}
