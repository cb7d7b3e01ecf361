#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the encoder cache engine against memcpy, safetensors and LMCache's own encoder cache engine, in one run.

    python scripts/bench_ec.py [--mib 1 8 32] [--reps 20] [--disk DIR] [--shm DIR] [--remote URL ...] [--json FILE]

All rows of a size are measured in each repetition, in varying order, and reported as medians of
wall time and of the calling thread's CPU time (which a busy machine disturbs less), with ratios to ``memcpy`` (into
mapped memory) or, for loads, to ``clone`` (into fresh memory: all clones of a repetition are kept, so
the allocator cannot return pages that are already mapped; loads are kept in the same way).

    memcpy              dst.copy_(src)
    clone fresh         src.clone(), every result kept
    clone               src.clone(), the result dropped (the allocator may reuse its pages)
    put                 ECCacheEngine.put: cost on the model thread (the writer is idle when it is called)
    put + flush         until the entry can be found by another process
    get fresh, get      ECCacheEngine.get, results kept and dropped; shm: shared memory, disk: a folder (page cache)
    contains            ECCacheEngine.contains of a stored entry, and of a missing one
    safetensors         save_file, load_file + copy
    upstream            lmcache.v1.ec_engine: put, and StorageManager.get over fs:// (its own get never reads storage)

Exit status 1 if wall time misses a target: put at most 1.5 x memcpy, get from the page cache (disk) at most
1.5 x clone fresh, at 8 and 32 MiB; a full pool of 0.5 GiB at most 64 MiB more in scheduler and worker together; an
engine built within 0.5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity

MIB = 1 << 20
TARGET = 1.5


class Timer:
    """Samples by row name, in microseconds: wall time and CPU time of the calling thread."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` and note its time under ``name``."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = call()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.note(name, wall, cpu)
        return result

    def note(self, name: str, wall: float, cpu: float) -> None:
        """Note seconds under ``name``."""
        self.wall.setdefault(name, []).append(wall * 1e6)
        self.cpu.setdefault(name, []).append(cpu * 1e6)

    def clear(self) -> None:
        """Forget all samples."""
        self.wall.clear()
        self.cpu.clear()

    def ratio(self, name: str, base: str) -> tuple[float, float]:
        """Medians of ``name`` over medians of ``base``: wall, CPU."""
        pairs = ((self.wall[name], self.wall[base]), (self.cpu[name], self.cpu[base]))
        wall, cpu = (statistics.median(one) / statistics.median(other) for one, other in pairs)
        return wall, cpu


def build(shm: str, disk: str = "", remote: str = "") -> tuple[ECCacheEngine, float]:
    """An engine and the seconds that building it took."""
    config = ECConfig(shm_path=shm, disk_path=disk, remote_url=remote, cpu_bytes=512 * MIB, stats_seconds=0,
                      load_deadline=30.0, store_deadline=30.0, lookup_deadline=5.0)  # fmt: skip
    identity = ModelIdentity("bench/model", engine_id=f"bench-{os.getpid()}-{disk or 'shm'}-{remote}")
    began = time.perf_counter()
    engine = ECCacheEngine(config, identity, role="worker", dtype=torch.bfloat16)
    return engine, time.perf_counter() - began


@contextlib.contextmanager
def upstream(folder: str) -> Iterator[Any]:
    """LMCache's own engine over ``fs://folder``, or ``None`` when it cannot be built."""
    try:
        from lmcache.v1.config import LMCacheEngineConfig, load_ec_engine_config
        from lmcache.v1.ec_engine import ECCacheEngine as Upstream
        from lmcache.v1.metadata import LMCacheMetadata

        os.makedirs(folder, exist_ok=True)
        base = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.5, remote_url=f"fs://h:0{folder}/")
        metadata = LMCacheMetadata(
            model_name="bench/model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(2, 2, 256, 2, 32), role="worker",
        )  # fmt: skip
        engine = Upstream(load_ec_engine_config(base_config=base), metadata, torch.bfloat16)
    except ImportError as error:
        print(f"LMCache's own engine is not measured: {error}")
        yield None
        return
    try:
        yield engine
    finally:
        engine.close()


