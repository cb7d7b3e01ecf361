# SPDX-License-Identifier: Apache-2.0
"""A folder of many entries: what a store and an eviction look at, which entries go, wrong clocks, failing devices."""

from __future__ import annotations

import collections
import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_ec_store import MIB, age, key, on_disk, opened, published, read, write

from vllm_omni_patch.patches.ec_connector.storage import folder as folder_module
from vllm_omni_patch.patches.ec_connector.storage.files import FileStore
from vllm_omni_patch.patches.ec_connector.storage.folder_upkeep import Upkeep

PAGE = 4096
LOOKS = ("listdir", "scandir", "lstat", "stat", "open", "unlink", "rename", "mkdir", "statvfs", "utime")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Counts the system calls that take a path or list a folder."""
    counted: collections.Counter[str] = collections.Counter()
    for name in LOOKS:

        def call(*args: object, name: str = name, real: object = getattr(os, name), **more: object) -> object:
            counted[name] += 1
            return real(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(os, name, call)
    yield counted


def full_store(path: Path, count: int, prefix: str = "old") -> FileStore:
    """A store that holds ``count`` entries of one page, its limit; the first was used longest ago."""
    store = opened(path, count * PAGE, touch_seconds=0.0)
    for index in range(count):
        assert write(store, f"{prefix}{index}", 64) == "stored"
        age(store, f"{prefix}{index}", 10_000 + count - index)
    return store


def test_a_store_makes_the_same_few_calls_in_any_number_of_entries(
    tmp_path: Path, calls: collections.Counter[str]
) -> None:
    made = []
    for count in (10, 1000):
        store = opened(tmp_path / str(count))
        for index in range(count):
            write(store, f"a{index}", 64)
        (tmp_path / str(count) / "ec-v1" / f"{key('b').shard:02x}").mkdir(exist_ok=True)
        calls.clear()
        assert write(store, "b", 64) == "stored"
        made.append(dict(calls))
    # The entry before, its temporary file, the lock, the entry after; the folders, and what was made.
    assert made[0] == made[1] == {"open": 4, "lstat": 3, "rename": 1}


def test_an_eviction_looks_at_a_sample_and_serves_several_stores(
    tmp_path: Path, calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = full_store(tmp_path, 600)
    calls.clear()
    for index in range(80):
        assert write(store, f"new{index}", 64) == "stored"
    evictions = calls["unlink"] / 16
    assert 5 <= evictions <= 6, "sixteen go at once"
    assert calls["stat"] <= 128 * evictions
    assert store.folder.counted() == on_disk(store) <= 600 * PAGE


def test_the_least_recently_used_go_and_what_is_used_stays(tmp_path: Path) -> None:
    """A sample is no order: of the older half nearly all go before the younger, and a working set stays whole."""
    store = full_store(tmp_path, 400)
    working = [f"old{index}" for index in random.Random(0).sample(range(400), 40)]
    for index in range(300):
        for name in working if index % 20 == 0 else ():
            assert read(store, name) is not None, "it was used a moment ago"
        assert write(store, f"new{index}", 64) == "stored"
    alive = [read(store, f"old{index}") is not None for index in range(400)]
    assert sum(alive[:200]) < sum(alive[200:])
    assert sum(read(store, name) is not None for name in working) == len(working)


def test_times_in_the_future_are_no_privilege(tmp_path: Path) -> None:
    """A clock was wrong: every entry of a full folder seems to be used in a year."""
    store = full_store(tmp_path, 400)
    for file in published(store):
        os.utime(file.path, (time.time() + 3e7,) * 2)
    hits = 0
    for index in range(200):
        name = f"new{index % 100}"
        if read(store, name) is None:
            assert write(store, name, 64) == "stored"
        else:
            hits += 1
    assert hits == 100, "the working set fits four times"


def test_a_large_entry_takes_the_place_of_many_small_ones(tmp_path: Path) -> None:
    store = full_store(tmp_path, 1500)
    assert write(store, "large", 1000 * PAGE - 1024) == "stored"
    assert read(store, "large") is not None
    assert 300 * PAGE <= store.folder.counted() - 1000 * PAGE == on_disk(store) - 1000 * PAGE <= 500 * PAGE


def test_what_was_removed_by_hand_makes_room_at_once_where_nothing_is_left(tmp_path: Path) -> None:
    store = full_store(tmp_path, 100)
    for file in published(store):
        os.unlink(file.path)
    assert store.folder.counted() == 100 * PAGE
    assert write(store, "a", 64) == "stored" and store.folder.counted() == PAGE


def test_what_killed_processes_had_counted_takes_no_room_from_a_small_folder(tmp_path: Path) -> None:
    store = full_store(tmp_path, 30)
    for index in range(50):
        with store.folder.lock.held() as counts:
            counts.add(index, 5 * PAGE)
        assert write(store, f"new{index}", 64) == "stored"
        assert len(published(store)) == 30
    assert store.folder.counted() == on_disk(store)


def test_stores_go_on_while_shards_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every count ends up right, whatever was stored, replaced, evicted and removed meanwhile."""
    store = full_store(tmp_path, 300)
    monkeypatch.setattr(folder_module, "_SAMPLE", 16)
    for index in range(300):
        if index % 50 == 0:
            with store.folder.lock.held() as counts:
                for shard in range(256):
                    counts.add(shard, 10 * PAGE if index % 100 else -MIB)
            store.folder.upkeep._next = 0.0
        assert write(store, f"new{index}", 64 + 5000 * (index % 3 == 0)) == "stored"
        if index % 5 == 0:
            store.remove(key(f"new{index - 5}"))
            assert write(store, f"new{index}", 9000, force=True) == "stored"
    assert store.folder.upkeep.wait(60)
    store.folder.upkeep.everything()
    assert store.folder.counted() == on_disk(store) <= 300 * PAGE


