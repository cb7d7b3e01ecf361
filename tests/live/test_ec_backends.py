# SPDX-License-Identifier: Apache-2.0
"""The engine over real remote backends: redis, the LMCache server, and a shared folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ModelIdentity
from vllm_omni_patch.patches.ec_connector.config import MIB, ECConfig
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry, bytes_of
from vllm_omni_patch.patches.ec_connector.storage.key import Key

SHAPES = ((1, 64), (32, 64), (729, 1152), (4096, 3000))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


@contextlib.contextmanager
def redis(port: int) -> Iterator[subprocess.Popen[bytes]]:
    with running(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""], port) as process:
        yield process


@contextlib.contextmanager
def lmcache_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    with running([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"], port) as process:
        yield process


SERVERS = {"redis": redis, "lm": lmcache_server}


def need(kind: str) -> None:
    if kind == "redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")


@pytest.fixture(params=["redis", "lm", "fs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "fs":
        yield f"fs://any:0{tmp_path}/shared"
        return
    need(request.param)
    port = free_port()
    with SERVERS[request.param](port):
        yield f"{request.param}://127.0.0.1:{port}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Any]:
    engines: list[ECCacheEngine] = []

    def make(url: str, host: str, role: str = "worker", wait: bool = True, **config: Any) -> ECCacheEngine:
        (tmp_path / host).mkdir(exist_ok=True)
        values = {"lookup_deadline": 5.0, "load_deadline": 20.0, "store_deadline": 20.0, "retry_seconds": 0.1, **config}
        engine = ECCacheEngine(
            ECConfig(remote_url=url, shm_path=str(tmp_path / host), **values),
            ModelIdentity("org/a-model-with-a-very-long-name-" + "x" * 200, engine_id=host),
            role=role,  # type: ignore[arg-type]
            dtype=torch.bfloat16,
        )
        engines.append(engine)
        assert not wait or engine._tiers.remote[0].wait_ready(120)
        return engine

    yield make
    for engine in engines:
        engine.close(5)


def output(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(torch.bfloat16)


def until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_one_host_stores_another_finds(url: str, hosts: Any) -> None:
    one = hosts(url, "one")
    for shape in SHAPES:
        assert not one.contains(str(shape)) and one.get(str(shape), "cpu") is None
        assert one.put(str(shape), output(shape))
    assert one.flush(60)
    assert one.stats.snapshot().remote_failures == 0
    scheduler, worker = hosts(url, "two", "scheduler"), hosts(url, "two")
    for shape in SHAPES:
        assert scheduler.contains(str(shape), shape[0]), shape
        assert not scheduler.contains(str(shape), shape[0] + 1)
        found = worker.get(str(shape), "cpu", shape[0])
        assert found is not None and torch.equal(found, output(shape)), shape
    assert worker.stats.snapshot().remote_failures == 0
    # Replaced under the same id, over the network too. A put while the local copy is being written is a duplicate.
    assert worker.flush(60)
    assert worker.put("(1, 64)", output((5, 64))) and worker.flush(60)
    third = hosts(url, "three")
    found = third.get("(1, 64)", "cpu", 5)
    assert found is not None and torch.equal(found, output((5, 64)))


def test_another_model_on_the_same_server_is_never_served(url: str, hosts: Any, tmp_path: Path) -> None:
    one = hosts(url, "one")
    assert one.put("id", output((4, 64))) and one.flush(60)
    other = hosts(url, "two", salt="tenant")
    assert not other.contains("id") and other.get("id", "cpu") is None


def test_close_is_quick_and_leaves_no_thread(url: str, hosts: Any) -> None:
    before = set(threading.enumerate())
    engine = hosts(url, "one")
    assert engine.put("id", output((32, 64))) and engine.flush(60)
    began = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - began < 10
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith(("ec-", "storage-man"))])
    assert not engine.contains("id")


@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_what_was_loaded_leaves_the_pool(kind: str, hosts: Any) -> None:
    """Three times its size in and out; and an entry that another host replaced is the new one."""
    need(kind)
    port = free_port()
    with SERVERS[kind](port):
        one, two = (
            hosts(f"{kind}://127.0.0.1:{port}", host, cpu_bytes=4 * MIB, staging_bytes=MIB)._tiers.remote[0]._remote
            for host in ("one", "two")
        )
        for index in range(12):
            key = Key(b"id", 1, "bfloat16", b"b" * 32)
            tensor = torch.full((1024, 2048), index, dtype=torch.bfloat16)
            data = bytes_of(tensor)
            entry = Entry.describe(key, 1024, 2048, "bfloat16", data, {})
            assert (one, two)[index % 2].write(key, entry, data, 10.0) == "stored"
            for remote in (one, two):
                assert remote.find(key, 10.0) == entry and remote.read(key, entry) == data


@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_a_frozen_server_is_a_miss_after_a_deadline_and_comes_back(kind: str, hosts: Any) -> None:
    need(kind)
    port = free_port()
    with SERVERS[kind](port) as process:
        url = f"{kind}://127.0.0.1:{port}"
        one = hosts(url, "one")
        assert one.put("id", output((32, 64))) and one.flush(60)
        scheduler = hosts(url, "two", "scheduler", lookup_deadline=0.3, retry_seconds=0.5)
        worker = hosts(url, "two", load_deadline=1.0, retry_seconds=0.5)
        assert scheduler.contains("id")
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert not scheduler.contains("id") and worker.get("id", "cpu") is None
        first = time.monotonic() - began
        began = time.monotonic()
        for _ in range(50):
            assert not scheduler.contains("id")
        assert first < 5 and time.monotonic() - began < 5
        process.send_signal(signal.SIGCONT)
        until(lambda: scheduler.contains("id"))
        until(lambda: worker.get("id", "cpu") is not None)


@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_a_server_that_starts_late_is_used(kind: str, hosts: Any) -> None:
    need(kind)
    port = free_port()
    engine = hosts(f"{kind}://127.0.0.1:{port}", "one", wait=False)
    assert not engine.contains("id")
    assert engine.put("before", output((32, 64))) and engine.flush(120), "kept locally meanwhile"
    assert engine.get("before", "cpu") is not None
    with SERVERS[kind](port):
        other = hosts(f"{kind}://127.0.0.1:{port}", "two")

        def arrives() -> bool:
            # A store during the pause after a failure is kept locally only.
            name = str(time.monotonic())
            return engine.put(name, output((32, 64))) and engine.flush(60) and other.contains(name)

        until(arrives, 120)


EXITS = """
import os, sys, torch
from vllm_omni_patch.patches.ec_connector.config import MIB, ECConfig
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry, bytes_of
from vllm_omni_patch.patches.ec_connector.storage.key import Key
from vllm_omni_patch.patches.ec_connector.cache.engine import ECCacheEngine
from vllm_omni_patch.patches.ec_connector.cache.model import ModelIdentity
engine = ECCacheEngine(ECConfig(remote_url=sys.argv[1], shm_path=sys.argv[2], load_deadline=1.0, store_deadline=1.0),
                       ModelIdentity("m"), role="worker", dtype=torch.bfloat16)
engine._tiers.remote[0].wait_ready(120)
engine.put("id", torch.ones(32, 64, dtype=torch.bfloat16))
print("stored" if engine.flush(30) else "not stored", flush=True)
sys.stdin.readline()
if sys.argv[3] == "close":
    engine.close(2.0)
"""


@pytest.mark.parametrize("how", ["close", "leave"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_the_process_ends_whatever_the_server_does(kind: str, frozen: bool, how: str, tmp_path: Path) -> None:
    need(kind)
    port = free_port()
    with SERVERS[kind](port) as server:
        command = [sys.executable, "-c", EXITS, f"{kind}://127.0.0.1:{port}", str(tmp_path), how]
        environment = {**os.environ, "LMCACHE_LOG_LEVEL": "CRITICAL"}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert "stored\n" in lines
            if frozen:
                server.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 0
            assert time.monotonic() - began < 30


def test_no_pool_is_paid_for_in_either_process(url: str, hosts: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    hosts(url, "zero").close()  # imports are paid here
    before = resident()
    engines = [hosts(url, "one"), hosts(url, "one", "scheduler")]
    for engine in engines:
        engine.contains("x")
    assert resident() - before < 64 * 2**20
