# SPDX-License-Identifier: Apache-2.0
"""The Neuron budget of one worker: which mode, which numbers, which policy.

Order and formula are those of the determine_available_memory design, section 4: compile host, then CPU mode, then
device. Section 3 of that page describes the bytes in use differently from what was released.

The plugin's releases 0.1 to 0.5 load models through NxD Inference, which compiles and lays out KV while it loads them.
There is nothing left to decide there: the blocks that exist are the budget, and cap and minimum would only stop a start
that works.

Nothing here touches vLLM: the hook hands over a :class:`WorkerView`. The Neuron runtime and the host's files are
arguments, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_patch import flags

from .. import flags as settings
from ..host import host_memory
from ..report import report
from ..report.report import BudgetReport, Input
from ..report.units import GIB
from . import kv_budget
from .hbm import CoreHbm, device_core_hbm, static_core_hbm
from .laid_out import LaidOut
from .model import ModelBytes, model_bytes

# The runtime always holds somewhat more than the model (collectives, code, rings); a larger gap suggests tensors that
# are neither parameters nor buffers.
GAP_WORTH_A_NOTE = GIB


@dataclass
class WorkerView:
    """What a worker and its vLLM config say. Sizes in bytes, lengths in tokens.

    ``local_workers`` is the number of workers of this engine on this host and ``replicas`` the number of engines
    there; each comes with the name of its source. ``kv_layers`` returns (block size in tokens, bytes of one block
    over all layers) and is only called under the ``need`` policy. ``laid_out`` returns the KV that the model has
    laid out while it loaded, ``None`` where it does not report it; ``own_number`` what the worker itself would return.
    """

    gpu_memory_utilization: float
    model: Any
    worker: str = "NeuronWorker"
    rank: int | None = None
    local_rank: int | None = None
    drafter: Any = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    local_workers: int = 1
    local_workers_source: str = "parallel_config.local_world_size"
    replicas: int = 1
    replicas_source: str = "parallel_config.data_parallel_size_local"
    max_num_seqs: int = 0
    max_model_len: int = 0
    kv_layers: Callable[[], tuple[int, int]] | None = None
    laid_out: Callable[[], LaidOut | None] = lambda: None
    own_number: Callable[[], int] | None = None


@dataclass
class NeuronBudget:
    """One worker's budget: the report of it, whose ``kv_bytes`` are the number and whose ``notes`` are for the log.

    ``side`` is ``"compile host"`` or ``"device"`` where programs may be compiled on the one for the other, and empty
    otherwise; ``at_total`` then gives the budget of the same settings at another HBM size.
    """

    report: BudgetReport
    side: str = ""
    at_total: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Settings:
    """The environment, read once per decision."""

    cap: float
    minimum: int
    cpu_compile: bool
    cpu_mode: bool
    target: str
    lnc: int | None
    policy: str
    used_from: str


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in ``environ`` (default: the process's).

    Raises:
        FlagError: a value is not accepted; it is a ``RuntimeError`` and a ``ValueError``.
        RuntimeError: two settings exclude each other.
    """
    environ = os.environ if environ is None else environ

    def read(flag: flags.Flag) -> Any:
        return flags.read(flag, environ)

    lnc = read(settings.LOGICAL_NC_CONFIG)
    older = read(settings.VIRTUAL_CORE_SIZE)
    result = Settings(
        cap=read(settings.CAP_FRACTION),
        minimum=max(int(read(settings.MIN_BUDGET_GIB) * GIB), 0),
        cpu_compile=read(settings.CPU_COMPILE),
        cpu_mode=read(settings.CPU_MODE),
        target=read(settings.PLATFORM_TARGET),
        lnc=older if lnc is None else lnc,
        policy=read(settings.POLICY),
        used_from=read(settings.USED_BYTES),
    )
    if result.cpu_compile and result.cpu_mode:
        raise RuntimeError("VLLM_NEURON_CPU_COMPILE and VLLM_NEURON_CPU_MODE exclude each other; unset one of them.")
    return result


RuntimeStats = Callable[[], tuple[int, int]]


