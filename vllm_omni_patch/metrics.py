# SPDX-License-Identifier: Apache-2.0
"""Gauges and counters named ``vllm_omni_patch_*``, gathered over all processes of an engine.

vLLM serves ``/metrics`` from the API server, while most of what we count happens in the engine core and in workers.
Each process therefore keeps its own numbers and leaves them in the run folder: as a snapshot and, where the folder is
in memory, in a file that is changed in place. Where ``/metrics`` is served one collector (``exposition.py``) reads all
of them. Prometheus' own multiprocess mode is not used for this: vLLM turns it on only with several API servers, and
its child processes import ``prometheus_client`` before it could be set.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from typing import Any, Literal

from vllm_omni_patch import flags, installed, ledger, numbers

PREFIX = "vllm_omni_patch_"
FOLDER = "vllm-omni-patch-run"  # start of the run folder's name; the host's name follows
STALE_S = 24 * 3600.0
MEMORY = "/dev/shm"
INTERVAL_S = 0.25  # a process leaves at most four snapshots a second, however much it counts

Kind = Literal["gauge", "counter"]
Key = tuple[str, tuple[tuple[str, str], ...]]

_lock = threading.RLock()
_families: dict[str, tuple[Kind, str]] = {}
_values: dict[Key, float] = {}
_places: dict[Key, int] = {}  # in ``_values``, from which nothing is taken, and so in the file of numbers
_numbers: numbers.Numbers | None = None
_flushing = threading.RLock()
_written = 0.0
_due = threading.Event()
_clerk: threading.Thread | None = None  # leaves the snapshots
_ended = False
_made_by = 0
_serves = False


def set_gauge(name: str, help: str, value: float, /, **labels: object) -> None:
    """Set gauge ``vllm_omni_patch_<name>`` to ``value``."""
    with _lock:
        _families[name] = ("gauge", help)
        _set((name, _key(labels)), float(value))


def add(name: str, help: str, amount: float = 1, /, **labels: object) -> None:
    """Add ``amount`` (>= 0) to counter ``vllm_omni_patch_<name>``; the name ends in ``_total``."""
    with _lock:
        _families[name] = ("counter", help)
        key = (name, _key(labels))
        _set(key, _values.get(key, 0.0) + amount)


def _set(key: Key, value: float) -> None:
    """Keep a number and show it: in place where others know its place, else with the next snapshot."""
    _values[key] = value
    place = _places.setdefault(key, len(_places))
    if _numbers is not None and place < _numbers.count:
        if _numbers.put(place, value):
            return
        _drop_numbers()
    _soon()


def _drop_numbers() -> None:
    """Show no more numbers in place, until the next snapshot begins a new file."""
    global _numbers
    if _numbers is not None:
        _numbers.close()
        _numbers = None


def values() -> dict[Key, float]:
    """This process's numbers, by name (without the prefix) and sorted labels."""
    with _lock:
        return dict(_values)


def _key(labels: dict[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in labels.items()))


# -- snapshots in the run folder


def start() -> None:
    """Make the run folder, or take the one that was inherited. Without one, numbers stay within each process."""
    global _made_by
    try:
        path = flags.read(flags.RUN_DIR)
        if not path:
            parent = _memory() or tempfile.gettempdir()
            _sweep(parent)
            path = tempfile.mkdtemp(prefix=f"{FOLDER}-{platform.node()}-", dir=parent)
            os.environ[flags.RUN_DIR.name] = path
            _made_by = os.getpid()
        elif not os.path.isdir(path) and not _from_elsewhere(path):
            os.makedirs(path, mode=0o700)
            _made_by = os.getpid()
    except OSError as error:
        ledger.say(logging.INFO, f"no run folder ({error}): numbers of other processes will not be on /metrics")
    atexit.register(_at_exit)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # Children of multiprocessing leave without exit handlers, but run their finalizers.
        from multiprocessing.util import Finalize

        Finalize(None, _at_exit, exitpriority=-100)


def _sweep(parent: str) -> None:
    """Remove run folders of this host and user that engines left behind when they were killed, a day ago or longer.

    Process ids may belong to another container that shares the folder. Should one be alive all the same, one of
    its next numbers makes the folder again.
    """
    for one in os.scandir(parent):
        try:
            about = one.stat(follow_symlinks=False)
            if not one.name.startswith(f"{FOLDER}-{platform.node()}-") or about.st_uid != os.getuid():
                continue
            names = [name for name in os.listdir(one.path) if name.startswith("metrics-")]
            pids = [name.rpartition("-")[2].removesuffix(".json") for name in names]
            host = platform.node()
            if time.time() - about.st_mtime > STALE_S and not any(is_alive({"host": host, "pid": pid}) for pid in pids):
                shutil.rmtree(one.path, ignore_errors=True)
        except OSError:
            continue


def _memory() -> str | None:
    """A folder in memory, where there is one: numbers change all the time and live as long as the engine. On a disk
    each change would be written out."""
    return MEMORY if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK | os.X_OK) else None


def _from_elsewhere(path: str) -> bool:
    """A run folder that a process on another host made: its path means nothing here."""
    name = os.path.basename(path.rstrip("/"))
    return name.startswith(f"{FOLDER}-") and not name.startswith(f"{FOLDER}-{platform.node()}-")


def folder() -> str | None:
    """The run folder, when there is one that this process can reach."""
    path = os.environ.get(flags.RUN_DIR.name, "").strip()
    return path if path and (os.path.isdir(path) or not _from_elsewhere(path)) else None


def changed() -> None:
    """Numbers or states have changed: leave a snapshot now, or soon if there was one a moment ago. Never raises."""
    if _written + INTERVAL_S <= time.monotonic():
        flush()
    else:
        _soon()


