# SPDX-License-Identifier: Apache-2.0
"""The budget's report: every number with its source and whether it was measured, and what a user could set.

A worker's hook fills one :class:`BudgetReport` and calls :func:`emit`. Nothing in here is read by the arithmetic that
sets the budget, and :func:`emit` never raises: the budget is the same with and without a report.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_omni_patch import flags, ledger, metrics

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
GIB = 1 << 30

logger = ledger.logger("memory")


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
    """An input that somebody set; unknown where it is ``None``."""
    return Input.unknown(name, source, unit) if value is None else Input(name, value, source, "configured", unit)


@dataclass
class BudgetReport:
    """What one worker's ``determine_available_memory`` returned, and why. All sizes in bytes.

    ``kv_bytes`` is the number returned; ``short_by`` how far below 0 the formula came out where it was cut off at 0.
    ``policy`` names the rule that made it (``stock``, ``process``, ``explicit``, ``cap``...), ``formula`` the same in
    one line of text. ``own_advice`` is what the worker's own policy suggests; ``advice`` is that and what
    ``advice.advise`` works out. ``linear_in_requested`` says that lowering ``requested`` by one byte lowers the budget
    by one byte, so that a utilisation can be computed from a wanted budget. ``size_given`` says that somebody set the
    size itself, so that no requested share bounds it. ``blocks`` and ``block_bytes`` stay ``None`` until the KV cache
    is laid out. ``kv_setting`` is the setting that fixes the size on this worker: the option,
    ``VLLM_CPU_KVCACHE_SPACE`` (whole GiB) on CPU through vLLM 0.19, or empty where there is none.
    ``counts_own_process``: the budget was made from all memory of this process, so everything in place is in it.
    """

    platform: Platform
    worker: str
    policy: str
    kv_bytes: int
    formula: str = ""
    device: str = ""
    rank: int | None = None
    local_rank: int | None = None
    inputs: list[Input] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    own_advice: list[str] = field(default_factory=list)
    block_bytes: int | None = None
    blocks: int | None = None
    linear_in_requested: bool = True
    size_given: bool = False
    short_by: int = 0
    kv_setting: str = "--kv-cache-memory-bytes"
    counts_own_process: bool = False
    reserved_for_model_local_kv: int = 0
    model_local_kv: dict[str, Any] | None = None

    def get(self, name: str) -> Input | None:
        """The input called ``name``; the newest where it was added twice."""
        return next((item for item in reversed(self.inputs) if item.name == name), None)

    def value(self, name: str) -> Any:
        """Value of the input called ``name``, ``None`` when it is absent or unknown."""
        item = self.get(name)
        return None if item is None else item.value


def emit(report: BudgetReport, brief: bool = False) -> str | None:
    """Log ``report`` as one table, write ``memory-<pid>.json`` and set the gauges; returns the file's path, if any.

    Never raises; what went wrong is one warning. Completes ``report`` in place: standard inputs that are missing are
    added as unknown, the model-local KV is taken from the ledger, the advice is worked out. ``brief``: the table was
    logged before and only the block count is new.
    """
    try:
        complete(report)
        data = to_dict(report)
        if brief:
            logger.info("KV cache laid out: %s blocks of %s bytes", report.blocks, report.block_bytes)
        else:
            logger.info("%s", as_text(data))
        _set_gauges(report)
        return ledger.write_report("memory", data)
    except Exception as error:
        try:
            logger.warning("the memory report failed (%s: %s); the budget is not affected", type(error).__name__, error)
        except Exception:  # a broken log handler must not reach the worker either
            pass
        return None


def complete(report: BudgetReport) -> None:
    """Fill in what every report has: the standard inputs, the model-local KV, the advice. Safe to call again."""
    from .advice import advise  # it reads reports, so it imports this module

    for name, unit in STANDARD:
        if report.get(name) is None:
            report.inputs.append(Input.unknown(name, "not measured by this worker", unit))
    published = ledger.published(MODEL_LOCAL_KV)
    if isinstance(published, dict):
        report.model_local_kv = published
    report.advice = [*report.own_advice, *advise(report)]


def local_kv(report: BudgetReport, key: str) -> int | None:
    """``declared_bytes``, ``resident_bytes`` or ``pending_bytes`` of the model-local KV; ``None`` when not known."""
    return byte_count((report.model_local_kv or {}).get(key))


def byte_count(value: Any) -> int | None:
    """``value`` as a number of bytes, or ``None`` for anything that is not a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


