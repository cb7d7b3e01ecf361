# SPDX-License-Identifier: Apache-2.0
"""The report of a CPU worker: its memory node, its container, and what its process holds."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..host import host_memory
from ..report import report
from ..report.report import BudgetReport, Input, configured
from ..report.units import byte_count, gib
from . import weights

HOST_ROOT = "/"
"""Where the files of the host's memory are read."""


def fill(made: BudgetReport, worker: Any, stock: int, explicit: bool, before: weights.Before | None) -> None:
    """Add a CPU worker's inputs to ``made``. ``before``: the weights' sizes before packing, where they were counted."""
    total, available, where = node_memory()
    requested = byte_count(getattr(worker, "requested_cpu_memory", None))
    space = byte_count(getattr(worker.cache_config, "cpu_kvcache_space_bytes", None))
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
        made.kv_setting, made.size_given = "VLLM_CPU_KVCACHE_SPACE", True
        made.inputs.append(configured("cpu_kvcache_space", space, "VLLM_CPU_KVCACHE_SPACE or its default"))
    made.inputs.append(configured(report.REQUESTED, requested, "node total x gpu_memory_utilization"))
    held = _weights(worker, before)
    made.inputs.append(held)
    made.inputs.append(
        Input.unknown(report.ACTIVATION_PEAK, "not profiled on CPU; a touched buffer counts as resident")
    )
    made.inputs.append(_rest(own, held.value))
    made.inputs.append(Input(report.GRAPH_ESTIMATE, 0, "no graphs on CPU", "zero"))
    made.inputs.append(Input.measured(report.OWN_PROCESS, own, text))
    made.inputs.append(_others(total, available, own))
    _container(made, worker, available, where)


def _weights(worker: Any, before: weights.Before | None) -> Input:
    try:
        counted = weights.total(weights.models_of(worker.model_runner), {} if before is None else before)
    except Exception as error:
        return Input.unknown(report.WEIGHTS, f"the model could not be counted ({type(error).__name__}: {error})")
    if counted is None:
        return Input.unknown(report.WEIGHTS, "vLLM packed parameters before they were counted")
    count, packed = counted
    text = "parameters and buffers of the model"
    if packed:
        text += f", {packed} of them as they were before vLLM packed them"
    return Input.measured(report.WEIGHTS, count, text)


def _rest(own: int | None, held: Any) -> Input:
    if own is None or held is None:
        return Input.unknown(report.NON_TORCH, "needs resident memory and weights")
    if own < held:
        return Input.unknown(report.NON_TORCH, "less is resident than the weights take: some are not touched yet")
    text = "resident memory less weights: code, libraries, buffers, further copies of weights for the kernels"
    return Input.measured(report.NON_TORCH, own - held, text)


def _others(total: int | None, available: int | None, own: int | None) -> Input:
    if total is None or available is None or own is None:
        return Input.unknown(report.OTHER_PROCESSES, "needs the node's figures and resident memory")
    rest = total - available - own
    if rest < 0:
        return Input.unknown(report.OTHER_PROCESSES, "files that this process has mapped count as available too")
    return Input.measured(report.OTHER_PROCESSES, rest, "node total less available less own process")


def _workers(worker: Any) -> tuple[int, int]:
    """Workers of this engine that take their KV from the same container, and from the same memory node.

    vLLM spreads the workers of a host evenly over its memory nodes.
    """
    parallel = getattr(worker, "parallel_config", None)
    local = byte_count(getattr(parallel, "local_world_size", None) or getattr(parallel, "world_size", None)) or 1
    local *= byte_count(getattr(parallel, "data_parallel_size_local", None)) or 1
    try:
        from vllm.utils.cpu_resource_utils import get_visible_memory_node

        nodes = max(len(get_visible_memory_node()), 1)
    except Exception:
        nodes = 1
    return local, -(-local // nodes)


def _container(made: BudgetReport, worker: Any, available: int | None, where: str) -> None:
    """What is free: on the memory node and in the container, which the node does not know of (vllm pull 45086).

    Where a cgroup file cannot be read, how much is free is not known: the node's figure is an upper bound of it.
    """
    workers, on_node = _workers(worker)
    share = None if available is None else available // on_node
    notes: list[str] = []
    try:
        host = host_memory(HOST_ROOT)
    except Exception as error:
        if sys.platform == "linux":  # elsewhere there are no cgroups
            notes = [str(error)]
    else:
        notes = host.notes
        limits = [each for each in host.bounds if each.limit and each.available is not None]
        tightest = min(limits, key=lambda each: each.available or 0, default=None)
        if tightest is not None:
            made.inputs.append(configured("container_limit", tightest.limit, tightest.source))
            if available is None or (tightest.available or 0) < available:
                available, where = tightest.available, tightest.source
            part = (tightest.available or 0) // workers
            share = part if share is None else min(part, share)
    if share is not None and made.kv_bytes > share:
        each = "" if workers == 1 else f" to each of {workers} workers"
        made.notes.append(f"{where} leaves {gib(share)}{each}, less than this KV cache")
    made.notes += notes
    if notes:
        most = "" if available is None else f"; at most {gib(available)} ({where})"
        made.inputs.append(Input.unknown(report.DEVICE_FREE, f"the container's memory cannot be read{most}"))
    else:
        made.inputs.append(Input.measured(report.DEVICE_FREE, available, where))
    if workers > 1:
        text = f"what is free, shared by the {workers} workers of this engine here"
        made.inputs.append(Input.measured(report.FREE_SHARE, None if notes else share, text))


def node_memory() -> tuple[int | None, int | None, str]:
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

    try:
        return int(psutil.Process(os.getpid()).memory_info().rss)
    except Exception:
        return None
