# SPDX-License-Identifier: Apache-2.0
"""Declared against observed: the statuses, with real caches, and whose a cache is."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cache_utils = pytest.importorskip("transformers.cache_utils")

from vllm_omni_patch.patches.model_local_kv.collect import collect
from vllm_omni_patch.patches.model_local_kv.observe.observer import Observer, Peak
from vllm_omni_patch.patches.model_local_kv.observe.reconcile import Assignment, Group, Row, reconcile
from vllm_omni_patch.patches.model_local_kv.observe.suspects import find, merge
from vllm_omni_patch.patches.model_local_kv.specs import ModelLocalKVScope, ModelLocalKVSpec, Residency, RowDriver

pytest_plugins = ["support.local_kv_runners"]

HEADS, SIZE, LAYERS, CAPACITY = 2, 8, 2, 16
ROW = 2 * LAYERS * HEADS * SIZE * CAPACITY * 4


def spec(name: str = "request", **changes: Any) -> ModelLocalKVSpec:
    fields: dict[str, Any] = {
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_dim": SIZE,
        "dtype": torch.float32,
        "physical_capacity_positions": CAPACITY,
        "capacity_source": "test",
        "scope": ModelLocalKVScope.REQUEST,
        "rows": RowDriver.MAX_NUM_SEQS,
    }
    return ModelLocalKVSpec(name=name, **{**fields, **changes})


def fill(positions: int, rows: int = 1, size: int = SIZE) -> Any:
    cache = cache_utils.DynamicCache()
    for layer in range(LAYERS):
        new = torch.zeros(rows, HEADS, positions, size)
        cache.update(new, new, layer)
    return cache


class Decoder(torch.nn.Module):
    """Declares what it is given; makes caches."""

    def __init__(self, *declared: Any) -> None:
        super().__init__()
        self.declared = declared
        self.inner = Maker()

    def model_local_kv_specs(self) -> list[Any]:
        return list(self.declared)

    def forward(self, positions: int, rows: int = 1, size: int = SIZE) -> Any:
        return fill(positions, rows, size)


class Maker(torch.nn.Module):
    def forward(self, positions: int, rows: int = 1) -> Any:
        return fill(positions, rows)


class Model(torch.nn.Module):
    def __init__(self, *declared: Any) -> None:
        super().__init__()
        self.decoder = Decoder(*declared)
        self.other = Maker()

    def forward(self, positions: int) -> Any:
        return fill(positions)


class Bench:
    """A model whose declarations are read and whose caches are followed."""

    def __init__(self, observer: Observer, model: Any, max_num_seqs: int = 4) -> None:
        self.observer = observer
        self.model = model
        found = collect([("", model)], max_num_seqs=max_num_seqs, keep_paths=True)
        self.assignment = Assignment(found.entries, found.paths, found.root)
        observer.regroup(self.assignment)

    def rows(self) -> list[Row]:
        self.observer.sample()
        peaks = {group: peak for group, peak in self.observer.peaks.items() if isinstance(group, Group)}
        return reconcile(self.assignment, peaks)

    def row(self) -> Row:
        (row,) = self.rows()
        return row


def test_matched(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.decoder(CAPACITY, rows=2)
    row = bench.row()
    assert (row.owner, row.names, row.status) == ("decoder", ("request",), "matched")
    assert (row.declared_peak, row.observed_peak, row.observed_row, row.rows_seen) == (4 * ROW, 2 * ROW, ROW, 2)
    del kept


def test_a_cache_made_below_the_owner_is_the_owners(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.decoder.inner(CAPACITY)
    assert bench.row().status == "matched"
    del kept


def test_a_cache_made_above_the_owner_is_the_one_owners_of_that_shape(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model(CAPACITY)
    assert (bench.row().owner, bench.row().status) == ("decoder", "matched")
    del kept


def test_with_two_owners_of_one_shape_below_it_is_nobodys(observer: Observer) -> None:
    model = Model(spec())
    model.second = Decoder(spec())
    bench = Bench(observer, model)
    kept = model(CAPACITY)
    assert [(row.owner, row.status) for row in bench.rows()] == [
        ("decoder", "never seen"),
        ("second", "never seen"),
        ("Model", "undeclared"),
    ]
    del kept


def test_over_declared(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.decoder(CAPACITY // 2)
    row = bench.row()
    assert row.status == "over-declared"
    assert (row.observed_row, row.bytes_per_row) == (ROW // 2, ROW)
    del kept


def test_wrong_dtype_is_over_declared_and_not_another_cache(observer: Observer) -> None:
    bench = Bench(observer, Model(spec(dtype=torch.float64)))
    kept = bench.model.decoder(CAPACITY)
    assert bench.row().status == "over-declared"
    del kept


def test_under_declared_by_rows_and_by_a_pinned_storage(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()), max_num_seqs=1)
    kept = [bench.model.decoder(CAPACITY) for _ in range(2)]
    row = bench.row()
    assert (row.status, row.observed_peak, row.declared_peak) == ("under-declared", 2 * ROW, ROW)
    del kept
    bench = Bench(observer, Model(spec()), max_num_seqs=64)
    cache = bench.model.decoder(2 * CAPACITY)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, -CAPACITY:], layer.values[:, :, -CAPACITY:]
    row = bench.row()
    assert row.status == "under-declared"
    assert (row.observed_row, row.observed_row_storage) == (ROW, 2 * ROW)
    assert "pinned" in row.text


def test_a_storage_that_was_declared_is_no_surprise(observer: Observer) -> None:
    bench = Bench(observer, Model(spec(storage_positions=2 * CAPACITY)))
    cache = bench.model.decoder(2 * CAPACITY)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, -CAPACITY:], layer.values[:, :, -CAPACITY:]
    assert bench.row().status == "matched"


def test_never_seen_tells_a_dead_cache_from_an_empty_one(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    assert (bench.row().status, bench.row().created) == ("never seen", 0)

    class Empty(Maker):
        def forward(self, *args: Any) -> Any:
            return cache_utils.DynamicCache()

    bench.model.decoder.inner = Empty()
    bench = Bench(observer, bench.model)
    for _ in range(3):
        bench.model.decoder.inner()
    kept = bench.model.decoder.inner()
    row = bench.row()
    assert (row.status, row.created) == ("never seen", 4)
    assert "4 caches were created and held nothing" in row.text
    bench = Bench(observer, torch.nn.ModuleDict({"x": bench.model.decoder.inner}))
    assert bench.rows() == [], "an undeclared cache that holds nothing is no finding"
    del kept


def test_a_graph_pool_without_python_objects_is_not_called_dead(observer: Observer) -> None:
    pool = spec(
        "pool",
        scope=ModelLocalKVScope.MODEL,
        rows=RowDriver.FIXED,
        rows_reason="buckets",
        residency=Residency.GRAPH_POOL,
    )
    row = Bench(observer, Model(pool)).row()
    assert row.status == "not observable"
    assert not_measured(row) == [None] * 6


def not_measured(row: Row) -> list[Any]:
    return [
        row.observed_peak,
        row.observed_view,
        row.observed_row,
        row.observed_row_storage,
        row.rows_seen,
        row.live,
    ]


def test_the_part_in_graphs_is_not_mixed_with_what_is_seen(observer: Observer) -> None:
    pool = spec("pool", rows=RowDriver.FIXED, rows_fixed=9, rows_reason="buckets", residency=Residency.GRAPH_POOL)
    bench = Bench(observer, Model(spec(), pool), max_num_seqs=1)
    kept = [bench.model.decoder(CAPACITY) for _ in range(2)]
    seen, unseen = bench.rows()
    assert (seen.names, seen.status, seen.observed_peak) == (("request",), "under-declared", 2 * ROW)
    assert (unseen.names, unseen.status, unseen.observed_peak) == (("pool",), "not observable", None)
    del kept


def test_undeclared(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.other(CAPACITY)
    declared, undeclared = bench.rows()
    assert declared.status == "never seen"
    assert (undeclared.owner, undeclared.status, undeclared.observed_peak) == ("other", "undeclared", ROW)
    assert undeclared.sites[0].endswith(" fill")
    del kept


def test_a_cache_of_the_same_shape_elsewhere_is_not_the_owners_because_the_model_calls_both(observer: Observer) -> None:
    class Both(Model):
        def forward(self, positions: int) -> Any:
            return [self.decoder(positions), self.other(positions)]

    bench = Bench(observer, Both(spec()))
    kept = bench.model(CAPACITY)
    assert [(row.owner, row.status, row.observed_peak) for row in bench.rows()] == [
        ("decoder", "matched", ROW),
        ("other", "undeclared", ROW),
    ]
    del kept


def test_another_shape_at_the_owner_is_undeclared(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.decoder(CAPACITY, size=SIZE * 2)
    assert [(row.owner, row.status) for row in bench.rows()] == [("decoder", "never seen"), ("decoder", "undeclared")]
    del kept


def test_a_retained_cache_and_its_working_copy_are_one_group(observer: Observer) -> None:
    copies = spec("working_copy", scope=ModelLocalKVScope.INVOCATION, rows=RowDriver.FIXED, rows_reason="one call")
    bench = Bench(observer, Model(spec(), copies), max_num_seqs=1)
    kept = bench.model.decoder(CAPACITY)
    twin = copy.deepcopy(kept)
    row = bench.row()
    assert (row.names, row.status, row.observed_peak) == (("request", "working_copy"), "matched", 2 * ROW)
    del twin, kept
    gc.collect()
    assert bench.row().observed_peak == 2 * ROW, "a peak stays"


def test_an_owner_that_declares_at_the_root_covers_the_tree(observer: Observer) -> None:
    model = Decoder(spec())
    bench = Bench(observer, model)
    kept = model.inner(CAPACITY)
    assert (bench.row().owner, bench.row().status) == ("Decoder", "matched")
    del kept


def test_a_layout_that_cannot_be_measured_is_said_so() -> None:
    found = collect([("", Model(spec()))], max_num_seqs=1)
    assignment = Assignment(found.entries, {}, found.root)
    peak = Peak(created=1, unmeasured=1, kinds={"OddCache"})
    (row,) = reconcile(assignment, {Group("decoder", ("request",)): peak})
    assert row.status == "not observable" and not_measured(row) == [None] * 6
    assert "OddCache" in row.text
    rows = reconcile(Assignment([], {}), {Group("x", site="here"): peak})
    assert [(one.status, not_measured(one)) for one in rows] == [("undeclared", [None] * 6)]
    assert "cannot be measured" in rows[0].text


def test_of_what_can_be_measured_in_part_no_peak_is_claimed(observer: Observer) -> None:
    class OddCache(cache_utils.DynamicCache):  # type: ignore[misc]
        pass

    bench = Bench(observer, Model(spec()), max_num_seqs=1)
    odd = [OddCache() for _ in range(2)]
    for cache in odd:
        cache.__dict__.pop("layers")
    record = {record.kind: record for _, record in observer.live()}["OddCache"]
    record_group = Group("decoder", ("request",))
    observer.regroup(lambda origin, geometry: record_group)
    kept = bench.model.decoder(CAPACITY)
    row = bench.row()
    assert record.group == record_group and row.unmeasured == 2
    assert row.status == "not observable" and not_measured(row) == [None] * 6
    assert f"{ROW} bytes were alive at once, and more in 2 caches" in row.text
    more = bench.model.decoder(CAPACITY)
    row = bench.row()
    assert (row.status, row.observed_peak) == ("under-declared", 2 * ROW), "a floor above the limit is a finding"
    del kept, more


def test_a_cache_is_its_makers_though_the_maker_is_gone(observer: Observer) -> None:
    bench = Bench(observer, Model(spec()))
    kept = bench.model.decoder(CAPACITY)
    bench.model = None
    gc.collect()
    assert (bench.row().owner, bench.row().status) == ("decoder", "matched")
    del kept


# -- tensors on modules


class Ring:
    """A ring cache that is no module: K and V in one tensor."""

    def __init__(self, slots: int) -> None:
        self.cache = torch.zeros(2, slots, HEADS, CAPACITY, SIZE)


class RingKVCache(Ring):
    pass


class Tensors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._k_cache = torch.zeros(3, HEADS, CAPACITY, SIZE)
        self._v_cache = torch.zeros(3, HEADS, CAPACITY, SIZE)
        self.flow_cache = {"estimator_att_cache": torch.zeros(10, 2, 2, 8, 5, 128), "cnn_cache": torch.zeros(2, 3, 4)}
        self.streams = [Ring(2)]
        self.register_buffer("kv_buffer", torch.zeros(4, 4, 4))
        self.register_buffer("rotary_cos_sin_cache", torch.zeros(4, 4, 4))
        self.weight = torch.nn.Parameter(torch.zeros(2, 4, 3, 3, 3))
        self.state = {"past_key_values": torch.zeros(2, 2, 2), "ids": torch.zeros(2, 2, 2, dtype=torch.long)}
        self.key_cache_view = self._k_cache[:1]


class Paged(torch.nn.Module):
    """As vLLM's attention layers: the engine owns its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = [torch.zeros(2, 8, HEADS, CAPACITY, SIZE)]

    def get_kv_cache_spec(self) -> None:
        return None


