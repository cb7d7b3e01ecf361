# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS: declared bytes equal the bytes of the real caches, on a stage that loads itself.

Needs vLLM-Omni beside its vLLM: ``scripts/check_families.py`` makes the environments and runs this file in each.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import omni_caches as omni
from support.omni_caches import TABLE, MiB, before, cache_tensors, declared, entry, since, storage_bytes, view_bytes

RELEASE = omni.omni_release()


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture
def qwen3(qwen3_folder: Path) -> Iterator[tuple[Any, SimpleNamespace]]:
    """The loaded stage and its config, with our declaration installed."""
    config = omni.qwen3_config(qwen3_folder)
    stage = omni.qwen3_stage(config)
    with omni.installed(omni.MODELS + omni.QWEN3):
        yield stage, config


def _codes(stage: Any, rows: int, frames: int) -> Any:
    return torch.randint(0, 16, (rows, stage._num_quantizers, frames))


def _decode(stage: Any, requests: list[dict[str, Any]], frames: int) -> None:
    """One served call of the stage's decoder, as ``Qwen3TTSCode2Wav.forward`` makes it."""
    rows = len(requests)
    with torch.no_grad():
        stage.decoder.batched_chunked_decode(
            _codes(stage, rows, frames), [frames] * rows, caches=requests, max_batch_size=stage._decode_batch_max_size
        )


def _peak(decoder: Any) -> list[int]:
    """Records the largest storage of all live caches, looked at whenever the transformer returns."""
    from transformers.cache_utils import DynamicCache

    peak = [0]

    def look(*_: Any) -> None:
        alive = [o for o in gc.get_objects() if type(o) is DynamicCache]
        peak[0] = max(peak[0], storage_bytes(cache_tensors(alive)))

    decoder.pre_transformer.register_forward_hook(look)
    return peak


@contextlib.contextmanager
def caches_made() -> Iterator[list[str]]:
    """Class names of the transformers caches that are constructed meanwhile."""
    from transformers.cache_utils import Cache

    made: list[str] = []
    construct = Cache.__init__

    def counted(cache: Any, *args: Any, **kwargs: Any) -> None:
        made.append(type(cache).__name__)
        construct(cache, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "__init__", counted)
        yield made


@since(0, 28)
@pytest.mark.parametrize("rows", [1, 4])
def test_qwen3_eager_decode_holds_what_is_declared(qwen3: Any, rows: int) -> None:
    stage, config = qwen3
    config.scheduler_config.max_num_seqs = rows
    expected = torch.float32 if RELEASE == (0, 28) else torch.bfloat16
    assert next(stage.decoder.parameters()).dtype is expected

    found = declared(stage, config, max_num_seqs=rows)
    kept = entry(found, "codec_decoder_request")
    working, joined = entry(found, "codec_decoder_working_copy"), entry(found, "codec_decoder_batch_copy")
    assert {e.owner for e in found.entries} == {"decoder"}

    requests = [{"prefix_frames": 72} for _ in range(rows)]
    peak = _peak(stage.decoder)
    _decode(stage, requests, 73)
    for _ in range(5):
        _decode(stage, requests, 25)
    held = list(cache_tensors(request["past_key_values"] for request in requests))
    assert view_bytes(held) == kept.declared_peak == rows * 71 * 8 * 16 * 64 * 2 * expected.itemsize
    assert storage_bytes(held) <= kept.storage_peak
    assert peak[0] - storage_bytes(held) == working.storage_peak + joined.storage_peak
    TABLE.add("qwen3_tts", f"kept per request, {rows} requests", kept.declared_peak, view_bytes(held))
    TABLE.add(
        "qwen3_tts",
        f"storage of one eager call beside the kept caches, {rows} requests",
        working.storage_peak + joined.storage_peak,
        peak[0] - storage_bytes(held),
    )


@since(0, 28)
def test_qwen3_published_row_and_256_rows(qwen3: Any) -> None:
    stage, config = qwen3
    config.scheduler_config.max_num_seqs = 256
    kept = entry(declared(stage, config, 256), "codec_decoder_request")
    row = {torch.float32: 4.4375, torch.bfloat16: 2.21875}[next(stage.decoder.parameters()).dtype]
    assert kept.bytes_per_row == row * MiB
    assert kept.declared_peak == 256 * row * MiB
    stage.decoder.float()
    kept = entry(declared(stage, config, 256), "codec_decoder_request")
    assert (kept.bytes_per_row, kept.declared_peak) == (4.4375 * MiB, 1136 * MiB)


