# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS: the audio tokenizer's streaming decoder, a ring of keys and values per attention and slot.

Owner: ``MossAudioTokenizerModel`` of the first codec (``moss_tts.audio_tokenizer``) and of the second one
(``moss_tts.audio_tokenizer_v2``). A ring is one tensor ``(2, slots, heads, context, head_dim)``; the context is about
ten seconds at the resolution of its stage, so the stages differ and each shape is an entry of its own.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
0.22         absent
0.24, 0.26   second codec: active once a request streams
0.28         second codec: active in async-chunk mode
0.30         both codecs: active in async-chunk mode
===========  ========================================================================================

The pool is made at load when graphs are captured, else by the first streaming request: ``max_num_seqs`` slots, and
scratch slots for graph padding. Once it is there, its own tensors are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach

_NAME = "decoder_ring"
_CONTEXT_UNSET = 1024  # both codecs' own capacity for an attention without a context


def install(hook: Hook) -> Undo:
    """Declare the decoder's rings."""
    return attach(hook, declare)


def declare(codec: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """One entry per ring shape of the decoder, over all attentions of that shape."""
    attentions = [module for module in codec.decoder.modules() if _is_attention(module)]
    if not attentions:
        specs.inert(_NAME, "the decoder of this release keeps no streaming state")
        return []
    live = any(module._streaming_state is not None for module in attentions)
    if not live and getattr(getattr(specs.engine_config(), "model_config", None), "async_chunk", None) is False:
        specs.inert(_NAME, "model_config.async_chunk is off: the decoder runs whole utterances and keeps nothing")
        return []
    shapes: dict[tuple[int, int, int, int, Any], int] = {}
    for module in attentions:
        shape = _ring(module)
        shapes[shape] = shapes.get(shape, 0) + 1
    return [
        specs.ModelLocalKVSpec(
            name=f"{_NAME}_{context}",
            layers=layers,
            kv_heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            physical_capacity_positions=context,
            capacity_source=f"context of {context} positions at this stage's resolution",
            scope=specs.ModelLocalKVScope.MODEL,
            storage_positions=context,
            **(_live_rows(slots) if slots else _coming_rows()),
        )
        for (slots, heads, context, head_dim, dtype), layers in shapes.items()
    ]


def _is_attention(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("_streaming_state", "num_heads", "embed_dim", "context"))


def _ring(attention: Any) -> tuple[int, int, int, int, Any]:
    """``(slots, heads, context, head_dim, dtype)``; no slots while there is no pool."""
    ring = getattr(attention._streaming_state, "kv_cache", None)
    if ring is not None:
        _, slots, heads, context, head_dim = ring.cache.shape
        return int(slots), int(heads), int(context), int(head_dim), ring.cache.dtype
    heads = int(attention.num_heads)
    context = int(attention.context or getattr(attention, "weights_per_step", 0) or _CONTEXT_UNSET)
    return 0, heads, context, int(attention.embed_dim) // heads, _ring_dtype(attention)


def _ring_dtype(attention: Any) -> Any:
    """The dtype of the pool: the second codec takes bfloat16 on CUDA, whatever its weights are."""
    projections = getattr(attention, "in_projs", None)
    weight = attention.in_proj.weight if projections is None else projections[0].weight
    if projections is not None and weight.device.type == "cuda":
        import torch

        return torch.bfloat16
    return weight.dtype


def _live_rows(slots: int) -> dict[str, Any]:
    return {
        "rows": specs.RowDriver.FIXED,
        "rows_fixed": slots,
        "rows_reason": f"the pool has {slots} slots, those for graph padding included",
        "residency": specs.Residency.AT_LOAD,
    }


def _coming_rows() -> dict[str, Any]:
    return {
        "rows": specs.RowDriver.MAX_NUM_SEQS,
        "allocation_note": "made whole by the first streaming request; graphs add slots for padding",
        "residency": specs.Residency.LATER,
    }
