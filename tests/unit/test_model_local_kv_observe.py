# SPDX-License-Identifier: Apache-2.0
"""Real transformers caches, followed and measured. On other releases: scripts/check_transformers.py."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cache_utils = pytest.importorskip("transformers.cache_utils")

from vllm_omni_patch.patches.model_local_kv.observe.measure import measure
from vllm_omni_patch.patches.model_local_kv.observe.observer import Observer

pytest_plugins = ["support.local_kv_runners"]

HEADS, SIZE = 2, 8


def config(**changes: Any) -> Any:
    from transformers import Qwen2Config

    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": HEADS * SIZE,
        "vocab_size": 32,
        "intermediate_size": 16,
    }
    return Qwen2Config(**{**fields, **changes})


def fill(cache: Any, positions: int, rows: int = 1, layers: int = 2, start: int = 0) -> Any:
    for layer in range(layers):
        new = torch.zeros(rows, HEADS, positions, SIZE)
        cache.update(new, new, layer, {"cache_position": torch.arange(start, start + positions)})
    return cache


def size(positions: int, rows: int = 1, layers: int = 2) -> int:
    return 2 * layers * rows * HEADS * positions * SIZE * 4


class Decoder(torch.nn.Module):
    def forward(self, positions: int = 5, rows: int = 1) -> Any:
        return self.make(positions, rows)

    def make(self, positions: int, rows: int) -> Any:
        return fill(cache_utils.DynamicCache(), positions, rows)


def only(observer: Observer) -> Any:
    observer.sample()
    assert len(observer.peaks) == 1, observer.peaks
    return next(iter(observer.peaks.values()))


# -- layouts


class OldCache:
    """Lists of tensors, as transformers had them before its caches got layers."""

    def __init__(self, keys: list[Any], values: list[Any]) -> None:
        self.key_cache, self.value_cache = keys, values


class Layer:
    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values, self.window = keys, values, 4


class NewCache:
    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers


class PairCache:
    def __init__(self, one: Any, other: Any) -> None:
        self.self_attention_cache, self.cross_attention_cache = one, other


def tensors() -> list[Any]:
    return [torch.zeros(3, HEADS, 5, SIZE) for _ in range(4)]


def test_three_layouts_of_the_same_tensors_measure_alike() -> None:
    k0, k1, v0, v1 = tensors()
    old = measure(OldCache([k0, k1], [v0, v1]))
    new = measure(NewCache([Layer(k0, v0), Layer(k1, v1)]))
    pair = measure(PairCache(NewCache([Layer(k0, v0)]), OldCache([k1], [v1])))
    assert old is not None
    assert old == new == pair
    assert (old.view_bytes, old.storage_bytes, old.rows, old.kv_heads, old.head_dim) == (
        size(5, 3),
        size(5, 3),
        3,
        HEADS,
        SIZE,
    )


def test_an_unknown_layout_is_not_measurable_and_an_empty_known_one_is_zero() -> None:
    assert measure(object()) is None
    assert measure(PairCache(object(), NewCache([]))) is None
    for empty in (NewCache([]), NewCache([Layer(None, None)]), NewCache([Layer(torch.zeros(0), torch.zeros(0))])):
        held = measure(empty)
        assert held is not None
        assert (held.view_bytes, held.storage_bytes, held.rows) == (0, 0, 0)


def test_views_of_one_storage_pin_it_once() -> None:
    whole = torch.zeros(1, HEADS, 100, SIZE)
    held = measure(NewCache([Layer(whole[:, :, -71:], whole[:, :, :71])]))
    assert held is not None
    assert held.view_bytes == 2 * HEADS * 71 * SIZE * 4
    assert held.storage_bytes == HEADS * 100 * SIZE * 4


def test_a_static_cache_is_measured_without_making_it_allocate() -> None:
    cache = cache_utils.StaticCache(config=config(), max_cache_len=16)
    held = measure(cache)
    assert held is not None
    assert held.storage_bytes == 0
    fill(cache, 3)
    held = measure(cache)
    assert held is not None
    assert held.storage_bytes == size(16)


def test_a_sliding_cache_pins_what_was_concatenated_for_it() -> None:
    window = config(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    cache = fill(fill(cache_utils.DynamicCache(config=window), 20), 5, start=20)
    held = measure(cache)
    assert held is not None
    assert held.view_bytes == size(7)
    assert held.storage_bytes == size(7 + 5)


# -- following


def test_every_cache_is_followed_with_its_owner_and_site(observer: Observer) -> None:
    decoder = Decoder()
    cache = decoder(5, 3)
    ((live, record),) = observer.live()
    assert live is cache
    assert record.origin.owners[0][1]() is decoder
    assert record.origin.classes[0].endswith("Decoder")
    assert record.origin.site.endswith(" make")
    peak = only(observer)
    assert (peak.storage_bytes, peak.view_bytes, peak.rows) == (size(5, 3), size(5, 3), 3)
    assert (peak.row_bytes, peak.row_storage_bytes) == (size(5), size(5))
    assert (peak.live_bytes, peak.created) == (size(5, 3), 1)


def test_a_deep_copy_is_its_sources_owner_and_counts_by_itself(observer: Observer) -> None:
    decoder = Decoder()

    class Server(torch.nn.Module):
        def forward(self, source: Any) -> Any:
            return copy.deepcopy(source)

    cache = decoder()
    twin = Server()(cache)
    owners = [record.origin.owners[0][1]() for _, record in observer.live()]
    assert owners == [decoder, decoder]
    peak = only(observer)
    assert (peak.storage_bytes, peak.live_bytes, peak.created) == (2 * size(5), 2 * size(5), 2)
    del twin
    observer.sample()
    assert (peak.storage_bytes, peak.live_bytes) == (2 * size(5), size(5))


def test_shallow_copies_and_pickles_are_followed(observer: Observer) -> None:
    cache = Decoder()()
    twin, other = copy.copy(cache), pickle.loads(pickle.dumps(cache))
    assert {id(one) for one, _ in observer.live()} == {id(cache), id(twin), id(other)}
    observer.sample()
    peaks = list(observer.peaks.values())
    assert sum(peak.storage_bytes for peak in peaks) == 2 * size(5), "a shallow copy shares its storage"


def test_an_encoder_decoder_cache_counts_as_its_halves(observer: Observer) -> None:
    pair = cache_utils.EncoderDecoderCache(fill(cache_utils.DynamicCache(), 4), cache_utils.DynamicCache())
    observer.sample()
    assert sum(peak.view_bytes for peak in observer.peaks.values()) == size(4)
    assert sum(peak.created for peak in observer.peaks.values()) == 2
    del pair
    gc.collect()
    assert observer.live() == []


def test_a_cache_that_lived_between_two_samples_is_not_missed(observer: Observer) -> None:
    Decoder()(9, 2)
    gc.collect()
    assert observer.live() == []
    peak = next(iter(observer.peaks.values()))
    assert (peak.storage_bytes, peak.row_bytes, peak.live_bytes) == (size(9, 2), size(9), size(9, 2))
    observer.sample()
    assert (peak.storage_bytes, peak.live_bytes) == (size(9, 2), 0)


def test_caches_that_stay_empty_do_not_cost_a_full_measurement_each(observer: Observer) -> None:
    observer.sample()
    observer._not_before = float("inf")  # the share of time is used up
    before = observer.samples
    for _ in range(10):
        cache_utils.DynamicCache()
    gc.collect()
    assert observer.samples == before
    Decoder()(3)
    gc.collect()
    assert observer.samples == before + 1


def test_caches_are_not_kept_alive(observer: Observer) -> None:
    decoder = Decoder()
    cache = decoder()
    observer.sample()
    ref, owner = weakref.ref(cache), weakref.ref(decoder)
    del cache, decoder
    gc.collect()
    assert ref() is None
    assert owner() is None


def test_looking_for_the_owner_keeps_no_other_local_alive(observer: Observer) -> None:
    class Blob:
        pass

    class Model(torch.nn.Module):
        def forward(self) -> tuple[Any, bool]:
            blob = Blob()
            ref = weakref.ref(blob)
            cache = cache_utils.DynamicCache()
            blob = None
            gc.collect()
            return cache, ref() is None

    _, freed = Model()()
    assert freed


def test_a_cache_made_by_a_plain_function_is_known_by_its_site(observer: Observer) -> None:
    def build() -> Any:
        return fill(cache_utils.DynamicCache(), 1)

    cache = build()
    ((_, record),) = observer.live()
    assert record.origin.site.endswith(" build")
    del cache


def test_a_sample_between_new_and_init_is_not_taken_for_an_unknown_layout(observer: Observer) -> None:
    bare = cache_utils.DynamicCache.__new__(cache_utils.DynamicCache)
    assert only(observer).unmeasured == 0
    del bare


def test_regrouping_sorts_what_is_alive_in_again(observer: Observer) -> None:
    cache = Decoder()()
    observer.sample()
    observer.regroup(lambda origin, geometry: ("group", geometry))
    assert set(observer.peaks) == {("group", (HEADS, SIZE))}
    assert observer.peaks[("group", (HEADS, SIZE))].created == 1
    del cache


def test_tensors_that_are_no_cache_are_added_to_their_group(observer: Observer) -> None:
    held = measure(NewCache([Layer(*tensors()[:2])]))
    assert held is not None
    observer.hold({"ring": held})
    observer.sample()
    assert observer.peaks["ring"].storage_bytes == 2 * 3 * HEADS * 5 * SIZE * 4
    observer.hold({})
    observer.sample()
    assert observer.peaks["ring"].live_bytes == 0


# -- on and off


def test_undo_restores_the_behaviour_of_the_class() -> None:
    one = Observer(interval=0)
    undo = one.install(cache_utils.Cache)
    kept = fill(cache_utils.DynamicCache(), 1)
    assert len(one.live()) == 1
    undo()
    cache = fill(cache_utils.DynamicCache(config=config()), 2)
    copy.deepcopy(cache)
    assert one.live() == []
    assert "__del__" not in vars(cache_utils.Cache)
    del kept


def test_after_an_undo_it_can_be_installed_again() -> None:
    for _ in range(2):
        one = Observer(interval=0)
        undo = one.install(cache_utils.Cache)
        cache = cache_utils.DynamicCache()
        assert len(one.live()) == 1
        undo()
        del cache


def test_a_class_with_its_own_constructor_is_refused() -> None:
    class Own:
        def __new__(cls) -> Any:
            return object.__new__(cls)

    with pytest.raises(RuntimeError, match="own __new__"):
        Observer(interval=0).install(Own)


def test_twice_is_refused(observer: Observer) -> None:
    with pytest.raises(RuntimeError, match="followed already"):
        Observer(interval=0).install(cache_utils.Cache)


def test_an_error_of_ours_reaches_no_caller(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(observer, "_origin", broken)
    cache = fill(cache_utils.DynamicCache(), 2)
    assert cache.get_seq_length() == 2
    monkeypatch.undo()
    other = fill(cache_utils.DynamicCache(), 2)
    monkeypatch.setattr(observer, "sample", broken)
    del cache, other
    gc.collect()


def test_the_thread_measures_by_itself_and_ends_with_the_undo() -> None:
    rounds: list[bool] = []
    one = Observer(interval=0.01, on_round=rounds.append)
    undo = one.install(cache_utils.Cache)
    cache = fill(cache_utils.DynamicCache(), 3)
    deadline = time.monotonic() + 20
    # A round may fall between two layers of the fill; a later one sees them all.
    while [peak.storage_bytes for peak in one.peaks.values()] != [size(3)] and time.monotonic() < deadline:
        time.sleep(0.01)
    undo()
    assert any(rounds), "a peak rose and the round said so"
    assert [peak.storage_bytes for peak in one.peaks.values()] == [size(3)]
    deadline = time.monotonic() + 20
    while any("observe-kv" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any("observe-kv" in thread.name for thread in threading.enumerate())
    del cache


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_a_thread_of_its_own() -> None:
    one = Observer(interval=0.01)
    undo = one.install(cache_utils.Cache)
    cache = cache_utils.DynamicCache()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine = fill(cache_utils.DynamicCache(), 1)
            alive = [thread.name for thread in threading.enumerate() if "observe-kv" in thread.name]
            os.write(write, b"y" if alive and mine is not None else b"n")
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 1)
    os.close(read)
    os.waitpid(child, 0)
    undo()
    del cache
    assert answer == b"y"


def test_a_full_graph_stays_one_when_it_makes_a_cache(observer: Observer) -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(x: Any) -> Any:
        keys, values = cache_utils.DynamicCache().update(x, x, 0)
        return keys + values

    assert step(torch.ones(1, 1, 2, 2)).sum() == 8


def test_threads_that_make_and_drop_caches_do_not_disturb_a_sample(observer: Observer) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def churn() -> None:
        decoder = Decoder()
        try:
            while not stop.is_set():
                kept = [decoder(1) for _ in range(5)]
                del kept
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        observer.sample()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    observer.sample()
    assert sum(peak.live_bytes for peak in observer.peaks.values()) == 0


def test_generation_gives_the_same_tokens_and_one_owner(observer: Observer) -> None:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config()).eval()
    out = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert out.shape == (1, 7)
    gc.collect()
    assert len(observer.peaks) == 1
    assert max(peak.row_bytes for peak in observer.peaks.values()) == size(6)
