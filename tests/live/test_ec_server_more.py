# SPDX-License-Identifier: Apache-2.0
"""The encoder cache in more real engines than every change can wait for: roles, storages, ranks, swapped weights."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, IMAGES, OURS, counted, counters, entries, wait_for

from support import ec_faults, tiny_model
from support.engine_process import Answer, Server, free_port, left_over

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ec-more")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return tiny_model.make(str(folder / "model"))


@pytest.fixture(scope="module")
def reference(folder: Path, model: str) -> dict[int, Answer]:
    """Answers of a stock engine: flag off, no connector."""
    return _stock_answers(model, folder)


def _stock_answers(model: str, folder: Path) -> dict[int, Answer]:
    with Server(model, str(folder), arguments=ARGUMENTS, name="stock") as server:
        answers = {seed: server.image(seed) for seed in IMAGES}
        assert all(answer.ok for answer in answers.values()), server.log()[-3000:]
        assert "omni" not in server.log().lower()
        return answers


def engine(
    model: str,
    folder: Path,
    role: str = "ec_both",
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    name: str = "ours",
    **more: Any,
) -> Server:
    ec, arguments = {**OURS, "ec_role": role}, (*ARGUMENTS, *arguments)
    return Server(model, str(folder), ec=ec, flag="ec_connector", env=env, arguments=arguments, name=name, **more)


def ask(server: Server, reference: Mapping[int, Answer], rounds: int = 1) -> None:
    for _ in range(rounds):
        for seed in IMAGES:
            answer = server.image(seed)
            assert answer.same(reference[seed], 1e-4), f"image {seed}: {answer}\n{server.log()[-3000:]}"
        time.sleep(0.3)


def test_memory_only(folder: Path, model: str, reference: dict[int, Answer]) -> None:
    """Without a disk: found by the other process and after eviction, and nothing is left in shared memory."""
    shm = Path(tempfile.mkdtemp(prefix="ec-test-", dir="/dev/shm"))
    try:
        with engine(model, folder, env={"LMCACHE_EC_SHM_PATH": str(shm)}, name="memory") as server:
            ask(server, reference, rounds=2)
            assert counted(server, "hits", len(IMAGES)) >= len(IMAGES)
            assert entries(shm)
            shared = server.group.shared_folders()
            assert server.stop() == {}
        assert left_over(shared) == [] and os.listdir(shm) == []
    finally:
        shutil.rmtree(shm)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_deployment_is_one_number(folder: Path, model: str, engines: int) -> None:
    """Two ranks load what one scheduler promised, and either API server says so once for each engine.

    Each scrape may reach another server. Requests come one by one, so each lookup that finds an item is a load. More
    images than both engines have room for together, and an odd number, so that no engine always gets the same.
    """
    images = range(1, 8)
    more = ["--api-server-count", "2", "--tensor-parallel-size", "2", "--data-parallel-size", str(engines)]
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / f"deployment-{engines}")}
    with engine(model, folder, env=env, arguments=tuple(more), name=f"deployment-{engines}", serve=True) as server:
        for _ in range(4):
            assert all(server.image(seed, timeout=240).ok for seed in images), server.log()[-3000:]
            time.sleep(0.5)
        hits = counted(server, "hits", 4)
        assert [counters(server) for _ in range(8)] == [counters(server)] * 8
        seen = counters(server)
        assert seen["hits"] == hits == seen["lookup_hits"] and seen.get("fallbacks", 0) == 0
        assert seen["stored"] == len(entries(folder / f"deployment-{engines}")) == len(images)
        size = os.path.getsize(entries(folder / f"deployment-{engines}")[0])
        assert 0 < seen["bytes_loaded"] <= hits * size
        members = server.group.members().values()
        assert [sum(role in command for command in members) for role in ("APIServer", "Worker")] == [2, 2 * engines]
        assert server.stop() == {}


def test_two_servers_share_a_folder(folder: Path, model: str, reference: dict[int, Answer]) -> None:
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / "shared")}
    with engine(model, folder, env=env, name="one") as one, engine(model, folder, env=env, name="two") as two:
        for seed in IMAGES[:2]:
            assert one.image(seed).same(reference[seed], 1e-4)
        for seed in IMAGES[2:]:
            assert two.image(seed).same(reference[seed], 1e-4)
        wait_for(lambda: len(entries(folder / "shared")) == len(IMAGES))
        ask(one, reference)
        ask(two, reference)
        assert counted(one, "hits", 2) >= 2 and counted(two, "hits", 2) >= 2
        assert counted(one, "stored", 2) + counted(two, "stored", 2) == len(IMAGES)


def test_a_producer_feeds_a_consumer(folder: Path, model: str, reference: dict[int, Answer]) -> None:
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / "roles")}
    with engine(model, folder, "ec_producer", env, name="producer") as producer:
        for seed in IMAGES:
            assert producer.image(seed, max_tokens=1).status == 200, producer.log()[-3000:]
        wait_for(lambda: len(entries(folder / "roles")) == len(IMAGES))
        assert producer.image(IMAGES[0], max_tokens=1).status == 200, "an item that is stored already"
        assert counted(producer, "stored", len(IMAGES)) == len(IMAGES)
        assert producer.stop() == {}
    with engine(model, folder, "ec_consumer", env, name="consumer") as consumer:
        ask(consumer, reference)
        assert consumer.image(77).ok, "an item that nobody stored"
        assert counted(consumer, "hits", len(IMAGES)) == len(IMAGES)
        assert counters(consumer).get("stored", 0) == 0
        assert consumer.stop() == {}
    assert len(entries(folder / "roles")) == len(IMAGES)


def test_swapped_weights_are_another_model(folder: Path, reference: dict[int, Answer]) -> None:
    swapped = str(folder / "swapped")
    tiny_model.make(swapped)
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / "swap-store")}
    with engine(swapped, folder, env=env, name="before") as server:
        ask(server, reference)
        wait_for(lambda: len(entries(folder / "swap-store")) == len(IMAGES))
    tiny_model.make(swapped, vision_seed=7)
    changed = _stock_answers(swapped, folder)
    assert not any(changed[seed].same(reference[seed], 1e-3) for seed in IMAGES)
    with engine(swapped, folder, env=env, name="after") as server:
        ask(server, changed)
        assert counters(server).get("hits", 0) == 0


def test_two_ranks(folder: Path, model: str) -> None:
    """One rank loses what the other has: both encode, nobody deadlocks, and the answers stay the same."""
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / "ranks"), **ec_faults.prepare(str(folder / "rank-faults"))}
    with engine(model, folder, env=env, arguments=("--tensor-parallel-size", "2"), name="ranks") as server:
        first = {seed: server.image(seed, timeout=60) for seed in IMAGES}
        assert all(answer.ok for answer in first.values()), server.log()[-3000:]
        wait_for(lambda: len(entries(folder / "ranks")) == len(IMAGES))
        assert counted(server, "stored", len(IMAGES)) == len(IMAGES), "one rank writes"
        ask(server, first)
        hits = counted(server, "hits", 2)
        ec_faults.one_rank(env, True)
        ask(server, first)
        lost = len(ec_faults.done(env))
        assert lost >= len(IMAGES)
        ec_faults.one_rank(env, False)
        for kind in ("deleted", "bit flipped in the payload", "cut in the header", "other length"):
            ask(server, first)
            ec_faults.ask(env, kind, str(folder / "ranks"))
            ask(server, first)
            assert not ec_faults.withdraw(env)
        ask(server, first)
        assert counted(server, "hits", hits + 1) > hits
        assert server.stop() == {}


def test_a_dead_engine_leaves_no_process(folder: Path, model: str) -> None:
    env = {"LMCACHE_EC_LOCAL_DISK": str(folder / "crash")}
    with engine(model, folder, env=env, name="crash") as server:
        assert server.image(1).ok
        core = [pid for pid, command in server.group.members().items() if "EngineCore" in command]
        core = core or _children(server.group.process.pid)
        os.kill(core[0], signal.SIGKILL)
        assert server.group.reap(60) == {}


@pytest.mark.parametrize("last", ["stopped", "killed"])
def test_nothing_is_left_whoever_ends_last(folder: Path, model: str, last: str) -> None:
    """A worker that is stopped outlives its engine core and its API server; it goes on, or is killed, after them."""
    with engine(model, folder, name=f"last-{last}") as server:
        assert server.image(1).ok
        shared = server.group.shared_folders()
        assert len(shared) == 2
        members = server.group.members()
        workers = [pid for pid, command in members.items() if "Worker" in command]
        assert workers, members
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        for pid in set(members) - set(workers):
            os.kill(pid, signal.SIGKILL)
        server.group.process.wait(60)
        assert all(map(os.path.isdir, shared)), "somebody is there"
        for pid in workers:
            os.kill(pid, signal.SIGCONT if last == "stopped" else signal.SIGKILL)
        assert server.group.reap(60) == {}
        assert left_over(shared) == []


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the storage server on the way out, also one that a test has stopped (SIGSTOP)."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    process = subprocess.Popen([program, "--port", str(port), "--save", "", "--dir", str(folder)])
    with _ended(process):
        yield f"redis://127.0.0.1:{port}", process


@contextlib.contextmanager
def _lmcache_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with open(folder / "lmcache-server.log", "wb") as log:
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with _ended(process):
        time.sleep(15)
        assert process.poll() is None, (folder / "lmcache-server.log").read_text()[-2000:]
        yield f"lm://127.0.0.1:{port}", process


@contextlib.contextmanager
def _shared_folder(folder: Path) -> Iterator[tuple[str, None]]:
    store = folder / "fs-store"
    store.mkdir()
    yield f"fs://host:0{store}", None


@pytest.mark.parametrize("kind", ["fs", "redis", "lmcache"])
def test_another_host_through_a_remote(folder: Path, model: str, reference: dict[int, Answer], kind: str) -> None:
    """A second engine with nothing local finds what a first one stored; a server that hangs costs an encode."""
    remotes: dict[str, Any] = {"fs": _shared_folder, "redis": _redis, "lmcache": _lmcache_server}
    with remotes[kind](folder) as (url, process):
        env = {"LMCACHE_EC_REMOTE_URL": url}
        with engine(model, folder, env=env, name=f"{kind}-one") as server:
            ask(server, reference)
            time.sleep(2)
            assert server.stop() == {}
        with engine(model, folder, env=env, name=f"{kind}-two") as server:
            ask(server, reference)
            assert counted(server, "hits", len(IMAGES) - 1) >= len(IMAGES) - 1
            if process is not None:
                process.send_signal(signal.SIGSTOP)
                started = time.monotonic()
                ask(server, reference)
                assert server.chat(timeout=20).ok
                assert time.monotonic() - started < 60, "bounded, whatever the server does"
                process.send_signal(signal.SIGCONT)
            assert server.stop() == {}