@since(0, 28)
@pytest.mark.parametrize("frames", [72, 125, 250])
def test_qwen3_view_pins_the_whole_reference(qwen3: Any, frames: int) -> None:
    stage, config = qwen3
    config.model_config.stage_connector_config["extra"]["ref_code_context_frames"] = frames
    kept = entry(declared(stage, config), "codec_decoder_request")
    request: dict[str, Any] = {"prefix_frames": frames}
    with torch.no_grad():
        stage.decoder(_codes(stage, 1, frames + 3), request)
    held = list(cache_tensors([request["past_key_values"]]))
    assert view_bytes(held) == kept.bytes_per_row
    assert storage_bytes(held) == kept.storage_per_row
    TABLE.add(
        "qwen3_tts", f"storage per request, reference of {frames} frames", kept.storage_per_row, storage_bytes(held)
    )


@since(0, 28)
def test_qwen3_reference_that_is_not_cut_has_no_known_storage(qwen3: Any) -> None:
    stage, config = qwen3
    config.model_config.stage_connector_config["extra"]["codec_left_context_frames"] = 0
    assert entry(declared(stage, config), "codec_decoder_request").storage_per_row is None


@since(0, 28)
def test_qwen3_request_without_reference_keeps_nothing(qwen3: Any) -> None:
    stage, config = qwen3
    kept = entry(declared(stage, config), "codec_decoder_request")
    request: dict[str, Any] = {"prefix_frames": 0}
    _decode(stage, [request], 1)
    _decode(stage, [request], 25)
    assert storage_bytes(cache_tensors([request["past_key_values"]])) == 0
    assert "without reference audio keeps 0 bytes" in kept.note
    TABLE.add("qwen3_tts", "request without reference audio", kept.declared_peak, 0, "over-declared: observed 0")


@since(0, 28)
def test_qwen3_reference_within_the_window_pins_no_more(qwen3: Any) -> None:
    stage, config = qwen3
    config.model_config.stage_connector_config["extra"]["codec_left_context_frames"] = 30
    kept = entry(declared(stage, config), "codec_decoder_request")
    assert kept.storage_per_row == kept.bytes_per_row


@since(0, 28)
def test_qwen3_reads_a_connector_that_is_an_object(qwen3: Any) -> None:
    stage, config = qwen3
    config.scheduler_config.max_num_seqs = 64
    config.model_config.stage_connector_config = SimpleNamespace(extra={"decode_batch_max_size": 2})
    assert entry(declared(stage, config, 64), "codec_decoder_working_copy").rows == 2


@since(0, 28)
@pytest.mark.parametrize(("retains", "said"), [(False, True), (True, False), (None, False)])
def test_qwen3_says_when_waiting_requests_are_not_counted(qwen3: Any, retains: bool | None, said: bool) -> None:
    stage, config = qwen3
    if retains is not None:
        config.model_config.retains_state_across_chunks = retains
    assert ("do not count as running" in entry(declared(stage, config), "codec_decoder_request").note) is said


@since(0, 28)
@pytest.mark.parametrize("window", [None, 0, 1])
def test_qwen3_without_a_window_declares_nothing(qwen3: Any, window: int | None) -> None:
    stage, config = qwen3
    stage.decoder.config.sliding_window = window
    found = declared(stage, config)
    assert found.entries == [] and f"sliding_window={window}" in found.inert[0].reason


@since(0, 28)
@pytest.mark.parametrize(("limit", "sequences", "rows"), [(4, 64, 4), (4, 2, 2), (0, 64, 64), (None, 64, 64)])
def test_qwen3_working_copies_are_as_wide_as_one_call(qwen3: Any, limit: Any, sequences: int, rows: int) -> None:
    stage, config = qwen3
    config.scheduler_config.max_num_seqs = sequences
    if limit is not None:
        config.model_config.stage_connector_config["extra"]["decode_batch_max_size"] = limit
    found = declared(stage, config, sequences)
    assert entry(found, "codec_decoder_working_copy").rows == rows
    assert entry(found, "codec_decoder_batch_copy").rows == rows
    assert entry(found, "codec_decoder_request").rows == sequences


@since(0, 28)
def test_qwen3_stateless_declares_and_makes_nothing(qwen3_folder: Path) -> None:
    config = omni.qwen3_config(qwen3_folder)
    config.model_config.async_chunk = False
    stage = omni.qwen3_stage(config)
    with omni.installed(omni.MODELS + omni.QWEN3):
        found = declared(stage, config, 256)
    assert found.entries == []
    assert [(i.name, i.owner) for i in found.inert] == [("codec_decoder", "decoder")]
    with caches_made() as made, torch.no_grad():
        stage.decoder.batched_chunked_decode(_codes(stage, 2, 90), [90, 40])
    assert made == []
    TABLE.add("qwen3_tts", "stateless", 0, 0)


