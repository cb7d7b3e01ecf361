# SPDX-License-Identifier: Apache-2.0
"""MiMo-Audio, MiniCPM-o, ming-flash-omni: declared bytes equal the bytes of the real caches.

Needs vLLM-Omni beside its vLLM: ``scripts/check_families.py`` makes the environments and runs this file in each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip(
        "vLLM-Omni is not installed; scripts/check_families.py makes an environment for it", allow_module_level=True
    )
torch = pytest.importorskip("torch")

from support import omni_caches as omni
from support.omni_caches import (
    TABLE,
    KiB,
    MiB,
    before,
    cache_tensors,
    declared,
    entry,
    since,
    storage_bytes,
    view_bytes,
)

RELEASE = omni.omni_release()


# --- MiMo-Audio ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mimo() -> Iterator[Any]:
    if RELEASE < (0, 16):
        pytest.skip(f"vLLM-Omni {RELEASE} has no MiMo-Audio")
    with omni.installed(omni.MODELS + omni.MIMO):
        yield omni.mimo_model()


@pytest.mark.parametrize("rows", [1, 4])
def test_mimo_calls_hold_what_is_declared(mimo: Any, rows: int) -> None:
    found = declared(mimo, max_num_seqs=rows)
    decode, encode = omni.mimo_caches(mimo, rows)
    for name, cache, row in (
        ("local_transformer", decode, 704 * KiB),
        ("input_local_transformer", encode, 96 * KiB),
    ):
        one = entry(found, name)
        held = list(cache_tensors([cache]))
        assert one.bytes_per_row == row
        assert view_bytes(held) == storage_bytes(held) == one.declared_peak == one.storage_peak == rows * row
        TABLE.add("mimo_audio", f"{name}, {rows} rows", one.declared_peak, storage_bytes(held))


@pytest.fixture(scope="module")
def mimo_buckets(mimo: Any) -> tuple[list[Any], dict[str, int]]:
    """What the collector reads with every bucket captured, and the bytes of one cache per bucket, run here."""
    sizes = omni.module(omni.MIMO).MIMO_CUDAGRAPH_BATCH_SIZES
    held = [omni.mimo_caches(mimo, rows) for rows in sizes]
    omni.mimo_captured(mimo)
    entries = declared(mimo, max_num_seqs=8).entries
    mimo.local_forward_cg_by_bs.clear()
    mimo.input_local_transformer_cg_by_bs.clear()
    measured = {
        "local_transformer_graph_pool": storage_bytes(cache_tensors(decode for decode, _ in held)),
        "input_local_transformer_graph_pool": storage_bytes(cache_tensors(encode for _, encode in held)),
        # The bucket of 8 rows is what eight sequences make in one eager call.
        "local_transformer": storage_bytes(cache_tensors([held[sizes.index(8)][0]])),
    }
    return entries, measured


def test_mimo_buckets_hold_what_is_declared(mimo_buckets: Any) -> None:
    entries, measured = mimo_buckets
    for name, mebibytes in (
        ("local_transformer_graph_pool", 179.4375),
        ("input_local_transformer_graph_pool", 24.46875),
    ):
        (pool,) = [e for e in entries if e.name == name]
        assert pool.rows == 261
        assert measured[name] == pool.declared_peak == mebibytes * MiB
        assert pool.residency == "graph_pool"
        if RELEASE < (0, 20):
            assert "a graph pool of its own" in pool.note
        else:
            assert "share one graph pool" in pool.note and "between 128 and 261 rows" in pool.note
        TABLE.add("mimo_audio", f"{name}, all buckets", pool.declared_peak, measured[name], "one cache per bucket")


def test_mimo_prefill_rows_come_from_the_batched_tokens(mimo: Any) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))
    assert entry(declared(mimo, config), "input_local_transformer").rows == 2048
    assert "not visible here" in entry(declared(mimo), "input_local_transformer").note


# --- MiniCPM-o ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minicpm() -> Iterator[Any]:
    if RELEASE < (0, 22):
        pytest.skip(f"vLLM-Omni {RELEASE} has no MiniCPM-o 4.5")
    encoder = omni.minicpm_encoder()
    with omni.installed(omni.MODELS + omni.MINICPM):
        yield encoder


@pytest.fixture(scope="module")
def minicpm_session(minicpm: Any) -> int:
    """Bytes of a session's cache after it has heard all 1500 positions."""
    cache = omni.minicpm_stream(minicpm, 30)
    assert not cache.cross_attention_cache.layers
    held = list(cache_tensors([cache.self_attention_cache]))
    assert view_bytes(held) == storage_bytes(held)
    return storage_bytes(held)


