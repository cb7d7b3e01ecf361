# SPDX-License-Identifier: Apache-2.0
"""The Neuron budget of one worker: which mode, which numbers, which policy.

Order and formula are those of the determine_available_memory design, section 4: compile host, then CPU mode, then
device. What section 3 of that page says about the bytes in use differs, and is not what was released.

Nothing here touches vLLM: the hook hands over a :class:`WorkerView`. The Neuron runtime and the host's files come in
as arguments, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.patches.available_memory import budget, calibrate
from vllm_omni_patch.patches.available_memory import flags as settings
from vllm_omni_patch.patches.available_memory.budget import GIB
from vllm_omni_patch.patches.available_memory.host import host_memory
from vllm_omni_patch.patches.available_memory.neuron_hbm import CoreHbm, device_core_hbm, static_core_hbm
from vllm_omni_patch.patches.available_memory.neuron_model import ModelBytes, model_bytes
from vllm_omni_patch.patches.available_memory.report import Input

# The runtime always holds somewhat more than the model (collectives, code, rings); a gap above this is worth a word,
# because tensors that are neither parameters nor buffers are then likely.
GAP_WORTH_A_NOTE = GIB


@dataclass
class WorkerView:
    """What a worker and its vLLM config say. Sizes in bytes, lengths in tokens.

    ``local_workers`` is the number of workers of this engine on this host and ``replicas`` the number of engines
    there; each comes with the words for its source. ``kv_layers`` returns (block size in tokens, bytes of one block
    over all layers) and is only called under the ``need`` policy.
    """

    gpu_memory_utilization: float
    model: Any
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
    architecture: str = calibrate.UNKNOWN
    quantization: str = "none"
    tensor_parallel_size: int = 1
    compiler: str = calibrate.UNKNOWN


@dataclass
class NeuronBudget:
    """``available`` bytes of KV, the rule that made them, and every number on the way.

    ``total_budget`` is HBM x gpu_memory_utilization (``None`` where no such product was made), ``cap`` the cap fraction
    that was used, ``key`` what a calibration of this run would hold for. ``warnings`` are for the log.
    """

    available: int
    policy: str
    formula: str
    inputs: list[Input] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    total_budget: int | None = None
    cap: float | None = None
    minimum: int = 0
    key: calibrate.Key | None = None
    follows_utilization: bool = False


@dataclass(frozen=True)
class Settings:
    """The environment, read once per decision."""

    cap: float
    cap_is_set: bool
    minimum: int
    cpu_compile: bool
    cpu_mode: bool
    target: str
    lnc: int | None
    policy: str
    headroom: int | None
    calibration: str
    unique_storage: bool
    used_from: str
    fair_share: bool
    host_replicas: int | None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in ``environ`` (default: the process's).

    Raises:
        FlagError: a value is not accepted; it is a ``RuntimeError`` and a ``ValueError``.
        RuntimeError: two settings exclude each other, or one needs another.
    """
    environ = os.environ if environ is None else environ

    def read(flag: flags.Flag) -> Any:
        return flags.read(flag, environ)

    lnc = read(settings.LOGICAL_NC_CONFIG)
    older = read(settings.VIRTUAL_CORE_SIZE)
    headroom = read(settings.HEADROOM_GIB)
    result = Settings(
        cap=read(settings.CAP_FRACTION),
        cap_is_set=bool(environ.get(settings.CAP_FRACTION.name, "").strip()),
        minimum=max(int(read(settings.MIN_BUDGET_GIB) * GIB), 0),
        cpu_compile=read(settings.CPU_COMPILE),
        cpu_mode=read(settings.CPU_MODE),
        target=read(settings.PLATFORM_TARGET),
        lnc=older if lnc is None else lnc,
        policy=read(settings.POLICY),
        headroom=None if headroom is None else int(headroom * GIB),
        calibration=read(settings.CALIBRATION),
        unique_storage=read(settings.UNIQUE_STORAGE),
        used_from=read(settings.USED_BYTES),
        fair_share=read(settings.LNC1_FAIR_SHARE),
        host_replicas=read(settings.HOST_REPLICAS),
    )
    if result.cpu_compile and result.cpu_mode:
        raise RuntimeError("VLLM_NEURON_CPU_COMPILE and VLLM_NEURON_CPU_MODE exclude each other; unset one of them.")
    if result.policy == "headroom" and result.headroom is None:
        raise RuntimeError(
            f"{settings.POLICY.name}=headroom needs {settings.HEADROOM_GIB.name}, in GiB per logical core (0 too)."
        )
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
        return NeuronBudget(
            int(view.kv_cache_memory_bytes),
            "explicit",
            "kv_cache_memory_bytes",
            [Input("kv_cache_memory_bytes", int(view.kv_cache_memory_bytes), "cache_config", "configured")],
        )
    env = read_settings(environ)
    if env.cpu_mode:
        return _cpu_mode(view, env, host_root)
    inputs: list[Input] = []
    warnings: list[str] = []
    if env.cpu_compile:
        hbm = static_core_hbm(env.target, env.lnc, env.fair_share)
        if view.num_gpu_blocks_override is not None:
            return _explicit_blocks(view, hbm.bytes, "device_total", [Input("device_total", hbm.bytes, hbm.source)])
        used = _used_without_device(view, env, inputs)
    else:
        runtime_used, runtime_free = usable_stats(runtime_stats())
        inputs.append(Input.measured("runtime_used", runtime_used, "get_vnc_memory_stats"))
        inputs.append(Input.measured("device_free", runtime_free, "get_vnc_memory_stats"))
        if view.num_gpu_blocks_override is not None:
            return _explicit_blocks(view, runtime_free, "device_free", inputs)
        hbm = device_core_hbm(runtime_used + runtime_free, env.target, env.lnc, env.fair_share)
        used = _used_on_device(view, env, runtime_used, inputs, warnings)
    if hbm.warning:
        warnings.append(hbm.warning)
    inputs.insert(0, Input("device_total", hbm.bytes, hbm.source, "configured" if env.cpu_compile else "measured"))
    result = _by_policy(view, env, hbm, used)
    result.inputs = inputs + result.inputs
    result.warnings = warnings + result.warnings
    return result


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


