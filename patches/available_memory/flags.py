# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this patch. Those under upstream's names keep upstream's meaning and default.

What vllm-neuron and the Neuron SDK define for themselves, and the budget only reads, is ``internal``.
"""

from __future__ import annotations

from vllm_omni_patch.flags import Flag, Removed

CAP_FRACTION = Flag(
    "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION",
    "float",
    0.30,
    "Neuron: the largest part of the GMU budget (HBM x gpu_memory_utilization) that KV may take.",
    minimum=0,
    exclusive_minimum=True,
    maximum=1,
    accepts="a number in (0, 1]",
)
MIN_BUDGET_GIB = Flag(
    "VLLM_NEURON_MIN_KV_BUDGET_GIB",
    "float",
    1.0,
    "Neuron: a KV budget below this many GiB stops the engine. 0 or less: no such check.",
    accepts="a finite number of GiB; 0 or less turns the check off",
)
CPU_COMPILE = Flag(
    "VLLM_NEURON_CPU_COMPILE",
    "bool",
    False,
    "Neuron: compile on a host without a device, for NEURON_PLATFORM_TARGET_OVERRIDE.",
    internal=True,
)
CPU_MODE = Flag(
    "VLLM_NEURON_CPU_MODE",
    "bool",
    False,
    "Neuron: run on the host CPU; KV comes from host memory, shared fairly between the workers of this host.",
    internal=True,
)
PLATFORM_TARGET = Flag(
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "str",
    "",
    "Neuron: the platform compiled for (trn1, inf2, trn2, trn3 and their variants). Needed with "
    "VLLM_NEURON_CPU_COMPILE.",
    internal=True,
)
LOGICAL_NC_CONFIG = Flag(
    "NEURON_LOGICAL_NC_CONFIG",
    "int",
    None,
    "Neuron: physical cores per logical core. Unset: NEURON_RT_VIRTUAL_CORE_SIZE, else 2 on trn2 and trn3, 1 on trn1 "
    "and inf2.",
    minimum=1,
    maximum=2,
    accepts="1 or 2",
    internal=True,
)
VIRTUAL_CORE_SIZE = Flag(
    "NEURON_RT_VIRTUAL_CORE_SIZE",
    "int",
    None,
    "Neuron: the older name of NEURON_LOGICAL_NC_CONFIG.",
    minimum=1,
    maximum=2,
    accepts="1 or 2",
    internal=True,
)

COMPILED_ARTIFACTS = Flag(
    "NEURON_COMPILED_ARTIFACTS",
    "str",
    "",
    "Neuron: folder of the compiled programs. What the KV budget was made of is left there for the other side (compile "
    "host or device) to compare.",
    internal=True,
)
COMPILE_CACHE_URL = Flag(
    "NEURON_COMPILE_CACHE_URL",
    "str",
    "",
    "Neuron: folder of the compiler's cache; used in the same way where NEURON_COMPILED_ARTIFACTS is unset. What is "
    "behind an s3:// address cannot be compared.",
    internal=True,
)

POLICY = Flag(
    "VLLM_OMNI_PATCH_NEURON_POLICY",
    "choice",
    "cap",
    "How the Neuron budget is made. cap: GMU budget less model bytes, at most the cap fraction. need: the same, and "
    "never more than max_num_seqs * ceil(max_model_len / block_size) + 1 blocks.",
    choices=("cap", "need"),
    removed_choices=(("headroom", f"Set {CAP_FRACTION.name} for the room that KV may take."),),
)
USED_BYTES = Flag(
    "VLLM_OMNI_PATCH_NEURON_USED_BYTES",
    "choice",
    "auto",
    "What counts as used on the device. model: parameters and buffers of the model. runtime: what the Neuron runtime "
    "reports, KV that is laid out already included. auto: model; where the inference library has laid out KV while "
    "the model loaded, its blocks are the budget and nothing is subtracted.",
    choices=("auto", "model", "runtime"),
)

NEURON_FLAGS = (
    CAP_FRACTION,
    MIN_BUDGET_GIB,
    CPU_COMPILE,
    CPU_MODE,
    PLATFORM_TARGET,
    LOGICAL_NC_CONFIG,
    VIRTUAL_CORE_SIZE,
    COMPILED_ARTIFACTS,
    COMPILE_CACHE_URL,
    POLICY,
    USED_BYTES,
)

REMOVED = (
    Removed("VLLM_OMNI_PATCH_NEURON_HEADROOM_GIB", f"Set {CAP_FRACTION.name} for the room that KV may take."),
    Removed("VLLM_OMNI_PATCH_NEURON_CALIBRATION", f"Set {CAP_FRACTION.name} to the cap fraction that compiled."),
    Removed(
        "VLLM_OMNI_PATCH_NEURON_UNIQUE_STORAGE",
        "Tensors are summed as vllm-neuron does; where tied weights count twice, raise --gpu-memory-utilization.",
    ),
    Removed(
        "VLLM_OMNI_PATCH_NEURON_LNC1_FAIR_SHARE",
        "Halve --gpu-memory-utilization where two logical cores share one HBM stack; the budget is the same.",
    ),
    Removed(
        "VLLM_OMNI_PATCH_NEURON_HOST_REPLICAS",
        "Divide --gpu-memory-utilization by the number of engines on this host; the budget is the same.",
    ),
)

GPU_BUDGET = Flag(
    "VLLM_OMNI_PATCH_GPU_BUDGET",
    "choice",
    "stock",
    "stock: vLLM's own KV budget, unchanged. process: only this process's memory is subtracted from the requested "
    "memory; other processes on the same GPU are not counted.",
    choices=("stock", "process"),
)
RESERVE_MODEL_LOCAL_KV = Flag(
    "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV",
    "bool",
    False,
    "Subtract pending model-local KV, which profiling cannot see, from the KV budget.",
)

FLAGS = (*NEURON_FLAGS, GPU_BUDGET, RESERVE_MODEL_LOCAL_KV)