@since(0, 28)
def test_qwen3_unseen_setting_is_said_not_guessed(qwen3: Any) -> None:
    stage, _ = qwen3
    kept = entry(declared(stage), "codec_decoder_request")
    assert "model_config.async_chunk is not visible" in kept.note
    assert kept.storage_per_row is None


@pytest.fixture
def captured(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stage with a graph wrapper whose captures ran here: the code under capture is real, the recording is not."""
    stage, config = qwen3
    segmented = omni.module("qwen3_tts.segmented_graph_wrapper")
    monkeypatch.setattr(segmented, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(segmented, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))

    def capture(sizes: list[int]) -> Any:
        decoder = stage.decoder
        wrapper = segmented.CUDAGraphDecoderWrapper(
            decoder, capture_batch_sizes=sizes, num_quantizers=stage._num_quantizers
        )
        device, dtype = torch.device("cpu"), next(decoder.parameters()).dtype
        for rows in sizes:
            wrapper._capture_icl_prefix(rows, device, torch.long)
            wrapper._capture_xvec_prefix(rows, device, torch.long)
            for frames in wrapper.icl_capture_sizes:
                caches = wrapper._make_dummy_icl_cache(rows, device, dtype)
                wrapper._capture_combined_suffix("icl", rows, frames, caches, device, torch.long)
            for frames in wrapper._xvec_previous_frames_by_target:
                caches = wrapper._make_dummy_xvec_cache(rows, device, dtype)
                wrapper._capture_combined_suffix("xvec", rows, frames, caches, device, torch.long)
        decoder._cudagraph_wrapper = wrapper
        return wrapper

    return stage, config, capture


@since(0, 28)
@pytest.mark.parametrize(("sizes", "rows"), [([1], 5), ([1, 2, 4], 35)])
def test_qwen3_captures_hold_what_is_declared(captured: Any, sizes: list[int], rows: int) -> None:
    stage, config, capture = captured
    eager = declared(stage, config, 64)
    wrapper = capture(sizes)
    found = declared(stage, config, 64)
    pool = entry(found, "codec_decoder_graph_pool")
    states = (wrapper.combined_states, wrapper.icl_prefix_states, wrapper.xvec_prefix_states)
    held = list(cache_tensors(s["cache"]["past_key_values"] for group in states for s in group.values()))
    assert pool.rows == rows
    assert view_bytes(held) == pool.declared_peak
    assert storage_bytes(held) == pool.storage_peak
    assert pool.residency == "at_load"
    # Graphs add the pool; they do not make the kept caches go away.
    assert entry(found, "codec_decoder_request") == entry(eager, "codec_decoder_request")
    assert entry(found, "codec_decoder_working_copy").rows == 1
    TABLE.add("qwen3_tts", f"graph pool, batch sizes {sizes}", pool.declared_peak, view_bytes(held))
    TABLE.add("qwen3_tts", f"graph pool storage, batch sizes {sizes}", pool.storage_peak, storage_bytes(held))


@since(0, 28)
def test_qwen3_wrapper_decides_only_where_the_setting_is_not_visible(captured: Any) -> None:
    stage, config, capture = captured
    wrapper = capture([1])
    wrapper.async_chunk = False
    assert declared(stage, config).entries, "model_config.async_chunk is on"
    found = declared(stage)
    assert found.entries == [] and "graph wrapper" in found.inert[0].reason
    wrapper.async_chunk = True
    assert {"codec_decoder_request", "codec_decoder_working_copy"} <= {e.name for e in declared(stage).entries}


@since(0, 30)
def test_qwen3_native_declaration_stands_and_ours_corrects_it(qwen3: Any) -> None:
    stage, config = qwen3
    # Upstream ties its declaration to the graph wrapper, which enforce_eager does not make.
    assert stage.decoder.model_local_kv_specs() == []
    corrected = declared(stage, config, 64)
    assert all(e.corrected and not e.native for e in corrected.entries)
    assert len(corrected.entries) == 3


@before(0, 28)
def test_qwen3_old_decoder_is_inert() -> None:
    qwen3 = omni.module(omni.QWEN3)
    configuration = omni.module("qwen3_tts.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    config = configuration.Qwen3TTSTokenizerV2Config(decoder_config=omni.QWEN3_WIDTHS).decoder_config
    decoder = qwen3.Qwen3TTSTokenizerV2Decoder._from_config(config).eval()
    with omni.installed(omni.MODELS + omni.QWEN3):
        found = declared(decoder, SimpleNamespace(model_config=SimpleNamespace(async_chunk=True)), 256)
    assert found.entries == []
    assert "stateless" in found.inert[0].reason
    with caches_made() as made, torch.no_grad():
        decoder.chunked_decode(torch.randint(0, 16, (1, 4, 90)))
    assert made == []
    TABLE.add("qwen3_tts", "inert: a decode makes no cache", 0, 0)