def measure_upstream(timer: Timer, engine: Any, name: str, source: torch.Tensor) -> None:
    """Upstream's put and a read through its storage manager, on a name of its own."""
    key = engine._make_cache_key(name)
    manager = engine._storage_manager
    backend = manager.storage_backends["RemoteBackend"]
    timer("upstream put", lambda: engine.put(name, source))
    while backend.exists_in_put_tasks(key) or not backend.contains(key):
        time.sleep(0.0005)
    manager.storage_backends["LocalCPUBackend"].remove(key)
    obj = timer("upstream get (fs)", lambda: manager.get(key))
    if obj is None or not torch.equal(obj.tensor, source):
        raise SystemExit("LMCache's StorageManager returned other data")
    obj.ref_count_down()
    manager.storage_backends["LocalCPUBackend"].remove(key)


def measure_safetensors(timer: Timer, path: str, source: torch.Tensor, target: torch.Tensor) -> None:
    """save_file, and load_file with a copy that pays for the mapped pages."""
    from safetensors.torch import load_file, save_file

    timer("safetensors save", lambda: save_file({"t": source}, path))
    timer("safetensors load", lambda: target.copy_(load_file(path)["t"]))


def measure_engine(
    timer: Timer, place: str, engine: ECCacheEngine, name: str, source: torch.Tensor, target: torch.Tensor, first: bool
) -> None:
    """One put and one dropped load of a fresh name; the copy to ``target`` is measured before or after the put."""

    def copy() -> torch.Tensor:
        return target.copy_(source)

    if first:
        timer("memcpy", copy)
    began = time.perf_counter()
    stored = timer(f"put ({place})", lambda: engine.put(name, source))
    between = time.perf_counter()
    if not first:
        timer("memcpy", copy)
    began += time.perf_counter() - between
    if not stored or not engine.flush(60):
        raise SystemExit(f"not stored: {engine.stats.reasons()}")
    timer.note(f"put + flush ({place})", time.perf_counter() - began, 0.0)
    found = timer(f"get ({place})", lambda: engine.get(name, "cpu"))
    if found is None or not torch.equal(found, source):
        raise SystemExit(f"the engine on {place} returned other data")
    timer(f"contains ({place})", lambda: engine.contains(name))
    timer(f"contains, absent ({place})", lambda: engine.contains(name + "-absent"))


def measure_fresh(timer: Timer, engines: dict[str, ECCacheEngine], name: str, source: torch.Tensor) -> None:
    """Clone and loads into memory that no earlier result has left behind."""
    # Give what earlier rows freed back to the system, or the first results here would not be fresh.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    kept = []
    for _ in range(2):
        if trim is not None:
            trim(0)
        kept.append(timer("clone fresh", lambda: source.clone()))
        for place, engine in engines.items():
            if place in ("shm", "disk"):
                kept.append(timer(f"get fresh ({place})", lambda engine=engine: engine.get(name, "cpu")))
    del kept
    gc.collect()


