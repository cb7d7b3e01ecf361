# SPDX-License-Identifier: Apache-2.0
"""Hurt the encoder cache engine while it works, and count what comes of it. The engine alone, without vLLM.

    python scripts/fault_ec.py [--faults 300] [--kills 1000] [--seconds 120] [--processes 4] [--folder DIR]

Three parts, each with its own line of figures; exit status 1 when one of them finds anything wrong:

faults  between a lookup that said yes and the load: the entry is deleted, cut short, flipped in header or payload,
        zeroed, replaced by a sound entry of another id, another length or another model, made a folder, a FIFO or a
        link, its folder removed or made unreadable; or the storage fails while an entry is written (disk full,
        read-only). Wanted: no wrong tensor, no exception, the entry not offered again, the next put and load succeed.
kills   a process that stores without pause is killed (SIGKILL) at random moments. Wanted: every entry that is found
        afterwards is right, and nothing that it left behind survives the next writer.
crowd   processes write and read one small folder at once. Wanted: no error, no wrong tensor, the limit held.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.storage import files
from vllm_omni_patch.patches.ec_connector.storage.folder import Folder

MIB = 1 << 20
SHAPES = ((1, 64), (32, 64), (257, 1024), (576, 4096))


NOISE = torch.randint(
    -(2**15), 2**15, (SHAPES[-1][0] * SHAPES[-1][1],), generator=torch.Generator().manual_seed(0)
).short()


def tensor_of(name: str, shape: tuple[int, int]) -> torch.Tensor:
    """The one right tensor for a name and shape, in any process; cheap, because thousands are made."""
    draw = random.Random(f"{name}/{shape}").getrandbits(32)
    count = shape[0] * shape[1]
    words = NOISE.repeat(-(-count // NOISE.numel()))[:count] if count > NOISE.numel() else NOISE[:count]
    factor, shift = (draw & 0xFFFF) | 1, draw >> 16
    return (words.int() * factor + shift).short().view(torch.bfloat16).view(shape)


def build(folder: str, engine_id: str, model: str = "m", role: Any = "worker", **config: Any) -> ECCacheEngine:
    """An engine on ``folder``."""
    values = {"disk_path": os.path.join(folder, "disk"), "shm_path": os.path.join(folder, "shm"), "stats_seconds": 0}
    os.makedirs(values["shm_path"], exist_ok=True)  # type: ignore[arg-type]
    values.update(config)
    return ECCacheEngine(ECConfig(**values), ModelIdentity(model, engine_id=engine_id), role=role, dtype=torch.bfloat16)  # type: ignore[arg-type]


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Bit for bit equal."""
    return (
        found is not None
        and found.shape == expected.shape
        and torch.equal(found.view(torch.int16), expected.view(torch.int16))
    )


def overwrite(path: Path, where: int, data: bytes) -> None:
    """Change bytes of a file in place; ``where`` counts from the end when negative."""
    with open(path, "r+b") as file:
        file.seek(where, os.SEEK_END if where < 0 else os.SEEK_SET)
        file.write(data)


def replace_by(path: Path, folder: str, name: str, shape: tuple[int, int], model: str) -> None:
    """Put a sound entry of another id, length or model in the entry's place."""
    other_folder = os.path.join(folder, f"other-{os.urandom(4).hex()}")
    other = build(other_folder, "other", model)
    other.put(name, tensor_of(name + "-other", shape))
    other.flush(10)
    (made,) = Path(other_folder).rglob("*.ec")
    os.replace(made, path)
    other.close()
    shutil.rmtree(other_folder)


def turn_into(path: Path, make: Callable[[Path], Any]) -> None:
    """Replace the file by something that is no file."""
    path.unlink()
    make(path)


@contextlib.contextmanager
def failing(code: int) -> Iterator[None]:
    """Every write to storage fails with ``code``."""

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with mock.patch.object(files.os, "writev", fail):
        yield


