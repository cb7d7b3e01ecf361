# SPDX-License-Identifier: Apache-2.0
"""Declared bytes equal the bytes of the real buffers: rings and preallocated buffers of an installed vLLM-Omni.

Needs vLLM-Omni beside its vLLM: ``scripts/check_families.py`` makes the environments and runs this file in each.
"""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import omni_caches as omni
from support.omni_caches import TABLE, KiB, MiB, declared, entry, storage_bytes

RELEASE = omni.omni_release()


def present(name: str) -> Any:
    """The module, or a skip: not every release has every model."""
    if importlib.util.find_spec(omni.MODELS + name.partition(".")[0]) is None:
        pytest.skip(f"vLLM-Omni {RELEASE} has no {name}")
    if importlib.util.find_spec(omni.MODELS + name) is None:
        pytest.skip(f"vLLM-Omni {RELEASE} has no {name}")
    return omni.module(name)


def moss_codec(name: str, device: str) -> Any:
    """The codec: the first one as published, the second one with a decoder of two stages."""
    codec = present(f"moss_tts.{name}")
    model = codec.MossAudioTokenizerModel
    if name == "audio_tokenizer":
        config = model.config_class()
    else:
        stage = {
            "module_type": "Transformer",
            "dim_feedforward": 32,
            "causal": True,
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "max_period": 10000,
            "gating": "none",
            "layer_scale": 0.01,
            "conv_layout": True,
        }
        wide = {
            **stage,
            "input_dimension": 64,
            "output_dimension": 128,
            "d_model": 128,
            "num_heads": 2,
            "num_layers": 3,
        }
        narrow = {
            **stage,
            "input_dimension": 64,
            "output_dimension": 960,
            "d_model": 64,
            "num_heads": 1,
            "num_layers": 2,
        }
        patches = {"module_type": "PatchedPretransform"}
        down = [{**patches, "patch_size": 960}, {**narrow, "input_dimension": 960, "output_dimension": 32}]
        down += [{**patches, "patch_size": 2}, {**wide, "output_dimension": 64}]
        config = model.config_class(
            sampling_rate=48000,
            downsample_rate=960,
            encoder_kwargs=down,
            decoder_kwargs=[wide, {**patches, "patch_size": 2}, narrow, {**patches, "patch_size": 960}],
            quantizer_kwargs={
                "input_dim": 64, "rvq_dim": 32, "output_dim": 64, "num_quantizers": 2,
                "codebook_size": 16, "codebook_dim": 8,
            },
        )  # fmt: skip
    with torch.device(device):
        return model(config).eval()


def rings_of(codec: Any) -> list[Any]:
    states = [getattr(module, "_streaming_state", None) for module in codec.decoder.modules()]
    rings = [getattr(state, "kv_cache", None) for state in states]
    return [ring.cache for ring in rings if ring is not None]


def test_moss_first_codec_pool() -> None:
    codec = moss_codec("audio_tokenizer", "meta")
    with omni.installed(omni.MODELS + "moss_tts.audio_tokenizer"):
        streaming = SimpleNamespace(model_config=SimpleNamespace(async_chunk=True))
        if RELEASE < (0, 30):
            found = declared(codec, streaming, 4)
            assert found.entries == [] and "no streaming state" in found.inert[0].reason
            return
        stateless = SimpleNamespace(model_config=SimpleNamespace(async_chunk=False))
        assert declared(codec, stateless, 4).entries == []
        coming = declared(codec, streaming, 4).entries
        codec.initialize_decoder_state_pool(4, 1)
        made = declared(codec, streaming, 4).entries
        rings = rings_of(codec)
        assert sum(ring.nbytes for ring in rings) == sum(e.declared_peak for e in made)
        assert {e.rows for e in made} == {5} and {e.residency for e in made} == {"at_load"}
        # Published figure of the default config: 302.734375 MiB per slot, float32.
        assert sum(e.bytes_per_row for e in made) == 302.734375 * MiB
        assert [(e.name, e.bytes_per_row) for e in coming] == [(e.name, e.bytes_per_row) for e in made]
        assert {e.rows for e in coming} == {4} and {e.residency for e in coming} == {"later"}
        TABLE.add(
            "moss_tts", "first codec, 4 slots and 1 for padding",
            sum(e.declared_peak for e in made), sum(ring.nbytes for ring in rings), "shapes on the meta device",
        )  # fmt: skip


