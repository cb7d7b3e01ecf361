# SPDX-License-Identifier: Apache-2.0
"""The settings that decide whether a family declares, and how wide. The bytes are proved on the real classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.model_local_kv.families import mimo_audio, minicpm_o, qwen3_tts
from vllm_omni_patch.patches.model_local_kv.specs import ModelLocalKVSpec, RowDriver, collecting


def ask(declare: Any, owner: Any, config: Any = None) -> tuple[list[ModelLocalKVSpec], list[tuple[str, str]]]:
    """What a declarer says while it is collected, and what it calls inert."""
    inert: list[tuple[str, str]] = []
    with collecting(config, inert):
        return list(declare(owner)), inert


class Parameters:
    def __init__(self, dtype: Any, **attributes: Any) -> None:
        self._dtype = dtype
        vars(self).update(attributes)

    def parameters(self) -> Any:
        return iter([SimpleNamespace(dtype=self._dtype)])


def decoder(dtype: Any = torch.float32, wrapper: Any = None, window: int | None = 72) -> Any:
    config = SimpleNamespace(
        num_hidden_layers=8, num_key_value_heads=16, head_dim=64, sliding_window=window, hidden_size=512
    )
    return Parameters(dtype, config=config, _cudagraph_wrapper=wrapper, decode_suffix=lambda: None)


def engine(async_chunk: bool = True, sequences: int = 64, **extra: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(async_chunk=async_chunk, stage_connector_config={"extra": extra}),
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
    )


def empty_wrapper(async_chunk: bool) -> Any:
    return SimpleNamespace(
        async_chunk=async_chunk, combined_states={}, icl_prefix_states={}, xvec_prefix_states={"x": {"cache": None}}
    )


@pytest.mark.parametrize("wrapper", [None, empty_wrapper(True), empty_wrapper(False)])
def test_qwen3_setting_decides_not_the_wrapper(wrapper: Any) -> None:
    specs, inert = ask(qwen3_tts.declare, decoder(wrapper=wrapper), engine(async_chunk=False))
    assert specs == [] and inert[0][0] == "codec_decoder"
    specs, inert = ask(qwen3_tts.declare, decoder(wrapper=wrapper), engine(async_chunk=True))
    assert specs[0].peak_bytes(256) == 1136 << 20 and inert == []


def test_qwen3_wrapper_decides_where_the_setting_is_not_visible() -> None:
    specs, inert = ask(qwen3_tts.declare, decoder(wrapper=empty_wrapper(False)))
    assert specs == [] and "graph wrapper" in inert[0][1]
    specs, _ = ask(qwen3_tts.declare, decoder(wrapper=empty_wrapper(True)))
    assert [s.name for s in specs] == ["codec_decoder_request", "codec_decoder_working_copy"]


@pytest.mark.parametrize("window", [None, 0, 1])
def test_qwen3_without_a_window_is_inert(window: int | None) -> None:
    specs, inert = ask(qwen3_tts.declare, decoder(window=window), engine())
    assert specs == [] and f"sliding_window={window}" in inert[0][1]


@pytest.mark.parametrize(
    ("extra", "storage"),
    [
        ({"codec_left_context_frames": 72}, 72),
        ({"codec_left_context_frames": 72, "ref_code_context_frames": 500}, 500),
        ({"codec_left_context_frames": 30}, 71),
        ({"codec_chunk_frames": 25}, 71),
        ({"codec_left_context_frames": 0}, None),
        ({}, None),
    ],
)
def test_qwen3_reference_bounds_the_storage(extra: dict[str, int], storage: int | None) -> None:
    specs, _ = ask(qwen3_tts.declare, decoder(), engine(**extra))
    assert specs[0].storage_positions == storage or (storage is None and specs[0].storage_bytes_per_row is None)


def test_qwen3_reads_a_connector_that_is_an_object() -> None:
    config = engine()
    config.model_config.stage_connector_config = SimpleNamespace(extra={"decode_batch_max_size": 2})
    specs, _ = ask(qwen3_tts.declare, decoder(), config)
    assert (specs[1].rows, specs[1].rows_fixed) == (RowDriver.FIXED, 2)


@pytest.mark.parametrize(("retains", "said"), [(False, True), (True, False), (None, False)])
def test_qwen3_says_when_waiting_requests_are_not_counted(retains: bool | None, said: bool) -> None:
    config = engine()
    if retains is not None:
        config.model_config.retains_state_across_chunks = retains
    specs, _ = ask(qwen3_tts.declare, decoder(), config)
    assert ("do not count as running" in str(specs[0].allocation_note)) is said


class Shared:
    def capture(self) -> None:
        current_platform.get_global_graph_pool()  # type: ignore[name-defined]  # noqa: F821


class Private:
    def capture(self, buffer: Any) -> None:
        torch.cuda.graph(None, buffer.pool)


class Other:
    def capture(self) -> None:
        pass


@pytest.mark.parametrize(
    ("capture", "shared", "text"),
    [(Shared(), True, "share one"), (Private(), False, "of its own"), (Other(), True, "not known")],
)
def test_mimo_reads_the_pool_from_the_capturing_code(capture: Any, shared: bool, text: str) -> None:
    found, words = mimo_audio._pool(capture)
    assert found is shared and text in words


def encoder(keyword: str, parameter: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(f"def forward(hidden_states, {parameter}=None, **kwargs): pass", namespace)
    layer = SimpleNamespace(self_attn=SimpleNamespace(forward=namespace["forward"]))
    if keyword:
        layer._past_key_values_kwarg = keyword
    return SimpleNamespace(
        layers=[layer] * 24,
        config=SimpleNamespace(encoder_attention_heads=16, d_model=1024),
        conv1=SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16)),
        embed_positions=SimpleNamespace(weight=torch.zeros(1500, 1)),
    )


def duplex(mode: str | None, sessions: int | None = None) -> Any:
    settings = {"session_mode": mode, "duplex_max_sessions": sessions}
    return SimpleNamespace(model_config=SimpleNamespace(**{k: v for k, v in settings.items() if v is not None}))


@pytest.mark.parametrize(
    ("keyword", "parameter", "kept"),
    [
        ("past_key_values", "past_key_values", True),  # 0.28 and later
        ("past_key_value", "past_key_value", True),  # 0.28 on an older transformers: the release picks the name
        ("", "past_key_values", False),  # 0.26
        ("", "past_key_value", True),  # 0.26 on transformers before 4.56
    ],
)
def test_minicpm_signature_decides(keyword: str, parameter: str, kept: bool) -> None:
    specs, inert = ask(minicpm_o.declare, encoder(keyword, parameter), duplex("duplex", 4))
    assert bool(specs) is kept and bool(inert) is not kept


@pytest.mark.parametrize(
    ("config", "rows"),
    [(duplex("duplex", 4), 4), (duplex("duplex"), 1), (duplex(None), 1), (None, 1), (duplex("turn"), 0)],
)
def test_minicpm_sessions(config: Any, rows: int) -> None:
    specs, _ = ask(minicpm_o.declare, encoder("past_key_values", "past_key_values"), config)
    assert sum(s.row_count(64) for s in specs) == rows
    assert sum(s.peak_bytes(64) for s in specs) == int(140.625 * 2**20) * rows
