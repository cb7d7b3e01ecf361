# SPDX-License-Identifier: Apache-2.0
"""Nemotron VoiceChat: the talker's captured decode steps, one static cache per length of session.

Owner: ``NemotronVoiceChatTalkerForConditionalGeneration``, which answers for two plain objects it holds. The step graph
(``use_talker_cuda_graphs``) keeps a static cache for every bucket that a session has needed, at batch 2 under guidance;
the unconditional stream of the native talker (``native_talker_guidance``) does so at batch 1. Buckets are never given
back.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
to 0.26      absent
0.28         no captured steps. A session's cache grows with the session, so it has no bound to declare
0.30         active when one of the two settings is on; both are off by default, and a session's cache
             then grows with the session as in 0.28
===========  ========================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach

_NATIVE = "vllm_omni.model_executor.models.nemotron_voicechat.talker_native"


def install(hook: Hook) -> Undo:
    """Declare the caches of the captured steps."""
    return attach(hook, declare)


def declare(talker: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """One entry per bucket of the captured steps; empty where sessions decode eagerly."""
    graph = getattr(talker, "_step_graph", None)
    if graph is not None:
        rows = 2 if graph.guidance_enabled else 1
        why = "a conditional and an unconditional row" if rows == 2 else "guidance is off"
        return _buckets("talker_step", talker, graph.dtype, graph._bucket_lens, rows, why)
    if getattr(talker, "_native_guidance", False):
        sizes = sys.modules[_NATIVE].UncondStepGraph._BUCKETS
        known = [size for size in sizes if size <= talker._graph_max_cache_len]
        why = "one session at a time owns the captured stream; others decode eagerly, without a bound"
        return _buckets("unconditional_step", talker, talker._dtype, known, 1, why)
    return []


def _buckets(
    name: str, talker: Any, dtype: Any, sizes: Iterable[int], rows: int, why: str
) -> list[specs.ModelLocalKVSpec]:
    return [
        specs.spec_from_hf_config(
            talker.tts.tts_model.backbone.config,
            name=f"{name}_{int(size)}",
            physical_capacity_positions=int(size),
            capacity_source=f"bucket of {int(size)} positions",
            dtype=dtype,
            scope=specs.ModelLocalKVScope.MODEL,
            rows=specs.RowDriver.FIXED,
            rows_fixed=rows,
            rows_reason=why,
            allocation_note="made when a session first needs this length, and kept",
            cache="static",
            residency=specs.Residency.LATER,
        )
        for size in sizes
    ]
