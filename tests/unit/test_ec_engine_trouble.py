# SPDX-License-Identifier: Apache-2.0
"""The engine in trouble: damage, failing storage, full queues."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.ec_engines import MIB, engine_builder, entry_files, output, same  # noqa: F401
from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ModelIdentity
from vllm_omni_patch.patches.ec_connector.storage import files as store_module


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "header", "unreadable"])
def test_a_promise_that_cannot_be_kept_is_a_miss_and_not_repeated(
    damage: str, disk: bool, build: Any, tmp_path: Path
) -> None:
    worker, scheduler = build(disk=disk), build("scheduler", disk=disk)
    tensor = output(64, 64)
    assert worker.put("id", tensor) and worker.flush(5)
    assert scheduler.contains("id", 64)
    (path,) = entry_files(tmp_path)
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "unreadable":
        path.unlink()
        path.mkdir()
    else:
        data = bytearray(path.read_bytes())
        data[30 if damage == "header" else -1] ^= 1
        path.write_bytes(data)
    assert worker.get("id", "cpu", 64) is None
    assert not scheduler.contains("id", 64) and not worker.contains("id", 64)
    if damage == "unreadable":
        path.rmdir()
    assert worker.put("id", tensor) and worker.flush(5)
    assert scheduler.contains("id", 64) and same(worker.get("id", "cpu", 64), tensor)


def test_discard_forgets_everywhere(build: Any, tmp_path: Path) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    worker.discard("id")
    assert not scheduler.contains("id") and entry_files(tmp_path) == []
    worker.discard("never stored")


def test_what_cannot_be_removed_is_blocklisted_until_put_again(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    real = os.unlink

    def read_only(path: Any, **options: Any) -> None:
        if str(path).endswith(".ec"):
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, **options)

    monkeypatch.setattr("vllm_omni_patch.patches.ec_connector.storage.folder.os.unlink", read_only)
    worker.discard("id")
    assert len(entry_files(tmp_path)) == 1
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    monkeypatch.undo()
    assert worker.put("id", output(4, 4, seed=1)) and worker.flush(5)
    assert scheduler.contains("id") and same(worker.get("id", "cpu"), output(4, 4, seed=1))


@pytest.mark.parametrize("damage", ["header", "payload"])
@pytest.mark.parametrize("shm", ["works", "is full"])
def test_a_damaged_entry_on_a_read_only_disk_is_said_once_and_found_again_when_encoded_again(
    damage: str,
    shm: str,
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    (path,) = entry_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[20 if damage == "header" else -1] ^= 1
    path.write_bytes(data)

    opens, makes = os.open, os.mkdir

    def refusing(real: Any) -> Any:
        def call(where: Any, *args: Any, **more: Any) -> Any:
            read_only = str(where).startswith(str(tmp_path / "disk")) and (real is not opens or args[0] & os.O_RDWR)
            full = shm == "is full" and "blocklisted" in str(where) and real in (opens, makes)
            if read_only or full:
                raise OSError(errno.EROFS if read_only else errno.ENOSPC, "refused")
            return real(where, *args, **more)

        return call

    for name in ("open", "unlink", "rename", "mkdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for _ in range(5):
        assert worker.get("id", "cpu") is None
        # Without a list that all processes share, each finds a damaged payload by itself.
        assert not scheduler.contains("id") or (shm, damage) == ("is full", "payload")
    assert caplog.text.count("is unusable") == 1 and worker.stats.snapshot().bad_entries == 1
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    for _ in range(5):
        assert scheduler.contains("id") and same(worker.get("id", "cpu"), output(4, 4))
    assert caplog.text.count("is unusable") == 1


def test_disk_trouble_pauses_writes_with_one_warning_and_they_resume(
    build: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(disk=True, retry_seconds=0.2)
    full = True
    real = os.writev

    def writev(handle: int, parts: Any) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, parts)

    monkeypatch.setattr(store_module.os, "writev", writev)
    with caplog.at_level(logging.INFO, "vllm.omni_patch.ec"):
        for index in range(5):
            engine.put(f"a{index}", output(4, 4))
        assert engine.flush(5)
        assert [r.levelname for r in caplog.records if "disk" in r.message and "paused" in r.message] == ["WARNING"]
        assert engine.stats.snapshot().dropped == 5
        full = False
        deadline = time.monotonic() + 10
        while not engine.contains("b"):
            engine.put("b", output(4, 4))
            engine.flush(5)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert any("resumed" in record.message for record in caplog.records)
    assert same(engine.get("b", "cpu"), output(4, 4))


def test_while_the_disk_fails_shared_memory_takes_the_entries(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    real = os.open

    def refuse(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if str(path).startswith(str(tmp_path / "disk")) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr("vllm_omni_patch.patches.ec_connector.storage.folder.os.open", refuse)
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    monkeypatch.undo()
    assert scheduler.contains("id") and same(worker.get("id", "cpu"), output(4, 4))


def test_a_folder_that_cannot_be_made_never_hurts(build: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = build(disk_path=str(tmp_path / "file" / "below"))
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    assert same(worker.get("id", "cpu"), output(4, 4)), "kept in shared memory meanwhile"


def test_a_vanished_folder_is_made_again(build: Any, tmp_path: Path) -> None:
    import shutil

    engine = build(disk=True)
    assert engine.put("a", output(4, 4)) and engine.flush(5)
    shutil.rmtree(tmp_path / "disk")
    deadline = time.monotonic() + 10
    while not list((tmp_path / "disk").rglob("*.ec")):
        engine.put(f"x{time.monotonic()}", output(4, 4))
        engine.flush(5)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_folder_at_an_address_costs_that_entry_only(build: Any, tmp_path: Path) -> None:
    engine = build()
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    (path,) = entry_files(tmp_path)
    path.unlink()
    path.mkdir()
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    assert engine.get("id", "cpu") is None
    assert engine.stats.reasons() == {"address taken": 1}
    assert engine.put("other", output(4, 4)) and engine.flush(5)
    assert same(engine.get("other", "cpu"), output(4, 4))


def test_pool_is_bounded_and_given_back(build: Any, tmp_path: Path) -> None:
    """Scenario: 8 MiB, entries of 3 MiB, 200 stores and loads, then one of 9 MiB."""
    engine = build(cpu_bytes=8 * MIB)
    tensor = output(1536, 1024)
    for index in range(200):
        assert engine.put(str(index), tensor) and engine.flush(5)
        assert same(engine.get(str(index), "cpu"), tensor)
        assert sum(path.stat().st_size for path in entry_files(tmp_path)) <= 8 * MIB
    assert engine._staging is not None and engine._staging.take(engine._staging.size) is not None, "all came back"
    assert engine.put("large", output(4608, 1024)) is False
    assert engine.stats.reasons() == {"too large": 1}


def writer_at_a_gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every write of the store waits until the event is set."""
    gate = threading.Event()
    real = store_module.FileStore.write

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        gate.wait(10)
        return real(self, *args, **options)

    monkeypatch.setattr(store_module.FileStore, "write", slow)
    return gate


