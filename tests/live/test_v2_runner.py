# SPDX-License-Identifier: Apache-2.0
"""The patches under Model Runner V2, which is the default on GPU from vLLM 0.32: the same answers as a stock V2 engine.

Here it runs on the CPU with Triton's interpreter (``support/triton_cpu.py``). ``TRITON_PLACE`` names a folder with
Triton; ``scripts/test.sh`` lays one beside the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, IMAGES, OURS, counted, counters, entries, wait_for

from support import ec_faults, tiny_model, triton_cpu
from support.engine_process import Answer, Server

pytestmark = pytest.mark.skipif(not triton_cpu.place(), reason="no Triton for the V2 runner (see scripts/test.sh)")

FAULTS = ("deleted", "bit flipped in the payload", "garbage")
RUNNER = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


@dataclass
class Place:
    """Folders of this module and the variables that make vLLM run V2."""

    folder: Path
    model: str
    v2: dict[str, str]

    def environment(self, **more: str) -> dict[str, str]:
        """``more`` on top of V2's variables; ``PYTHONPATH`` is joined."""
        paths = [path for path in (more.pop("PYTHONPATH", ""), self.v2["PYTHONPATH"]) if path]
        return {**self.v2, **more, "PYTHONPATH": os.pathsep.join(paths)}

    def ours(self, name: str, *arguments: str, **more: str) -> Server:
        """An engine of ours on the one disk."""
        env = self.environment(
            LMCACHE_EC_LOCAL_DISK=str(self.folder / "disk"),
            VLLM_OMNI_PATCH_REPORT_DIR=str(self.folder / name),
            VLLM_SERVER_DEV_MODE="1",
            **more,
        )
        return Server(
            self.model, str(self.folder), ec=OURS, flag="1", env=env, arguments=[*ARGUMENTS, *arguments], name=name
        )

    def read(self, name: str, pattern: str) -> list[dict[str, object]]:
        """The reports of one engine."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / name).glob(pattern))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("v2")
    return Place(folder, tiny_model.make(str(folder / "model")), triton_cpu.environment(str(folder)))


@pytest.fixture(scope="module")
def stock(place: Place) -> dict[int, Answer]:
    """Answers of a V2 engine without the flag and without a connector."""
    with Server(place.model, str(place.folder), env=place.environment(), arguments=ARGUMENTS, name="stock") as server:
        answers = {seed: server.image(seed) for seed in IMAGES}
        assert all(answer.ok for answer in answers.values()), server.log()[-3000:]
        assert "Using V2 Model Runner" in server.log()
    return answers


@dataclass
class Run:
    """What an engine that was killed had counted, and answers in which a load failed, by fault."""

    counts: dict[str, float]
    failed: dict[str, Answer]
    log: str


@pytest.fixture(scope="module")
def killed(place: Place, stock: dict[int, Answer]) -> Run:
    """Stores, hits after eviction and after a reset, loads that fail; then a kill."""
    faults = ec_faults.prepare(str(place.folder / "faults"))
    disk = place.folder / "disk"
    server = place.ours("killed", **faults)
    try:
        for _ in range(2):
            for seed in IMAGES:
                assert server.image(seed).same(stock[seed], 1e-4), server.log()[-3000:]
            wait_for(lambda: len(entries(disk)) == len(IMAGES))
        counted(server, "hits", len(IMAGES) - 2)
        assert server.post("/reset_encoder_cache")[0] == 200
        before = counters(server)["hits"]
        assert server.image(IMAGES[-1]).same(stock[IMAGES[-1]], 1e-4)
        counted(server, "hits", before + 1)
        counts, failed = counters(server), {}
        for kind in FAULTS:
            for seed in (IMAGES[0], *IMAGES[1:]):
                assert server.image(seed).ok
            wait_for(lambda: len(entries(disk)) == len(IMAGES))
            ec_faults.ask(faults, kind, str(disk))
            failed[kind] = server.image(IMAGES[0])
            assert not ec_faults.withdraw(faults), f"{kind} was not applied"
        counted(server, "fallbacks", len(FAULTS))
        for seed in IMAGES:
            assert server.image(seed).ok
        wait_for(lambda: len(entries(disk)) == len(IMAGES))
        return Run(counts, failed, server.log())
    finally:
        server.group.kill()


@pytest.fixture(scope="module")
def restarted(place: Place, killed: Run) -> Iterator[Server]:
    """The same disk after the kill, with asynchronous scheduling asked for."""
    with place.ours("restarted", "--async-scheduling") as server:
        yield server


def test_it_is_the_v2_runner_that_is_patched(place: Place, killed: Run) -> None:
    assert "Using V2 Model Runner" in killed.log
    rows = [row for one in place.read("killed", "ledger-*.json") for row in one["entries"]]  # type: ignore[attr-defined]
    states = {row["target"]: row["state"] for row in rows if row["patch"] == "ec_connector"}
    v2 = {target: state for target, state in states.items() if "worker.gpu." in target}
    assert v2 and set(v2.values()) == {"applied"}, states
    assert not [row for row in rows if row["state"] == "failed"]


def test_stored_and_found_again_in_one_engine(killed: Run) -> None:
    assert killed.counts["stored"] == len(IMAGES) and killed.counts["hits"] >= len(IMAGES) - 1
    assert killed.counts.get("fallbacks", 0) == 0


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failed_load_is_answered_as_without_a_cache(killed: Run, stock: dict[int, Answer], kind: str) -> None:
    assert killed.failed[kind].same(stock[IMAGES[0]], 1e-4)


def test_load_model_is_reported(place: Place, killed: Run) -> None:
    """The patch ``model_local_kv`` hooks the V2 runner's ``load_model``."""
    loads = [load for one in place.read("killed", "model-local-kv-*.json") for load in one["loads"]]  # type: ignore[attr-defined]
    assert [load["runner"] for load in loads] == [RUNNER]


def test_found_again_after_a_kill(restarted: Server, stock: dict[int, Answer], place: Place) -> None:
    for seed in IMAGES:
        assert restarted.image(seed).same(stock[seed], 1e-4)
    assert counted(restarted, "hits", len(IMAGES)) == len(IMAGES)
    assert counters(restarted).get("stored", 0) == 0
    assert restarted.stop() == {}


@pytest.mark.slow
def test_two_ranks(place: Place) -> None:
    """A load that fails on one rank: both encode, nobody waits, and the answers stay the same."""
    disk = place.folder / "ranks"
    faults = ec_faults.prepare(str(place.folder / "rank-faults"))
    env = place.environment(LMCACHE_EC_LOCAL_DISK=str(disk), **faults)
    arguments = [*ARGUMENTS, "--tensor-parallel-size", "2"]
    with Server(
        place.model, str(place.folder), ec=OURS, flag="1", env=env, arguments=arguments, name="ranks"
    ) as server:
        first = {seed: server.image(seed) for seed in IMAGES}
        assert all(answer.ok for answer in first.values()), server.log()[-3000:]
        wait_for(lambda: len(entries(disk)) == len(IMAGES))
        assert counted(server, "stored", len(IMAGES)) == len(IMAGES), "one rank writes"
        ec_faults.one_rank(faults, True)
        for seed in IMAGES:
            assert server.image(seed).same(first[seed], 1e-4), server.log()[-3000:]
        assert len(ec_faults.done(faults)) >= len(IMAGES) - 2
        ec_faults.one_rank(faults, False)
        before = counters(server).get("hits", 0)
        for seed in IMAGES:
            assert server.image(seed).same(first[seed], 1e-4)
        assert counted(server, "hits", before + 1) > before
        assert server.stop() == {}
