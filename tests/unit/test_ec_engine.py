# SPDX-License-Identifier: Apache-2.0
"""The engine: what goes in comes out, in every process, and nothing else ever does."""

from __future__ import annotations

import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.ec_engines import emptied, engine_builder, entry_files, output, same  # noqa: F401
from vllm_omni_patch.patches.ec_connector.cache.model import ModelIdentity


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (729, 1152), (3, 7), (17, 256), (1, 1), (300, 1024)])
def test_every_engine_finds_what_one_stored(shape: tuple[int, int], disk: bool, build: Any) -> None:
    worker, scheduler = build(disk=disk), build("scheduler", disk=disk)
    tensor = output(*shape)
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    assert worker.put("id", tensor) and worker.flush(5)
    assert scheduler.contains("id") and scheduler.contains("id", shape[0])
    assert not scheduler.contains("id", shape[0] + 1)
    assert same(worker.get("id", "cpu", shape[0]), tensor)
    assert worker.get("id", "cpu", shape[0] + 1) is None


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"],
)
def test_dtypes_come_back_as_they_went(dtype: str, build: Any) -> None:
    engine = build()
    tensor = output(33, 65, dtype=torch.float32).to(getattr(torch, dtype))
    assert engine.put("id", tensor) and engine.flush(5)
    assert same(engine.get("id", "cpu"), tensor)


def test_views_are_stored_by_value(build: Any) -> None:
    engine = build()
    batch = output(10, 64)
    views = {"rows": batch[2:5], "columns": batch[:, 3:40], "turned": batch.t(), "strided": batch[::3, ::2]}
    for name, view in views.items():
        assert engine.put(name, view)
    expected = {name: view.clone() for name, view in views.items()}
    batch.zero_()
    assert engine.flush(5)
    for name, value in expected.items():
        assert same(engine.get(name, "cpu"), value), name


def test_a_gradient_is_no_hindrance(build: Any) -> None:
    engine = build()
    tensor = output(4, 4).requires_grad_()
    assert engine.put("id", tensor) and engine.flush(5)
    assert same(engine.get("id", "cpu"), tensor.detach())


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(0, 256),
        torch.zeros(3, 0),
        torch.zeros(5),
        torch.zeros(2, 3, 4),
        torch.tensor(1.0),
        torch.zeros(3, 4, dtype=torch.int8),
        torch.zeros(3, 4, dtype=torch.bool),
        torch.zeros(3, 4, dtype=torch.complex64),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4).to_sparse(),
        [torch.zeros(3, 4)],
        None,
        "text",
    ],
    ids=lambda value: f"{type(value).__name__}{getattr(value, 'shape', '')}{getattr(value, 'dtype', '')}",
)
def test_what_cannot_be_stored_is_declined_and_counted(value: Any, build: Any, tmp_path: Path) -> None:
    engine = build()
    assert engine.put("id", value) is False
    assert engine.stats.snapshot().dropped == 1 and sum(engine.stats.reasons().values()) == 1
    assert entry_files(tmp_path) == []


def test_bad_ids_are_declined(build: Any) -> None:
    engine = build()
    for bad in ("", None, 7, b"x", "x" * 100_000, "renderer0-mm-1-image-0"):
        assert engine.put(bad, output(2, 2)) is False
        assert engine.contains(bad) is False and engine.get(bad, "cpu") is None
        engine.discard(bad)


@pytest.mark.parametrize("mm_hash", ["../../x", "/abs/olute", "a\0b", "\ud800lone", "ü" * 10_000, "." * 300])
def test_any_other_id_works(mm_hash: str, build: Any, tmp_path: Path) -> None:
    engine = build(disk=True)
    assert engine.put(mm_hash, output(2, 2)) and engine.flush(5)
    assert engine.contains(mm_hash) and same(engine.get(mm_hash, "cpu"), output(2, 2))
    assert {path.name for path in tmp_path.iterdir()} == {"shm", "disk"}


def test_a_result_aliases_nothing(build: Any) -> None:
    engine = build()
    first = output(64, 64)
    engine.put("0", first)
    assert engine.flush(5)
    kept = engine.get("0", "cpu")
    for index in range(1, 50):
        engine.put(str(index), output(64, 64, seed=index))
    assert engine.flush(5)
    assert same(kept, first)
    kept.zero_()
    assert same(engine.get("0", "cpu"), first)


def test_restart_finds_what_was_stored_on_disk_and_writes_nothing_again(build: Any, tmp_path: Path) -> None:
    tensors = {f"{shape}{dtype}": output(*shape, dtype=dtype) for shape in ((1, 64), (729, 1152), (3, 7))
               for dtype in (torch.bfloat16, torch.float32)}  # fmt: skip
    engine = build(disk=True)
    for name, tensor in tensors.items():
        assert engine.put(name, tensor)
    engine.close()
    times = {path: path.stat().st_mtime_ns for path in entry_files(tmp_path)}
    assert len(times) == len(tensors)
    again = build(disk=True, identity=ModelIdentity("m", engine_id="the next run"), touch_seconds=60.0)
    for name, tensor in tensors.items():
        assert same(again.get(name, "cpu"), tensor)
        assert again.put(name, tensor)
    assert again.flush(5)
    assert {path: path.stat().st_mtime_ns for path in entry_files(tmp_path)} == times
    assert again.stats.snapshot().duplicates == len(tensors) and again.stats.snapshot().stored == 0


