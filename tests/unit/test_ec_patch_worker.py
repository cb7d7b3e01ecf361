# SPDX-License-Identifier: Apache-2.0
"""What the worker's side loads, refuses and stores, on real engines; two ranks over gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from support.ec_requests import Adapter, Feature, engine, planned, request
from vllm_omni_patch.patches.ec_connector.vllm.adapters import LoadedAdapters
from vllm_omni_patch.patches.ec_connector.vllm.counts import Deltas, Report
from vllm_omni_patch.patches.ec_connector.vllm.items import ItemKeys, Load
from vllm_omni_patch.patches.ec_connector.vllm.scheduler import SchedulerSide, StepPlan
from vllm_omni_patch.patches.ec_connector.vllm.worker import WorkerSide, agree_over


def unchanged() -> bool:
    return False


def worker(store: Any, **more: Any) -> WorkerSide:
    given = {"keys": ItemKeys(), "stores": True, "weights_changed": unchanged, **more}
    return WorkerSide(store, device="cpu", **given)


def load(name: str, rows: int | None = 32, width: int | None = None, key: str | None = None) -> Load:
    return Load("r1", 0, name, name if key is None else key, rows, width)


def keep(store: Any, key: str, tensor: Any) -> None:
    assert store.put(key, tensor) and store.flush(10)


def test_loads_what_was_promised(store: Any) -> None:
    tensor = torch.randn(32, 64)
    keep(store, "a", tensor)
    cache: dict[str, Any] = {}
    side = worker(store)
    side.load(cache, planned(store, [load("a")]))
    assert torch.equal(cache["a"], tensor) and side.take_failed() == []


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (None, load("a")),
        ((7, 64), load("a")),
        ((32, 64), load("a", width=128)),
        ((32, 64), load("a", key="")),
    ],
    ids=["gone", "other rows", "other width", "no key"],
)
def test_what_does_not_fit_is_encoded(store: Any, stored: tuple[int, int] | None, wanted: Load) -> None:
    if stored:
        keep(store, "a", torch.randn(*stored))
    cache: dict[str, Any] = {}
    side = worker(store)
    side.load(cache, StepPlan([wanted]))
    assert cache == {}
    assert side.take_failed() == [wanted] and side.take_failed() == []
    assert store.stats.snapshot().fallbacks == 0, "counted when it is known to be encoded: recompute.extend"


def weights_of(adapter: Adapter, text: bytes) -> None:
    folder = Path(adapter.lora_path)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(text * 100)


def test_an_adapters_outputs_are_those_of_the_files_that_vllm_read(store: Any, tmp_path: Path) -> None:
    """Files replaced on disk change nothing in an adapter that is loaded, until vLLM loads it again."""
    adapter = Adapter("a", str(tmp_path / "adapter"))
    loaded, seen = LoadedAdapters(), ItemKeys(tower_lora=True)
    side = worker(store, keys=ItemKeys(True, loaded))
    scheduler = SchedulerSide(store, seen, keyless=False, wait=5.0)
    asked = request("r1", ("a:x", 32), lora=adapter)

    def step(encoded: Any) -> Any:
        """The output that the request gets: the cache's where it is loaded, else what is encoded here."""
        cache: dict[str, Any] = {}
        scheduler.finished(asked)
        if scheduler.has_items(asked) == [True]:
            scheduler.allocated(asked, 0)
        side.load(cache, scheduler.plan())
        if "a:x" not in cache:
            side.take_failed()
            side.about_to_encode([("r1", asked.mm_features[0], adapter)])
            cache["a:x"] = encoded
            side.save(cache, "a:x")
            assert store.flush(10)
        return cache["a:x"]

    weights_of(adapter, b"old")
    old, new, other = torch.randn(32, 64), torch.randn(32, 64), torch.randn(32, 64)
    assert step(old) is old and step(old) is old, "not loaded by vLLM as far as is known: nothing is stored"
    assert loaded.load(adapter, lambda: "model") == "model"
    assert step(old) is old
    assert torch.equal(step(other), old) and step(other) is not old

    weights_of(adapter, b"new")
    key = seen.key("a:x", "r1", adapter)
    assert key is not None
    assert step(old) is old and not store.contains(key), "the old adapter's output, under the new files' name"
    keep(store, key, new)  # by another engine, which has loaded the new files
    assert step(old) is old and store.contains(key), "the entry is sound, and not this adapter's"
    loaded.load(adapter, lambda: None)
    assert torch.equal(step(other), new)


