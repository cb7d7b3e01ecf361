# SPDX-License-Identifier: Apache-2.0
"""``determine_available_memory``: a KV budget that is right on Neuron and on a shared GPU, and explains itself.

The declaration only; importing it imports no installer.
"""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Native, Parameter, Patch, Target

from .flags import FLAGS, REMOVED
from .neuron.releases import NEW_LAYOUT, NEW_MODULE, OLD_LAYOUT, OLD_MODULE

_HERE = "vllm_omni_patch.patches.available_memory"
_METHOD = "determine_available_memory"
_NO_PARAMETERS = Contract(parameters=())
# What every published worker of the old layout defines, and the order in which vLLM calls it, rests on.
_NEURON_WORKER = Contract(parameters=(), base_methods=("init_device", "load_model", "get_kv_cache_spec"))

NEURON_NATIVE = Native(
    base_methods=("_compute_kv_budget", "_get_kv_cap_fraction"),
    reason="this worker already bounds KV by gpu_memory_utilization and the cap fraction",
)
# The path itself is the sign here: a release that moved its worker to this module computes a budget of its own,
# so the names of its helpers do not matter.
NEURON_NATIVE_PATH = Native(
    base_methods=NEURON_NATIVE.base_methods,
    module_attributes=("NeuronWorker",),
    reason="plugin releases with this module layout (0.21 and later) compute the KV budget themselves",
)

PATCH = Patch(
    name="available_memory",
    summary="A KV budget that is right on Neuron and on a shared GPU, and a report of where the number came from.",
    why="vllm-neuron 0.1 returns 1 GiB whatever the device has; 0.2 to 0.5 return the free bytes, or 20 GiB when the "
    "query fails, whatever gpu_memory_utilization says and however many KV blocks exist. vLLM measures the whole "
    "device, so a neighbour on the same GPU changes or aborts the budget. Nothing shows how the number was made.",
    scope="Wraps determine_available_memory of the Neuron, GPU, CPU, XPU and vLLM-Omni workers. GPU budgets stay "
    "vLLM's own unless VLLM_OMNI_PATCH_GPU_BUDGET asks otherwise.",
    fragility="Reads worker attributes (cache_config, model_runner, vllm_config) that are not a public interface; "
    "Neuron rows rest on published descriptions, not on a device.",
    remove_when="vllm-neuron 0.21 or later is the oldest plugin in use; vLLM sizes KV from the memory of its own "
    "process (vllm-project/vllm pull 55828).",
    effect="changes",
    targets=(
        Target(
            module=OLD_MODULE,
            qualname=f"NeuronWorker.{_METHOD}",
            install=f"{_HERE}.neuron.hooks:install",
            distribution="vllm-neuron",
            contract=_NEURON_WORKER,
            native=NEURON_NATIVE,
            optional=True,
            evidence="documented",
            documented=OLD_LAYOUT,
            note="plugin 0.1 to 0.5; on 0.5 the contiguous-KV and pooling branches stay the plugin's own",
        ),
        Target(
            module=NEW_MODULE,
            qualname=f"NeuronWorker.{_METHOD}",
            install=f"{_HERE}.neuron.hooks:install",
            distribution="vllm-neuron",
            contract=_NO_PARAMETERS,
            native=NEURON_NATIVE_PATH,
            optional=True,
            evidence="documented",
            documented=NEW_LAYOUT,
            note="plugin 0.21 and later: left alone",
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname=f"Worker.{_METHOD}",
            install=f"{_HERE}.hooks:install_gpu",
            contract=Contract(
                parameters=(),
                class_attributes=("requested_memory", "init_snapshot", "available_kv_cache_memory_bytes"),
                module_attributes=("memory_profiling",),
            ),
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname="Worker.init_device",
            install=f"{_HERE}.hooks:install_init",
            contract=Contract(parameters=(), class_attributes=("requested_memory", "init_snapshot")),
            note="own memory before the weights; with the process budget also an error that names the other processes",
        ),
        Target(
            module="vllm.model_executor.model_loader.utils",
            qualname="process_weights_after_loading",
            install=f"{_HERE}.hooks:install_count",
            contract=Contract(parameters=(Parameter("model"), Parameter("model_config"), Parameter("target_device"))),
            note="on CPU only: counts the weights before vLLM packs and empties them",
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname="Worker.initialize_from_config",
            install=f"{_HERE}.hooks:install_layout",
            contract=Contract(parameters=(Parameter("kv_cache_config"),)),
            note="adds the block count to the report",
        ),
        Target(
            module="vllm.v1.worker.startup_plan",
            qualname="compute_plan_fingerprint",
            install=f"{_HERE}.hooks:install_plan",
            optional=True,
            note="vLLM 0.26 and later: a saved start-up plan belongs to the budget policy that made it",
        ),
        Target(
            module="vllm_omni.worker.base",
            qualname=f"OmniGPUWorkerBase.{_METHOD}",
            install=f"{_HERE}.omni:install",
            distribution="vllm-omni",
            contract=Contract(
                parameters=(),
                class_attributes=("available_kv_cache_memory_bytes",),
                module_attributes=("memory_profiling",),
            ),
            optional=True,
            note="0.16 to 0.28 read this process through NVML, 0.30 does not; both follow VLLM_OMNI_PATCH_GPU_BUDGET",
        ),
        Target(
            module="vllm.v1.worker.cpu_worker",
            qualname=f"CPUWorker.{_METHOD}",
            install=f"{_HERE}.hooks:install_report",
            contract=_NO_PARAMETERS,
            optional=True,
        ),
        Target(
            module="vllm.v1.worker.xpu_worker",
            qualname=f"XPUWorker.{_METHOD}",
            install=f"{_HERE}.hooks:install_report",
            contract=_NO_PARAMETERS,
            optional=True,
        ),
    ),
    flags=FLAGS,
    commands=(("memory", f"{_HERE}.cli:app"),),
    removed=REMOVED,
)
