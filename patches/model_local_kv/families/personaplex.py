# SPDX-License-Identifier: Apache-2.0
"""PersonaPlex: the streaming transformers of its Mimi codec.

Owner: ``_MimiStreamingTransformer``, twice in each codec (encoder and decoder). One ring ``(2, rows, heads, context,
head_dim)`` per layer, made by ``streaming_init(rows)``. There is one codec per session slot, each at one row, so the
slots are counted by the walk.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
to 0.26      absent
0.28, 0.30   active; made when a slot is first used
===========  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype


def install(hook: Hook) -> Undo:
    """Declare the codec transformer's ring."""
    return attach(hook, declare)


def declare(transformer: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """The ring of one codec transformer."""
    rings = transformer._kv
    rows, residency, note = 1, specs.Residency.LATER, "made when the slot is first used"
    if rings:
        rows, residency, note = int(rings[0].cache.shape[1]), specs.Residency.AT_LOAD, "made already"
    layer = transformer.layers[0]
    return [
        specs.ModelLocalKVSpec(
            name="mimi_ring",
            layers=len(transformer.layers),
            kv_heads=int(layer.num_heads),
            head_dim=int(layer.head_dim),
            dtype=parameter_dtype(transformer),
            physical_capacity_positions=int(transformer.context),
            capacity_source=f"context({int(transformer.context)})",
            scope=specs.ModelLocalKVScope.SESSION,
            rows=specs.RowDriver.FIXED,
            rows_fixed=rows,
            rows_reason="one codec per session slot, streaming_init with one row",
            allocation_note=note,
            storage_positions=int(transformer.context),
            residency=residency,
        )
    ]
