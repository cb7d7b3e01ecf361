# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a hit per request in a real vLLM: no cache, vLLM's connectors, LMCache's own engine, ours.

    python scripts/bench_ec_vllm.py [--images 40] [--restarts 3] [--rounds 4]

All engines run at the same time and are measured in turn, in short blocks of varying order, because the speed of a
machine changes from second to second. There is a pause before each block: a vLLM worker spins for a second after
its last step, and on few cores that would slow down the next engine. The script prints the median
time of a request in ms and their ratio to vLLM's ``ECExampleConnector``:

* ``after restart``: images that an engine stored before it ended, each requested once from each of several new
  engines, because two engines of the same kind differ by a few percent for as long as they run;
* ``steady``: images that were requested before and are no longer in vLLM's own cache, which holds two here;
* ``CPU``: CPU time of all processes of the engine per steady request, including its worker's spinning after a block.

LMCache's engine is wrapped in a minimal connector class, with its storage on ``fs://``. vLLM stops
at its first hit after a restart (it never reads a backend), so its first column says what happened.
``ECCPUConnector`` needs vLLM's V2 model runner. If that does not start on this machine, its row says why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))

from support import engine_process, tiny_model

ARGUMENTS = ["--max-num-batched-tokens", "64", "--no-enable-prefix-caching"]
BASELINE = "ECExampleConnector"
UPSTREAM = "LMCache's engine"
OFFLOAD = "ECCPUConnector"
REST_SECONDS = 1.5  # longer than a worker spins after its last step
FIRST_BLOCK, STEADY_BLOCK = 4, 10  # images
THIN = """
from lmcache.integration.vllm.vllm_ec_adapter import LMCacheECConnectorImpl
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase


class ThinLMCacheConnector(ECConnectorBase):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        self._impl = LMCacheECConnectorImpl(vllm_config, role, self)

    def start_load_caches(self, encoder_cache, **kwargs):
        self._impl.start_load_caches(encoder_cache, **kwargs)

    def save_caches(self, encoder_cache, mm_hash, **kwargs):
        self._impl.save_caches(encoder_cache, mm_hash, **kwargs)

    def has_cache_item(self, identifier):
        return self._impl.has_cache_item(identifier)

    def update_state_after_alloc(self, request, index):
        self._impl.update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output):
        return self._impl.build_connector_meta(scheduler_output)

    def shutdown(self):
        self._impl.close()
"""


Times = dict[str, list[float]]


class Variant:
    """One way to run vLLM, and the folder in which it keeps what outlives it."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.folder = os.path.join(folder, name.replace(" ", "-").replace("'", "").replace(",", ""))
        os.makedirs(self.folder, exist_ok=True)
        self.flag: str | None = None
        self.ec: Mapping[str, Any] | None = None
        self.env: dict[str, str] = {}
        self.survives = False
        self.why_not = ""  # why it could not be started

    def boot(self, model: str) -> engine_process.Server:
        return engine_process.Server(
            model, self.folder, ec=self.ec, flag=self.flag, env=self.env, arguments=ARGUMENTS, name="engine"
        )


def variants(folder: str) -> list[Variant]:
    none = Variant("no cache", folder)
    example = Variant(BASELINE, folder)
    example.ec = {
        "ec_connector": BASELINE,
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": os.path.join(example.folder, "store")},
    }
    example.survives = True
    offload = Variant(OFFLOAD, folder)
    offload.ec = {
        "ec_connector": OFFLOAD,
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"ec_cpu_bytes": 1 << 29},
    }
    offload.env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    upstream = Variant(UPSTREAM, folder)
    upstream.ec = {
        "ec_connector": "ThinLMCacheConnector",
        "ec_role": "ec_both",
        "ec_connector_module_path": "thin_lmcache",
    }
    with open(os.path.join(upstream.folder, "thin_lmcache.py"), "w") as file:
        file.write(THIN)
    store = os.path.join(upstream.folder, "store")
    os.makedirs(store)
    upstream.env = {
        "PYTHONPATH": upstream.folder,
        "LMCACHE_EC_MAX_LOCAL_CPU_SIZE": "0.5",
        "LMCACHE_EC_REMOTE_URL": f"fs://host:0{store}",
    }
    ours = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}
    disk = Variant("ours, disk", folder)
    disk.flag, disk.ec, disk.survives = "ec_connector", ours, True
    disk.env = {"LMCACHE_EC_LOCAL_DISK": os.path.join(disk.folder, "store")}
    memory = Variant("ours, memory", folder)
    memory.flag, memory.ec = "ec_connector", ours
    return [none, example, offload, upstream, disk, memory]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the steady part")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-ec-")
    # A vision side that costs several times what the rest of a request does, as real ones do.
    model = tiny_model.make(os.path.join(folder, "model"), vision_layers=8, vision_width=256, image_size=224)
    every = variants(folder)
    images = list(range(1000, 1000 + options.images))
    for variant in every:
        if variant.survives:
            with variant.boot(model) as server:
                for seed in images:
                    check(server.image(seed), server)
                time.sleep(1)
    first: Times = {}
    lasting = [variant for variant in every if variant.survives or variant.ec is None]
    running: list[tuple[Variant, engine_process.Server]] = []
    try:
        for number in range(options.restarts):
            start(lasting if number % 2 else lasting[::-1], model, running)
            for name, times in ask(running, images, FIRST_BLOCK).items():
                first[name] = first.get(name, []) + times
            while running:
                running.pop()[1].group.kill()
        start(every, model, running)
        ask(running, images, len(images))
        steady: Times = {variant.name: [] for variant, _ in running}
        before = {variant.name: processor_seconds(server) for variant, server in running}
        for _ in range(options.rounds):
            for name, times in ask(running, images, STEADY_BLOCK).items():
                steady[name] += times
        spent = {
            variant.name: (processor_seconds(server) - before[variant.name]) / len(steady[variant.name])
            for variant, server in running
        }
        served = {v.name: hits(s) for v, s in running if v.flag}
    finally:
        for _, server in running:
            server.group.kill()
    died = upstream_after_restart(next(v for v in every if v.name == UPSTREAM), model, images)
    report(every, first, steady, spent, served, died)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def start(variants: list[Variant], model: str, running: list[tuple[Variant, engine_process.Server]]) -> None:
    """Boot ``variants`` and put each into ``running`` once it has answered a few images of its own."""
    for variant in variants:
        try:
            running.append((variant, variant.boot(model)))
            for seed in (1, 2, 3, 4):
                check(running[-1][1].image(seed), running[-1][1])
        except RuntimeError as error:
            if variant.name != OFFLOAD:
                raise
            variant.why_not = last_error(str(error))
            if running and running[-1][0] is variant:
                running.pop()[1].group.kill()


def last_error(log: str) -> str:
    """The last line of a log that names an exception; for one of pydantic's, what it objects to."""
    named = re.findall(r"Value error, (.+)", log) or re.findall(r"\b((?:\w+\.)*\w*(?:Error|Exception): .+)", log)
    return named[-1].partition(" [type=")[0].strip()[:200] if named else "no reason in its log"


