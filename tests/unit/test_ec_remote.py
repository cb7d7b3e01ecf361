# SPDX-License-Identifier: Apache-2.0
"""The remote tier: deadlines, breaker, reconnection; the shared folder behind ``fs://``."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.stats import ECStats
from vllm_omni_patch.patches.ec_connector.storage.breaker import CircuitBreaker
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry, FormatError
from vllm_omni_patch.patches.ec_connector.storage.executor import SingleThreadExecutor, Stuck
from vllm_omni_patch.patches.ec_connector.storage.key import Key, encode_id, stable_u64
from vllm_omni_patch.patches.ec_connector.storage.remote import RemoteTier
from vllm_omni_patch.patches.ec_connector.storage.shared_folder import shared_folder_path


class Server:
    """A remote that keeps entries in a dict and can be made slow, dead or forgetful."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[bytes, bytes]] = {}
        self.up = True
        self.gate = threading.Event()
        self.gate.set()
        self.connects = self.drops = self.calls = 0

    def connect(self) -> None:
        self.connects += 1
        if not self.up:
            raise ConnectionError("refused")

    def drop(self) -> None:
        self.drops += 1

    def _serve(self) -> None:
        self.calls += 1
        self.gate.wait(30)
        if not self.up:
            raise ConnectionError("reset")

    def find(self, key: Key, seconds: float) -> Entry | None:
        self._serve()
        found = self.entries.get(key.path)
        return None if found is None else Entry.decode(found[0])

    def read(self, key: Key, entry: Entry) -> memoryview:
        self._serve()
        data = memoryview(bytearray(self.entries[key.path][1]))
        if len(data) != entry.payload:
            raise FormatError("a piece is missing")
        entry.verify(data)
        return data

    def write(self, key: Key, entry: Entry, payload: memoryview, seconds: float) -> str:
        self._serve()
        self.entries[key.path] = (entry.header, bytes(payload))
        return "stored"

    def remove(self, key: Key) -> bool:
        self._serve()
        return self.entries.pop(key.path, None) is not None


def key(mm_hash: str = "id") -> Key:
    return Key(encode_id(mm_hash), stable_u64(mm_hash), "bfloat16", b"b" * 32)


def made_entry(mm_hash: str = "id", rows: int = 4) -> tuple[Entry, memoryview]:
    data = memoryview(bytearray(range(rows * 8 * 2)))
    return Entry.describe(key(mm_hash), rows, 8, "bfloat16", data, {}), data


@pytest.fixture
def server() -> Any:
    made = Server()
    yield made
    made.gate.set()


def tier_on(server: Server, **config: Any) -> RemoteTier:
    values = {"lookup_deadline": 0.1, "load_deadline": 0.3, "store_deadline": 0.3, "retry_seconds": 0.2, **config}
    return RemoteTier("test", server, ECConfig(**values), ECStats("worker"))


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_store_look_up_load_remove(server: Server) -> None:
    tier = tier_on(server)
    assert tier.wait_ready(5)
    entry, payload = made_entry()
    assert not tier.contains(key(), None) and tier.load(key(), None) is None
    assert tier.write(key(), entry, payload) == "stored"
    assert tier.write(key(), entry, payload) == "present"
    assert tier.contains(key(), 4) and not tier.contains(key(), 5)
    loaded = tier.load(key(), 4)
    assert loaded is not None and bytes(loaded[1]) == bytes(payload)
    longer, longer_payload = made_entry(rows=7)
    assert tier.write(key(), longer, longer_payload) == "stored", "another length replaces"
    assert tier.contains(key(), 7)
    assert tier.discard(key()) and not tier.contains(key(), None)
    tier.close(1)


def test_a_hung_server_costs_one_deadline_then_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_on(server, retry_seconds=30)
    assert tier.wait_ready(5)
    server.gate.clear()
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        began = time.monotonic()
        assert not tier.contains(key(), None)
        assert 0.05 < time.monotonic() - began < 10
        began = time.monotonic()
        for _ in range(1000):
            assert not tier.contains(key(), None) and tier.load(key(), None) is None
        assert time.monotonic() - began < 10
    assert len([record for record in caplog.records if "paused" in record.message]) == 1
    assert server.calls == 1
    until(lambda: server.drops == 1)
    tier.close(0.5)