def damage_kinds(
    folder: str, name: str, shape: tuple[int, int], rng: random.Random
) -> dict[str, Callable[[Path], Any]]:
    """What can happen to an entry's file."""
    length = shape[0] * shape[1] * 2
    return {
        "deleted": lambda p: p.unlink(),
        "cut short": lambda p: os.truncate(p, rng.randrange(p.stat().st_size)),
        "emptied": lambda p: os.truncate(p, 0),
        "grown": lambda p: overwrite(p, p.stat().st_size, b"x"),
        "header flipped": lambda p: overwrite(p, rng.randrange(p.stat().st_size - length), os.urandom(3)),
        "payload flipped": lambda p: overwrite(p, -rng.randrange(1, length), os.urandom(1)),
        "payload zeroed": lambda p: overwrite(p, -min(length, 4096), bytes(64)),
        "garbage": lambda p: p.write_bytes(os.urandom(p.stat().st_size)),
        "another id": lambda p: replace_by(p, folder, name + "x", shape, "m"),
        "another length": lambda p: replace_by(p, folder, name, (shape[0] + 1, shape[1]), "m"),
        "another model": lambda p: replace_by(p, folder, name, shape, "m2"),
        "a folder": lambda p: turn_into(p, Path.mkdir),
        "a FIFO": lambda p: turn_into(p, os.mkfifo),
        "a link": lambda p: turn_into(p, lambda q: q.symlink_to("/dev/zero")),
        "folder removed": lambda p: shutil.rmtree(Path(folder) / "disk"),
    }