def test_an_adapter_whose_files_change_while_it_is_loaded_is_not_known(tmp_path: Path) -> None:
    adapter, loaded = Adapter("a", str(tmp_path / "adapter")), LoadedAdapters()
    weights_of(adapter, b"old")
    loaded.load(adapter, lambda: weights_of(adapter, b"new"))
    assert ItemKeys(True, loaded).key("a:x", "r1", adapter) is None
    loaded.load(adapter, lambda: None)
    assert ItemKeys(True, loaded).key("a:x", "r1", adapter) == ItemKeys(True).key("a:x", "r1", adapter)

    def fail() -> None:
        raise ValueError("no adapter")

    with pytest.raises(ValueError, match="no adapter"):
        loaded.load(adapter, fail)
    assert ItemKeys(True, loaded).key("a:x", "r1", adapter) is None


def test_a_bad_entry_is_not_offered_again(store: Any, tmp_path: Path) -> None:
    keep(store, "a", torch.randn(32, 64))
    (path,) = tmp_path.glob("disk/**/*.ec")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.contains("a", 32), "the header is sound, so the scheduler says yes"
    side = worker(store)
    side.load({}, planned(store, [load("a")]))
    assert [item.mm_hash for item in side.take_failed()] == ["a"]
    assert not store.contains("a", 32)


def test_a_tensor_of_another_length_in_the_cache_is_not_taken(store: Any) -> None:
    tensor = torch.randn(32, 64)
    keep(store, "a", tensor)
    cache = {"a": torch.randn(7, 64)}
    worker(store).load(cache, planned(store, [load("a")]))
    assert torch.equal(cache["a"], tensor)


def test_a_tensor_in_hand_needs_no_entry(store: Any) -> None:
    tensor = torch.randn(32, 64)
    cache: dict[str, Any] = {}
    side = worker(store)
    side.load(cache, planned(store, [load("a")], {"a": tensor}))
    assert torch.equal(cache["a"], tensor) and not side.take_failed()


def test_an_engine_that_raises_costs_an_encode(store: Any) -> None:
    class Broken:
        stats = store.stats

        def open(self, *_: Any) -> Any:
            raise OSError("the storage has gone")

        def discard(self, *_: Any) -> None:
            raise OSError("the storage has gone")

        def put(self, *_: Any) -> Any:
            raise OSError("the storage has gone")

    side = worker(Broken())
    side.load({}, planned(store, [load("a")]))
    assert len(side.take_failed()) == 1
    side.about_to_encode([("r1", Feature("a"), None)])
    side.save({"a": torch.randn(3, 4)}, "a")


def test_stores_what_the_encoder_made(store: Any) -> None:
    side = worker(store)
    tensor = torch.randn(32, 64)
    side.about_to_encode([("r1", Feature("a"), None)])
    side.save({"a": tensor}, "a")
    assert store.flush(10)
    assert torch.equal(store.get("a", "cpu", 32), tensor)


@pytest.mark.parametrize(
    "feature",
    [
        Feature("p", modality="prompt_embeds"),
        Feature("p", data={"image_embeds": object()}),
        Feature("renderer0-mm-1-image-0"),
        Feature("r1-image-0"),
    ],
    ids=["prompt_embeds", "image_embeds", "counter", "request id"],
)
def test_what_must_not_persist_is_not_stored(store: Any, feature: Feature) -> None:
    side = worker(store)
    side.about_to_encode([("r1", feature, None)])
    side.save({feature.identifier: torch.randn(32, 64)}, feature.identifier)
    side.save({"unseen": torch.randn(32, 64)}, "unseen")
    assert store.flush(10)
    facts = store.stats.snapshot()
    assert facts.stored == 0 and facts.dropped == 0


def test_an_adapter_stores_under_its_own_key(store: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"w" * 100)
    adapter = Adapter("a", str(tmp_path / "adapter"))
    keys = ItemKeys(tower_lora=True)
    side = worker(store, keys=keys)
    side.about_to_encode([("r1", Feature("a:x"), adapter)])
    side.save({"a:x": torch.randn(32, 64)}, "a:x")
    assert store.flush(10)
    key = keys.key("a:x", "r1", adapter)
    assert key is not None and store.contains(key, 32) and not store.contains("a:x", 32)