def to_dict(report: BudgetReport) -> dict[str, Any]:
    """``report`` as the plain data that is written as JSON (``schema`` 1, sizes in bytes)."""
    return {"schema": SCHEMA, "pid": os.getpid(), "time": time.time(), **asdict(report)}


def gib(value: int | float | None) -> str:
    """Bytes as GiB with two decimals; ``unknown`` for ``None``. Small values are shown in MiB."""
    if value is None:
        return "unknown"
    if abs(value) < 0.1 * GIB:
        return f"{value / (1 << 20):.2f} MiB"
    return f"{value / GIB:.2f} GiB"


def as_text(data: dict[str, Any]) -> str:
    """The report as a plain table, from the data that :func:`to_dict` gives or that was read from the file."""
    title = f"KV cache budget of {data.get('worker', '?')}"
    where = [part for part in (data.get("device"), _rank(data), f"pid {data.get('pid')}") if part]
    rows = [(*_cells(item), f"{item.get('state')}: {item.get('source')}") for item in data.get("inputs", [])]
    local = data.get("model_local_kv")
    for key, label in (
        ("declared_bytes", "declared"),
        ("resident_bytes", "resident"),
        ("pending_bytes", "still to come"),
    ):
        value = byte_count((local or {}).get(key))
        source = "no declaration in this process" if local is None else "declarations of the loaded model"
        state = "unknown" if value is None else "zero" if value == 0 else "declared"
        rows.append((f"model_local_kv {label}", gib(value), f"{state}: {source}"))
    reserved = data.get("reserved_for_model_local_kv") or 0
    if reserved:
        rows.append(
            ("reserved for model_local_kv", gib(reserved), "configured: VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV")
        )
    rows.append(("KV cache", gib(data.get("kv_bytes")), f"{data.get('kv_bytes')} bytes, policy {data.get('policy')}"))
    blocks, block_bytes = data.get("blocks"), data.get("block_bytes")
    per_block = "" if block_bytes is None else f"{block_bytes} bytes each"
    rows.append(
        ("KV cache blocks", "unknown" if blocks is None else str(blocks), per_block or "the cache is not laid out yet")
    )
    left, middle = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [f"{title} ({', '.join(where)})"]
    lines += [f"  {name:<{left}}  {value:>{middle}}  {text}" for name, value, text in rows]
    if data.get("formula"):
        lines.append(f"  = {data['formula']}")
    lines += [f"  note: {note}" for note in data.get("notes", [])]
    lines += [f"  {line}" for line in data.get("advice", [])]
    return "\n".join(lines)


def _rank(data: dict[str, Any]) -> str:
    return "" if data.get("rank") is None else f"rank {data['rank']}"


def _cells(item: dict[str, Any]) -> tuple[str, str]:
    value, unit = item.get("value"), item.get("unit", "bytes")
    if value is None:
        return str(item.get("name")), "unknown"
    if unit == "bytes" and isinstance(value, (int, float)):
        return str(item.get("name")), gib(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return str(item.get("name")), text if unit in ("ratio", "text") else f"{text} {unit}"


def _set_gauges(report: BudgetReport) -> None:
    """Every known number of bytes as ``memory_<name>_bytes``; an unknown one is left out, since 0 would be a claim."""
    numbers = {item.name: item.value for item in report.inputs if item.unit == "bytes"}
    for key in ("declared_bytes", "resident_bytes", "pending_bytes"):
        numbers[f"{MODEL_LOCAL_KV}_{key.removesuffix('_bytes')}"] = local_kv(report, key)
    numbers["kv_cache"] = report.kv_bytes
    for name, value in numbers.items():
        count = byte_count(value)
        if count is not None:
            gauge = f"memory_{name.removesuffix('_bytes')}_bytes"
            label = name.removesuffix("_bytes").replace("_", " ")
            metrics.set_gauge(gauge, f"KV cache budget: {label}, in bytes.", count, rank=_label(report.rank))
    if report.blocks is not None:
        metrics.set_gauge("memory_kv_cache_blocks", "KV cache blocks.", report.blocks, rank=_label(report.rank))


def _label(rank: int | None) -> object:
    return "" if rank is None else rank


def report_folder() -> str:
    """Folder of the report files, empty when none is set.

    Raises:
        FlagError: the variable holds a value that it does not accept.
    """
    return str(flags.read(flags.REPORT_DIR) or "")
