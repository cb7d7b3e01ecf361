# SPDX-License-Identifier: Apache-2.0
"""Ming-flash-omni: the talker's language model, which speaks one request at a time.

Owner: ``MingAudioGenerator``, a plain object held as ``MingFlashOmniTalkerForConditionalGeneration.audio_generator``;
the walk finds the talker, which answers for its generator. Geometry from the checkpoint's ``Qwen2Config``, dtype from
the model's parameters.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
to 0.18      absent
0.20 - 0.30  active: a static cache of 2048 positions per segment of text, whole on its first write. A
             request that sets ``use_static_cache`` to false keeps nothing from step to step
===========  ========================================================================================

Up to 0.28 the 2048 is a literal; it is asked for by calling the generator's own method with "no static cache", which
builds nothing. 0.30 names it and declares natively, rightly; ours is the same with the storage and the residency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype


def install(hook: Hook) -> Undo:
    """Declare the generator's static cache."""
    return attach(hook, declare)


def install_talker(hook: Hook) -> Undo:
    """Let the talker, which a walk over modules meets, answer for its generator."""
    return attach(hook, declare_talker)


def declare_talker(talker: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """What the talker's generator holds."""
    generator = talker.audio_generator
    if generator is None:
        specs.inert("talker_llm_static_cache", "the talker has no audio generator")
        return []
    return declare(generator)


def declare(generator: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """The static cache of the talker's language model."""
    dtype = parameter_dtype(generator._model)
    length = getattr(generator, "_STATIC_CACHE_LEN", None)
    if length is None:
        # Returns (None, length) without building a cache.
        _, length = generator._init_kv_cache(False, "meta", dtype)
    return [
        specs.spec_from_hf_config(
            generator._llm_config,
            name="talker_llm_static_cache",
            physical_capacity_positions=int(length),
            capacity_source=f"max_cache_len={int(length)} of _init_kv_cache",
            dtype=dtype,
            scope=specs.ModelLocalKVScope.INVOCATION,
            rows=specs.RowDriver.FIXED,
            rows_fixed=1,
            rows_reason="forward() takes the first request and runs its whole decode loop before it returns",
            allocation_note="each layer is allocated whole by its first write; made anew for every segment of text",
            cache="static",
            residency=specs.Residency.LATER,
        )
    ]
