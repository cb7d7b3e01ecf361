# SPDX-License-Identifier: Apache-2.0
"""From a worker and its budget to a :class:`~vllm_omni_patch.patches.available_memory.report.BudgetReport`.

Reads worker attributes and memory counters only; every figure that cannot be read is an unknown input. Called after
the number is settled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm_omni_patch.patches.available_memory import report
from vllm_omni_patch.patches.available_memory.host import host_memory
from vllm_omni_patch.patches.available_memory.profiling import ProfileWatch, is_unified, read_device
from vllm_omni_patch.patches.available_memory.report import BudgetReport, Input


def build(worker: Any, value: Any, stock: Any, policy: str, explicit: bool, watch: ProfileWatch | None) -> BudgetReport:
    """The report of one budget of ``value`` bytes; ``stock`` is what vLLM's method returned.

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
        local_rank=getattr(worker, "local_rank", None),
    )
    made.linear_in_requested = not made.policy.startswith("explicit") and made.policy != "startup plan"
    utilization = getattr(worker.cache_config, "gpu_memory_utilization", None)
    made.inputs.append(_configured(report.UTILIZATION, utilization, "gpu_memory_utilization", "ratio"))
    if made.platform == "cpu":
        _cpu(made, worker, int(stock), explicit)
    elif watch is None:
        _xpu(made, worker, int(stock))
    else:
        _gpu(made, worker, int(stock), watch)
    setting = getattr(worker.cache_config, "kv_cache_memory_bytes", None)
    if setting:
        made.inputs.append(_configured(report.EXPLICIT_KV, int(setting), made.policy))
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
    requested = report.byte_count(getattr(worker, "requested_memory", None))
    weights = _int(worker.model_runner, "model_memory_usage")
    made.inputs += [
        Input.measured(report.DEVICE_TOTAL, total, "init_snapshot, device query of torch"),
        _configured(report.REQUESTED, requested, "device total x gpu_memory_utilization"),
        Input.measured(report.WEIGHTS, weights, "model_runner.model_memory_usage"),
    ]
    free = None if profile is None else profile.free_after
    reading = watch.reading or read_device(getattr(worker, "device", None))
    own = reading.bytes if reading.state == "measured" else None
    reserved = None if profile is None else profile.torch_reserved
    if profile is None:
        why = "no profiling on this path"
        made.inputs += [Input.unknown(name, why) for name in (report.ACTIVATION_PEAK, report.NON_TORCH)]
    else:
        made.inputs.append(Input.measured(report.ACTIVATION_PEAK, profile.headroom, "torch's peak above what stays"))
        if own is not None and reserved is not None:
            made.inputs.append(
                Input.measured(report.NON_TORCH, max(own - reserved, 0), "own process less torch reserved")
            )
        else:
            text = "device-wide growth outside torch, neighbours included"
            made.inputs.append(Input.measured(report.NON_TORCH, profile.non_torch_increase, text))
    made.inputs.append(_graphs(worker, watch))
    made.inputs.append(Input(report.OWN_PROCESS, own, f"NVML: {reading.reason}", reading.state))
    if reserved is not None:
        made.inputs.append(Input.measured("torch_reserved", reserved, "torch, after profiling"))
    if free is not None:
        made.inputs.append(Input.measured(report.DEVICE_FREE, free, "device query of torch, after profiling"))
    if total is not None and free is not None and own is not None:
        others = max(total - free - own, 0)
        made.inputs.append(Input.measured(report.OTHER_PROCESSES, others, "device total less free less own process"))
    else:
        made.inputs.append(Input.unknown(report.OTHER_PROCESSES, "needs this process's own memory from NVML"))
    available = report.byte_count(getattr(worker, "available_kv_cache_memory_bytes", None))
    if profile is not None and available is not None and available > stock:
        made.inputs.append(
            Input.measured("multimodal_reservation", available - stock, "mm_ipc_gpu_memory_gb, decoders")
        )
    if watch.terms is not None and profile is not None and requested is not None:
        graphs = max(_int(worker, "cudagraph_memory_estimate") or 0, 0)
        text = "requested less vLLM's own terms of this release, graph estimate off"
        made.inputs.append(Input.measured(report.STOCK_BUDGET, requested - profile.stock_non_kv, text))
        made.formula = _process_formula(made, watch, graphs)
    elif profile is not None:
        era = "consumed since start" if profile.total_consumed is not None else "weights + non-torch growth"
        made.formula = f"requested - ({era} + activation peak) - graph estimate where applied"
    made.counts_own_process = watch.terms is not None and watch.terms.exact
    if watch.terms is not None and not watch.terms.exact:
        made.policy += ", own memory unknown"
    made.notes += watch.notes
    _gpu_notes(made, worker, watch)


def _process_formula(made: BudgetReport, watch: ProfileWatch, graphs: int) -> str:
    terms = watch.terms
    if terms is None:
        return ""
    own = "own process" if terms.exact else "larger of vLLM's consumption and torch's reserved bytes"
    return f"requested {report.gib(made.value(report.REQUESTED))} - ({own} + activation peak + graph estimate)"


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
            f"vLLM subtracted a negative graph estimate, which enlarged the budget by {report.gib(-estimate)}; "
            "VLLM_OMNI_PATCH_GPU_BUDGET=process takes it as 0"
        )
    profile = watch.profile
    if watch.terms is None and profile is not None and profile.free_after > profile.free_before:
        made.notes.append("another process released device memory during profiling")
    if is_unified(getattr(worker, "device", None)):
        made.notes.append("unified memory: the device's total is shared with the host")