def test_suspects_are_found_by_name_and_shape_and_weights_and_paged_kv_are_not() -> None:
    found = {suspect.attribute: suspect for suspect in find([("a", Tensors()), ("b", Paged())])}
    assert set(found) == {"_k_cache", "_v_cache", "flow_cache", "streams", "kv_buffer", "state", "key_cache_view"}
    assert found["_k_cache"].storage_bytes == 3 * HEADS * CAPACITY * SIZE * 4
    assert found["streams"].why.startswith("shape (2, slots")
    assert found["flow_cache"].tensors == 1
    assert found["key_cache_view"].view_bytes * 3 == found["key_cache_view"].storage_bytes
    assert find([("b", Paged())]) == []
    assert {name: one.rows() for name, one in found.items()} == {
        "_k_cache": 3,
        "_v_cache": 3,
        "key_cache_view": 1,
        "streams": 2,
        "flow_cache": 0,
        "kv_buffer": 0,
        "state": 0,
    }


def test_a_ring_that_is_declared_is_observed_and_not_suspected(observer: Observer) -> None:
    class Codec(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ring = RingKVCache(4)

        def model_local_kv_specs(self) -> list[Any]:
            ring = spec("ring", layers=1, rows=RowDriver.FIXED, rows_fixed=4, rows_reason="slots")
            return [ring]

    codec = Codec()
    bench = Bench(observer, torch.nn.ModuleDict({"codec": codec}))
    (suspect,) = find([("codec", codec)])
    group = bench.assignment.at(suspect.owner, suspect.heads_and_size())
    assert group == Group("codec", ("ring",))
    observer.hold({group: merge([suspect])})
    row = bench.row()
    assert (row.status, row.observed_peak, row.rows_seen) == ("matched", 4 * ROW // LAYERS, 4)


def test_k_and_v_in_two_tensors_are_one_row(observer: Observer) -> None:
    class Codec(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._k_cache = torch.zeros(3, HEADS, CAPACITY, SIZE)
            self._v_cache = torch.zeros(3, HEADS, CAPACITY, SIZE)

        def model_local_kv_specs(self) -> list[Any]:
            return [spec("kv", layers=1, rows=RowDriver.FIXED, rows_fixed=3, rows_reason="slots")]

    codec = Codec()
    bench = Bench(observer, codec)
    observer.hold({Group("Codec", ("kv",)): merge(find([("Codec", codec)]))})
    assert (bench.row().status, bench.row().rows_seen) == ("matched", 3)
    assert merge([]).rows == 0
    flat = merge(find([("x", Flat())]))
    assert flat.rows == 0
    observer.hold({Group("Codec", ("kv",)): flat})
    row = bench.row()
    assert row.observed_peak and (row.rows_seen, row.observed_row) == (None, None), "it does not say what a row is"


class Flat(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_buffer = torch.zeros(4, 4, 4)
