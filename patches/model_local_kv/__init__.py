# SPDX-License-Identifier: Apache-2.0
"""Attention KV that models keep outside the paged manager: declared, observed, compared, reported.

The declaration only; importing it imports no installer, no torch and no vLLM.
"""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Patch, Target

from .families.targets import TARGETS as OWNERS
from .flags import FLAGS, REMOVED
from .uses import CACHE, USES

_HERE = "vllm_omni_patch.patches.model_local_kv"
_LOAD_MODEL = f"{_HERE}.hooks:install_load_model"

# load_model's own parameters were renamed (0.17) and grew (0.32). The hook passes all of them on and binds none.
_OWN = Contract(parameters=(), class_attributes=("model",))
_INHERITED = Contract(parameters=())

RUNNERS: tuple[Target, ...] = (
    Target(
        module="vllm.v1.worker.gpu_model_runner",
        qualname="GPUModelRunner.load_model",
        install=_LOAD_MODEL,
        contract=_OWN,
        note="model runner V1; XPU inherits it",
    ),
    Target(
        module="vllm.v1.worker.gpu.model_runner",
        qualname="GPUModelRunner.load_model",
        install=_LOAD_MODEL,
        contract=_OWN,
        optional=True,
        note="model runner V2, from 0.12; its CPU, XPU and encoder-only flavours inherit it",
    ),
    Target(
        module="vllm.v1.worker.cpu_model_runner",
        qualname="CPUModelRunner.load_model",
        install=_LOAD_MODEL,
        contract=_OWN,
        optional=True,
        note="the V1 CPU runner does not call the one that it overrides",
    ),
    Target(
        module="vllm_omni.worker.gpu_model_runner",
        qualname="OmniGPUModelRunner.load_model",
        install=_LOAD_MODEL,
        distribution="vllm-omni",
        contract=_INHERITED,
        optional=True,
    ),
    Target(
        module="vllm_omni.worker.gpu_model_runner",
        qualname="OmniGPUModelRunner._report_model_local_kv",
        install=f"{_HERE}.hooks:install_native_report",
        distribution="vllm-omni",
        contract=_INHERITED,
        optional=True,
        note="from 0.30: vLLM-Omni's own report. Its lines stand; the hook only notes that they were printed",
    ),
    Target(
        module="vllm_omni.worker_v2.omni_model_runner",
        qualname="OmniGPUModelRunner.load_model",
        install=_LOAD_MODEL,
        distribution="vllm-omni",
        contract=_INHERITED,
        optional=True,
        note="from 0.30; vLLM-Omni's own report does not reach this runner",
    ),
    Target(
        module="vllm_omni.platforms.npu.worker.npu_model_runner",
        qualname="OmniNPUModelRunner.load_model",
        install=_LOAD_MODEL,
        distribution="vllm-omni",
        contract=_INHERITED,
        optional=True,
        note="calls vllm-ascend's load_model past OmniGPUModelRunner's; vLLM-Omni's own report does not reach it",
    ),
)

PATCH = Patch(
    name="model_local_kv",
    summary="A report of the attention KV that models keep outside the paged manager, declared and observed.",
    why="Speech and omni models keep KV in transformers caches and ring buffers that no per-stage number contains. "
    "Most of it is allocated per request, after the KV budget was set, so a server runs out of memory at a concurrency "
    "that looked safe.",
    scope="After load_model of the V1, V2, CPU and vLLM-Omni model runners. Adds model_local_kv_specs() to the classes "
    "of vLLM-Omni that own such caches. Reports; allocates nothing and subtracts nothing.",
    fragility="Model families are known by module and class name and by the settings that switch their caches on. "
    "Observation reads the layers of transformers caches.",
    remove_when="Every release in use declares its caches by itself and reports under model runner V2 and on NPU "
    "(vllm-project/vllm-omni pull 6171 is the first step).",
    effect="reports",
    targets=(
        *RUNNERS,
        *OWNERS,
        CACHE,
    ),
    flags=FLAGS,
    removed=REMOVED,
    uses=USES,
)