def test_it_reconnects_when_the_server_is_back(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_on(server, retry_seconds=0.05)
    assert tier.wait_ready(5)
    assert tier.write(key(), *made_entry()) == "stored"
    server.up = False
    assert not tier.contains(key(), None)
    with caplog.at_level(logging.INFO, "vllm.omni_patch.ec"):
        server.up = True
        until(lambda: tier.contains(key(), None))
        until(lambda: "resumed" in caplog.text)
    assert server.connects >= 2
    tier.close(1)


def test_a_server_that_is_down_at_the_start_is_found_later(server: Server) -> None:
    server.up = False
    tier = tier_on(server, retry_seconds=0.05)
    assert not tier.wait_ready(5) and not tier.contains(key(), None)
    with pytest.raises(OSError):
        tier.write(key(), *made_entry())
    server.up = True
    until(lambda: tier.contains(key(), None) is False and tier.wait_ready(1))
    assert tier.write(key(), *made_entry()) == "stored" and tier.contains(key(), None)
    tier.close(1)


@pytest.mark.parametrize("part", ["header", "payload"])
def test_a_damaged_entry_is_a_miss_and_removed(part: str, server: Server) -> None:
    tier = tier_on(server)
    assert tier.wait_ready(5)
    entry, payload = made_entry()
    damaged = entry.header[:50] + b"???" + entry.header[53:]
    server.entries[key().path] = (damaged, bytes(payload)) if part == "header" else (entry.header, bytes(payload)[:-1])
    assert tier.load(key(), None) is None
    assert server.entries == {} and tier.contains(key(), None) is False
    assert tier.write(key(), entry, payload) == "stored" and tier.load(key(), None) is not None
    tier.close(1)


def test_close_leaves_no_thread_even_when_the_server_hangs(server: Server) -> None:
    tier = tier_on(server)
    assert tier.wait_ready(5)
    server.gate.clear()
    tier.contains(key(), None)
    began = time.monotonic()
    tier.close(0.5)
    assert time.monotonic() - began < 20
    server.gate.set()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("ec-remote")])
    assert not tier.contains(key(), None) and tier.load(key(), None) is None


def test_single_thread_executor() -> None:
    executor = SingleThreadExecutor("executor")
    assert executor.run(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 // 0, 5)
    gate = threading.Event()
    with pytest.raises(Stuck):
        executor.run(lambda: gate.wait(10), 0.05)
    with pytest.raises(Stuck, match="earlier"):
        executor.run(lambda: 7, 0.05)
    assert not executor.close(0.05)
    gate.set()
    assert executor.close(5)
    with pytest.raises(Stuck):
        executor.run(lambda: 7, 5)


def test_a_circuit_breaker_s_pause_doubles_up_to_a_minute() -> None:
    breaker = CircuitBreaker("x", 1.0)
    lengths = []
    for _ in range(8):
        breaker.failed(OSError("no"))
        lengths.append(breaker._pause)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60] and not breaker.allows()
    breaker.worked()
    assert breaker.allows() and not breaker.failing


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("fs://host:0/a/b", "/a/b"),
        ("fs:///a/b/", "/a/b"),
        ("fs://h/a%20b", "/a b"),
        ("fs://host:0/", ""),
        ("redis://host:1/a", ""),
        ("lm://host:1", ""),
    ],
)
def test_shared_folder_urls(url: str, path: str) -> None:
    assert shared_folder_path(url) == path


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    """Engines of several hosts: nothing in common but the shared folder."""
    engines: list[ECCacheEngine] = []

    def make(host: str, role: str = "worker") -> ECCacheEngine:
        (tmp_path / host).mkdir(exist_ok=True)
        config = ECConfig(
            remote_url=f"fs://any:0{tmp_path}/shared", shm_path=str(tmp_path / host), lookup_deadline=5.0,
            load_deadline=10.0, retry_seconds=0.05,
        )  # fmt: skip
        engine = ECCacheEngine(config, ModelIdentity("m", engine_id=host), role=role, dtype=torch.bfloat16)
        assert engine._tiers.remote[0].wait_ready(10)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(5)


def test_another_host_finds_it_and_keeps_a_copy(hosts: Any, tmp_path: Path) -> None:
    one, two = hosts("one"), hosts("two")
    scheduler = hosts("two", "scheduler")
    tensor = torch.randn(300, 512).to(torch.bfloat16)
    assert one.put("id", tensor) and one.flush(10)
    assert scheduler.contains("id", 300) and not scheduler.contains("id", 301)
    found = two.get("id", "cpu", 300)
    assert found is not None and torch.equal(found, tensor)
    assert two.flush(10)
    for path in (tmp_path / "shared").rglob("*.ec"):
        path.unlink()
    again = two.get("id", "cpu", 300)
    assert again is not None and torch.equal(again, tensor), "from its own memory"
    assert two.stats.snapshot().hits == 2