def test_other_ranks_do_not_store(store: Any) -> None:
    side = worker(store, stores=False)
    side.about_to_encode([("r1", Feature("a"), None)])
    side.save({"a": torch.randn(32, 64)}, "a")
    assert store.flush(10) and store.stats.snapshot().stored == 0


def test_counts_are_told_once(store: Any) -> None:
    deltas = Deltas(("hits", "load_seconds"))
    keep(store, "a", torch.randn(32, 64))
    store.get("a", "cpu", 32)
    first = deltas.take(store.stats)
    assert first["hits"] == 1 and first["load_seconds"] > 0
    assert deltas.take(store.stats) == {}
    assert Report({"hits": 2}).merged(Report({"hits": 3, "misses": 1})).counts == {"hits": 3, "misses": 1}


class Weights:
    """What a worker asks about its weights: changed as often as it was told to be."""

    def __init__(self) -> None:
        self.changes = 0
        self.asked = 0
        self.broken = False

    def __call__(self) -> bool:
        self.asked += 1
        if self.broken:
            raise RuntimeError("no layout that can be looked into")
        changed, self.changes = self.changes > 0, 0
        return changed


def encode(side: WorkerSide, name: str, tensor: Any) -> None:
    side.about_to_encode([("r1", Feature(name), None)])
    side.save({name: tensor}, name)


def test_a_hit_promised_before_the_weights_changed_is_encoded(store: Any, tmp_path: Path) -> None:
    """The scheduler said yes under the generation of before; the step's own output goes under the new one."""
    weights = Weights()
    side = worker(store, weights_changed=weights)
    old, new, other = torch.randn(32, 64), torch.randn(32, 64), torch.randn(32, 64)
    keep(store, "a", old)
    keep(store, "b", other)
    cache: dict[str, Any] = {}
    weights.changes = 1
    side.load(cache, planned(store, [load("a")]))
    assert cache == {} and [item.mm_hash for item in side.take_failed()] == ["a"]
    encode(side, "a", new)
    assert store.flush(10)
    side.load(cache, planned(store, [load("a")]))
    assert torch.equal(cache["a"], new) and not side.take_failed()
    assert not store.contains("b"), "nothing of before is offered"
    # The next run loads the checkpoint again: what was stored before is there, what was stored since is not found.
    with contextlib.closing(engine(tmp_path, engine_id="restarted")) as restarted:
        assert torch.equal(restarted.get("a", "cpu", 32), old)
        assert torch.equal(restarted.get("b", "cpu", 32), other)


def test_vllms_own_copy_of_a_promised_item_is_not_taken_after_a_change(store: Any) -> None:
    weights = Weights()
    side = worker(store, weights_changed=weights)
    keep(store, "a", torch.randn(32, 64))
    weights.changes = 1
    cache = {"a": torch.randn(32, 64)}
    side.load(cache, planned(store, [load("a")]))
    assert cache == {} and len(side.take_failed()) == 1


def test_an_output_of_changed_weights_is_stored_in_a_new_generation(store: Any, tmp_path: Path) -> None:
    weights = Weights()
    side = worker(store, weights_changed=weights)
    side.load({}, StepPlan())
    encode(side, "a", torch.randn(32, 64))
    weights.changes = 1
    side.load({}, StepPlan())
    encode(side, "b", torch.randn(32, 64))
    assert store.flush(10) and store.contains("b") and not store.contains("a")
    with contextlib.closing(engine(tmp_path, engine_id="restarted")) as restarted:
        assert restarted.contains("a") and not restarted.contains("b")


def test_weights_are_looked_at_once_in_a_step_that_loads_or_stores_and_not_in_others(store: Any) -> None:
    weights = Weights()
    side = worker(store, weights_changed=weights)
    keep(store, "a", torch.randn(32, 64))
    for plan, encodes, looks in (
        (StepPlan(), False, 0),
        (planned(store, [load("a")]), False, 1),
        (StepPlan(), True, 1),
        (planned(store, [load("a")]), True, 1),
        (StepPlan(), True, 1),
    ):
        weights.asked = 0
        side.load({}, plan)
        if encodes:
            side.about_to_encode([("r1", Feature("b"), None)])
        assert weights.asked == looks
    weights.asked = 0
    side.about_to_encode([("r1", Feature("b"), None)])  # a producer is not asked to load
    assert weights.asked == 1