def test_moss_second_codec_pool() -> None:
    codec = moss_codec("audio_tokenizer_v2", "cpu")
    with omni.installed(omni.MODELS + "moss_tts.audio_tokenizer_v2"), contextlib.ExitStack() as streaming:
        coming = declared(codec, None, 3).entries
        assert {e.rows for e in coming} == {3}
        if RELEASE >= (0, 26):
            codec.initialize_decoder_state_pool(3, 1)
            rows = 4
        else:
            streaming.enter_context(codec.streaming(3))
            rows = 3
        made = declared(codec, None, 3).entries
        rings = rings_of(codec)
        assert len(rings) == 5 and len(made) == 2
        assert storage_bytes(rings) == sum(e.declared_peak for e in made)
        assert {e.rows for e in made} == {rows}
        assert [e.bytes_per_row for e in coming] == [e.bytes_per_row for e in made]
        TABLE.add("moss_tts", f"second codec, {rows} slots", sum(e.declared_peak for e in made), storage_bytes(rings))


def test_personaplex_ring() -> None:
    mimi = present("personaplex.personaplex_mimi")
    slots = torch.nn.ModuleList([mimi._MimiStreamingTransformer() for _ in range(4)])
    with omni.installed(omni.MODELS + "personaplex.personaplex_mimi"):
        coming = declared(slots)
        for slot in slots:
            slot.streaming_init(1)
        made = declared(slots)
    rings = [ring.cache for slot in slots for ring in slot._kv]
    # Two slots of an encoder and a decoder each: 7.8125 MiB per transformer, float32.
    assert [e.declared_peak for e in coming.entries] == [e.declared_peak for e in made.entries] == [7.8125 * MiB] * 4
    assert storage_bytes(rings) == sum(e.declared_peak for e in made.entries)
    assert {e.residency for e in coming.entries} == {"later"} and {e.residency for e in made.entries} == {"at_load"}
    TABLE.add("personaplex", "two codecs of one slot each", int(4 * 7.8125 * MiB), storage_bytes(rings))


@pytest.mark.parametrize(
    ("name", "owner", "configuration", "row"),
    [
        ("fish_speech.fish_speech_fast_ar", "FishSpeechFastAR", "FishSpeechFastARConfig", 176 * KiB),
        ("audio8_tts.audio8_tts_fast_ar", "Audio8TTSFastAR", "Audio8TTSFastARConfig", 22 * KiB),
    ],
)
def test_fast_ar_buffers(name: str, owner: str, configuration: str, row: int) -> None:
    home = present(name)
    model = getattr(home, owner).__new__(getattr(home, owner))
    torch.nn.Module.__init__(model)
    model.config = getattr(home, configuration)()
    model._num_codebooks, model._fast_dim = int(model.config.num_codebooks), int(model.config.hidden_size)
    model._embed_buf = model._pos_ids = None
    model.fast_norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
    if RELEASE >= (0, 22):
        model._k_cache = model._v_cache = None
    with omni.installed(omni.MODELS + name):
        coming = declared(model, max_num_seqs=6)
        if RELEASE < (0, 22):
            assert coming.entries == [] and "between the codebooks" in coming.inert[0].reason
            return
        model._ensure_buffers(6, torch.device("cpu"), torch.bfloat16)
        made = declared(model, max_num_seqs=6)
    buffers = [model._k_cache, model._v_cache]
    assert entry(coming, "fast_ar_buffers").declared_peak == storage_bytes(buffers) == 6 * row
    assert entry(made, "fast_ar_buffers").declared_peak == 6 * row
    TABLE.add("fast_ar", f"{owner}, 6 rows", 6 * row, storage_bytes(buffers))