def _explicit_blocks(view: WorkerView, available: int, formula: str, inputs: list[Input]) -> NeuronBudget:
    """The number of blocks is set by hand: vLLM compares ``available`` with the need of one request and uses it for
    nothing else, so a cap or a minimum would only refuse what was asked for by name."""
    source = Input("num_gpu_blocks_override", view.num_gpu_blocks_override, "cache_config", "configured", "blocks")
    return NeuronBudget(available, "explicit blocks", formula, [*inputs, source])


def _used_without_device(view: WorkerView, env: Settings, inputs: list[Input]) -> int:
    if env.used_from == "runtime":
        raise RuntimeError(
            f"{settings.USED_BYTES.name}=runtime needs a device, and VLLM_NEURON_CPU_COMPILE has none. Use auto or "
            "model here and on the device."
        )
    counted = _count(view, env)
    if counted is None or (counted.parameters == 0 and env.used_from == "auto"):
        raise RuntimeError(
            "The bytes of the model are not known on this host: the host model has no parameters (NxD Inference keeps "
            "them on the device). Compile on a device, or set kv_cache_memory_bytes or num_gpu_blocks_override to the "
            "value used there."
        )
    inputs.append(Input.measured("weights", counted.total, counted.source))
    return counted.total


def _used_on_device(
    view: WorkerView, env: Settings, runtime_used: int, inputs: list[Input], warnings: list[str]
) -> int:
    counted = None if env.used_from == "runtime" else _count(view, env)
    if counted is not None and (counted.parameters > 0 or env.used_from == "model"):
        inputs.append(Input.measured("weights", counted.total, counted.source))
        if runtime_used - counted.total > GAP_WORTH_A_NOTE:
            warnings.append(
                f"The Neuron runtime has {runtime_used} bytes in use and the model's parameters and buffers are "
                f"{counted.total}; the rest is not in the KV budget. {settings.USED_BYTES.name}=runtime counts it, but "
                "then a host without a device cannot compile for the same block count."
            )
        return counted.total
    if env.used_from == "model":
        raise RuntimeError(f"{settings.USED_BYTES.name}=model, but {type(view.model).__name__} has no parameters.")
    why = "as set" if env.used_from == "runtime" else "the host model has no parameters (NxD Inference)"
    inputs.append(Input.measured("weights", runtime_used, f"bytes in use by the Neuron runtime; {why}"))
    return runtime_used


def _count(view: WorkerView, env: Settings) -> ModelBytes | None:
    """``None`` where the model is not a torch module, so that nothing can be counted."""
    try:
        return model_bytes(view.model, view.drafter, env.unique_storage)
    except TypeError:
        return None


def _by_policy(view: WorkerView, env: Settings, hbm: CoreHbm, used: int) -> NeuronBudget:
    gmu = view.gpu_memory_utilization
    key = calibrate.Key(
        view.architecture,
        view.quantization,
        view.tensor_parallel_size,
        calibrate.UNKNOWN if hbm.lnc is None else hbm.lnc,
        calibrate.UNKNOWN if hbm.platform is None else hbm.platform.family,
        view.compiler,
    )
    if env.policy == "headroom":
        headroom = env.headroom or 0
        available = budget.headroom_kv_budget(hbm.bytes, used, headroom)
        detail = f"HBM {hbm.bytes}, weights {used}, headroom {headroom} bytes ({settings.HEADROOM_GIB.name})."
        return NeuronBudget(
            budget.check_minimum(available, env.minimum, detail),
            "headroom",
            "max(device_total - weights - headroom, 0)",
            [Input("headroom", headroom, settings.HEADROOM_GIB.name, "configured")],
            total_budget=hbm.bytes,
            minimum=env.minimum,
            key=key,
        )
    return _capped(view, env, hbm, used, gmu, key)


