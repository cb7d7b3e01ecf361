#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure checksums for the encoder cache's entries on one thread: alone, and within a load as the engine does it.

    python scripts/bench_checksum.py [--mib 0.5 8 32 128] [--reps 12]

A load reads a file from the page cache into fresh memory in pieces, and sums each piece while it is in a CPU cache.
Times are medians of the thread's CPU time. Ratios are to a copy into mapped memory (``sum``) and to a clone into fresh
memory (``load``, every result of a repetition kept). BLAKE3 is measured if it is installed (vLLM installs it).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from vllm_omni_patch.patches.ec_connector.storage.entry import PIECE

MIB = 1 << 20


def checksums() -> dict[str, Callable[[], Any]]:
    """Constructors by name."""
    found: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
    try:
        import blake3
    except ImportError:
        return found
    return {"xxh3_128": found["xxh3_128"], "blake3": blake3.blake3, "sha256": found["sha256"]}


def load(handle: int, size: int, make: Callable[[], Any] | None) -> torch.Tensor:
    """``size`` bytes of a file in memory of their own, summed by ``make()`` where given."""
    result = torch.empty(size, dtype=torch.uint8)
    buffer = memoryview(result.numpy())  # type: ignore[arg-type]
    check = make() if make is not None else None
    for start in range(0, size, PIECE):
        piece = buffer[start : start + PIECE]
        os.preadv(handle, [piece], start)
        if check is not None:
            check.update(piece)
    if check is not None:
        check.digest()
    return result


def measure(rows: dict[str, Callable[[], Any]], reps: int, *, fresh: bool) -> dict[str, float]:
    """Median CPU seconds of each row, measured in turn in an order that changes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    times: dict[str, list[float]] = {name: [] for name in rows}
    order = list(rows)
    for _ in range(reps + 1):
        order = order[1:] + order[:1]
        kept = []
        for name in order:
            if fresh and trim is not None:
                gc.collect()
                trim(0)
            began = time.thread_time()
            kept.append(rows[name]())
            times[name].append(time.thread_time() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def run(size: int, reps: int) -> None:
    """Print both lines for one size in bytes."""
    known = checksums()
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    target = torch.empty_like(source)
    view = memoryview(source.numpy())  # type: ignore[arg-type]
    with tempfile.TemporaryFile() as file:
        file.write(view)
        file.flush()
        handle = file.fileno()
        sums: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
        loads: dict[str, Callable[[], Any]] = {"clone": source.clone, "none": lambda: load(handle, size, None)}
        for name, make in known.items():
            sums[name] = lambda make=make: make(view).digest()
            loads[name] = lambda make=make: load(handle, size, make)
        for what, rows, fresh in (("sum", sums, False), ("load", loads, True)):
            found = measure(rows, reps, fresh=fresh)
            base = next(iter(found.values()))
            cells = (f"{name} {value * 1e3:7.2f} ms {value / base:5.2f}" for name, value in found.items())
            print(f"{size / MIB:g} MiB".ljust(9) + f"{what:6s}" + "   ".join(cells), flush=True)


def main() -> None:
    """Print two lines for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.5, 8, 32, 128])
    parser.add_argument("--reps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for mib in args.mib:
        run(int(mib * MIB), args.reps)


if __name__ == "__main__":
    main()
