# SPDX-License-Identifier: Apache-2.0
"""Entries on their way into sealed memory, and from there into other processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from support.ec_requests import available, engine, request
from vllm_omni_patch.patches.ec_connector.cache.memory import open_place
from vllm_omni_patch.patches.ec_connector.vllm.items import ItemKeys
from vllm_omni_patch.patches.ec_connector.vllm.scheduler import SchedulerSide


def keep(store: Any, key: str, rows: int = 32, columns: int = 64) -> torch.Tensor:
    tensor = torch.randn(rows, columns)
    assert store.put(key, tensor) and store.flush(20)
    return tensor


def fetched(store: Any, key: str, rows: int | None = 32) -> Any:
    fetch = store.fetch(key, rows)
    assert fetch.settled(20)
    return fetch


def test_what_is_fetched_is_mapped_and_cannot_be_changed(store: Any) -> None:
    tensor = keep(store, "a")
    place = fetched(store, "a").memory.place
    mapped = store.open("a", place, "cpu")
    assert torch.equal(mapped, tensor)
    mapped.zero_()  # pages of its own
    assert torch.equal(store.open("a", place, "cpu"), tensor)
    handle = os.open(f"/proc/{place.pid}/fd/{place.handle}", os.O_RDWR)
    try:
        for change in (
            lambda: os.ftruncate(handle, 0),
            lambda: os.write(handle, b"x"),
            lambda: os.ftruncate(handle, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(handle)


def test_another_process_maps_it(store: Any) -> None:
    tensor = keep(store, "a")
    place = fetched(store, "a").memory.place
    code = (
        "import pickle, sys; from vllm_omni_patch.patches.ec_connector.cache.memory import open_place\n"
        "sys.stdout.buffer.write(pickle.dumps(open_place(pickle.load(sys.stdin.buffer)).clone()))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(place), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(pickle.loads(done.stdout), tensor)


def test_a_place_that_is_gone_or_another_file_is_an_error(store: Any) -> None:
    keep(store, "a")
    place = fetched(store, "a").memory.place
    for other in (
        replace(place, host="another host"),
        replace(place, handle=1 << 20),
        replace(place, inode=place.inode + 1),
        replace(place, size=place.size // 2),
    ):
        with pytest.raises(OSError):
            open_place(other)
    with open(__file__, "rb") as file:  # not sealed
        status = os.fstat(file.fileno())
        unsealed = replace(place, handle=file.fileno(), device=status.st_dev, inode=status.st_ino, size=status.st_size)
        with pytest.raises(OSError):
            open_place(unsealed)


def test_a_process_that_cannot_reach_the_memory_loads_the_entry_itself(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = keep(store, "a")
    away = replace(fetched(store, "a").memory.place, host="another host")
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert torch.equal(store.open("a", away, "cpu"), tensor)
    assert caplog.text.count("cannot map what the scheduler has loaded") == 1


def test_another_item_or_other_weights_are_not_opened(store: Any) -> None:
    keep(store, "a")
    place = fetched(store, "a").memory.place
    assert store.open("b", place, "cpu") is None
    store.new_generation()
    assert store.open("a", place, "cpu") is None
    assert not store.serves("a", fetched(store, "a"))


def test_a_damaged_entry_is_a_miss_and_removed(store: Any, tmp_path: Path) -> None:
    keep(store, "a")
    (path,) = tmp_path.glob("disk/**/*.ec")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fetched(store, "a").memory is None
    assert not path.exists() and store.stats.snapshot().bad_entries == 1


def test_memory_is_bounded_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    made = engine(tmp_path, cpu_bytes=16 << 20)  # 4 MiB for what is fetched
    try:
        for number in range(12):
            keep(made, str(number), 1024, 256)  # 1 MiB
        for number in range(12):
            assert fetched(made, str(number), 1024).memory is not None
        fetcher = made._fetcher
        assert fetcher is not None and fetcher._used <= 4 << 20
        held = [fetched(made, str(number), 1024) for number in range(4)]
        assert fetched(made, "11", 1024).memory is None, "requests hold all of it: a miss, after a short wait"
        held.clear()
        assert fetched(made, "11", 1024).memory is not None
    finally:
        made.close()


def test_a_request_waits_for_its_items_and_for_no_others(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys())
    keep(store, "a")
    asked = request("r1", ("a", 32), ("nowhere", 32))
    assert available(side, asked)
    assert side.has_item("a") and not side.has_item("nowhere")
    lookups = store.stats.snapshot().lookups
    for _ in range(5):
        assert side.ensure_available(asked, 0)
    assert store.stats.snapshot().lookups == lookups, "asked once for each item"
    behind = request("r2", ("a", 32))
    assert side.ensure_available(behind, 100), "its tokens are computed"
    assert store.stats.snapshot().lookups == lookups


def test_storage_that_hangs_costs_the_scheduler_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """System calls on the disk's files do not come back; 2,000 steps of the scheduler go on meanwhile."""
    made = engine(tmp_path, load_deadline=0.4)
    side = SchedulerSide(made, ItemKeys())
    for number in range(8):
        keep(made, str(number))
    held = threading.Event()
    real = os.open

    def hanging(path: Any, *more: Any, **named: Any) -> int:
        if str(path).startswith(str(tmp_path / "disk")) and str(path).endswith(".ec"):
            assert threading.current_thread().name != "MainThread"
            held.wait()
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", hanging)
    try:
        took, answers = [], {}
        for step in range(2000):
            asked = request(f"r{step % 40}", (str(step % 8), 32))
            began = time.perf_counter()
            answers[asked.request_id] = side.ensure_available(asked, 0)
            side.plan()
            took.append(time.perf_counter() - began)
            time.sleep(0.0005)
        took.sort()
        # The first ask of each request may wait half a millisecond; a busy machine interrupts others.
        assert took[int(len(took) * 0.95)] < 0.001
        assert all(answers.values()), "after the deadline each is a miss"
        assert not side.has_item("1")
        began = time.perf_counter()
        assert side.ensure_available(request("late", ("5", 32)), 0) and not side.has_item("5")
        assert time.perf_counter() - began < 0.1, "while it hangs, nothing is waited for"
        assert caplog.text.count("Encoder cache reads from disk") == 1
        held.set()
        monkeypatch.undo()
        time.sleep(0.1)
        assert fetched(made, "3").memory is not None, "it resumes by itself"
    finally:
        held.set()
        made.close()