def test_a_full_queue_drops_and_counts(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(queue_entries=2)
    gate = writer_at_a_gate(monkeypatch)
    results = [engine.put(str(index), output(4, 4)) for index in range(10)]
    gate.set()
    assert engine.flush(5)
    kept = results.count(True)
    assert 2 <= kept <= 3 and engine.stats.reasons() == {"queue full": 10 - kept}
    assert [engine.contains(str(index)) for index in range(10)] == results
    assert engine.put("later", output(4, 4)) and engine.flush(5)


def test_staging_full_drops_and_comes_back(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(staging_bytes=MIB)
    gate = writer_at_a_gate(monkeypatch)
    results = [engine.put(str(index), output(150, 1024, seed=index)) for index in range(6)]
    assert results == [True, True, True, False, False, False]
    gate.set()
    assert engine.flush(5)
    for index in range(20):
        assert engine.put(f"more{index}", output(150, 1024, seed=index)) and (index % 2 or engine.flush(5))
    assert engine.flush(5)
    for index in range(20):
        assert same(engine.get(f"more{index}", "cpu"), output(150, 1024, seed=index))


def test_the_same_output_put_twice_is_written_once(build: Any) -> None:
    engine = build()
    for _ in range(20):
        assert engine.put("id", output(200, 1024))
    assert engine.flush(5)
    facts = engine.stats.snapshot()
    assert facts.stored == 1 and facts.duplicates == 19


def test_ranks_that_put_at_once_make_one_entry(build: Any, tmp_path: Path) -> None:
    ranks = [build(disk=True) for _ in range(4)]
    barrier = threading.Barrier(4)
    tensor = output(2000, 1024)

    def rank(engine: ECCacheEngine) -> None:
        barrier.wait()
        assert engine.put("id", tensor)
        assert engine.flush(10)

    threads = [threading.Thread(target=rank, args=(engine,)) for engine in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entry_files(tmp_path)) == 1
    facts = [engine.stats.snapshot() for engine in ranks]
    assert sum(fact.stored for fact in facts) == 1 and sum(fact.duplicates for fact in facts) == 3
    assert all(same(engine.get("id", "cpu"), tensor) for engine in ranks)


def test_two_engines_with_default_settings_do_not_meet(build: Any) -> None:
    one = build(identity=ModelIdentity("m", engine_id="one"))
    two = build(identity=ModelIdentity("m", engine_id="two"))
    assert one.put("id", output(4, 4)) and one.flush(5)
    assert not two.contains("id")
    nameless = [build(identity=ModelIdentity("m")) for _ in range(2)]
    assert nameless[0].put("id", output(4, 4)) and nameless[0].flush(5)
    assert not nameless[1].contains("id")


def test_the_switch_turns_it_off(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_EC_DISABLE", "1")
    engine = build()
    assert engine.put("id", output(4, 4)) is False and not engine.contains("id")
    assert entry_files(tmp_path) == []


def test_counters_and_log_line(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    from vllm_omni_patch import metrics

    before = metrics.values()
    engine = build(stats_seconds=0.0001)
    with caplog.at_level(logging.INFO, "vllm.omni_patch.ec"):
        engine.get("id", "cpu")
        engine.put("id", output(4, 4))
        engine.flush(5)
        engine.contains("id")
        engine.get("id", "cpu")
        engine.stats.fallback()
        engine.close()
    facts = engine.stats.snapshot()
    assert (facts.hits, facts.misses, facts.stored, facts.lookups, facts.lookup_hits) == (1, 1, 1, 1, 1)
    assert facts.bytes_loaded == facts.bytes_stored == 32 and facts.load_seconds > 0 and facts.fallbacks == 1
    grown = {name[0]: value - before.get(name, 0) for name, value in metrics.values().items()}
    assert grown["ec_hits_total"] == 1 and grown["ec_stored_total"] == 1 and grown["ec_bytes_loaded_total"] == 32
    assert "1 hits, 1 misses, 1 stored" in caplog.text


def test_readers_survive_a_cleaner(build: Any, tmp_path: Path) -> None:
    engine = build(disk=True)
    tensors = {str(index): output(200, 512, seed=index) for index in range(20)}
    for name, tensor in tensors.items():
        engine.put(name, tensor)
    assert engine.flush(10)
    wrong: list[str] = []
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            for name, tensor in tensors.items():
                found = engine.get(name, "cpu")
                if found is not None and not same(found, tensor):
                    wrong.append(name)

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for path in entry_files(tmp_path)[::2]:
        path.unlink()
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and sum(engine.get(name, "cpu") is not None for name in tensors) == 10


def test_a_file_that_cannot_be_read_is_not_offered_again(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_module.os, "preadv", broken)
    assert scheduler.contains("id") and worker.get("id", "cpu") is None
    monkeypatch.undo()
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    assert scheduler.contains("id") and same(worker.get("id", "cpu"), output(4, 4))


def test_running_out_of_files_blames_no_entry(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)

    def broken(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(store_module.os, "preadv", broken)
    assert engine.get("id", "cpu") is None
    monkeypatch.undo()
    assert same(engine.get("id", "cpu"), output(4, 4))