def run_size(mib: int, reps: int, engines: dict[str, ECCacheEngine], scratch: str, theirs: Any) -> Timer:
    """All rows for one size."""
    timer = Timer()
    source = torch.randn(mib * MIB // 2048, 1024).to(torch.bfloat16)
    target = torch.empty_like(source).copy_(source)
    for rep in range(reps + 2):
        if rep == 2:
            timer.clear()  # the first two only warm up
        name = f"{mib}-{rep}"
        timer("memcpy", lambda: target.copy_(source))
        timer("clone", lambda: source.clone())
        for place, engine in engines.items():
            measure_engine(timer, place, engine, name, source, target, rep % 2 == 0)
        measure_fresh(timer, engines, name, source)
        measure_safetensors(timer, os.path.join(scratch, "bench.safetensors"), source, target)
        if theirs is not None:
            measure_upstream(timer, theirs, f"{name}-up", source)
        for engine in engines.values():
            engine.discard(name)
    return timer


def report(results: dict[int, Timer]) -> list[str]:
    """Print the table; returns the targets that were missed."""
    sizes = list(results)
    names = list(results[sizes[0]].wall)
    print(f"{'median wall us (x memcpy)':32s}" + "".join(f"{size:>12d} MiB      " for size in sizes))
    for name in names:
        cells = []
        for size in sizes:
            value = statistics.median(results[size].wall[name])
            cells.append(f"{value:>12.0f} {results[size].ratio(name, 'memcpy')[0]:>6.2f}  ")
        print(f"{name:32s}" + "".join(cells))
    missed = []
    for size in sizes:
        for name in names:
            if name in ("put (shm)", "put (disk)"):
                base, wanted = "memcpy", size >= 8
            elif name in ("get fresh (shm)", "get fresh (disk)"):
                base, wanted = "clone fresh", size >= 8 and "disk" in name
            elif name in ("get (shm)", "get (disk)"):
                base, wanted = "clone", False
            else:
                continue
            wall, cpu = results[size].ratio(name, base)
            verdict = "" if not wanted else " ok" if wall <= TARGET else " MISSED"
            print(f"{size:3d} MiB  {name:17s} wall {wall:5.2f}  cpu {cpu:5.2f}  x {base}{verdict}")
            if "MISSED" in verdict:
                missed.append(f"{name} at {size} MiB: {wall:.2f} x {base}")
    return missed


def memory_of(role: Any, pool: int, shm: str, told: Any, tell: Any) -> None:
    """A process with an engine: fills the CPU tier when it is the worker; tells how much it grew, in bytes."""

    def resident() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))

    torch.set_num_threads(1)
    source = torch.zeros(4 * MIB // 2048, 1024, dtype=torch.bfloat16) + 1
    before = resident()
    began = time.perf_counter()
    config = ECConfig(shm_path=shm, cpu_bytes=pool, stats_seconds=0)
    engine = ECCacheEngine(config, ModelIdentity("m", engine_id="memory"), role=role, dtype=torch.bfloat16)
    seconds = time.perf_counter() - began
    for index in range(pool // (4 * MIB) + 8 if role == "worker" else 0):
        engine.put(f"m{index}", source)
        engine.flush(60)
    engine.contains("m1")
    tell.put((role, resident() - before, seconds))
    told.wait(60)
    engine.close()


def memory_part(shm_parent: str) -> list[str]:
    """Memory of a scheduler and a worker process with a full CPU tier of 0.5 GiB, and their start-up."""
    pool = 512 * MIB
    context = multiprocessing.get_context("spawn")
    told, tell = context.Event(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="ec-bench-", dir=shm_parent) as shm:
        processes = [
            context.Process(target=memory_of, args=(role, pool, shm, told, tell)) for role in ("worker", "scheduler")
        ]
        for process in processes:
            process.start()
        rows = [tell.get(timeout=300) for _ in processes]
        shared = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(shm) for name in names)
        told.set()
        for process in processes:
            process.join(60)
    total = shared + sum(grown for _, grown, _ in rows)
    parts = ", ".join(f"{role} {grown / MIB:.1f} MiB in {seconds:.3f} s" for role, grown, seconds in rows)
    print(f"full pool of 0.5 GiB: {shared / MIB:.1f} MiB shared, {parts}; together {total / MIB:.1f} MiB")
    missed = [] if total <= pool + 64 * MIB else [f"{total / MIB:.1f} MiB in both processes"]
    return missed + [f"{role} started in {seconds:.2f} s" for role, _, seconds in rows if seconds > 0.5]


def engine_part(args: argparse.Namespace) -> list[str]:
    """Measure the engine alone; returns the targets that were missed."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-bench-", dir=args.shm))
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-bench-", dir=args.disk))
        engines: dict[str, ECCacheEngine] = {}
        seconds: dict[str, float] = {}
        for place, where in {"shm": ("", ""), "disk": (disk, ""), **{url: ("", url) for url in args.remote}}.items():
            engines[place], seconds[place] = build(shm, *where)
            stack.callback(engines[place].close)
        theirs = None if args.no_upstream else stack.enter_context(upstream(os.path.join(disk, "upstream")))
        results = {mib: run_size(mib, args.reps, engines, disk, theirs) for mib in args.mib}
    print("building an engine (0.5 GiB), s: " + ", ".join(f"{k} {v:.3f}" for k, v in seconds.items()))
    missed = report(results)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({size: {"wall": t.wall, "cpu": t.cpu} for size, t in results.items()}, file, indent=1)
    return missed


def main() -> int:
    """Run the engine part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--shm", default="/dev/shm")
    parser.add_argument("--disk", default=None, help="a folder on a disk; default: the temporary folder")
    parser.add_argument("--remote", nargs="*", default=[], help="URLs of remote backends to measure too")
    parser.add_argument("--no-upstream", action="store_true", help="do not measure LMCache's own engine")
    parser.add_argument("--json", help="write all samples to this file")
    args = parser.parse_args()
    missed = memory_part(args.shm) + engine_part(args)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
