#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure whether the encoder cache slows down with the number of entries in its folder.

    python scripts/bench_ec_growth.py [--entries 1000 10000 100000 300000] [--folder DIR ...] [--rounds 30]

For each folder (default: where temporary files go, and /dev/shm), stores of all sizes are made side by side from
entries of 4 KiB (1.7 GB for the default sizes; all are removed in the end). Every operation is then measured on each of
them in turn, in an order that changes. Times are medians; the ratio is to the smallest store.

    contains, get, put   a header looked up; an entry read and verified; an entry written and published
    evicting put         the same in a full store, so that room is made; a mean, because one eviction serves several
    build, close         an engine made, closed after one put

Then, on the largest store: a pass of the background upkeep that counts every shard again, beside a loop that stands
for the model's thread and beside another process that stores; the longest time for which this process held the lock;
and ``ec stats`` and ``ec clear --all``. Exit status 1 when a ratio is above 1.5, the lock was held over 50 ms, a store
of the other process did not reach the folder, or a command took more than 30 s.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry
from vllm_omni_patch.patches.ec_connector.storage.files import FileStore
from vllm_omni_patch.patches.ec_connector.storage.folder_lock import FolderLock
from vllm_omni_patch.patches.ec_connector.storage.key import Key, encode_id, stable_u64

UNLIMITED = 1 << 50
DIGEST = ModelIdentity("bench").namespace_digest("bench", "", "bfloat16", "")
SHAPE = (1, 1760)  # with its header one page
PAYLOAD = memoryview(bytearray(os.urandom(SHAPE[0] * SHAPE[1] * 2)))
OPERATIONS = ("contains", "get", "put", "evicting put", "build", "close")
# Puts, evicting or not, between two looks at the clock: an eviction makes room for about sixteen.
BATCH = 32


def key(name: str) -> Key:
    """The key of an entry of this script."""
    return Key(encode_id(name), stable_u64(name), "bfloat16", DIGEST)


def entry(name: str) -> Entry:
    """Its header."""
    return Entry.describe(key(name), *SHAPE, "bfloat16", PAYLOAD, {"model": "bench"})


def write(store: FileStore, name: str) -> str:
    """Store an entry."""
    return store.write(key(name), entry(name), PAYLOAD)


def fill(base: str, names: list[str]) -> None:
    """Make a store of entries last used one second apart, without the package's locks and counts."""
    FileStore(base, UNLIMITED).folder.make()
    root = os.path.join(base, "ec-v1")
    for shard in range(256):
        os.mkdir(os.path.join(root, f"{shard:02x}"), 0o700)
    now = time.time()
    for index, name in enumerate(names):
        path = os.path.join(root, key(name).path)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(handle, [entry(name).header, PAYLOAD])
        os.utime(handle, (now - len(names) + index,) * 2)
        os.close(handle)
    FileStore(base, UNLIMITED).folder.usage()


