# SPDX-License-Identifier: Apache-2.0
"""Settings of ``model_local_kv``."""

from __future__ import annotations

from vllm_omni_patch.flags import Flag

OBSERVE = Flag(
    "VLLM_OMNI_PATCH_OBSERVE_KV",
    "bool",
    False,
    "Follow the transformers caches that live in the process, measure them while serving and compare them with what "
    "is declared.",
)
INTERVAL = Flag(
    "VLLM_OMNI_PATCH_OBSERVE_KV_INTERVAL",
    "float",
    1.0,
    "Seconds between two measurements. Stretched by itself so that measuring stays below 1 % of the time.",
    minimum=0.01,
    maximum=3600,
)

FLAGS: tuple[Flag, ...] = (OBSERVE, INTERVAL)