def decide(
    view: WorkerView,
    runtime_stats: RuntimeStats,
    environ: Mapping[str, str] | None = None,
    host_root: str | os.PathLike[str] = "/",
) -> NeuronBudget:
    """The KV budget of one worker.

    ``runtime_stats`` returns (used, free) bytes of the visible logical core and is asked only on a device.
    ``host_root`` stands for ``/`` in CPU mode.

    Raises:
        RuntimeError, ValueError: a setting is not accepted; the runtime's figures or the model's bytes are not usable;
            the budget is below the minimum. The text names the number or the variable.
    """
    if view.kv_cache_memory_bytes:
        return _explicit_bytes(view, int(view.kv_cache_memory_bytes), environ)
    env = read_settings(environ)
    if env.cpu_mode:
        return _cpu_mode(view, env, host_root)
    laid_out = view.laid_out() if env.used_from == "auto" and not env.cpu_compile else None
    if laid_out is not None:
        return _laid_out(view, env, laid_out, runtime_stats)
    inputs: list[Input] = []
    warnings: list[str] = []
    if env.cpu_compile:
        hbm = static_core_hbm(env.target, env.lnc)
        if view.num_gpu_blocks_override is not None:
            inputs.append(Input(report.DEVICE_TOTAL, hbm.bytes, hbm.source))
            return _explicit_blocks(view, hbm.bytes, "device_total", inputs, "compile host")
        used = _used_without_device(view, env, inputs)
    else:
        runtime_used, runtime_free = usable_stats(runtime_stats())
        inputs.append(Input.measured("runtime_used", runtime_used, "get_vnc_memory_stats"))
        inputs.append(Input.measured(report.DEVICE_FREE, runtime_free, "get_vnc_memory_stats"))
        if view.num_gpu_blocks_override is not None:
            return _explicit_blocks(view, runtime_free, "device_free", inputs, "device")
        known = _used_on_device(view, env, runtime_used, inputs, warnings)
        if known is None:
            return _own_number(view, runtime_used, runtime_free, inputs)
        used = known
        hbm = device_core_hbm(runtime_used + runtime_free, env.target, env.lnc)
    if hbm.warning:
        warnings.append(hbm.warning)
    inputs.insert(0, Input(report.DEVICE_TOTAL, hbm.bytes, hbm.source, "configured" if env.cpu_compile else "measured"))
    made = _capped(view, env, hbm, used)
    made.inputs = inputs + made.inputs
    made.notes = warnings
    side = "compile host" if env.cpu_compile else "device"
    return NeuronBudget(made, side, lambda total: _capped(view, env, replace(hbm, bytes=total), used).kv_bytes)


def usable_stats(stats: Any) -> tuple[int, int]:
    """``stats`` as (used, free) bytes.

    Raises:
        RuntimeError: not a pair of numbers, used below 0 or nothing free; (-1, -1) is the runtime's way to fail.
    """
    try:
        used, free = (int(value) for value in stats)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"The Neuron runtime's memory figures are unusable: {stats!r}.") from error
    if used < 0 or free <= 0:
        raise RuntimeError(
            f"The Neuron runtime's memory figures are unusable: used={used}, free={free} bytes. Check that the runtime "
            "is initialized and that no other process holds this core (neuron-ls, neuron-top)."
        )
    return used, free