class Sized:
    """A store of one size and its operations."""

    def __init__(self, base: str, count: int) -> None:
        self.base, self.count, self.made = base, count, 0
        self.names = [f"entry-{index}" for index in range(count)]
        fill(base, self.names)
        self.roomy = FileStore(base, UNLIMITED)
        self.cache = self.engine()
        self.full = FileStore(base, self.roomy.folder.counted() + BATCH * 4096)
        for store in (self.roomy, self.full):
            store.folder.upkeep._next = float("inf")  # measured by itself

    def run(self, operation: str) -> float:
        """Seconds of one operation."""
        return float(getattr(self, operation.replace(" ", "_"))())

    def contains(self) -> float:
        """One lookup by the scheduler."""
        return self.ask(self.cache.contains)

    def get(self) -> float:
        """One load by a worker."""
        return self.ask(lambda name: self.cache.get(name, "cpu") is not None)

    def ask(self, call: Callable[[str], bool]) -> float:
        """Seconds of one call for an entry that is there, another choice in each round."""
        names = random.sample(self.names[-self.count // 2 :], BATCH)  # the older half may have been evicted
        return timed(lambda: demand(all([call(name) for name in names]))) / BATCH

    def put(self) -> float:
        """One entry; removed again, unmeasured."""
        self.made += 1
        names = [f"new-{self.made}-{index}" for index in range(BATCH)]
        seconds = timed(lambda: [write(self.roomy, name) for name in names]) / BATCH
        for name in names:
            self.roomy.remove(key(name))
        return seconds

    def evicting_put(self) -> float:
        """One entry in a full store."""
        self.made += 1
        names = [f"evicting-{self.made}-{index}" for index in range(4 * BATCH)]
        self.names += names
        return timed(lambda: [write(self.full, name) for name in names]) / (4 * BATCH)

    def engine(self) -> ECCacheEngine:
        """An engine on this store."""
        places = {"disk_path": self.base, "disk_bytes": UNLIMITED, "shm_path": self.base + "-shm"}
        config = ECConfig(namespace="bench", stats_seconds=0, **places)  # type: ignore[arg-type]
        return ECCacheEngine(config, ModelIdentity("bench", engine_id=""), role="worker", dtype=torch.bfloat16)

    def build(self) -> float:
        """An engine made."""
        made: list[ECCacheEngine] = []
        seconds = timed(lambda: made.append(self.engine()))
        made[0].close()
        return seconds

    def close(self) -> float:
        """An engine closed that has stored something."""
        self.made += 1
        engine = self.engine()
        engine.put(f"closing-{self.made}", torch.zeros(SHAPE, dtype=torch.bfloat16))
        engine.flush(10)
        return timed(engine.close)


def demand(true: bool) -> None:
    """Stop where what is measured does not work."""
    if not true:
        raise SystemExit("an operation that is measured failed")


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def lock_times() -> Iterator[list[float]]:
    """Collects the seconds of each time that this process holds a folder's lock."""
    times: list[float] = []
    real = FolderLock.held

    @contextlib.contextmanager
    def held(self: FolderLock, seconds: float | None = None) -> Iterator[Any]:
        with real(self, seconds) as counts:
            began = time.perf_counter()
            try:
                yield counts
            finally:
                times.append(time.perf_counter() - began)

    FolderLock.held = held  # type: ignore[method-assign]
    try:
        yield times
    finally:
        FolderLock.held = real  # type: ignore[method-assign]


def peer(base: str, limit: int, stop: Any, results: Any) -> None:
    """Another process that stores into the same full folder, about 200 entries a second."""
    store = FileStore(base, limit)
    outcomes, longest, count = [], 0.0, 0
    while not stop.is_set():
        began = time.perf_counter()
        try:
            outcomes.append(write(store, f"peer-{os.getpid()}-{count}"))
        except OSError as error:
            outcomes.append(str(error))
        longest = max(longest, time.perf_counter() - began)
        count += 1
        time.sleep(0.005)
    results.put((len(outcomes), outcomes.count("stored"), longest))


def model_loop(wait: Callable[[], Any]) -> tuple[float, float]:
    """(rounds a second, longest gap in seconds) of a thread that computes in Python while another waits."""
    rounds, longest, ended = 0, 0.0, []
    threading.Thread(target=lambda: (wait(), ended.append(1))).start()
    began = last = time.perf_counter()
    while not ended:
        sum(range(2000))
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        rounds += 1
    return rounds / (last - began), longest


def beside_upkeep(sized: Sized) -> bool:
    """Count every shard of the store again, in the background; whether nothing suffered."""
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    store = FileStore(sized.base, sized.full.limit)
    other = context.Process(target=peer, args=(sized.base, sized.full.limit, stop, results))
    other.start()
    time.sleep(4.0)  # until it has imported what it needs
    alone, alone_gap = model_loop(lambda: time.sleep(3.0))
    with store.folder.lock.held() as counts:
        for shard in range(256):
            counts._write(shard, counts._used[shard], 0)
    began = time.perf_counter()
    store.folder.upkeep.start_if_due(wrong=True)
    beside, gap = model_loop(lambda: store.folder.upkeep.wait(600))
    took = time.perf_counter() - began
    for index in range(200):
        write(store, f"main-{index}")
    stop.set()
    tried, stored, longest = results.get(timeout=60)
    other.join(30)
    print(f"upkeep: all shards of {sized.count} entries counted again in {took:.1f} s")
    print(
        f"  a loop beside it and the other process: {beside / alone:.2f} x its rate before, longest gap "
        f"{1e3 * gap:.1f} ms ({1e3 * alone_gap:.1f} before)"
    )
    print(f"  the other process: {stored} of {tried} stored, longest store {1e3 * longest:.1f} ms")
    return bool(stored == tried)


def commands(sized: Sized) -> bool:
    """The commands on the largest store, each as a process of its own."""
    good = True
    os.sync()  # the disk still writes what was measured before
    for words in (["stats"], ["clear", "--all"]):
        call = [
            os.path.join(os.path.dirname(sys.executable), "vllm-omni-patch"),
            "ec",
            words[0],
            sized.base,
            *words[1:],
        ]
        began = time.perf_counter()
        output = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        took = time.perf_counter() - began
        print(f"ec {' '.join(words)}: {took:.1f} s; {output.partition(': ')[2]}")
        good &= took <= 30
    return good


def bench(folder: str, entries: list[int], rounds: int) -> bool:
    """All figures of one place."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()
    print(f"\n{os.path.dirname(folder)} ({kind})")
    stores = [Sized(os.path.join(folder, str(count)), count) for count in entries]
    times: dict[tuple[str, int], list[float]] = {}
    with lock_times() as held:
        order = list(stores)
        for _ in range(rounds):
            order = order[1:] + order[:1]
            for operation in OPERATIONS:
                for sized in order:
                    times.setdefault((operation, sized.count), []).append(sized.run(operation))
        good = True
        print(f"{'us (x smallest)':16}" + "".join(f"{count:>12,} entries" for count in entries))
        for operation in OPERATIONS:
            medians = [statistics.median(times[operation, count]) for count in entries]
            print(f"{operation:16}" + "".join(f"{1e6 * m:12.0f}  {m / medians[0]:5.2f} " for m in medians))
            good &= max(medians) <= 1.5 * medians[0]
        good &= beside_upkeep(stores[-1])
    print(
        f"lock: held {len(held)} times, longest {1e3 * max(held):.1f} ms, median {1e6 * statistics.median(held):.0f} us"
    )
    return good & (max(held) <= 0.05) & commands(stores[-1])


def main() -> int:
    """Run it; 0 when nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1000, 10_000, 100_000, 300_000])
    parser.add_argument("--folder", nargs="+", default=[tempfile.gettempdir(), "/dev/shm"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for place in args.folder:
        folder = tempfile.mkdtemp(prefix="ec-growth-", dir=place)
        try:
            good &= bench(folder, sorted(args.entries), args.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
