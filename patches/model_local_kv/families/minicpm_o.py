# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-o 4.5: the Whisper encoder that hears a duplex session chunk by chunk.

Owner: ``MiniCPMWhisperEncoder``, held as ``thinker.apm``. One ``EncoderDecoderCache`` per session, of which only the
self-attention part fills; the encoder runs at batch size 1. Bounded by the learned positions; the served path starts
over before it reaches them.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
to 0.20      absent
0.22, 0.24   inert: nothing streams audio through the encoder
0.26         inert: the layer hands its cache over as ``past_key_value``, which the attention of
             transformers >= 4.56 does not know and swallows; nothing is ever kept
0.28, 0.30   active when ``model_config.session_mode`` is ``duplex``, for ``duplex_max_sessions`` sessions
===========  ========================================================================================

0.30 declares natively: one session, in every mode. Its line stands; ours counts the sessions and is empty in turn mode.
Both settings are visible from 0.28 on, so the count is a fixed one with the setting as its reason.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach

_NAME = "whisper_encoder_self_attn"
_THINKER = "MiniCPMO45OmniLLMForConditionalGeneration"


def install(hook: Hook) -> Undo:
    """Declare the streaming encoder's cache."""
    return attach(hook, declare)


def declare(encoder: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """The self-attention cache of one session, times the sessions; empty where no session keeps one."""
    reason = _never_kept(encoder)
    if reason:
        specs.inert(_NAME, reason)
        return []
    model_config = getattr(specs.engine_config(), "model_config", None)
    mode = getattr(model_config, "session_mode", None)
    if mode is not None and mode != "duplex":
        specs.inert(_NAME, f"model_config.session_mode is {mode!r}: only duplex sessions stream audio")
        return []
    sessions = getattr(model_config, "duplex_max_sessions", None) if mode == "duplex" else None
    if sessions is None:
        rows, why = 1, "one session; the session mode and the session cap are not visible here"
        note: str | None = "held in duplex mode only, once per session"
    else:
        rows, why, note = int(sessions), f"model_config.duplex_max_sessions={int(sessions)}, batch size 1 each", None
    config = encoder.config
    return [
        specs.spec_from_hf_config(
            config,
            name=_NAME,
            layers=len(encoder.layers),
            kv_heads=config.encoder_attention_heads,
            head_dim=config.d_model // config.encoder_attention_heads,
            physical_capacity_positions=int(encoder.embed_positions.weight.shape[0]),
            capacity_source="embed_positions rows (max_source_positions)",
            dtype=encoder.conv1.weight.dtype,
            scope=specs.ModelLocalKVScope.SESSION,
            rows=specs.RowDriver.FIXED,
            rows_fixed=rows,
            rows_reason=why,
            allocation_note=note,
            # DynamicCache() without a config.
            cache="plain",
            residency=specs.Residency.LATER,
        )
    ]


def _never_kept(encoder: Any) -> str:
    """Why this release keeps no cache, whatever its settings; empty when it can."""
    thinker = getattr(sys.modules.get(type(encoder).__module__), _THINKER, None)
    if thinker is not None and not hasattr(thinker, "get_audio_embedding_streaming"):
        return "this release has no streaming audio path"
    layer = encoder.layers[0]
    handed = getattr(layer, "_past_key_values_kwarg", "past_key_value")
    if handed not in inspect.signature(layer.self_attn.forward).parameters:
        return f"the attention of this transformers does not take {handed!r}: the cache is lost after every chunk"
    return ""