@pytest.mark.parametrize(
    "other",
    [
        ModelIdentity("m2", engine_id="engine"),
        ModelIdentity("m", revision="r", engine_id="engine"),
        ModelIdentity("m", weights="files:1:x", engine_id="engine"),
        ModelIdentity("m", facts={"vllm": "0.33.0"}, engine_id="engine"),
    ],
    ids=["name", "revision", "weights", "vllm"],
)
def test_another_model_is_never_served(other: ModelIdentity, build: Any) -> None:
    build_one, build_two = build(disk=True), build(disk=True, identity=other)
    assert build_one.put("id", output(4, 4)) and build_one.flush(5)
    assert not build_two.contains("id") and build_two.get("id", "cpu") is None
    assert build_two.put("id", output(4, 4, seed=1)) and build_two.flush(5)
    assert same(build_one.get("id", "cpu"), output(4, 4)), "both live side by side"
    assert same(build_two.get("id", "cpu"), output(4, 4, seed=1))


def test_another_model_dtype_salt_or_namespace_is_never_served(build: Any) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    for other in (build(disk=True, dtype=torch.float16), build(disk=True, salt="t"), build(disk=True, namespace="n")):
        assert not other.contains("id") and other.get("id", "cpu") is None


def test_equal_namespaces_share_over_mount_points(build: Any) -> None:
    here = build(disk=True, namespace="prod", identity=ModelIdentity("/mnt/a", weights="x", engine_id="1"))
    there = build(disk=True, namespace="prod", identity=ModelIdentity("/mnt/b", weights="y", engine_id="2"))
    assert here.put("id", output(4, 4)) and here.flush(5)
    assert same(there.get("id", "cpu"), output(4, 4))


def test_a_64_bit_collision_is_a_miss(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_patch.patches.ec_connector.cache.engine.stable_u64", lambda mm_hash: 7)
    engine = build(disk=True)
    assert engine.put("a", output(4, 4)) and engine.flush(5)
    assert not engine.contains("b") and engine.get("b", "cpu") is None
    assert engine.put("b", output(4, 4, seed=1)) and engine.flush(5)
    assert same(engine.get("b", "cpu"), output(4, 4, seed=1)) and engine.get("a", "cpu") is None


def test_reused_id_with_another_length_is_encoded_again_and_replaced(build: Any) -> None:
    engine = build()
    assert engine.put("img-1", output(138, 64)) and engine.flush(5)
    assert not engine.contains("img-1", 638) and engine.get("img-1", "cpu", 638) is None
    assert engine.put("img-1", output(638, 64)) and engine.flush(5)
    assert same(engine.get("img-1", "cpu", 638), output(638, 64))


def test_a_new_generation_hides_what_was_stored_in_all_processes_and_ends_with_the_run(build: Any) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    scheduler.new_generation()
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    worker.new_generation()
    assert worker.put("id", output(4, 4, seed=1)) and worker.flush(5)
    assert scheduler.contains("id") and same(worker.get("id", "cpu"), output(4, 4, seed=1))
    worker.close()
    scheduler.close()
    again = build(disk=True)
    assert same(again.get("id", "cpu"), output(4, 4)), "the next run loads the weights from the model again"


def test_a_generation_that_cannot_be_written_down_still_hides_what_was_stored(build: Any) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    worker.new_generation()
    assert worker.put("id", output(4, 4)) and worker.flush(5) and scheduler.contains("id")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as when the memory is full
    try:
        worker.new_generation()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert worker.get("id", "cpu") is None, "output of the weights of before"
    assert worker.put("id", output(4, 4, seed=1)) and worker.flush(5)
    assert same(worker.get("id", "cpu"), output(4, 4, seed=1))
    assert not list(Path(worker._run_folder.path).glob("generation.*"))
    scheduler.new_generation()
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None, (
        "a generation that others began later counts"
    )


@pytest.mark.parametrize("disk", [False, True])
def test_a_removed_shared_folder_brings_no_earlier_generation_back(build: Any, disk: bool) -> None:
    worker, scheduler = build(disk=disk), build("scheduler", disk=disk)
    assert worker.put("id", output(4, 4)) and worker.flush(5) and scheduler.contains("id")
    worker.new_generation()
    shutil.rmtree(worker._run_folder.path)
    assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    deadline = time.monotonic() + 20
    while not scheduler.contains("id") and time.monotonic() < deadline:  # the first store may fail with the folder
        worker.put("id", output(4, 4, seed=1))
        worker.flush(5)
        time.sleep(0.05)
    assert scheduler.contains("id") and same(scheduler.get("id", "cpu"), output(4, 4, seed=1))
    assert worker._run_folder.generation() == scheduler._run_folder.generation() != ""
    worker._run_folder.blocklist("some/entry")
    assert scheduler._run_folder.blocklisted("some/entry")
    files = [path for path in Path(worker._run_folder.path).rglob("*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)
    worker.close()
    assert scheduler.contains("id")
    scheduler.close()
    assert emptied(worker._run_folder.parent)


def test_a_generation_that_cannot_be_read_is_a_miss(build: Any) -> None:
    worker, scheduler = build(disk=True), build("scheduler", disk=True)
    assert worker.put("id", output(4, 4)) and worker.flush(5) and scheduler.contains("id")
    worker.new_generation()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError):
            scheduler._run_folder.generation()
        assert not scheduler.contains("id") and worker.get("id", "cpu") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not scheduler.contains("id")