def _explicit_bytes(view: WorkerView, available: int, environ: Mapping[str, str] | None) -> NeuronBudget:
    """No other setting is read, so an invalid one does not matter."""
    source = Input(report.EXPLICIT_KV, available, "cache_config", "configured")
    made = _report(view, available, "explicit", "kv_cache_memory_bytes", [source])
    try:
        compiles, on_host = (flags.read(flag, environ) for flag in (settings.CPU_COMPILE, settings.CPU_MODE))
    except flags.FlagError:
        return NeuronBudget(made)
    laid_out = None if compiles or on_host else view.laid_out()
    if laid_out is not None:
        made.notes = _beyond("kv_cache_memory_bytes", available // laid_out.block_bytes, laid_out)
    if laid_out is not None or on_host:
        return NeuronBudget(made)
    return NeuronBudget(made, "compile host" if compiles else "device")


def _beyond(setting: str, blocks: int, laid_out: LaidOut) -> list[str]:
    if blocks <= laid_out.blocks:
        return []
    return [
        f"{setting} asks for {blocks} KV blocks, but the compiled model has {laid_out.blocks}; data written to "
        "the other blocks is lost. To fix: set the number that was compiled, or compile again."
    ]


def _laid_out(view: WorkerView, env: Settings, laid_out: LaidOut, runtime_stats: RuntimeStats) -> NeuronBudget:
    """The blocks that exist are the budget: fewer would free nothing, more would be written beside them.

    The runtime's figures are for the report only.
    """
    inputs: list[Input] = []
    try:
        used, free = usable_stats(runtime_stats())
        inputs.append(Input.measured("runtime_used", used, "get_vnc_memory_stats, laid out KV included"))
        inputs.append(Input.measured(report.DEVICE_FREE, free, "get_vnc_memory_stats"))
        inputs.append(Input.measured(report.DEVICE_TOTAL, used + free, "Neuron runtime, used + free"))
    except RuntimeError as error:
        inputs.append(Input.unknown("runtime_used", str(error)))
    inputs.append(Input("laid_out_blocks", laid_out.blocks, laid_out.source, "configured", "blocks"))
    inputs.append(Input("block", laid_out.block_bytes, "get_kv_cache_spec, all layers", "configured"))
    override = view.num_gpu_blocks_override
    if override is not None:
        result = _explicit_blocks(view, override * laid_out.block_bytes, "num_gpu_blocks_override * block", inputs)
        result.report.notes = _beyond("num_gpu_blocks_override", override, laid_out)
        return result
    available = laid_out.blocks * laid_out.block_bytes
    formula = "laid_out_blocks * block"
    if env.policy == "need":
        need, need_inputs = _need(view)
        inputs += need_inputs
        available, formula = min(available, need), f"min({formula}, need)"
    notes = [laid_out.warning] if laid_out.warning else []
    return NeuronBudget(_report(view, available, "laid out", formula, inputs, notes))


def _own_number(view: WorkerView, used: int, free: int, inputs: list[Input]) -> NeuronBudget:
    """The number of the unpatched worker: how much of ``used`` is KV that is already laid out is unknown."""
    number = free if view.own_number is None else int(view.own_number())
    warning = (
        f"The model has no parameters on this host and does not report its KV layout, so the {used} bytes in use "
        f"cannot be split into model and KV. The worker's own number, {number} bytes, is used. To fix: set "
        "--num-gpu-blocks-override to the number of compiled blocks, or set "
        f"{settings.USED_BYTES.name}=runtime to subtract all bytes in use."
    )
    inputs.append(Input.unknown(report.WEIGHTS, "the host model has no parameters (NxD Inference)"))
    return NeuronBudget(_report(view, number, "stock", "the worker's own number", inputs, [warning]))


def _explicit_blocks(
    view: WorkerView, available: int, formula: str, inputs: list[Input], side: str = ""
) -> NeuronBudget:
    """The number of blocks is set by hand: vLLM only checks that ``available`` holds one request, so a cap or a
    minimum would only refuse the given number."""
    source = Input("num_gpu_blocks_override", view.num_gpu_blocks_override, "cache_config", "configured", "blocks")
    return NeuronBudget(_report(view, available, "explicit blocks", formula, [*inputs, source]), side)


def _used_without_device(view: WorkerView, env: Settings, inputs: list[Input]) -> int:
    if env.used_from == "runtime":
        raise RuntimeError(
            f"{settings.USED_BYTES.name}=runtime needs a device, and VLLM_NEURON_CPU_COMPILE has none. Use auto or "
            "model here and on the device."
        )
    counted = _count(view)
    if counted is None or (counted.parameters == 0 and env.used_from == "auto"):
        raise RuntimeError(
            "The size of the model is unknown on this host: the host model has no parameters (NxD Inference keeps them "
            "on the device). To fix: compile on a device, or set kv_cache_memory_bytes or num_gpu_blocks_override to "
            "the value used there."
        )
    inputs.append(Input.measured(report.WEIGHTS, counted.total, counted.source))
    return counted.total


def _used_on_device(
    view: WorkerView, env: Settings, runtime_used: int, inputs: list[Input], warnings: list[str]
) -> int | None:
    """Bytes of the model, or all bytes in use where the setting asks for them; ``None`` where neither is known."""
    counted = None if env.used_from == "runtime" else _count(view)
    if counted is not None and (counted.parameters > 0 or env.used_from == "model"):
        inputs.append(Input.measured(report.WEIGHTS, counted.total, counted.source))
        if runtime_used - counted.total > GAP_WORTH_A_NOTE:
            warnings.append(
                f"The Neuron runtime has {runtime_used} bytes in use and the model's parameters and buffers are "
                f"{counted.total}; the rest is not in the KV budget. {settings.USED_BYTES.name}=runtime counts it, but "
                "then a host without a device cannot compile for the same block count."
            )
        return counted.total
    if env.used_from == "model":
        raise RuntimeError(f"{settings.USED_BYTES.name}=model, but {type(view.model).__name__} has no parameters.")
    if env.used_from == "auto":
        return None
    inputs.append(Input.measured(report.WEIGHTS, runtime_used, "bytes in use by the Neuron runtime; as set"))
    return runtime_used


def _count(view: WorkerView) -> ModelBytes | None:
    """``None`` where the model is not a torch module, so that nothing can be counted."""
    try:
        return model_bytes(view.model, view.drafter)
    except TypeError:
        return None


def _capped(view: WorkerView, env: Settings, hbm: CoreHbm, used: int) -> BudgetReport:
    gmu = view.gpu_memory_utilization
    terms = kv_budget.compute_kv_budget(hbm.bytes, used, gmu, env.cap, env.minimum)
    inputs = [
        Input(report.UTILIZATION, gmu, "cache_config", "configured", "ratio"),
        Input(report.REQUESTED, terms.total_budget, "int(device_total * gpu_memory_utilization)", "configured"),
        Input("cap_fraction", env.cap, settings.CAP_FRACTION.name, "configured", "ratio"),
        Input("cap", terms.heuristic_cap, "int(requested * cap_fraction)", "configured"),
        Input("minimum", env.minimum, settings.MIN_BUDGET_GIB.name, "configured"),
    ]
    if hbm.platform is not None:
        inputs.append(Input("platform", hbm.platform.family, "the table of HBM sizes", "configured", "text"))
    available, formula, linear = terms.available, "min(max(requested - weights, 0), cap)", not terms.is_capped
    if env.policy == "need":
        need, need_inputs = _need(view)
        inputs += need_inputs
        linear = linear and need >= available
        available, formula = min(available, need), f"min({formula}, need)"
    made = _report(view, available, env.policy, formula, inputs)
    made.linear_in_requested = linear
    return made


def _need(view: WorkerView) -> tuple[int, list[Input]]:
    if view.kv_layers is None:
        raise RuntimeError(f"{settings.POLICY.name}=need: this worker does not report its KV cache layout. Use cap.")
    block_size, block_bytes = view.kv_layers()
    blocks = kv_budget.needed_blocks(view.max_num_seqs, view.max_model_len, block_size)
    source = "max_num_seqs * ceil(max_model_len / block_size) + 1"
    return blocks * block_bytes, [
        Input("needed_blocks", blocks, source, "configured", "blocks"),
        Input("block", block_bytes, "get_kv_cache_spec, all layers", "configured"),
        Input("need", blocks * block_bytes, "needed_blocks * block", "configured"),
    ]


def _cpu_mode(view: WorkerView, env: Settings, host_root: str | os.PathLike[str]) -> NeuronBudget:
    memory = host_memory(host_root)
    workers = max(view.local_workers, 1) * max(view.replicas, 1)
    gmu = view.gpu_memory_utilization
    inputs = [
        Input.measured("host_available", memory.available, memory.source),
        Input("local_workers", view.local_workers, view.local_workers_source, "configured", "workers"),
        Input("replicas", view.replicas, view.replicas_source, "configured", "engines"),
        Input(report.UTILIZATION, gmu, "cache_config", "configured", "ratio"),
        Input("cap_fraction", env.cap, settings.CAP_FRACTION.name, "configured", "ratio"),
    ]
    if view.num_gpu_blocks_override is not None:
        return _explicit_blocks(view, memory.available // workers, "host_available // workers", inputs)
    available = kv_budget.host_kv_budget(memory.available, workers, gmu, env.cap)
    formula = "int(int(host_available // (local_workers * replicas) * gpu_memory_utilization) * cap_fraction)"
    return NeuronBudget(_report(view, available, "cpu", formula, inputs, memory.notes))


def _report(
    view: WorkerView, available: int, policy: str, formula: str, inputs: list[Input], notes: list[str] | None = None
) -> BudgetReport:
    return BudgetReport(
        platform="neuron",
        worker=view.worker,
        policy=policy,
        kv_bytes=available,
        formula=formula,
        rank=view.rank,
        local_rank=view.local_rank,
        inputs=inputs,
        notes=notes or [],
        linear_in_requested=False,
    )
