# SPDX-License-Identifier: Apache-2.0
"""From a worker and its budget to a :class:`~.report.report.BudgetReport`.

Reads worker attributes and memory counters only; every figure that cannot be read is an unknown input. Called after
the number is settled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_omni_patch import metrics

from .cpu import explain_cpu, weights
from .gpu import budget
from .gpu.nvml import Reading
from .gpu.profiling import ProfileWatch, device_memory, is_unified
from .report import report
from .report.report import BudgetReport, Input, configured
from .report.units import byte_count, gib


def build(
    worker: Any,
    value: Any,
    stock: Any,
    policy: str,
    explicit: bool,
    watch: ProfileWatch | None,
    before: weights.Before | None = None,
) -> BudgetReport:
    """The report of one budget of ``value`` bytes; ``stock`` is what vLLM's method returned.

    ``before``: the sizes of a CPU worker's weights before they were packed, where they were counted.

    Raises:
        Exception: anything; the caller wraps it whole.
    """
    device = getattr(worker, "device", None)
    kind = getattr(device, "type", None) or getattr(getattr(worker, "device_config", None), "device_type", None)
    made = BudgetReport(
        platform={"cpu": "cpu", "xpu": "xpu"}.get(str(kind), "gpu"),  # type: ignore[arg-type]
        worker=type(worker).__name__,
        policy=_policy(worker, policy, explicit),
        kv_bytes=int(value),
        device="" if device is None else str(device),
        rank=getattr(worker, "rank", None),
        dp_rank=metrics.dp_rank(getattr(worker, "parallel_config", None)),
        local_rank=getattr(worker, "local_rank", None),
    )
    made.size_given = explicit or made.policy == "startup plan"
    made.linear_in_requested = not made.size_given
    utilization = getattr(worker.cache_config, "gpu_memory_utilization", None)
    made.inputs.append(configured(report.UTILIZATION, utilization, "gpu_memory_utilization", "ratio"))
    if made.platform == "cpu":
        explain_cpu.fill(made, worker, int(stock), explicit, before)
    elif watch is None:
        _xpu(made, worker, int(stock))
    else:
        _gpu(made, worker, int(stock), watch)
    setting = getattr(worker.cache_config, "kv_cache_memory_bytes", None)
    if setting:
        made.inputs.append(configured(report.EXPLICIT_KV, int(setting), made.policy))
    return made


def add_blocks(made: BudgetReport, kv_cache_config: Any) -> None:
    """Number of blocks and bytes per block from vLLM's ``KVCacheConfig``, whose tensors hold all layers' blocks.

    The block count is the scheduler's own, so it holds for mixed layer types and ``num_gpu_blocks_override`` too.
    """
    blocks = int(kv_cache_config.num_blocks)
    total = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
    made.blocks = blocks
    made.block_bytes = total // blocks if blocks else None


def _policy(worker: Any, policy: str, explicit: bool) -> str:
    if explicit:
        return "explicit kv_cache_memory_bytes"
    if getattr(worker.cache_config, "kv_cache_memory_bytes", None):
        return "startup plan"
    return policy


def _gpu(made: BudgetReport, worker: Any, stock: int, watch: ProfileWatch) -> None:
    snapshot, profile = getattr(worker, "init_snapshot", None), watch.profile
    total = _int(snapshot, "total_memory")
    requested = byte_count(getattr(worker, "requested_memory", None))
    loaded = _int(worker.model_runner, "model_memory_usage")
    made.inputs += [
        Input.measured(report.DEVICE_TOTAL, total, "init_snapshot, device query of torch"),
        configured(report.REQUESTED, requested, "device total x gpu_memory_utilization"),
        Input.measured(report.WEIGHTS, loaded, "model_runner.model_memory_usage"),
    ]
    free: int | None
    if profile is not None:
        free, when = profile.free_after, "after profiling"
    else:
        asked = device_memory(worker.device)
        free, when = (None if asked is None else asked[0]), "now"
    reading = watch.reading or _own(watch, total, free)
    own = reading.bytes
    reserved = None if profile is None else budget.possible(profile.torch_reserved, total)
    if profile is None:
        why = "no profiling on this path"
        made.inputs += [Input.unknown(name, why) for name in (report.ACTIVATION_PEAK, report.NON_TORCH)]
    else:
        made.inputs.append(
            Input.measured(report.ACTIVATION_PEAK, profile.transient_peak, "torch's peak above what stays")
        )
        if own is not None and reserved is not None and own >= reserved:
            made.inputs.append(Input.measured(report.NON_TORCH, own - reserved, "own process less torch reserved"))
        else:
            why = "needs this process's own memory from NVML and, below it, what torch has reserved"
            made.inputs.append(Input.unknown(report.NON_TORCH, why))
            text = "vLLM's own term: growth outside torch on the whole device, neighbours included"
            made.inputs.append(Input.measured(report.DEVICE_GROWTH, profile.non_torch_increase, text))
    made.inputs.append(_graphs(worker, watch))
    made.inputs.append(Input.measured(report.OWN_PROCESS, own, f"NVML: {reading.reason}"))
    if reserved is not None:
        made.inputs.append(Input.measured("torch_reserved", reserved, "torch, after profiling"))
    made.inputs.append(Input.measured(report.DEVICE_FREE, free, f"device query of torch, {when}"))
    made.inputs.append(_others(total, free, own))
    setting = byte_count(getattr(worker.cache_config, "kv_cache_memory_bytes", None)) or None
    available = setting or byte_count(getattr(worker, "available_kv_cache_memory_bytes", None))
    if (profile is not None or setting is not None) and available is not None and available > stock:
        made.inputs.append(
            Input.measured(report.MULTIMODAL_RESERVATION, available - stock, "mm_ipc_gpu_memory_gb, decoders")
        )
    if watch.terms is not None and profile is not None and requested is not None:
        text = "requested less vLLM's own terms of this release, graph estimate off"
        made.inputs.append(Input.measured(report.STOCK_BUDGET, requested - profile.stock_non_kv, text))
        made.formula = _process_formula(made, watch)
    elif profile is not None:
        era = "consumed since start" if profile.total_consumed is not None else "weights + non-torch growth"
        made.formula = f"requested - ({era} + activation peak) - graph estimate where applied"
    raw = getattr(worker, "available_kv_cache_memory_bytes", None)
    if made.kv_bytes == 0 and isinstance(raw, (int, float)) and raw < 0:
        made.short_by = -int(raw)
    made.counts_own_process = watch.terms is not None and watch.terms.exact
    if watch.terms is not None and not watch.terms.exact:
        made.policy += ", own memory unknown"
    made.notes += watch.notes
    _gpu_notes(made, worker, watch)


def _own(watch: ProfileWatch, total: int | None, free: int | None) -> Reading:
    """This process's memory where no profiling has read it."""
    try:
        known = total is not None and free is not None and not is_unified(watch.worker.device)
        return watch.read(total - free if known else None)  # type: ignore[operator]
    except Exception as error:
        return Reading.unknown(f"could not be read ({type(error).__name__}: {error})")


