# SPDX-License-Identifier: Apache-2.0
"""Fish Speech and Audio8: the fast autoregressive model that writes the codebooks of one frame.

Owners: ``FishSpeechFastAR`` and ``Audio8TTSFastAR``. Two buffers ``(layers, rows, kv_heads, num_codebooks + 1,
head_dim)``, made for the largest batch seen so far and never made smaller.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
0.18, 0.20   Fish Speech: inert, every step runs over the whole short sequence again
0.22 - 0.30  Fish Speech: active
0.30         Audio8: active
===========  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype

_NAME = "fast_ar_buffers"


def install(hook: Hook) -> Undo:
    """Declare the buffers of the fast model."""
    return attach(hook, declare)


def declare(model: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """Both buffers as one entry, at the width they reach when every sequence decodes at once."""
    if not hasattr(model, "_k_cache"):
        specs.inert(_NAME, "this release keeps no keys and values between the codebooks of a frame")
        return []
    positions = int(model._num_codebooks) + 1
    keys = model._k_cache
    made = "not made yet" if keys is None else f"made for {int(keys.shape[1])} rows so far"
    return [
        specs.spec_from_hf_config(
            model.config,
            name=_NAME,
            physical_capacity_positions=positions,
            capacity_source=f"num_codebooks({positions - 1}) + 1",
            dtype=parameter_dtype(model) if keys is None else keys.dtype,
            scope=specs.ModelLocalKVScope.MODEL,
            rows=specs.RowDriver.MAX_NUM_SEQS,
            allocation_note=f"as wide as the largest batch seen, never smaller again; {made}",
            cache="plain",
            residency=specs.Residency.UNKNOWN,
        )
    ]
