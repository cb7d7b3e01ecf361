# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS (and BreezeTTS): the codec decoder that turns codes into a waveform, stage 1.

Owner: ``Qwen3TTSTokenizerV2Decoder``, held as ``Qwen3TTSCode2Wav.decoder``. Geometry from ``decoder.config``, dtype
from the decoder's parameters: vLLM-Omni 0.28 casts the decoder to float32, 0.30 to ``model_config.dtype``.

===========  ========================================================================================
vLLM-Omni    state
===========  ========================================================================================
0.14 - 0.26  inert: a decode never asks for a cache; captured graphs hold none
0.28, 0.30   active when ``model_config.async_chunk`` is set, with graphs and under ``enforce_eager`` alike
===========  ========================================================================================

Entries: the cache kept for a request between chunks; the working copy of one decode call; in eager mode the copy that
joins the requests of a call into one batch; the caches of captured graphs, which are Python objects kept by the graph
wrapper (one hop: ``decoder._cudagraph_wrapper``) and so allocated when the KV budget is made.

0.30 declares natively. Its lines stand, and differ from ours where they are wrong: nothing is declared under
``enforce_eager``, where the same caches exist; the working copy is as wide as ``max_num_seqs``, while it is as wide as
one decode call; the copy that joins a batch is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .. import specs
from .attach import attach, parameter_dtype

_NAME = "codec_decoder"


def install(hook: Hook) -> Undo:
    """Declare the codec decoder's caches."""
    return attach(hook, declare)


def declare(decoder: Any) -> Sequence[specs.ModelLocalKVSpec]:
    """Caches of the codec decoder; empty in stateless mode and where the release's decoder is stateless."""
    if not hasattr(decoder, "decode_suffix"):
        specs.inert(_NAME, "the decoder of this release is stateless: it never asks its transformer for a cache")
        return []
    window = getattr(decoder.config, "sliding_window", None)
    if not window or window < 2:
        specs.inert(_NAME, f"sliding_window={window!r}: the streaming decode needs a window")
        return []
    wrapper = decoder._cudagraph_wrapper
    active, how = _async_chunk(wrapper)
    if active is False:
        specs.inert(_NAME, f"{how} is off: stateless decoding asks for no cache")
        return []
    note = "" if active else f"{how}; held only when it is on"
    return [*_per_request(decoder, wrapper, window, note), *_graph_pool(decoder, wrapper, window)]


def _async_chunk(wrapper: Any) -> tuple[bool | None, str]:
    """Whether streaming is on (``None``: not visible), and where that was read."""
    engine = specs.engine_config()
    setting = getattr(getattr(engine, "model_config", None), "async_chunk", None)
    if setting is not None:
        return bool(setting), "model_config.async_chunk"
    if wrapper is not None:
        return bool(wrapper.async_chunk), "async_chunk of the graph wrapper"
    return None, "model_config.async_chunk is not visible from the decoder"


def _per_request(decoder: Any, wrapper: Any, window: int, unsure: str) -> list[specs.ModelLocalKVSpec]:
    """The kept cache and what one decode call adds to it."""
    chunk = int(getattr(decoder, "_incremental_chunk_frames", 25))
    # A call runs over what it kept of the suffix (at most a window) and over the new frames.
    longest = window + chunk
    common = {
        "physical_capacity_positions": window - 1,
        "capacity_source": f"sliding_window({window}) - 1",
        "dtype": parameter_dtype(decoder),
        "residency": specs.Residency.LATER,
    }
    prefix = _prefix_frames()
    kept = specs.spec_from_hf_config(
        decoder.config,
        name=f"{_NAME}_request",
        scope=specs.ModelLocalKVScope.REQUEST,
        rows=specs.RowDriver.MAX_NUM_SEQS,
        allocation_note=_note(
            "kept from chunk to chunk of a request with a reference; a request without reference audio keeps 0 bytes",
            _parked(),
            unsure,
        ),
        **common,
    )
    if prefix is not None:
        kept = replace(
            kept,
            storage_positions=max(window - 1, prefix),
            storage_reason=f"the window is a view of a reference of up to {prefix} frames",
        )
    working: dict[str, Any] = {"scope": specs.ModelLocalKVScope.INVOCATION, **common}
    if wrapper is not None:
        working.update(
            rows=specs.RowDriver.FIXED,
            rows_fixed=1,
            rows_reason="with graphs only a fallback decodes eagerly, one request at a time; replays use the captures",
        )
        note = "deep copy of the kept cache for one call"
    else:
        working.update(_call_rows())
        note = "deep copy of the joined batch for one call"
    entries = [
        kept,
        specs.spec_from_hf_config(
            decoder.config,
            name=f"{_NAME}_working_copy",
            longest_update=longest,
            allocation_note=_note(note, unsure),
            **working,
        ),
    ]
    if wrapper is None:
        joined = specs.spec_from_hf_config(
            decoder.config,
            name=f"{_NAME}_batch_copy",
            allocation_note=_note("kept caches of a call's requests, concatenated; lives beside both others", unsure),
            **working,
        )
        entries.append(replace(joined, storage_positions=window - 1, storage_reason="concatenated from the views"))
    return entries


