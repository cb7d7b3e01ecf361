# SPDX-License-Identifier: Apache-2.0
"""Settings of ``model_local_kv``."""

from __future__ import annotations

from vllm_omni_patch.flags import Flag, Removed

OBSERVE = Flag(
    "VLLM_OMNI_PATCH_OBSERVE_KV",
    "bool",
    False,
    "Follow the transformers caches that live in the process, measure them while serving and compare them with what "
    "is declared.",
)
FLAGS: tuple[Flag, ...] = (OBSERVE,)
REMOVED = (
    Removed(
        "VLLM_OMNI_PATCH_OBSERVE_KV_INTERVAL",
        "Caches are measured once a second, and less often where that would take more than 1 % of the time.",
    ),
)
