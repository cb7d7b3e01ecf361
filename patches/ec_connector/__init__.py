# SPDX-License-Identifier: Apache-2.0
"""Encoder cache connector: keeps multimodal encoder outputs in LMCache's storage, and never takes the engine down."""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Native, Parameter, Patch, Target

from .flags import FLAGS
from .uses import USES

_HOOKS = "vllm_omni_patch.patches.ec_connector.hooks"
# Registered together with the recovery from a failed load, or not at all.
_GROUP = "connector"
# (module of a loader, its class, parameters of ``_prepare_weights``)
_LOADERS: tuple[tuple[str, str, tuple[Parameter, ...]], ...] = (
    (
        "default_loader",
        "DefaultModelLoader",
        (
            Parameter("model_name_or_path"),
            Parameter("subfolder", optional=True),
            Parameter("revision"),
            Parameter("fall_back_to_pt"),
            Parameter("allow_patterns_overrides"),
        ),
    ),
    ("sharded_state_loader", "ShardedStateLoader", (Parameter("model_name_or_path"), Parameter("revision"))),
    ("runai_streamer_loader", "RunaiModelStreamerLoader", (Parameter("model_name_or_path"), Parameter("revision"))),
    ("bitsandbytes_loader", "BitsAndBytesModelLoader", (Parameter("model_name_or_path"), Parameter("revision"))),
    (
        "gguf_loader",
        "GGUFModelLoader",
        (Parameter("model_name_or_path", optional=True), Parameter("model_config", optional=True)),
    ),
)
_MM_CONFIG = Contract(parameters=(), class_attributes=("model_config", "ec_transfer_config"))

PATCH = Patch(
    name="ec_connector",
    summary="LMCacheECConnector: encoder outputs cached across requests, restarts and hosts.",
    why=(
        "Encoding an image again costs a request ten times as much as loading it, or more. vLLM has the hook "
        "(--ec-transfer-config) and no connector for LMCache; LMCache's own engine never reads a disk or a server; and "
        "in every release an entry that was promised and cannot be loaded ends the engine."
    ),
    scope=(
        "Adds one name to ECConnectorFactory. Only when that name is chosen: encodes failed loads in the same step (V1 "
        "and V2 model runner), notes which files the model is loaded from, samples the encoder's weights and begins a "
        "new generation when they were replaced, leaves enable_mm_embeds as the user set it. With another connector or "
        "none, every wrapper calls the original and does nothing else."
    ),
    fragility=(
        "Binds scheduler_output.scheduled_encoder_inputs and the runner's requests (V1), or scheduled_encoder_inputs "
        "and encoder_cache.mm_features (V2). A worker whose runner lacks the recovery does not start the connector."
    ),
    remove_when=(
        "vLLM registers LMCacheECConnector itself and recovers from an encoder output that a connector promised and "
        "could not load."
    ),
    effect="adds",
    targets=(
        Target(
            module="vllm.distributed.ec_transfer.ec_connector.factory",
            qualname="ECConnectorFactory",
            install=f"{_HOOKS}:register",
            verify=f"{_HOOKS}:registered",
            group=_GROUP,
            contract=Contract(
                base_methods=("register_connector", "get_connector_class"), class_attributes=("_registry",)
            ),
            native=Native(strings=("LMCacheECConnector",), reason="vLLM registers the connector itself"),
        ),
        Target(
            module="vllm.v1.worker.gpu_model_runner",
            qualname="GPUModelRunner._execute_mm_encoder",
            install=f"{_HOOKS}:recover_v1",
            group=_GROUP,
            contract=Contract(
                parameters=(Parameter("scheduler_output"),),
                base_methods=("_gather_mm_embeddings",),
                class_attributes=("requests", "encoder_cache"),
                module_attributes=("has_ec_transfer",),
            ),
        ),
        Target(
            module="vllm.v1.worker.gpu.mm.encoder_runner",
            qualname="EncoderRunner.prepare_mm_inputs",
            install=f"{_HOOKS}:recover_v2",
            group=_GROUP,
            optional=True,
            contract=Contract(
                parameters=(Parameter("scheduled_encoder_inputs"),),
                class_attributes=("encoder_cache",),
            ),
            note="the V2 runner takes part in encoder cache transfer from 0.28.0",
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname="Worker.load_model",
            install=f"{_HOOKS}:sample_weights",
            group=_GROUP,
            contract=Contract(base_methods=("get_model",)),
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname="Worker.reload_weights",
            install=f"{_HOOKS}:new_generation_in_worker",
            optional=True,
            contract=Contract(parameters=()),
        ),
        Target(
            module="vllm.v1.worker.gpu_worker",
            qualname="Worker.update_weights",
            install=f"{_HOOKS}:new_generation_in_worker",
            optional=True,
            contract=Contract(parameters=(Parameter("update_info"),)),
        ),
        *(
            Target(
                module=f"vllm.model_executor.model_loader.{module}",
                qualname=f"{owner}._prepare_weights",
                install=f"{_HOOKS}:note_opened",
                optional=True,
                contract=Contract(parameters=parameters),
                note="the files that a model is loaded from; entries of what another loader loads serve one run",
            )
            for module, owner, parameters in _LOADERS
        ),
        Target(
            module="vllm.lora.worker_manager",
            qualname="WorkerLoRAManager._load_adapter",
            install=f"{_HOOKS}:note_adapter",
            optional=True,
            contract=Contract(parameters=(Parameter("lora_request"),)),
            note="the files of an adapter; without it nothing is stored or loaded of items that one changes",
        ),
        Target(
            module="vllm.multimodal.hasher",
            qualname="MultiModalHasher.hash_kwargs",
            install=f"{_HOOKS}:hash_by_weights",
            optional=True,
            contract=Contract(
                parameters=(Parameter("algorithm", kinds=("positional", "positional_or_keyword"), optional=True),)
            ),
            note="content hashes that do not change with the path to the same weights",
        ),
        Target(
            module="vllm.config.vllm",
            qualname="VllmConfig._resolve_mm_embedding_inputs",
            install=f"{_HOOKS}:keep_mm_embeds",
            optional=True,
            contract=_MM_CONFIG,
            note="from 0.30.0 a consumer accepts embeddings from clients without being asked to",
        ),
        Target(
            module="vllm.config.vllm",
            qualname="VllmConfig._resolve_allow_missing_mm_embeddings",
            install=f"{_HOOKS}:keep_mm_embeds",
            optional=True,
            contract=_MM_CONFIG,
            note="0.28 and 0.29 only: requests without data cannot be failed one by one",
        ),
        Target(
            module="vllm.config.ec_transfer",
            qualname="ECTransferConfig.__post_init__",
            install=f"{_HOOKS}:explain_role",
            optional=True,
            contract=Contract(parameters=(), class_attributes=("ec_connector", "ec_role")),
        ),
        Target(
            module="vllm.engine.arg_utils",
            qualname="EngineArgs.create_engine_config",
            install=f"{_HOOKS}:check_early",
            optional=True,
            note="rejected in the process that the user started; the connector rejects it too",
        ),
    ),
    flags=FLAGS,
    commands=(("ec", "vllm_omni_patch.patches.ec_connector.cli:app"),),
    uses=USES,
)