def check(answer: engine_process.Answer, server: engine_process.Server) -> float:
    if not answer.ok:
        raise RuntimeError(f"a request failed: {answer.error}\n{server.log()[-4000:]}")
    return answer.seconds


def ask(running: list[tuple[Variant, engine_process.Server]], images: list[int], block: int) -> Times:
    """Each image once to each engine: ``block`` images to the one, the same to the next, rested before each."""
    times: Times = {variant.name: [] for variant, _ in running}
    for number, start in enumerate(range(0, len(images), block)):
        turn = number % len(running)
        for variant, server in running[turn:] + running[:turn]:
            time.sleep(REST_SECONDS)
            times[variant.name] += [check(server.image(seed), server) for seed in images[start : start + block]]
    return times


def processor_seconds(server: engine_process.Server) -> float:
    """User and system time of the server's processes so far."""
    total = 0
    for pid in server.group.members():
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def hits(server: engine_process.Server) -> float:
    time.sleep(3)
    lines = server.get("/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm_omni_patch_ec_hits_total"))


def upstream_after_restart(variant: Variant, model: str, images: list[int]) -> str:
    with variant.boot(model) as server:
        if server.image(images[0]).ok:
            return "answered"
        return "answered with an error" if server.healthy() else "engine dead at the first hit"


def report(
    every: list[Variant],
    first: Times,
    steady: Times,
    spent: dict[str, float],
    served: dict[str, float],
    died: str,
) -> None:
    print(f"{'':22}{'after restart':>28}{'steady':>28}{'CPU':>16}   (median ms, ratio to {BASELINE}, n)")
    for variant in every:
        if variant.why_not:
            print(f"{variant.name:22}  not started here: {variant.why_not}")
            continue
        columns = [column(times, variant.name) for times in (first, steady)]
        if variant.name == UPSTREAM:
            columns[0] = f"{died:>28}"
        ratio = spent[variant.name] / spent[BASELINE]
        print(f"{variant.name:22}{columns[0]}{columns[1]}{1000 * spent[variant.name]:>10.1f} {ratio:>5.2f}")
    for name, count in served.items():
        print(f"{name}: {count:.0f} hits counted")
    if "ours, disk" in first:
        print(
            f"first three after restart, ms: {milliseconds(first['ours, disk'][:3])} (ours, disk)"
            f" {milliseconds(first[BASELINE][:3])} ({BASELINE})"
        )


def milliseconds(times: list[float]) -> str:
    return ", ".join(f"{1000 * t:.1f}" for t in times)


def column(times: Times, name: str) -> str:
    if name not in times or not times[name]:
        return f"{'-':>28}"
    median = statistics.median(times[name])
    ratio = median / statistics.median(times[BASELINE])
    return f"{1000 * median:>16.1f} {ratio:>5.2f} {len(times[name]):>5}"


if __name__ == "__main__":
    sys.exit(main())