class Tts:
    """What a captured step reads of the checkpoint's model, around a real backbone with sliding and full layers."""

    def __init__(self, backbone: Any) -> None:
        self.tts_model = SimpleNamespace(
            backbone=backbone, hidden_size=64, config=SimpleNamespace(num_quantizers=2), embed_subword=None
        )

    def _get_generation_config(self, guidance: bool) -> dict[str, Any]:
        return {"guidance": guidance}


def nemotron_talker(**settings: Any) -> Any:
    talker_class = present(
        "nemotron_voicechat.nemotron_voicechat_talker"
    ).NemotronVoiceChatTalkerForConditionalGeneration
    from transformers import Gemma3TextConfig, Gemma3TextModel

    config = Gemma3TextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=6,
        intermediate_size=32, vocab_size=64, sliding_window=600,
    )  # fmt: skip
    talker = talker_class.__new__(talker_class)
    torch.nn.Module.__init__(talker)
    talker.tts = Tts(Gemma3TextModel(config).to(torch.bfloat16).eval())
    talker._dtype, talker._graph_max_cache_len = torch.bfloat16, 4096
    vars(talker).update({"_step_graph": None, "_native_guidance": False, **settings})
    return talker


def filled(graph: Any, sizes: Any, rows: int) -> int:
    """Bytes of the caches that the captured step makes for these buckets, after one write each."""
    caches = [graph._get_bucket(size)["cache"] for size in sizes]
    for cache in caches:
        with torch.no_grad():
            graph.model.backbone(
                inputs_embeds=torch.zeros(rows, 3, 64, dtype=torch.bfloat16), past_key_values=cache, use_cache=True
            )
    return storage_bytes(omni.cache_tensors(caches))


@omni.since(0, 30)
@pytest.mark.parametrize(("guidance", "rows"), [(True, 2), (False, 1)])
def test_nemotron_step_graph_buckets(guidance: bool, rows: int) -> None:
    talker = nemotron_talker()
    step = omni.module("nemotron_voicechat.talker_graph").TalkerStepGraph(
        talker.tts, dtype=torch.bfloat16, device=torch.device("cpu"), max_cache_len=4096, guidance_enabled=guidance
    )
    vars(talker)["_step_graph"] = step
    with omni.installed(omni.MODELS + "nemotron_voicechat.nemotron_voicechat_talker"):
        found = declared(talker, max_num_seqs=1).entries
    assert [e.name for e in found] == [f"talker_step_{size}" for size in (512, 1024, 2048, 4096)]
    assert {e.rows for e in found} == {rows}
    measured = filled(step, (512, 1024, 2048, 4096), rows)
    assert sum(e.declared_peak for e in found) == sum(e.storage_peak for e in found) == measured
    TABLE.add("nemotron", f"step graph, every bucket, {rows} rows", sum(e.declared_peak for e in found), measured)


@omni.since(0, 30)
def test_nemotron_unconditional_stream_buckets() -> None:
    native = omni.module("nemotron_voicechat.talker_native")
    talker = nemotron_talker(_native_guidance=True, _graph_max_cache_len=2048)
    graph = native.UncondStepGraph(
        talker.tts.tts_model, hidden_size=64, dtype=torch.bfloat16, device=torch.device("cpu"), max_cache_len=2048
    )
    with omni.installed(omni.MODELS + "nemotron_voicechat.nemotron_voicechat_talker"):
        found = declared(talker, max_num_seqs=4).entries
    assert [e.positions for e in found] == [512, 1024, 2048]
    measured = filled(graph, (512, 1024, 2048), 1)
    assert sum(e.declared_peak for e in found) == measured
    TABLE.add("nemotron", "unconditional stream, every bucket", sum(e.declared_peak for e in found), measured)


@omni.since(0, 28)
def test_nemotron_eager_sessions_are_not_declared() -> None:
    talker = nemotron_talker()
    with omni.installed(omni.MODELS + "nemotron_voicechat.nemotron_voicechat_talker"):
        assert declared(talker, max_num_seqs=4).entries == []