def _graph_pool(decoder: Any, wrapper: Any, window: int) -> list[specs.ModelLocalKVSpec]:
    """Caches that captures keep for replay, counted from the live objects: a capture that failed left none."""
    if wrapper is None:
        return []
    rows, captures, empty = 0, 0, 0
    for states in (wrapper.combined_states, wrapper.icl_prefix_states, wrapper.xvec_prefix_states):
        for state in states.values():
            cache = (state.get("cache") or {}).get("past_key_values")
            keys = cache.layers[0].keys if cache is not None and cache.layers else None
            if keys is None or not keys.numel():
                empty += 1
                continue
            rows += int(keys.shape[0])
            captures += 1
    if not rows:
        return []
    pool = specs.spec_from_hf_config(
        decoder.config,
        name=f"{_NAME}_graph_pool",
        physical_capacity_positions=window - 1,
        capacity_source=f"sliding_window({window}) - 1",
        dtype=parameter_dtype(decoder),
        scope=specs.ModelLocalKVScope.MODEL,
        rows=specs.RowDriver.FIXED,
        rows_fixed=rows,
        rows_reason=f"batch rows of the {captures} captured caches that hold KV; {empty} more hold none",
        allocation_note="kept by reference for replay; captures without reference audio start from an empty cache",
        residency=specs.Residency.AT_LOAD,
    )
    # A capture's cache is filled by one update of a whole window, of which the layer keeps a view.
    return [replace(pool, storage_positions=window, storage_reason=f"the view pins the captured {window} frames")]


def _call_rows() -> dict[str, Any]:
    """Rows of one eager decode call: ``decode_batch_max_size`` of the connector where set, else every request."""
    engine = specs.engine_config()
    size = _connector().get("decode_batch_max_size")
    if not size:
        return {"rows": specs.RowDriver.MAX_NUM_SEQS}
    sequences = getattr(getattr(engine, "scheduler_config", None), "max_num_seqs", None)
    rows, why = int(size), f"decode_batch_max_size={int(size)}"
    if sequences is not None and int(sequences) < rows:
        rows, why = int(sequences), f"max_num_seqs={int(sequences)}, below {why}"
    return {"rows": specs.RowDriver.FIXED, "rows_fixed": rows, "rows_reason": why}


def _prefix_frames() -> int | None:
    """Most reference frames that reach the decoder; ``None`` when the connector does not cut them or is unknown."""
    connector = _connector()
    if not connector:
        return None
    # The default of 25 is the one of the stage input processor that cuts the reference.
    frames = int(connector.get("ref_code_context_frames") or connector.get("codec_left_context_frames", 25))
    return frames or None


def _connector() -> dict[str, Any]:
    """The stage connector's extra settings; empty when unknown."""
    config = getattr(getattr(specs.engine_config(), "model_config", None), "stage_connector_config", None)
    extra = config.get("extra", config) if isinstance(config, dict) else getattr(config, "extra", None)
    return extra if isinstance(extra, dict) else {}


def _parked() -> str:
    """The scheduler of 0.28 and 0.30 admits others while a request waits for its next chunk, unless told otherwise."""
    model_config = getattr(specs.engine_config(), "model_config", None)
    if getattr(model_config, "retains_state_across_chunks", None) is not False:
        return ""
    return (
        "requests that wait for a chunk keep theirs and do not count as running: the stage before bounds their number"
    )


def _note(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