def test_damage_in_the_shared_folder_is_a_miss_and_removed(hosts: Any, tmp_path: Path) -> None:
    one, two = hosts("one"), hosts("two")
    scheduler = hosts("two", "scheduler")
    tensor = torch.randn(300, 512).to(torch.bfloat16)
    assert one.put("id", tensor) and one.flush(10)
    (path,) = (tmp_path / "shared").rglob("*.ec")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert scheduler.contains("id")
    assert two.get("id", "cpu") is None
    assert not scheduler.contains("id")
    assert two.put("id", tensor) and two.flush(10)
    assert scheduler.contains("id")


def test_discard_reaches_the_shared_folder(hosts: Any, tmp_path: Path) -> None:
    one = hosts("one")
    assert one.put("id", torch.ones(4, 4, dtype=torch.bfloat16)) and one.flush(10)
    one.discard("id")
    assert not list((tmp_path / "shared").rglob("*.ec")) and not hosts("two", "scheduler").contains("id")


def test_a_store_that_the_shared_folder_did_not_take_is_not_counted(hosts: Any, tmp_path: Path) -> None:
    one = hosts("one")
    tier = one._tiers.remote[0]
    entry, payload = made_entry()
    assert tier.write(key(), entry, payload) == "stored"
    (path,) = (tmp_path / "shared").rglob("*.ec")
    path.unlink()
    path.mkdir()
    assert tier.write(key(), entry, payload, force=True) == "address taken"


def test_a_generation_of_one_run_stays_on_its_host(hosts: Any, tmp_path: Path) -> None:
    one = hosts("one")
    one.new_generation()
    assert one.put("id", torch.ones(4, 4, dtype=torch.bfloat16)) and one.flush(10)
    assert one.contains("id") and not list((tmp_path / "shared").rglob("*.ec"))


def without_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no thread left for those called ``name``."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("name", ["ec-remote-lookup", "ec-remote-load", "ec-remote-connect", "ec-remote"])
def test_a_thread_that_cannot_be_started_is_started_later(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_on(server, retry_seconds=0.01, lookup_deadline=2.0, load_deadline=2.0, store_deadline=5.0)
    assert tier.wait_ready(5) and tier.write(key(), *made_entry()) == "stored"
    if name in ("ec-remote-connect", "ec-remote"):
        server.up = False
        assert not tier.contains(key(), None)
        server.up = True
    with monkeypatch.context() as patch:
        without_thread(name, patch)
        for _ in range(3):
            tier.contains(key(), None)
            tier.load(key(), None)
            time.sleep(0.05)
    until(lambda: tier.contains(key(), None) and tier.load(key(), None) is not None)
    assert tier._stuck == 0, "no thread is counted as left behind"
    began = time.monotonic()
    tier.close(1)
    assert time.monotonic() - began < 20


def test_without_a_thread_to_connect_a_store_fails_at_once_and_close_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without_thread("ec-remote", patch)
        tier = tier_on(server)
        began = time.monotonic()
        with pytest.raises(OSError):
            tier.write(key(), *made_entry())
        assert not tier.contains(key(), None)
        tier.close(1)
        assert time.monotonic() - began < 20


def test_a_connection_that_no_thread_could_drop_is_dropped_before_the_next(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_on(server, retry_seconds=0.01, lookup_deadline=5.0)
    assert tier.wait_ready(5)
    with monkeypatch.context() as patch:
        without_thread("ec-remote-drop", patch)
        server.up = False
        assert not tier.contains(key(), None)
    server.up = True
    until(lambda: tier.write(key(), *made_entry()) == "stored" if tier.wait_ready(1) else tier.contains(key(), None))
    assert server.drops >= 1
    tier.close(1)


def test_no_password_in_messages(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = "redis://user:SECRET@host:1"

    def refuse(*_: Any) -> None:
        raise ConnectionError(f"no answer from {url}")

    with caplog.at_level(logging.DEBUG, "vllm.omni_patch.ec"):
        tier = RemoteTier(url, server, ECConfig(remote_url=url, retry_seconds=0.01), ECStats("worker"))
        assert tier.wait_ready(5)
        server.entries[key().path] = (made_entry()[0].header, b"")
        assert tier.load(key(), None) is None
        server.connect = server.find = server.write = refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="no answer from redis://host:1"):
            tier.write(key(), *made_entry(), force=True)
        until(lambda: "no answer" in caplog.text or tier.contains(key(), None))
        tier.close(1)
    assert "redis://host:1" in caplog.text and "SECRET" not in caplog.text


def test_a_url_that_is_none_is_no_folder() -> None:
    assert shared_folder_path("fs://[x") == ""