def test_what_came_with_the_step_has_nothing_to_be_encoded_from(store: Any) -> None:
    weights = Weights()
    weights.changes = 1
    side = worker(store, weights_changed=weights)
    tensor = torch.randn(32, 64)
    cache: dict[str, Any] = {}
    side.load(cache, planned(store, [load("a"), load("b")], {"a": tensor}))
    assert torch.equal(cache["a"], tensor) and [item.mm_hash for item in side.take_failed()] == ["b"]


def test_weights_that_cannot_be_looked_at_end_loads_and_stores(
    store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    side = worker(store, weights_changed=weights)
    keep(store, "a", torch.randn(32, 64))
    weights.broken = True
    with caplog.at_level("WARNING"):
        for _ in range(3):
            side.load({}, planned(store, [load("a")]))
            assert len(side.take_failed()) == 1
            encode(side, "b", torch.randn(32, 64))
    assert caplog.text.count("cannot compare the encoder's weights") == 1
    assert store.flush(10) and not store.contains("a") and not store.contains("b"), "and nothing more is promised"
    assert weights.asked == 1
    with contextlib.closing(engine(tmp_path, engine_id="restarted")) as restarted:
        assert restarted.contains("a"), "what was stored before is kept"


def _changing_rank(rank: int, port: int, folder: str, results: Any) -> None:
    """One of two ranks on one host. The weights of rank 1 change, then those of rank 1 cannot be told any more."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    made = engine(Path(folder))
    weights = Weights()
    side = worker(made, stores=rank == 0, weights_changed=weights, agree=agree_over(dist.group.WORLD))
    seen = []

    def step(loads: bool, encodes: str = "") -> None:
        cache: dict[str, Any] = {}
        side.load(cache, planned(made, [load("a")] if loads else []))
        failed = [item.mm_hash for item in side.take_failed()]
        for name in [*failed, *([encodes] if encodes else [])]:
            side.about_to_encode([("r1", Feature(name), None)])
            dist.all_reduce(torch.ones(1))  # the vision tower
            side.save({name: torch.zeros(32, 64)}, name)
        made.flush(10)
        dist.barrier()
        seen.append((sorted(cache), failed, made.contains("a"), made.contains("b")))
        dist.barrier()

    step(False, "a")
    step(True)
    weights.changes = rank
    step(True)  # found in a step that loads
    step(True)
    weights.changes = rank
    step(False, "b")  # found in a step that encodes
    step(True)
    weights.broken = rank == 1
    step(True, "b")
    step(True)
    made.close()
    results.put((rank, seen))
    dist.destroy_process_group()


def test_a_change_on_one_rank_is_a_new_generation_on_all(tmp_path: Path) -> None:
    assert _two(_changing_rank, tmp_path) == [
        ([], [], True, False),
        (["a"], [], True, False),
        ([], ["a"], True, False),
        (["a"], [], True, False),
        ([], [], False, True),
        ([], ["a"], True, True),
        ([], ["a"], False, False),
        ([], ["a"], False, False),
    ]


def _rank(rank: int, port: int, folder: str, results: Any) -> None:
    """One of two ranks. Rank 1 reads a folder of its own, from which the entry of the second step is gone."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    made = engine(Path(folder) / f"rank{rank}", engine_id=f"rank{rank}")
    side = worker(made, stores=rank == 0, agree=agree_over(dist.group.WORLD))
    for name in ("both", "one", "none"):
        if name == "both" or (name == "one" and rank == 0):
            made.put(name, torch.full((32, 64), 3.0))
    made.flush(10)
    cache: dict[str, Any] = {}
    side.load(cache, StepPlan())
    failed = []
    for names in (["both"], ["one", "both"], ["none"]):
        cache.clear()
        side.load(cache, planned(made, [load(name) for name in names]))
        failed.append((sorted(cache), [item.mm_hash for item in side.take_failed()]))
        # What the vision tower does on a rank that encodes: every rank must come here, or none.
        if failed[-1][1]:
            dist.all_reduce(torch.ones(1))
    made.close()
    results.put((rank, failed))
    dist.destroy_process_group()


def _two(rank: Any, folder: Path) -> Any:
    """What two processes, which run ``rank(rank, port, folder, results)``, have both seen."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(number, port, str(folder), results)) for number in range(2)]
    for process in ranks:
        process.start()
    try:
        seen = dict(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
    assert seen[0] == seen[1]
    return seen[0]


def test_two_ranks_decide_alike_when_one_fails(tmp_path: Path) -> None:
    assert _two(_rank, tmp_path) == [(["both"], []), (["both"], ["one"]), ([], ["none"])]
