# SPDX-License-Identifier: Apache-2.0
"""How an engine ends: closed, killed, forked; what stays and what goes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.ec_engines import MIB, emptied, engine_builder, entry_files, output, same  # noqa: F401
from vllm_omni_patch.patches.ec_connector.storage import files as store_module


def test_close_drains_leaves_no_thread_and_can_be_repeated(build: Any) -> None:
    before = set(threading.enumerate())
    engine = build(disk=True)
    for index in range(8):
        assert engine.put(str(index), output(1000, 1024, seed=index))
    engine.close()
    engine.close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("ec-")]
    assert left == []
    assert engine.put("x", output(2, 2)) is False and engine.get("0", "cpu") is None and not engine.contains("0")
    engine.discard("0")
    assert engine.flush(1)
    again = build(disk=True)
    assert all(same(again.get(str(index), "cpu"), output(1000, 1024, seed=index)) for index in range(8))


def test_close_gives_up_after_its_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    began, gate = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> str:
        began.set()
        gate.wait(60)
        return "stored"

    monkeypatch.setattr(store_module.FileStore, "write", hang)
    for index in range(5):
        engine.put(str(index), output(4, 4))
    assert began.wait(30)
    engine.close(0.2)
    assert not gate.is_set() and engine.stats.reasons() == {"left at shutdown": 4}
    gate.set()


def test_shared_memory_goes_with_the_last_engine(build: Any, tmp_path: Path) -> None:
    worker, scheduler = build(), build("scheduler")
    assert worker.put("id", output(4, 4)) and worker.flush(5)
    worker.close()
    assert scheduler.contains("id"), "still somebody's"
    scheduler.close()
    assert emptied(tmp_path / "shm")


KILLED = """
import os, signal, sys, torch
from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
engine = ECCacheEngine(ECConfig(shm_path=sys.argv[1], disk_path=sys.argv[2]), ModelIdentity("m", engine_id="dead"),
                       role="worker", dtype=torch.bfloat16)
engine.put("id", torch.ones(64, 64, dtype=torch.bfloat16))
engine.flush(5)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
engine.put("late", torch.ones(64, 64, dtype=torch.bfloat16))
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_after_a_process_ended_disk_stays_and_shared_memory_is_cleaned(how: str, build: Any, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir(exist_ok=True)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "shm"), str(tmp_path / "disk"), how]
    assert subprocess.run(command, timeout=120).returncode == (-9 if how == "kill" else 0)
    engine = build(disk=True)
    assert same(engine.get("id", "cpu"), torch.ones(64, 64, dtype=torch.bfloat16))
    assert (engine.get("late", "cpu") is not None) == (how == "exit"), "an exit without close drains"
    assert emptied(tmp_path / "shm", but=engine)


def test_a_forked_child_that_ends_takes_nothing_along(build: Any) -> None:
    engine = build()
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            declined = engine.put("x", output(2, 2)) is False
            engine.close(1.0)
            code = 0 if declined else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(engine.get("id", "cpu"), output(4, 4))
    assert engine.put("y", output(2, 2)) and engine.flush(5)
