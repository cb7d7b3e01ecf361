# SPDX-License-Identifier: Apache-2.0
"""vLLM's own example proxy, unmodified, before an ``ec_producer`` and an ``ec_consumer`` with our connector."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_backends import need, redis
from test_ec_server import ARGUMENTS, IMAGES, OURS, counted, counters

from support import epd_proxy, tiny_model, tiny_qwen2_vl, triton_cpu
from support.engine_process import Answer, Server, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not epd_proxy.is_there(), reason="no proxy (scripts/test.sh -m slow lays vLLM's own beside the environment)"
    ),
]
BESIDE = {"PYTHONPATH": str(epd_proxy.FOLDER)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("epd")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return tiny_qwen2_vl.make(str(folder / "model"))


@pytest.fixture(scope="module")
def reference(folder: Path, model: str) -> dict[int, Answer]:
    """Answers of one stock server."""
    with Server(model, str(folder), arguments=ARGUMENTS, env=BESIDE, name="stock") as server:
        answers = {seed: server.image(seed) for seed in IMAGES}
    assert all(answer.ok for answer in answers.values())
    assert len({tuple(answer.logprobs) for answer in answers.values()}) == len(IMAGES)
    return answers


@contextlib.contextmanager
def storage(kind: str, folder: Path) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Its settings, and what ends it."""
    if kind == "disk":
        yield {"LMCACHE_EC_LOCAL_DISK": str(folder / "shared")}, lambda: None
        return
    need("redis")
    port = free_port()
    with redis(port) as process:
        yield {"LMCACHE_EC_REMOTE_URL": f"redis://127.0.0.1:{port}"}, process.kill


@contextlib.contextmanager
def pair(
    model: str, folder: Path, env: dict[str, str], consumers: dict[str, str] | None = None
) -> Iterator[tuple[Server, Server]]:
    """A producer and a consumer that share nothing but what ``env`` says. ``consumers``: further variables of one."""

    def engine(role: str, **more: str) -> Server:
        ec, given = {**OURS, "ec_role": role}, {**env, **more}
        return Server(model, str(folder), ec=ec, flag="ec_connector", env=given, arguments=ARGUMENTS, name=role)

    with engine("ec_producer") as producer, engine("ec_consumer", **consumers or {}) as consumer:
        yield producer, consumer


@pytest.mark.parametrize("kind", ["disk", "redis", "redis, V2 consumer"])
def test_what_the_producer_stores_the_consumer_finds(
    folder: Path, model: str, reference: dict[int, Answer], kind: str
) -> None:
    kind, _, v2 = kind.partition(",")
    second: dict[str, str] = {}
    if v2:
        if not triton_cpu.place():
            pytest.skip("no Triton for the V2 runner (see scripts/test.sh)")
        second = triton_cpu.environment(str(folder))
        second["PYTHONPATH"] += os.pathsep + BESIDE["PYTHONPATH"]
    with (
        storage(kind, folder) as (env, end),
        pair(model, folder, {**env, **BESIDE}, second) as (producer, consumer),
        epd_proxy.Proxy(str(folder), [producer], [consumer]) as proxy,
    ):
        for seed in IMAGES:
            answer = proxy.image(seed)
            assert answer.same(reference[seed], 1e-4), f"{answer}\n{proxy.log()[-3000:]}\n{consumer.log()[-3000:]}"
        assert counted(producer, "stored", len(IMAGES)) == len(IMAGES)
        assert counted(consumer, "hits", len(IMAGES)) == len(IMAGES)
        assert counters(consumer).get("misses", 0) == counters(consumer).get("fallbacks", 0) == 0
        assert proxy.log().count("Rewrote 1 media item(s)") == len(IMAGES), "no request was sent twice"
        assert ("Using V2 Model Runner" in consumer.log()) is bool(v2)
        if kind == "redis":
            end()
            assert proxy.image(100).status == 500, "what came without its data cannot be encoded"
            assert proxy.chat(text="Hello").ok and producer.healthy() and consumer.healthy()
            with epd_proxy.Proxy(str(folder), [producer], [consumer], "--no-rewrite") as other:
                for seed in (*IMAGES, 100):
                    answer = other.image(seed)
                    assert answer.ok and (seed == 100 or answer.same(reference[seed], 1e-4))


def test_a_proxy_whose_ids_differ_is_named_and_no_rewrite_helps(
    tmp_path: Path,
) -> None:
    """BLIP-2 declares no metadata: the proxy gives the producer a ``uuid`` and sends the consumer the bare image."""
    model = tiny_model.make(str(tmp_path / "blip2"))
    env = {"LMCACHE_EC_LOCAL_DISK": str(tmp_path / "disk")}
    with pair(model, tmp_path, env) as (producer, consumer):
        with epd_proxy.Proxy(str(tmp_path), [producer], [consumer]) as proxy:
            for seed in range(20):
                assert proxy.image(seed).ok
            assert consumer.log().count("looked up 20 items and found none") == 1
        with epd_proxy.Proxy(str(tmp_path), [producer], [consumer], "--no-rewrite") as proxy:
            for seed in range(100, 104):
                assert proxy.image(seed).ok
        assert counted(consumer, "hits", 4) == 4
        assert consumer.log().count("and found none") == 1
