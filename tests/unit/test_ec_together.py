# SPDX-License-Identifier: Apache-2.0
"""What ranks, API servers and data-parallel engines of one deployment add up to on ``/metrics``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENGINES, RANKS = 2, 2
# Every process is a fork of one that has imported what they need; the servers run no engine. Each of the two engines
# has a scheduler and two ranks. Each rank loads 4 sound items, one that is damaged and one that nobody stored, and then
# one that rank 1 alone cannot load.
DEPLOYMENT = """
import os, pickle, sys, time, traceback
from dataclasses import replace
from pathlib import Path
import torch, torch.distributed as dist
import prometheus_client
from support.ec_requests import engine
from vllm_omni_patch import metrics
from vllm_omni_patch.telemetry import exposition, numbers
from vllm_omni_patch.patches.ec_connector.vllm.scheduler import StepPlan
from vllm_omni_patch.patches.ec_connector.vllm.worker import WorkerSide, agree_over
from vllm_omni_patch.patches.ec_connector.vllm.items import ItemKeys, Load

folder, engines, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SOUND, BAD = ["a", "b", "c", "d"], ["damaged", "missing"]
torch.set_num_threads(1)
deadline = time.monotonic() + 120

def wait(name):
    while not (folder / name).exists():
        if (folder / "failed").exists() or time.monotonic() > deadline:
            sys.exit(f"waited for {name} in vain")
        time.sleep(0.01)

def mark(name):
    (folder / name).touch()

def run(body, *arguments):
    if os.fork() == 0:
        try:
            body(*arguments)
            numbers.mine.flush()
            mark("-".join(map(str, ["done", *arguments])))
            wait("end")
        except BaseException:
            mark("failed")
            traceback.print_exc()
        finally:
            os._exit(0)

def entries(number):
    return set((folder / str(number) / "disk").rglob("*.ec"))

def scheduler(number):
    made = engine(folder / str(number), "scheduler", engine_id=f"engine {number}")
    wait(f"stored-{number}")
    fetches = {name: made.fetch(name, 32) for name in (*SOUND, "missing")}
    assert all(fetch.settled(60) for fetch in fetches.values())
    assert [name for name in fetches if made.serves(name, fetches[name])] == SOUND
    places = {name: fetches[name].memory.place for name in SOUND}
    for name in BAD:  # out of reach, so that each rank loads it itself
        places[name] = replace(places["a"], host="elsewhere", id_bytes=name.encode())
    (folder / f"places-{number}.new").write_bytes(pickle.dumps(places))
    os.rename(folder / f"places-{number}.new", folder / f"places-{number}")
    numbers.mine.flush()
    mark(f"done-{number}")
    wait("end")  # the memory is this process's

def rank(number, mine):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{number}", rank=mine, world_size=ranks)
    made = engine(folder / str(number), "worker", engine_id=f"engine {number}")
    first = mine == 0
    agree = agree_over(dist.group.WORLD)
    side = WorkerSide(
        made, ItemKeys(), device="cpu", first=first, stores=first, agree=agree, weights_changed=lambda: False
    )
    metrics.set_gauge("memory_kv_cache_bytes", "KV.", 10, rank=mine)
    if mine == 0:
        for name in (*SOUND, "damaged"):
            before = entries(number)
            assert made.put(name, torch.full((32, 64), 3.0)) and made.flush(20)
        (damaged,) = entries(number) - before
        with open(damaged, "r+b") as file:
            file.seek(-1, 2)
            byte = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([byte[0] ^ 1]))
        mark(f"stored-{number}")
    dist.barrier()
    wait(f"places-{number}")
    places = pickle.loads((folder / f"places-{number}").read_bytes())
    plan = lambda names: StepPlan([Load("r", 0, name, name, 32, None) for name in names], places)
    cache = {}
    side.load(cache, plan(SOUND + BAD))
    assert sorted(cache) == SOUND
    made.stats.fallback(len(side.take_failed()))
    if mine == 1:
        made.open = lambda *asked: made.stats.add("misses")
    side.load({}, plan(["a"]))
    failed = side.take_failed()
    assert len(failed) == 1
    made.stats.fallback(len(failed))
    dist.barrier()

def server(name):
    number = name[-1]
    for engine_number in range(engines):
        wait(f"done-{engine_number}")
        for mine in range(ranks):
            wait(f"done-{engine_number}-{mine}")
    registry = prometheus_client.CollectorRegistry()
    exposition.register(registry)
    (folder / "part").with_suffix(f".{number}").write_bytes(prometheus_client.generate_latest(registry))
    os.rename(folder / f"part.{number}", folder / f"page-{number}")

for number in range(engines):
    run(scheduler, number)
    for mine in range(ranks):
        run(rank, number, mine)
for number in range(2):
    run(server, f"server-{number}")
for number in range(2):
    wait(f"page-{number}")
mark("end")
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, float]]]:
    """The samples that two API servers show."""
    folder = tmp_path_factory.mktemp("deployment")
    env = {**os.environ, "VLLM_OMNI_PATCH_RUN_DIR": str(folder / "run"), "PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"}
    (folder / "run").mkdir(mode=0o700)
    command = [sys.executable, "-c", DEPLOYMENT, str(folder), str(ENGINES), str(RANKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    shown = []
    for number in range(2):
        lines = (folder / f"page-{number}").read_text().splitlines()
        rows = [line.removeprefix("vllm_omni_patch_").rsplit(" ", 1) for line in lines if not line.startswith("#")]
        shown.append({name: float(value) for name, value in rows})
    yield shown


def test_ranks_count_once_and_engines_are_added_up(pages: list[dict[str, float]]) -> None:
    page = {name.removeprefix("ec_").removesuffix("_total"): value for name, value in pages[0].items() if "ec_" in name}
    one_engine = {
        "hits": 5, "misses": 2, "fallbacks": 3, "bytes_loaded": 5 * 32 * 64 * 4, "bad_entries": 1,
        "stored": 5, "bytes_stored": 5 * 32 * 64 * 4, "lookups": 5, "lookup_hits": 4,
    }  # fmt: skip
    assert {name: page[name] for name in one_engine} == {name: ENGINES * count for name, count in one_engine.items()}
    assert page["load_seconds"] > 0 and "errors" not in page


def test_gauges_add_up_to_what_all_workers_hold(pages: list[dict[str, float]]) -> None:
    for page in pages:
        held = [value for name, value in page.items() if name.startswith("memory_kv_cache_bytes{")]
        assert held == [10.0] * ENGINES * RANKS


def test_every_api_server_shows_the_same(pages: list[dict[str, float]]) -> None:
    assert pages[0] == pages[1]