def _cpu(made: BudgetReport, worker: Any, stock: int, explicit: bool) -> None:
    total, available, where = _node_memory()
    requested = report.byte_count(getattr(worker, "requested_cpu_memory", None))
    space = report.byte_count(getattr(worker.cache_config, "cpu_kvcache_space_bytes", None))
    weights = _parameter_bytes(worker.model_runner)
    made.inputs.append(Input.measured(report.DEVICE_TOTAL, total, where))
    if requested is not None and not explicit:
        # vLLM 0.20 and later: requested_cpu_memory less the resident memory of this process.
        own: int | None = requested - stock
        text = "resident memory (RSS) as vLLM read it"
        made.formula = "requested - resident memory of this process"
    else:
        own, text = _resident_bytes(), "resident memory (RSS) of this process"
        made.linear_in_requested = False
        made.formula = "the configured size"
    if requested is None and space is not None:
        # vLLM 0.19 and earlier: the size is VLLM_CPU_KVCACHE_SPACE or its default; nothing is profiled.
        made.kv_setting = "VLLM_CPU_KVCACHE_SPACE"
        made.inputs.append(_configured("cpu_kvcache_space", space, "VLLM_CPU_KVCACHE_SPACE or its default"))
    made.inputs.append(_configured(report.REQUESTED, requested, "node total x gpu_memory_utilization"))
    made.inputs.append(Input.measured(report.WEIGHTS, weights, "parameters and buffers of the model"))
    made.inputs.append(
        Input.unknown(report.ACTIVATION_PEAK, "not profiled on CPU; a touched buffer counts as resident")
    )
    rest = None if own is None or weights is None else max(own - weights, 0)
    made.inputs.append(Input.measured(report.NON_TORCH, rest, "resident memory less weights"))
    made.inputs.append(Input(report.GRAPH_ESTIMATE, 0, "no graphs on CPU", "zero"))
    made.inputs.append(Input.measured(report.OWN_PROCESS, own, text))
    others = None if None in (total, available, own) else max(total - available - own, 0)  # type: ignore[operator]
    made.inputs.append(Input.measured(report.OTHER_PROCESSES, others, "node total less available less own process"))
    _container(made, available, where)


def _container(made: BudgetReport, available: int | None, where: str) -> None:
    """What the container leaves, which the memory node's figures do not know of (vllm pull 45086)."""
    host = _try(host_memory)
    limits = [] if host is None else [each for each in host.bounds if each.limit and each.available is not None]
    if limits:
        tightest = min(limits, key=lambda each: each.available or 0)
        made.inputs.append(_configured("container_limit", tightest.limit, tightest.source))
        if available is None or (tightest.available or 0) < available:
            available, where = tightest.available, tightest.source
            if made.kv_bytes > (available or 0):
                made.notes.append(f"{tightest.source} leaves {report.gib(available)}, less than this KV cache")
    made.inputs.append(Input.measured(report.DEVICE_FREE, available, where))


def _xpu(made: BudgetReport, worker: Any, stock: int) -> None:
    """XPU through 0.15, whose worker has a formula of its own; later ones take the GPU worker's road."""
    free, total = _try(lambda: _torch("xpu").mem_get_info(worker.device)) or (None, None)
    utilization = made.value(report.UTILIZATION)
    requested = None if total is None or utilization is None else int(total * utilization)
    stats: dict[str, Any] = _try(lambda: _torch("xpu").memory_stats(worker.device)) or {}
    peak, allocated = stats.get("allocated_bytes.all.peak"), stats.get("allocated_bytes.all.current")
    transient = None if peak is None or allocated is None else max(peak - allocated, 0)
    made.inputs += [
        Input.measured(report.DEVICE_TOTAL, total, "torch.xpu.mem_get_info"),
        _configured(report.REQUESTED, requested, "device total x gpu_memory_utilization"),
        Input.measured(
            report.WEIGHTS, _int(worker.model_runner, "model_memory_usage"), "model_runner.model_memory_usage"
        ),
        Input.measured(report.ACTIVATION_PEAK, transient, "torch's peak above what stays"),
        Input.measured(report.DEVICE_FREE, free, "torch.xpu.mem_get_info"),
        Input.unknown(report.OTHER_PROCESSES, "this worker measures the whole device"),
    ]
    if requested is not None and peak is not None:
        text = "requested less KV less torch's peak"
        made.inputs.append(Input.measured(report.NON_TORCH, max(requested - stock - peak, 0), text))
    made.formula = "requested - (torch peak + non-torch memory)"


def _node_memory() -> tuple[int | None, int | None, str]:
    """Total and available bytes of this process's memory node, as vLLM's CPU worker reads them, else of the host."""
    try:
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

        node = get_allowed_cpu_list()[0].numa_node
        status = get_memory_node_info(node)
        return int(status.total_memory), int(status.available_memory), f"memory node {node}"
    except Exception:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available), "host memory"


def _resident_bytes() -> int | None:
    import psutil

    return _try(lambda: int(psutil.Process(os.getpid()).memory_info().rss))


def _parameter_bytes(runner: Any) -> int | None:
    """Bytes of the distinct parameters and buffers of the runner's model."""

    def count() -> int:
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return sum(int(t.numel()) * int(t.element_size()) for t in tensors.values())

    return _try(count)


def _torch(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _try(read: Callable[[], Any]) -> Any:
    """Result of ``read``, ``None`` when it fails: an input that cannot be read is unknown."""
    try:
        return read()
    except Exception:
        return None


def _configured(name: str, value: Any, source: str, unit: str = "bytes") -> Input:
    return Input.unknown(name, source, unit) if value is None else Input(name, value, source, "configured", unit)


def _int(owner: Any, name: str, negative: bool = False) -> int | None:
    value = getattr(owner, name, None)
    if negative and isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    return report.byte_count(value)
