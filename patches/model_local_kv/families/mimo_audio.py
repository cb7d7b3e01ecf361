# SPDX-License-Identifier: Apache-2.0
"""MiMo-Audio: the two small transformers that write and read groups of audio codes.

Owner: ``MiMoAudioLLMForConditionalGeneration``. ``local_transformer`` decodes one group of codes in a loop of
``group_size + max(delay_pattern)`` steps; ``input_local_transformer`` reads a group of ``group_size`` positions.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
0.14         absent
0.16, 0.18   active; every captured bucket has a graph pool of its own, so the whole sum stays resident
0.20 - 0.30  active; the buckets share one pool, whose blocks a later capture can use again: what stays
             resident is between the largest bucket and the sum
===========  ========================================================================================

The buckets are captured whenever CUDA is there, under ``enforce_eager`` too. A captured cache is a local variable of
the captured frame: no Python object is left, its blocks are reserved by the pool and allocated to nobody.

0.30 declares natively, without ``input_local_transformer``: it is called without ``use_cache=False``, and transformers
then builds a cache by default. Its lines stand; ours adds the two entries, the residency and the pool's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype


def install(hook: Hook) -> Undo:
    """Declare the caches of both local transformers."""
    return attach(hook, declare)


def declare(model: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """Caches of both local transformers: one entry per eager call, one per set of captured buckets."""
    return [*_local(model), *_input_local(model)]


def _local(model: Any) -> list[specs.ModelLocalKVSpec]:
    steps = model.group_size + max(model.delay_pattern)
    common: dict[str, Any] = {
        "physical_capacity_positions": steps,
        "capacity_source": f"group_size({model.group_size}) + max(delay_pattern)({max(model.delay_pattern)})",
        "dtype": parameter_dtype(model.local_transformer),
        # Built as DynamicCache() without a config: every layer is a full one, whatever layer_types says.
        "cache": "plain",
    }
    entries = [
        specs.spec_from_hf_config(
            model.local_config,
            name="local_transformer",
            scope=specs.ModelLocalKVScope.INVOCATION,
            rows=specs.RowDriver.MAX_NUM_SEQS,
            allocation_note="one cache as wide as the call's requests; a call that replays a captured bucket has none",
            residency=specs.Residency.LATER,
            **common,
        )
    ]
    return [
        *entries,
        *_graph_pool("local_transformer", model.local_config, model.local_forward_cg_by_bs, common),
    ]


def _input_local(model: Any) -> list[specs.ModelLocalKVSpec]:
    transformer = model.input_local_transformer
    if getattr(transformer.config, "use_cache", True) is False:
        specs.inert("input_local_transformer", "config.use_cache is off")
        return []
    common: dict[str, Any] = {
        "physical_capacity_positions": model.group_size,
        "capacity_source": f"group_size({model.group_size})",
        "dtype": parameter_dtype(transformer),
    }
    groups = getattr(getattr(specs.engine_config(), "scheduler_config", None), "max_num_batched_tokens", None)
    if groups is None:
        rows: dict[str, Any] = {"rows": specs.RowDriver.MAX_NUM_SEQS}
        note = "one row per request in decode; prefill has one per audio group, whose number is not visible here"
    else:
        rows = {
            "rows": specs.RowDriver.FIXED,
            "rows_fixed": int(groups),
            "rows_reason": f"one per position of an encoded prompt: at most max_num_batched_tokens={int(groups)}",
        }
        note = "built by transformers because use_cache defaults to on; profiling encodes a short clip only"
    entries = [
        specs.spec_from_hf_config(
            model.input_local_config,
            name="input_local_transformer",
            scope=specs.ModelLocalKVScope.INVOCATION,
            allocation_note=note,
            residency=specs.Residency.LATER,
            longest_update=model.group_size,
            **rows,
            **common,
        )
    ]
    captured = model.input_local_transformer_cg_by_bs
    return [
        *entries,
        *_graph_pool("input_local_transformer", model.input_local_config, captured, common),
    ]


def _graph_pool(
    name: str, config: Any, captured: dict[int, Any], common: dict[str, Any]
) -> list[specs.ModelLocalKVSpec]:
    """The captured buckets. Their rows come from the captures that worked, not from the list of sizes."""
    if not captured:
        return []
    sizes = sorted(captured)
    shared, pool = _pool(next(iter(captured.values())))
    return [
        specs.spec_from_hf_config(
            config,
            name=f"{name}_graph_pool",
            scope=specs.ModelLocalKVScope.MODEL,
            rows=specs.RowDriver.FIXED,
            rows_fixed=sum(sizes),
            rows_reason=f"sum of captured buckets {sizes}",
            allocation_note=f"{pool}; captured under enforce_eager too"
            + (f"; resident between {sizes[-1]} and {sum(sizes)} rows" if shared else ""),
            residency=specs.Residency.GRAPH_POOL,
            **common,
        )
    ]


def _pool(capture: Any) -> tuple[bool, str]:
    """Whether the buckets share a graph pool, read from the code that captures them, and that in words."""
    names = getattr(getattr(type(capture).capture, "__code__", None), "co_names", ())
    if "get_global_graph_pool" in names:
        return True, "the buckets share one graph pool, whose blocks later captures use again"
    if "pool" in names:  # buffer.pool: a handle that every bucket's buffer makes for itself
        return False, "each bucket has a graph pool of its own"
    return True, "whether the buckets share a graph pool is not known"