def _soon() -> None:
    """Leave a snapshot before long, from another thread: this may be the middle of a model step, and replacing a file
    may have to wait for a disk. The thread stays: to start one takes longer than all the rest of a count."""
    global _clerk
    if _clerk is None:
        with _lock:
            if _clerk is None:
                _clerk = threading.Thread(target=_keep, name="vllm-omni-patch-metrics", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down; its exit handler writes
                    _clerk.start()
    if not _due.is_set():
        _due.set()


def _keep() -> None:
    while not _ended:
        _due.wait()
        time.sleep(max(0.0, _written + INTERVAL_S - time.monotonic()))
        _due.clear()  # before the numbers are read: one that changes meanwhile asks again
        if not _ended:
            flush()


def flush(last: bool = False) -> None:
    """Leave this process's snapshot in the run folder; after the ``last`` one no number is changed in place. Never
    raises."""
    global _written, _numbers
    try:
        with _flushing:
            _written = time.monotonic()
            path = folder()
            if path is None or not (_values or ledger.entries()):
                return
            ended: numbers.Numbers | None = None
            with _lock:
                if last:
                    ended, _numbers = _numbers, None
                else:
                    _give_places(path)
                one = snapshot()
                if _numbers is not None:
                    one["numbers"] = os.path.basename(_numbers.path)
            ledger.write_json(os.path.join(path, f"metrics-{platform.node()}-{os.getpid()}.json"), one, compact=True)
            if ended is not None:
                ended.close(remove=True)
    except Exception as error:
        ledger.logger("metrics").debug("could not leave a snapshot: %s", error)


def _give_places(path: str) -> None:
    """Put all numbers into a file that is changed in place, where the run folder is in memory. With the lock held."""
    global _numbers
    if not _values or not os.path.realpath(path).startswith(MEMORY + os.sep):
        return
    if _numbers is not None and not _numbers.is_there():
        _drop_numbers()
    if _numbers is None:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            about = os.stat(path)
            if about.st_uid != os.getuid() or about.st_mode & 0o022:
                return
            name = f"numbers-{platform.node()}-{os.getpid()}-{time.time_ns()}"
            _numbers = numbers.Numbers(os.path.join(path, name))
        except (OSError, ValueError) as error:
            ledger.logger("metrics").debug("numbers are left in snapshots only: %s", error)
            return
    _numbers.put_all(_values.values())


def snapshot() -> dict[str, Any]:
    """This process's numbers and states as plain data."""
    with _lock:
        return {
            "pid": os.getpid(),
            "host": platform.node(),
            "serves": _serves,
            "families": {name: list(family) for name, family in _families.items()},
            "values": [[name, [list(label) for label in labels], value] for (name, labels), value in _values.items()],
            "vllm_version": str(ledger.process().get("vllm_version", "")),
            "states": [[entry.patch, entry.target, entry.state] for entry in ledger.entries() if _matters(entry)],
        }


def _matters(entry: ledger.Entry) -> bool:
    """Left out, so that an alert on ``skipped`` means something: what is ordinary not to be here."""
    if entry.state == "pending":
        return installed.is_here(entry.target.partition(".")[0])
    return not (entry.state == "skipped" and entry.optional and entry.verdict == "absent")


def read_snapshots() -> list[dict[str, Any]]:
    """The snapshots of all processes of this run, this one's as it is now. Unreadable ones are left out."""
    path = folder()
    mine = f"metrics-{platform.node()}-{os.getpid()}.json"
    found = [snapshot()]
    for name in sorted(os.listdir(path)) if path and os.path.isdir(path) else []:
        if not name.startswith("metrics-") or name == mine:
            continue
        with contextlib.suppress(OSError, ValueError):
            found.append(_read(str(path), name))
    return found


def _read(path: str, name: str) -> dict[str, Any]:
    """A process's snapshot with its present numbers in it.

    Raises:
        OSError, ValueError: the snapshot cannot be read.
    """
    one: dict[str, Any] = {}
    for _ in range(2):
        with open(os.path.join(path, name)) as file:
            one = json.load(file)
        if "numbers" not in one:
            break
        try:
            present = numbers.read(os.path.join(path, os.path.basename(one["numbers"])), len(one["values"]))
        except FileNotFoundError:
            continue  # the process has ended, or begun another file: its snapshot is a newer one now
        for row, value in zip(one["values"], present, strict=True):
            row[2] = row[2] if value is None else value
        break
    return one


def is_alive(one: dict[str, Any]) -> bool:
    """The process that left a snapshot runs; one on another host is taken to."""
    if one.get("host") != platform.node():
        return True
    try:
        os.kill(int(one["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, KeyError):
        return True
    return True


def serving() -> None:
    """Note that this process shows the numbers: the run folder lives as long as it does."""
    global _serves
    _serves = True
    changed()


# -- the end of a process


def _at_exit() -> None:
    """Leave the last numbers. The maker of the run folder removes it, unless a server that uses it lives on."""
    global _ended
    _ended = True
    try:
        path = folder()
        if path is None or not os.path.isdir(path):
            return
        others = [one for one in read_snapshots() if one["pid"] != os.getpid() and one.get("serves") and is_alive(one)]
        if (_made_by == os.getpid() or _serves) and not others and os.path.basename(path).startswith(FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        else:
            flush(last=True)
    except Exception as error:
        ledger.logger("metrics").debug("the run folder was not cleared: %s", error)


def _after_fork() -> None:
    """A forked child counts from zero: what it inherited is its parent's."""
    global _lock, _flushing, _due, _clerk, _written, _serves
    _lock, _flushing, _due = threading.RLock(), threading.RLock(), threading.Event()
    _clerk, _written, _serves = None, 0.0, False
    _drop_numbers()
    _values.clear()
    _places.clear()


os.register_at_fork(after_in_child=_after_fork)