def _others(total: int | None, free: int | None, own: int | None) -> Input:
    if total is None or free is None or own is None:
        return Input.unknown(report.OTHER_PROCESSES, "needs this process's own memory from NVML and the device's free")
    rest = total - free - own
    if rest < -budget.BELOW_TORCH_SLACK:
        return Input.unknown(report.OTHER_PROCESSES, "less is in use on the device than this process holds")
    return Input.measured(report.OTHER_PROCESSES, max(rest, 0), "device total less free less own process")


def _process_formula(made: BudgetReport, watch: ProfileWatch) -> str:
    terms = watch.terms
    if terms is None:
        return ""
    own = "own process" if terms.exact else "larger of vLLM's consumption and torch's reserved bytes"
    return f"requested {gib(made.value(report.REQUESTED))} - ({own} + activation peak + graph estimate)"


def _graphs(worker: Any, watch: ProfileWatch) -> Input:
    estimate = watch.graph_estimate
    if estimate is None:
        estimate = _int(worker, "cudagraph_memory_estimate", negative=True)
    if estimate is None:
        return Input.unknown(report.GRAPH_ESTIMATE, "this release or path makes no estimate")
    return Input.measured(report.GRAPH_ESTIMATE, estimate, "model_runner.profile_cudagraph_memory")


def _gpu_notes(made: BudgetReport, worker: Any, watch: ProfileWatch) -> None:
    estimate = made.value(report.GRAPH_ESTIMATE)
    if watch.terms is None and isinstance(estimate, (int, float)) and estimate < 0:
        made.notes.append(
            f"vLLM subtracted a negative graph estimate, which enlarged the budget by {gib(-estimate)}; "
            "VLLM_OMNI_PATCH_GPU_BUDGET=process takes it as 0"
        )
    profile = watch.profile
    if watch.terms is None and profile is not None and profile.free_after > profile.free_before:
        made.notes.append("another process released device memory during profiling")
    if is_unified(getattr(worker, "device", None)):
        made.notes.append("unified memory: the device's total is shared with the host")


def _xpu(made: BudgetReport, worker: Any, stock: int) -> None:
    """XPU through 0.15, whose worker has a formula of its own; later ones are GPU workers."""
    free, total = _try(lambda: _torch("xpu").mem_get_info(worker.device)) or (None, None)
    utilization = made.value(report.UTILIZATION)
    requested = None if total is None or utilization is None else int(total * utilization)
    stats: dict[str, Any] = _try(lambda: _torch("xpu").memory_stats(worker.device)) or {}
    peak, allocated = stats.get("allocated_bytes.all.peak"), stats.get("allocated_bytes.all.current")
    transient = None if peak is None or allocated is None else max(peak - allocated, 0)
    made.inputs += [
        Input.measured(report.DEVICE_TOTAL, total, "torch.xpu.mem_get_info"),
        configured(report.REQUESTED, requested, "device total x gpu_memory_utilization"),
        Input.measured(
            report.WEIGHTS, _int(worker.model_runner, "model_memory_usage"), "model_runner.model_memory_usage"
        ),
        Input.measured(report.ACTIVATION_PEAK, transient, "torch's peak above what stays"),
        Input.measured(report.DEVICE_FREE, free, "torch.xpu.mem_get_info"),
        Input.unknown(report.OTHER_PROCESSES, "this worker measures the whole device"),
    ]
    if requested is not None and peak is not None:
        text = "requested less KV less torch's peak"
        rest = requested - stock - peak
        made.inputs.append(Input.measured(report.NON_TORCH, rest if rest >= 0 else None, text))
    made.formula = "requested - (torch peak + non-torch memory)"
    made.kv_setting = ""


def _torch(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _try(read: Callable[[], Any]) -> Any:
    """Result of ``read``, ``None`` when it fails: an input that cannot be read is unknown."""
    try:
        return read()
    except Exception:
        return None


def _int(owner: Any, name: str, negative: bool = False) -> int | None:
    value = getattr(owner, name, None)
    if negative and isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    return byte_count(value)
