# SPDX-License-Identifier: Apache-2.0
"""The protocol's arithmetic, against the published tables and against real transformers caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.model_local_kv.observe.measure import measure
from vllm_omni_patch.patches.model_local_kv.specs import (
    HasModelLocalKV,
    ModelLocalKVScope,
    ModelLocalKVSpec,
    RowDriver,
    spec_from_hf_config,
)

MIB = 1 << 20


def spec(**changes: Any) -> ModelLocalKVSpec:
    fields: dict[str, Any] = {
        "name": "cache",
        "layers": 16,
        "kv_heads": 64,
        "head_dim": 16,
        "dtype": torch.bfloat16,
        "physical_capacity_positions": 11,
        "capacity_source": "group_size + max(delay_pattern)",
        "scope": ModelLocalKVScope.REQUEST,
        "rows": RowDriver.MAX_NUM_SEQS,
    }
    return ModelLocalKVSpec(**{**fields, **changes})


def from_config(config: object, **changes: Any) -> ModelLocalKVSpec:
    fields: dict[str, Any] = {
        "name": "cache",
        "physical_capacity_positions": 4096,
        "capacity_source": "test",
        "scope": ModelLocalKVScope.REQUEST,
        "dtype": torch.bfloat16,
        "rows": RowDriver.MAX_NUM_SEQS,
    }
    return spec_from_hf_config(config, **{**fields, **changes})


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ((8, 16, 64, torch.float32, 71), 4.4375),
        ((8, 16, 64, torch.bfloat16, 71), 2.21875),
        ((16, 64, 16, torch.bfloat16, 11), 704 / 1024),
        ((24, 16, 64, torch.bfloat16, 1500), 140.625),
        ((24, 2, 64, torch.bfloat16, 2048), 24.0),
    ],
)
def test_bytes_per_row_of_the_published_table(geometry: tuple[Any, ...], expected: float) -> None:
    layers, heads, size, dtype, positions = geometry
    one = spec(layers=layers, kv_heads=heads, head_dim=size, dtype=dtype, physical_capacity_positions=positions)
    assert one.bytes_per_row == expected * MIB


def test_four_known_geometries_add_up() -> None:
    pool = spec(rows=RowDriver.FIXED, rows_fixed=261, rows_reason="sum of the captured buckets")
    requests = spec()
    encoder = spec(
        layers=24,
        kv_heads=16,
        head_dim=64,
        physical_capacity_positions=1500,
        scope=ModelLocalKVScope.SESSION,
        rows=RowDriver.FIXED,
        rows_reason="one session",
    )
    talker = spec(
        layers=24,
        kv_heads=2,
        head_dim=64,
        physical_capacity_positions=2048,
        rows=RowDriver.FIXED,
        rows_reason="calls are serialized",
    )
    peaks = [one.peak_bytes(8) / MIB for one in (pool, requests, encoder, talker)]
    assert peaks == [179.4375, 5.5, 140.625, 24.0]
    assert sum(peaks) == 349.5625


def test_rows_follow_the_engine_and_fixed_rows_do_not() -> None:
    decoder = spec(layers=8, kv_heads=16, head_dim=64, dtype=torch.float32, physical_capacity_positions=71)
    assert decoder.peak_bytes(256) == 1136 * MIB
    assert decoder.row_count(0) == 1
    assert spec(rows=RowDriver.FIXED, rows_fixed=3, rows_reason="three buffers").row_count(256) == 3


def test_a_fixed_count_needs_its_reason_and_numbers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rows_reason"):
        spec(rows=RowDriver.FIXED, rows_fixed=261)
    with pytest.raises(ValueError, match="rows_fixed"):
        spec(rows=RowDriver.FIXED, rows_fixed=0, rows_reason="none")
    for field in ("layers", "kv_heads", "head_dim", "physical_capacity_positions"):
        for value in (0, -1, 1.5, True, None):
            with pytest.raises(ValueError, match=field):
                spec(**{field: value})


def test_per_layer_positions_must_fit_the_layers() -> None:
    with pytest.raises(ValueError, match="2 entries for 16 layers"):
        spec(layer_positions=(11, 4))
    with pytest.raises(ValueError, match="largest"):
        spec(layers=2, layer_positions=(9, 4))
    assert spec(layers=2, layer_positions=(11, 4)).bytes_per_row == 2 * 64 * 16 * 2 * 15


def test_storage_is_never_below_the_view_and_unknown_stays_unknown() -> None:
    assert spec().storage_bytes_per_row is None
    assert spec().storage_peak_bytes(8) is None
    assert spec(storage_positions=4).storage_bytes_per_row == spec().bytes_per_row
    assert spec(storage_positions=22).storage_peak_bytes(8) == 2 * spec().peak_bytes(8)


def mixed(**changes: Any) -> SimpleNamespace:
    fields = {
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "head_dim": 128,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    return SimpleNamespace(**{k: v for k, v in {**fields, **changes}.items() if v is not None})


def test_sliding_and_full_layers_are_summed_one_by_one() -> None:
    one = from_config(mixed())
    assert one.bytes_per_row == 112_433_152
    assert one.layer_positions == (127, 4096) * 13
    assert one.storage_bytes_per_row is None, "nobody said how much one update brings"
    pinned = from_config(mixed(), longest_update=512)
    assert pinned.storage_bytes_per_row == 2 * 4 * 128 * 2 * 13 * (4096 + 127 + 512)


def test_the_kind_of_cache_decides_what_a_window_keeps() -> None:
    assert from_config(mixed(), cache="static").layer_positions == (128, 4096) * 13
    assert from_config(mixed(), cache="plain").bytes_per_row == 26 * 4096 * 2 * 4 * 128 * 2
    assert from_config(mixed(), physical_capacity_positions=71).layer_positions is None


def test_without_layer_types_a_window_makes_every_layer_slide() -> None:
    assert from_config(mixed(layer_types=None)).physical_capacity_positions == 127
    full = mixed(layer_types=None, sliding_window=None)
    assert from_config(full).physical_capacity_positions == 4096
    chunked = mixed(layer_types=None, sliding_window=None)
    chunked.attention_chunk_size = 64
    assert from_config(chunked).physical_capacity_positions == 63


def test_layers_that_share_kv_hold_nothing_and_a_copied_list_is_cut() -> None:
    assert from_config(mixed(num_kv_shared_layers=6)).layers == 20
    assert from_config(mixed(num_hidden_layers=2)).layer_positions == (127, 4096)


def test_head_dim_comes_from_the_config_before_the_division() -> None:
    assert from_config(mixed()).head_dim == 128
    assert from_config(mixed(head_dim=None)).head_dim == 64
    assert from_config(mixed(num_key_value_heads=None)).kv_heads == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "NoneType has none of num_hidden_layers"),
        (SimpleNamespace(num_hidden_layers=2), "kv_heads"),
        (SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2), "head_dim"),
        (mixed(head_dim=None, hidden_size=500), "do not divide"),
        (mixed(layer_types=["linear_attention"] * 26), "linear_attention"),
        (mixed(layer_types=["full_attention"] * 3), "3 entries for 26 layers"),
        (mixed(sliding_window=None), "sliding_window"),
        (mixed(v_head_dim=64), "v_head_dim"),
        (mixed(encoder_layers=2, decoder_layers=4), "layers="),
        (mixed(encoder_attention_heads=2, decoder_attention_heads=4), "kv_heads="),
        (mixed(num_hidden_layers="26"), "num_hidden_layers"),
    ],
)
def test_what_the_config_does_not_say_is_not_guessed(config: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config)


def test_both_sides_of_an_encoder_decoder_may_agree() -> None:
    same = mixed(encoder_layers=4, decoder_layers=4, encoder_attention_heads=2, decoder_attention_heads=2)
    assert from_config(same).layers == 26
    other = mixed(encoder_layers=2, decoder_layers=4)
    assert from_config(other, layers=2).layers == 2


def real_config(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    fields = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 32,
        "intermediate_size": 64,
    }
    return transformers.Qwen3Config(**{**fields, "head_dim": 32, **changes})


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    "types", [None, ["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2, ["sliding_attention"] * 4]
)
def test_declared_bytes_are_those_of_the_real_cache(kind: str, types: list[str] | None) -> None:
    from transformers.cache_utils import DynamicCache, StaticCache

    config = real_config(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=types)
    capacity, prefix = 20, 12
    declared = from_config(
        config,
        physical_capacity_positions=capacity,
        cache=kind,
        longest_update=prefix,
        dtype=torch.float32,
    )
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=capacity)
    for start, length in ((0, prefix), *((at, 1) for at in range(prefix, capacity))):
        for layer in range(4):
            new = torch.zeros(1, 2, length, 32)
            cache.update(new, new, layer, {"cache_position": torch.arange(start, start + length)})
    held = measure(cache)
    assert held is not None
    assert held.view_bytes == declared.bytes_per_row
    assert declared.storage_bytes_per_row is not None
    assert held.storage_bytes <= declared.storage_bytes_per_row


def test_the_protocol_can_be_asked_for() -> None:
    class Owner:
        def model_local_kv_specs(self) -> list[ModelLocalKVSpec]:
            return []

    assert isinstance(Owner(), HasModelLocalKV) and not isinstance(object(), HasModelLocalKV)
