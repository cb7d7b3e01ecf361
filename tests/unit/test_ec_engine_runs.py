# SPDX-License-Identifier: Apache-2.0
"""The engine in one run: unknown weights, forked children, closing, a generation that cannot be read."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.ec_engines import emptied, engine_builder, output, same  # noqa: F401
from vllm_omni_patch.patches.ec_connector.cache.model import ModelIdentity


def test_entries_of_unknown_weights_serve_one_run(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    first, second = ModelIdentity("s3://m", weights="run:1", engine_id="1"), ModelIdentity("s3://m", weights="run:2")
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        worker, scheduler = build(identity=first, disk=True), build("scheduler", identity=first, disk=True)
        assert worker.put("id", output(4, 4)) and worker.flush(5) and scheduler.contains("id")
        assert len(caplog.records) == 2 and "ec_namespace" in caplog.text and "s3://m" in caplog.text
        assert not build(identity=second, disk=True).contains("id")
        caplog.clear()
        named = [build(identity=each, disk=True, namespace="prod") for each in (first, second)]
        assert named[0].put("id", output(4, 4)) and named[0].flush(5) and named[1].contains("id")
        assert not caplog.records


def test_where_nothing_names_the_run_nothing_outlives_it(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        engine = build(identity=ModelIdentity("s3://m", weights="run:"), disk=True, remote_url=f"fs://{tmp_path}/r")
    assert "ec_namespace" in caplog.text and engine.config.disk_path == "" and not engine.config.has_remote
    assert engine.put("id", output(4, 4)) and engine.flush(5) and engine.contains("id")
    assert not (tmp_path / "disk").exists()


def test_in_a_forked_child_everything_is_a_miss_whatever_lock_was_held(build: Any) -> None:
    engine = build()
    assert engine.put("id", output(4, 4)) and engine.flush(5) and engine.contains("id")
    with engine.stats._lock, engine._lock, engine._writer._condition, engine._loads._buffer.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                missed = engine.get("id", "cpu") is None and not engine.contains("id")
                declined = not engine.put("x", output(2, 2)) and engine.flush(5)
                engine.discard("id")
                counted = engine.stats.snapshot().stored == 1 and engine.stats.reasons() == {}
                engine.stats.tick(last=True)
                engine.close()
                os._exit(0 if missed and declined and counted else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(engine.get("id", "cpu"), output(4, 4))


def test_a_put_during_close_starts_no_writer(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    engine = build()
    real = engine._storing

    def closed_meanwhile() -> Any:
        engine.close()
        return real()

    monkeypatch.setattr(engine, "_storing", closed_meanwhile)
    assert engine.put("id", output(4, 4)) is False and engine.stats.reasons() == {"closed": 1}
    assert engine._writer is None and threading.active_count() == before


@pytest.mark.parametrize("timeout", [None, 1e300])
def test_close_with_a_time_beyond_all_bounds(timeout: float | None, build: Any, tmp_path: Path) -> None:
    engine = build(close_deadline=1e300)
    assert engine.put("id", output(4, 4)) and engine.flush(1e300)
    engine.close(timeout)
    assert not [thread for thread in threading.enumerate() if thread.name == "ec-writer"]
    assert emptied(engine._run_folder.parent)


def test_close_goes_on_after_a_part_that_fails(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    assert engine.put("id", output(4, 4))
    writer = engine._writer

    def fail(timeout: float) -> bool:
        raise ValueError("no")

    monkeypatch.setattr(writer, "flush", fail)
    with pytest.raises(ValueError):
        engine.close()
    assert emptied(engine._run_folder.parent)
    writer._thread.join(10)
    assert not writer._thread.is_alive()


def test_a_generation_that_cannot_be_read_is_a_miss_and_said_once(
    build: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)

    def unreadable() -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with caplog.at_level(logging.DEBUG, "vllm.omni_patch.ec"), monkeypatch.context() as patch:
        patch.setattr(engine._run_folder, "generation", unreadable)
        for _ in range(5):
            assert not engine.contains("id") and engine.get("id", "cpu") is None
            assert engine.put("other", output(4, 4)) is False
            engine.discard("id")
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert engine.stats.reasons() == {"generation unknown": 5}
    assert engine.contains("id") and same(engine.get("id", "cpu"), output(4, 4))
    assert engine.put("other", output(4, 4)) and engine.put("", output(4, 4)) is False
    assert engine.stats.reasons() == {"generation unknown": 5, "id not storable": 1}


def test_a_store_that_outlives_close_leaves_nothing_in_memory(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    folder = engine._tiers.local[-1].store.folder
    reached, go = threading.Event(), threading.Event()
    real = folder.publish

    def publish(*arguments: Any) -> None:
        reached.set()
        assert go.wait(20)
        real(*arguments)

    monkeypatch.setattr(folder, "publish", publish)
    assert engine.put("id", output(4, 4)) and reached.wait(20)
    engine.close(0.0)
    go.set()
    engine._writer._thread.join(20)
    assert emptied(engine._run_folder.parent)