def part_faults(folder: str, wanted: int, rng: random.Random) -> bool:
    """Damage between lookup and load, and storage that fails."""
    worker = build(folder, "faults", retry_seconds=0.01)
    scheduler = build(folder, "faults", role="scheduler")
    wrong: list[str] = []
    served = done = 0
    kinds: dict[str, int] = {}
    names = list(damage_kinds(folder, "", (1, 1), rng))
    while done < wanted:
        kind = names[done % len(names)]
        shape = SHAPES[done // len(names) % len(SHAPES)]
        name = f"fault-{done}"
        expected = tensor_of(name, shape)
        put_until_there(worker, name, expected, wrong)
        path = entry_path(worker, name)
        if not scheduler.contains(name, shape[0]):
            wrong.append(f"{kind}: not found after a put")
        damage_kinds(folder, name, shape, rng)[kind](path)
        found = worker.get(name, "cpu", shape[0])
        if found is not None and same(found, expected):
            served += 1  # the byte written was the byte that stood there
        elif found is not None:
            wrong.append(f"{kind}: a wrong tensor")
        elif scheduler.contains(name, shape[0]):
            wrong.append(f"{kind}: offered again")
        if path.is_dir():
            path.rmdir()
        put_until_there(worker, name, expected, wrong)
        if not same(worker.get(name, "cpu", shape[0]), expected):
            wrong.append(f"{kind}: not stored again")
        worker.discard(name)
        kinds[kind] = kinds.get(kind, 0) + 1
        done += 1
    for code in (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT):
        for index in range(5):
            name = f"storage-{code}-{index}"
            with failing(code):
                worker.put(name, tensor_of(name, SHAPES[1]))
                worker.flush(10)
                if worker.get(name, "cpu") is not None:
                    wrong.append(f"{name}: found although every write failed")
            kinds[os.strerror(code)] = kinds.get(os.strerror(code), 0) + 1
            done += 1
        put_until_there(worker, f"after-{code}", tensor_of("after", SHAPES[1]), wrong)
    scheduler.close()
    worker.close()
    left = list(Path(folder).rglob("*.tmp"))
    print(f"faults: {done} of {len(kinds)} kinds, {len(wrong)} wrong, {served} without effect, {len(left)} leftovers")
    for line in wrong[:20]:
        print(f"  {line}")
    return not wrong and not left


def entry_path(engine: ECCacheEngine, name: str) -> Path:
    """The entry's file, in whichever tier it is."""
    key = engine._key(name)
    if key is None:
        raise SystemExit(f"{name} is no storable id")
    paths = [Path(tier.store.folder.root, key.path) for tier in engine._tiers.local]
    return next((path for path in paths if path.exists()), paths[0])


def put_until_there(engine: ECCacheEngine, name: str, tensor: torch.Tensor, wrong: list[str]) -> None:
    """Stores pause for a moment after a failure; an entry that never arrives is wrong."""
    deadline = time.monotonic() + 20
    while not engine.contains(name, tensor.shape[0]):
        engine.put(name, tensor)
        engine.flush(10)
        if time.monotonic() > deadline:
            wrong.append(f"{name}: cannot be stored any more")
            return
        time.sleep(0.001)


def child(folder: str, seed: int, ready: int) -> None:
    """Store without pause, until killed; writes to ``ready`` when it begins."""
    engine = build(folder, "killed", disk_bytes=24 * MIB, staging_bytes=8 * MIB)
    step = seed * 1_000
    os.write(ready, b".")
    while True:
        name = f"kill-{step % 400}"
        engine.put(name, tensor_of(name, SHAPES[step % len(SHAPES)]))
        step += 1
        if step % 16 == 0:
            engine.flush(5)


def part_kills(folder: str, kills: int, rng: random.Random) -> bool:
    """SIGKILL at random moments. Children are forked from a process that has imported everything."""
    server = subprocess.Popen(
        [sys.executable, __file__, "--fork-server", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if server.stdin is None or server.stdout is None:
        raise SystemExit("no pipes")
    reader = build(folder, "killed-reader", disk_bytes=24 * MIB)
    wrong: list[str] = []
    read = leftovers = 0
    for index in range(kills):
        server.stdin.write(f"{index}\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        time.sleep(rng.random() * 0.12)
        os.kill(pid, signal.SIGKILL)
        server.stdin.write("wait\n")
        server.stdin.flush()
        server.stdout.readline()
        leftovers += len(list(Path(folder, "disk").rglob("*.tmp")))
        for step in rng.sample(range(400), 12):
            shape = SHAPES[step % len(SHAPES)]
            found = reader.get(f"kill-{step}", "cpu")
            if found is not None:
                read += 1
                if not same(found, tensor_of(f"kill-{step}", shape)):
                    wrong.append(f"kill {index}: wrong tensor for {step}")
    server.stdin.close()
    server.wait(30)
    bad = reader.stats.snapshot().bad_entries
    put_until_there(reader, "after the kills", tensor_of("after", SHAPES[1]), wrong)
    store = reader._tiers.local[0].store
    used, entries = store.folder.usage()
    # The folder counts in pages of 4 KiB.
    on_disk = sum(-(-path.stat().st_size // 4096) * 4096 for path in Path(folder, "disk").rglob("*.ec"))
    left = list(Path(folder, "disk").rglob("*.tmp"))
    reader.close()
    build(folder, "next").close()
    deadline = time.monotonic() + 60
    while (shm := os.listdir(os.path.join(folder, "shm"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if used != on_disk or on_disk > 24 * MIB:
        wrong.append(f"{used} bytes counted, {on_disk} on disk in whole pages, limit {24 * MIB}")
    print(
        f"kills: {kills} writers killed, {leftovers} left a file, {len(left)} files left after the next writer, "
        f"{len(shm)} folders left in shared memory; {read} entries read, {len(wrong)} wrong, {bad} damaged; "
        f"{entries} entries of {used / MIB:.1f} MiB remain"
    )
    for line in wrong[:20]:
        print(f"  {line}")
    return not wrong and not left and not bad and not shm


def fork_server(folder: str) -> None:
    """Fork a storing child for each number that is read; answer with its pid, then with its end."""
    last = 0
    for line in sys.stdin:
        if line.strip() == "wait":
            os.waitpid(last, 0)
            print("ended", flush=True)
            continue
        ready, say = os.pipe()
        last = os.fork()
        if last == 0:
            sys.stdin.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            child(folder, int(line), say)
        os.read(ready, 1)
        os.close(ready)
        os.close(say)
        print(last, flush=True)


def crowd_member(folder: str, number: int, seconds: float, limit: int, results: Any) -> None:
    """One process of the crowd."""
    torch.set_num_threads(1)
    errors = ""
    wrong = reads = 0
    try:
        engine = build(folder, f"crowd-{number}", disk_bytes=limit, touch_seconds=0.0)
        rng = random.Random(number)
        expected = {f"crowd-{n}": tensor_of(f"crowd-{n}", SHAPES[n % len(SHAPES)]) for n in range(60)}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = f"crowd-{rng.randrange(60)}"
            found = engine.get(name, "cpu")
            if found is None:
                engine.put(name, expected[name])
            else:
                reads += 1
                wrong += not same(found, expected[name])
            if rng.random() < 0.02:
                engine.discard(name)
        engine.flush(20)
        engine.close()
        facts = engine.stats.snapshot()
        reasons = {k: v for k, v in engine.stats.reasons().items() if k != "queue full"}
        if reasons or facts.bad_entries:
            errors = f"{reasons}, {facts.bad_entries} bad entries"
        results.put((errors, wrong, reads, facts.stored))
    except BaseException as error:
        results.put((repr(error), wrong, reads, 0))


def part_crowd(folder: str, processes: int, seconds: float) -> bool:
    """Processes that share a folder which holds a third of what they store."""
    limit = 24 * MIB
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = [
        context.Process(target=crowd_member, args=(folder, number, seconds, limit, results))
        for number in range(processes)
    ]
    for member in members:
        member.start()
    highest = looks = 0
    root = Path(folder, "disk")
    watched = Folder(str(root), limit)
    while any(member.is_alive() for member in members) and results.qsize() < processes:
        # With the lock held nothing is counted, and only what was counted before is written.
        with contextlib.suppress(OSError), watched.lock.held():
            sizes = {}
            for path in itertools.chain(root.rglob("*.tmp"), root.rglob("*.ec")):
                with contextlib.suppress(OSError):
                    about = path.stat()
                    sizes[about.st_ino] = about.st_blocks * 512  # once, where it is published meanwhile
            highest = max(highest, sum(sizes.values()))
            looks += 1
        time.sleep(0.05)
    collected = [results.get(timeout=60) for _ in members]
    for member in members:
        member.join(30)
    errors = [line for line, *_ in collected if line]
    wrong = sum(row[1] for row in collected)
    counted = watched.counted()
    held = highest <= limit and watched.usage()[0] <= counted <= limit
    left = list(root.rglob("*.tmp"))
    print(
        f"crowd: {processes} processes for {seconds:g} s, {sum(row[3] for row in collected)} stored, "
        f"{sum(row[2] for row in collected)} loads, {wrong} wrong, {len(errors)} errors, at most "
        f"{highest / MIB:.2f} of {limit / MIB:.0f} MiB in {looks} looks, {len(left)} leftovers"
    )
    for line in errors:
        print(f"  {line}")
    return not errors and not wrong and held and not left and all(member.exitcode == 0 for member in members)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread for torch, and no warnings: every fault is warned about, as it should be."""
    logger, threads = logging.getLogger("vllm.omni_patch"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="0: leave this part out")
    parser.add_argument("--kills", type=int, default=1000, help="0: leave this part out")
    parser.add_argument("--seconds", type=float, default=120, help="0: leave the crowd out")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where to make the folders; default: where temporary files go")
    parser.add_argument("--fork-server", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.fork_server:
        torch.set_num_threads(1)
        fork_server(args.fork_server)
        return 0
    rng = random.Random(args.seed)
    good = []
    with quiet():
        for amount, run in (
            (args.faults, lambda folder: part_faults(folder, args.faults, rng)),
            (args.kills, lambda folder: part_kills(folder, args.kills, rng)),
            (args.seconds, lambda folder: part_crowd(folder, args.processes, args.seconds)),
        ):
            if amount:
                with tempfile.TemporaryDirectory(prefix="ec-fault-", dir=args.folder) as folder:
                    good.append(run(folder))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