@since(0, 28)
def test_minicpm_session_holds_what_is_declared(minicpm: Any, minicpm_session: int) -> None:
    config = omni.duplex_config(session_mode="duplex", duplex_max_sessions=4)
    session = entry(declared(minicpm, config, 64), "whisper_encoder_self_attn")
    assert minicpm_session == session.bytes_per_row == session.storage_per_row == 140.625 * MiB
    assert (session.rows, session.declared_peak) == (4, 562.5 * MiB)
    TABLE.add("minicpm_o", "one duplex session, 1500 positions", session.bytes_per_row, minicpm_session)


@since(0, 28)
def test_minicpm_turn_mode_declares_nothing(minicpm: Any) -> None:
    found = declared(minicpm, omni.duplex_config(session_mode="turn", duplex_max_sessions=1), 64)
    assert found.entries == []
    assert "'turn'" in found.inert[0].reason


@since(0, 28)
def test_minicpm_unseen_mode_is_said_not_guessed(minicpm: Any) -> None:
    session = entry(declared(minicpm, None, 64), "whisper_encoder_self_attn")
    assert session.rows == 1
    assert "not visible" in session.rows_reason and "duplex mode only" in session.note


@before(0, 28)
def test_minicpm_old_encoder_keeps_nothing(minicpm: Any) -> None:
    found = declared(minicpm, omni.duplex_config(session_mode="duplex", duplex_max_sessions=4), 64)
    assert found.entries == []
    expected = "no streaming audio path" if RELEASE < (0, 26) else "lost after every chunk"
    assert expected in found.inert[0].reason
    if RELEASE >= (0, 26):
        cache = omni.minicpm_stream(minicpm, 2)
        tensors = [] if cache is None else list(cache_tensors([cache.self_attention_cache]))
        assert storage_bytes(tensors) == 0
    TABLE.add("minicpm_o", f"inert: {found.inert[0].reason}", 0, 0)


# --- ming-flash-omni ----------------------------------------------------------------------------------------------


@pytest.fixture
def ming() -> Iterator[Any]:
    if RELEASE < (0, 20):
        pytest.skip(f"vLLM-Omni {RELEASE} has no ming-flash-omni")
    modules = ("ming_flash_omni.talker_module", "ming_flash_omni.ming_flash_omni_talker")
    with omni.installed(*(omni.MODELS + name for name in modules)):
        yield omni.ming_generator()


def _ming_bytes(ming: Any) -> int:
    """Bytes of the static cache after the prefill's first write."""
    cache, _ = ming._init_kv_cache(True, torch.device("cpu"), torch.bfloat16)
    assert storage_bytes(cache_tensors([cache])) == 0
    with torch.no_grad():
        ming._model(inputs_embeds=torch.zeros(1, 5, 896, dtype=torch.bfloat16), past_key_values=cache, use_cache=True)
    return storage_bytes(cache_tensors([cache]))


def test_ming_static_cache_holds_what_is_declared(ming: Any) -> None:
    one = entry(declared(ming, max_num_seqs=64), "talker_llm_static_cache")
    measured = _ming_bytes(ming)
    assert (one.rows, one.declared_peak, one.storage_peak) == (1, 24 * MiB, 24 * MiB)
    assert measured == one.declared_peak
    TABLE.add("ming_talker", "static cache after the prefill", one.declared_peak, measured)


def test_ming_talker_answers_for_its_generator(ming: Any) -> None:
    talker_class = omni.module("ming_flash_omni.ming_flash_omni_talker").MingFlashOmniTalkerForConditionalGeneration
    talker = talker_class.__new__(talker_class)
    torch.nn.Module.__init__(talker)
    talker.audio_generator = ming
    parent = torch.nn.Module()
    parent.talker = talker
    found = declared(parent, max_num_seqs=64)
    assert [(e.owner, e.declared_peak) for e in found.entries] == [("talker", 24 * MiB)]
    talker.audio_generator = None
    assert declared(parent).entries == []


# --- the sum of the four ------------------------------------------------------------------------------------------


@since(0, 28)
def test_four_families_add_up(mimo_buckets: Any, minicpm: Any, minicpm_session: int, ming: Any) -> None:
    """261 fixed and 8 per-sequence rows of 704 KiB, one session, one talker: 349.5625 MiB."""
    entries, measured = mimo_buckets
    found = [e for e in entries if not e.name.startswith("input_")]
    found += declared(minicpm, omni.duplex_config(session_mode="duplex", duplex_max_sessions=1), 8).entries
    found += declared(ming, max_num_seqs=8).entries
    peaks = {e.name: e.declared_peak for e in found}
    held = {name: size for name, size in measured.items() if not name.startswith("input_")}
    held |= {"whisper_encoder_self_attn": minicpm_session, "talker_llm_static_cache": _ming_bytes(ming)}
    assert peaks == held
    assert sum(held.values()) == 349.5625 * MiB
    assert all(e.rows_reason for e in found if e.row_driver == "fixed")
    TABLE.add("all four", "8 sequences and one session", sum(peaks.values()), sum(held.values()))
