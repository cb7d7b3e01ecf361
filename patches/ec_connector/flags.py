# SPDX-License-Identifier: Apache-2.0
"""The encoder cache's environment variables. Storage is configured as LMCache configures it: see ``config.py``."""

from __future__ import annotations

from vllm_omni_patch.flags import Flag

DISABLE = Flag(
    "VLLM_OMNI_PATCH_EC_DISABLE",
    "bool",
    False,
    "Keep the encoder cache connector registered but never look up or store anything: every item is encoded.",
)

FLAGS: tuple[Flag, ...] = (DISABLE,)