def test_a_change_while_a_shard_is_counted_spoils_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    write(store, "a", 64)
    shard, real, times = key("a").shard, store.folder.listing.temporaries, []

    def temporaries() -> Iterator[object]:
        yield from real()
        times.append(1)
        if len(times) == 1:
            assert write(store, "a", 5000, force=True) == "stored"

    monkeypatch.setattr(store.folder.listing, "temporaries", temporaries)
    store.folder.upkeep._count(shard)
    assert len(times) == 2 and store.folder.counted() == on_disk(store)


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "rename", "writev"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_device_that_fails_leaves_nothing_behind(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    handles = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, call, fail)
        for index in range(20):
            with pytest.raises(OSError):
                write(store, f"a{index}")
    assert len(os.listdir("/proc/self/fd")) == handles
    assert os.listdir(store.folder.listing.tmp) == [] and store.folder.counted() == 0
    assert write(store, "b") == "stored"


def test_leftovers_and_counting_are_the_background_s_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store does not wait for them; the end of the store's engine ends them."""
    store = FileStore(str(tmp_path), 64 * MIB)
    store.folder.make()
    for index in range(3000):
        Path(store.folder.listing.tmp, f"{'b' * 32}@{index:016x}@1@0@bfloat16.ec.01234567.tmp").touch()
    real = Upkeep.drop_leftover
    monkeypatch.setattr(Upkeep, "drop_leftover", lambda *args: (time.sleep(0.01), real(*args))[1])
    assert write(store, "a") == "stored"
    assert len(os.listdir(store.folder.listing.tmp)) > 2500, "30 s of work"
    began = time.monotonic()
    store.folder.upkeep.stop()
    assert time.monotonic() - began < 1 and store.folder.upkeep.wait(0)
    monkeypatch.undo()
    store.folder.upkeep.everything()
    assert os.listdir(store.folder.listing.tmp) == []


def test_a_process_that_can_start_no_thread_stores_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(tmp_path), 64 * MIB)
    store.folder.make()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert write(store, "a") == write(store, "b") == "stored"
    store.folder.upkeep.stop()
    assert store.folder.counted() == on_disk(store)
