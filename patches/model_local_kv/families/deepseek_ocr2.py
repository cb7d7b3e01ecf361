# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-OCR2 in vLLM itself: a language model used as image encoder.

Owner: ``Qwen2Decoder2Encoder``. It runs a transformers ``Qwen2Model`` over the image and as many queries, without
``use_cache=False``; transformers then builds a cache by default, which is dropped when the forward returns. A full view
has 256 queries and runs alone; the crops of an image have 144 each and run as one batch. The two follow each other.

Active wherever the model exists. The encoder is part of the profiling run, whose peak contains these caches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype


def install(hook: Hook) -> Undo:
    """Declare the encoder's caches."""
    return attach(hook, declare)


def declare(encoder: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """The cache of a full view, and the one of the crops of an image."""
    config = encoder.model.model.config
    if getattr(config, "use_cache", True) is False:
        specs.inert("image_view", "config.use_cache is off")
        return []
    crops = getattr(sys.modules.get("vllm.transformers_utils.processors.deepseek_ocr"), "MAX_CROPS", None)
    views = (
        ("image_view", encoder.query_1024, 1, "a full view runs alone"),
        (
            "image_crops",
            encoder.query_768,
            crops or 1,
            "one crop; their number is not visible here" if crops is None else f"MAX_CROPS={crops} in one batch",
        ),
    )
    return [
        specs.spec_from_hf_config(
            config,
            name=name,
            physical_capacity_positions=2 * int(queries.weight.shape[0]),
            capacity_source=f"{int(queries.weight.shape[0])} image positions and as many queries",
            dtype=parameter_dtype(encoder),
            scope=specs.ModelLocalKVScope.INVOCATION,
            rows=specs.RowDriver.FIXED,
            rows_fixed=rows,
            rows_reason=why,
            allocation_note="the full view and the crops follow each other: the larger entry is the peak, not the sum",
            residency=specs.Residency.PROFILED,
        )
        for name, queries, rows, why in views
    ]