def _capped(view: WorkerView, env: Settings, hbm: CoreHbm, used: int, gmu: float, key: calibrate.Key) -> NeuronBudget:
    cap, limit, cap_source, warnings = _cap(env, key)
    terms = budget.split_kv_budget(hbm.bytes, used, gmu, cap)
    available = terms.available if limit is None else min(terms.available, limit)
    detail = budget.describe(terms, hbm.bytes, used, gmu, cap)
    budget.check_minimum(available, env.minimum, detail)
    inputs = [
        Input("gpu_memory_utilization", gmu, "cache_config", "configured", "ratio"),
        Input("requested", terms.total_budget, "int(device_total * gpu_memory_utilization)", "configured"),
        Input("cap_fraction", cap, cap_source, "configured", "ratio"),
        Input("cap", terms.heuristic_cap, "int(requested * cap_fraction)", "configured"),
        Input("minimum", env.minimum, settings.MIN_BUDGET_GIB.name, "configured"),
    ]
    formula = "min(max(requested - weights, 0), cap)"
    if limit is not None:
        inputs.append(Input("calibrated_limit", limit, cap_source, "configured"))
        formula = formula[:-1] + ", calibrated_limit)"
    bound = terms.bound_by == "used" and available == terms.user_budget
    if env.policy == "need":
        need, need_input = _need(view)
        inputs += need_input
        bound = bound and need >= available
        available = min(available, need)
        formula = f"min({formula}, need)"
    return NeuronBudget(
        available,
        "calibrated" if limit is not None and env.policy == "cap" else env.policy,
        formula,
        inputs,
        warnings,
        terms.total_budget,
        cap,
        env.minimum,
        key,
        bound,
    )


def _cap(env: Settings, key: calibrate.Key) -> tuple[float, int | None, str, list[str]]:
    """Cap fraction, calibrated limit in bytes (``None`` without), the words for their source, warnings."""
    name = settings.CAP_FRACTION.name
    if env.cap_is_set:
        return env.cap, None, name, []
    if not env.calibration:
        return env.cap, None, f"{name}, its default", []
    rows, digest = calibrate.load(env.calibration)
    row = calibrate.find(rows, key)
    if row is None:
        return (
            env.cap,
            None,
            f"{name}, its default",
            [f"{env.calibration} has no row for {key}; the default cap fraction {env.cap:g} is used."],
        )
    # The bytes bound as well: a higher utilisation later must not turn the same fraction into more KV than compiled.
    return row.cap, row.kv_bytes, f"calibration file {env.calibration} ({digest})", []


def _need(view: WorkerView) -> tuple[int, list[Input]]:
    if view.kv_layers is None:
        raise RuntimeError(f"{settings.POLICY.name}=need: this worker does not tell its KV cache layout; use cap.")
    block_size, block_bytes = view.kv_layers()
    blocks = budget.needed_blocks(view.max_num_seqs, view.max_model_len, block_size)
    source = "max_num_seqs * ceil(max_model_len / block_size) + 1"
    return blocks * block_bytes, [
        Input("needed_blocks", blocks, source, "configured", "blocks"),
        Input("block", block_bytes, "get_kv_cache_spec, all layers", "configured"),
        Input("need", blocks * block_bytes, "needed_blocks * block", "configured"),
    ]


def _cpu_mode(view: WorkerView, env: Settings, host_root: str | os.PathLike[str]) -> NeuronBudget:
    memory = host_memory(host_root)
    replicas, source = view.replicas, view.replicas_source
    if env.host_replicas is not None:
        replicas, source = env.host_replicas, settings.HOST_REPLICAS.name
    workers = max(view.local_workers, 1) * max(replicas, 1)
    gmu = view.gpu_memory_utilization
    inputs = [
        Input.measured("host_available", memory.available, memory.source),
        Input("local_workers", view.local_workers, view.local_workers_source, "configured", "workers"),
        Input("replicas", replicas, source, "configured", "engines"),
        Input("gpu_memory_utilization", gmu, "cache_config", "configured", "ratio"),
        Input("cap_fraction", env.cap, settings.CAP_FRACTION.name, "configured", "ratio"),
    ]
    if view.num_gpu_blocks_override is not None:
        return _explicit_blocks(view, memory.available // workers, "host_available // workers", inputs)
    available = budget.host_kv_budget(memory.available, workers, gmu, env.cap)
    return NeuronBudget(
        available,
        "cpu",
        "int(int(host_available // (local_workers * replicas) * gpu_memory_utilization) * cap_fraction)",
        inputs,
        memory.notes,
        cap=env.cap,
    )
