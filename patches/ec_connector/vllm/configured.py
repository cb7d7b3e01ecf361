# SPDX-License-Identifier: Apache-2.0
"""What a ``VllmConfig`` chooses: this connector, a model runner, adapters of the encoder.

Read by attribute name; imports vLLM only where a question can be answered in no other way.
"""

from __future__ import annotations

from typing import Any

NAME = "LMCacheECConnector"


def uses_v2_runner(vllm_config: Any) -> bool:
    """Whether this engine's workers build the V2 model runner."""
    decided = getattr(vllm_config, "use_v2_model_runner", None)
    if decided is not None:
        return bool(decided)
    try:
        from vllm import envs

        return bool(getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False))
    except ImportError:
        return False


def tower_lora(vllm_config: Any) -> bool:
    """Whether adapters change encoder outputs in this engine (``enable_tower_connector_lora``)."""
    return bool(getattr(getattr(vllm_config, "lora_config", None), "enable_tower_connector_lora", False))


def is_ours(vllm_config: Any) -> bool:
    """Whether this configuration chooses our connector."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    return getattr(transfer, "ec_connector", None) == NAME
