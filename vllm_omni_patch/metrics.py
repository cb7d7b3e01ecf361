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
import math
import os
import platform
import sys
import tempfile
import threading
import time
from typing import Any, Literal

from vllm_omni_patch import flags, ledger
from vllm_omni_patch.code import installed
from vllm_omni_patch.commands import processes
from vllm_omni_patch.telemetry import numbers, shared_folder

PREFIX = "vllm_omni_patch_"
FOLDER = f"{shared_folder.PREFIX}run"  # start of the run folder's name; the host's name follows
MEMORY = "/dev/shm"
INTERVAL_S = 0.25  # a process leaves at most four snapshots a second, however much it counts
RETRY_S = 5.0  # from a snapshot that could not be left to the next try

Kind = Literal["gauge", "counter"]
Key = tuple[str, tuple[tuple[str, str], ...]]

_lock = threading.RLock()
_families: dict[str, tuple[Kind, str]] = {}
_values: dict[Key, float] = {}
_places: dict[Key, int] = {}  # in ``_values``, from which nothing is taken, and so in the file of numbers
_numbers: numbers.Numbers | None = None
_numbers_for = ""  # the run folder that they are in, as the environment names it
_seen: dict[str, dict[str, Any]] = {}  # the snapshots of other processes, as they were last read
_flushing = threading.RLock()
_written = 0.0
_failure = ""
_due = threading.Event()
_clerk: threading.Thread | None = None  # leaves the snapshots
_ended = False
_member: shared_folder.Member | None = None
_asked = False  # multiprocessing, to finalize forked children


def set_gauge(name: str, help: str, value: float | None, /, **labels: object) -> None:
    """Set gauge ``vllm_omni_patch_<name>`` to ``value``; ``None``: not known (any more), so it has no sample."""
    with _lock:
        _families[name] = ("gauge", help)
        key = (name, _key(labels))
        if value is not None or key in _values:
            _set(key, math.nan if value is None else float(value))


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
    if _numbers is not None and place < _numbers.known and os.environ.get(flags.RUN_DIR.name) == _numbers_for:
        try:
            _numbers.put(place, value)
            return
        except OSError:
            _numbers.known = 0  # removed, or no room: the next snapshot puts all of them there again
    _soon()


def values() -> dict[Key, float]:
    """This process's numbers, by name (without the prefix) and sorted labels."""
    with _lock:
        return dict(_values)


def _key(labels: dict[str, object]) -> tuple[tuple[str, str], ...]:
    # What is no text in UTF-8 would cost the whole page.
    return tuple(sorted((k, str(v).encode(errors="replace").decode()) for k, v in labels.items()))


# -- snapshots in the run folder


def start() -> None:
    """Make the run folder, or take the one that was inherited. Without one, numbers stay within each process."""
    try:
        path = flags.read(flags.RUN_DIR)
        if not path or _is_of_another_server(path):
            os.environ[flags.RUN_DIR.name] = _make()
        elif not os.path.isdir(path) and not _from_elsewhere(path):
            os.makedirs(path, mode=0o700)
        _join()
    except OSError as error:
        ledger.say(logging.INFO, f"no run folder ({error}): numbers of other processes will not be on /metrics")
    atexit.register(_at_exit)
    if is_multiprocessing_child():
        _finalize()
    _finalize_children()


def _make() -> str:
    """A new run folder, named after this host and process.

    Raises:
        OSError: it cannot be made.
    """
    failure: OSError | None = None
    parents = [parent for parent in (_memory(), tempfile.gettempdir()) if parent]
    for parent in parents:
        _sweep(parent)
    for parent in parents:
        try:
            return tempfile.mkdtemp(prefix=f"{_start()}{os.getpid()}-", dir=parent)
        except OSError as error:
            failure = error
    raise failure or OSError("no place for it")


def _start() -> str:
    return f"{FOLDER}-{platform.node()}-"


def _is_of_another_server(path: str) -> bool:
    """This is a server that was started as a program of its own by one that has a run folder already, perhaps for
    several servers. The API servers of one engine are children of multiprocessing.
    """
    name = os.path.basename(path.rstrip("/"))
    made_by_another = name.startswith(_start()) and not name.startswith(f"{_start()}{os.getpid()}-")
    return made_by_another and ledger.role() == "api server" and not is_multiprocessing_child()


def is_multiprocessing_child() -> bool:
    """Whether this process was started by another one of the engine through multiprocessing."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # While a child still imports what it is to run, it does not know its parent yet.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def _join() -> None:
    """Take part in the run folder, so that it is there as long as this process. One that the user named stays."""
    global _member
    path = folder()
    if _member is not None and _member.path == path and _member.is_there():
        return
    member, _member = _member, None
    if member is not None:
        member.leave()
    if path is not None and os.path.basename(path).startswith(_start()):
        _member = shared_folder.Member(path)


def _finalize() -> None:
    """Children of multiprocessing leave without exit handlers, but run their finalizers."""
    from multiprocessing.util import Finalize

    Finalize(None, _at_exit, exitpriority=-100)


def _finalize_children() -> None:
    """A child of multiprocessing clears the finalizers that it inherited, and then asks here for its own."""
    global _asked
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _asked:
        util.register_after_fork(sys.modules[__name__], lambda _: _finalize())
        _asked = True


def _sweep(parent: str) -> None:
    """Remove what earlier runs left when they were killed, with whatever they shared beside their numbers.

    A folder in memory is of this machine, whatever its container was called. Other folders may be on a file system
    that several hosts share and whose locks hold on one of them only.
    """
    shared_folder.sweep(parent, lambda name: parent == MEMORY or not _from_elsewhere(name))
    shared_folder.remove_stale(parent, _start())


def _memory() -> str | None:
    """A folder in memory, where there is one: numbers change all the time and live as long as the engine. On a disk
    each change would be written out."""
    return MEMORY if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK | os.X_OK) else None


def _from_elsewhere(path: str) -> bool:
    """A run folder that a process on another host made: its path means nothing here."""
    name = os.path.basename(path.rstrip("/"))
    return name.startswith(f"{FOLDER}-") and not name.startswith(_start())


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
                clerk = threading.Thread(target=_keep, name="vllm-omni-patch-metrics", daemon=True)
                with contextlib.suppress(RuntimeError):  # too many threads; or the end, where the exit handler writes
                    clerk.start()
                    _clerk = clerk
    if not _due.is_set():
        _due.set()


def _keep() -> None:
    while not _ended:
        _due.wait()
        time.sleep(max(0.0, _written + (RETRY_S if _failure else INTERVAL_S) - time.monotonic()))
        _due.clear()  # before the numbers are read: one that changes meanwhile asks again
        if not _ended:
            flush()


def flush(last: bool = False) -> None:
    """Leave this process's snapshot in the run folder; after the ``last`` one no number is changed in place. Never
    raises."""
    global _written, _numbers, _failure
    try:
        with _flushing:
            _written = time.monotonic()
            path = folder()
            if path is None or (_ended and not last) or not (_values or (ledger.entries() and not last)):
                return  # the states of a process that has ended are nobody's
            with contextlib.suppress(OSError):
                _join()
            with _lock:
                file = _numbers if last else _give_places(path)
                one = snapshot()
                if last:
                    _numbers = None
                elif file is not None:
                    one["numbers"] = os.path.basename(file.path)
            ledger.write_json(os.path.join(path, _name()), one, compact=True)
            if file is not None and last:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
            elif file is not None:
                with _lock:  # from now on readers know these places; what changed before asked for another snapshot
                    file.known = len(one["values"])
            _failure = ""
    except Exception as error:
        first, _failure = not _failure, str(error) or type(error).__name__
        if first and not last:
            who = f"process {os.getpid()} ({ledger.role()})"
            text = f"{who} cannot show its numbers on /metrics: {error}; trying again every {RETRY_S:g} s"
            ledger.say(logging.WARNING, text, "metrics")
        if not last:
            _soon()


def _name() -> str:
    """Name of this process's snapshot. Another process may come to have the same id."""
    return f"metrics-{platform.node()}-{os.getpid()}-{processes.born()}.json"


def _give_places(path: str) -> numbers.Numbers | None:
    """Put all numbers into a file that is changed in place, where the run folder is in memory. With the lock held, so
    without a log line: its handler may count."""
    global _numbers, _numbers_for
    if not _values or not os.path.realpath(path).startswith(MEMORY + os.sep):
        return None
    try:
        if _numbers is None or os.path.dirname(_numbers.path) != path or not os.path.exists(_numbers.path):
            _numbers = None
            os.makedirs(path, mode=0o700, exist_ok=True)
            about = os.stat(path)
            if about.st_uid != os.getuid() or about.st_mode & 0o022:
                return None
            name = f"numbers-{platform.node()}-{os.getpid()}-{time.time_ns()}"
            _numbers, _numbers_for = numbers.Numbers(os.path.join(path, name)), os.environ[flags.RUN_DIR.name]
        _numbers.put_all(_values.values())
    except OSError:
        if _numbers is not None:
            _numbers.known = 0
        return None
    return _numbers


def snapshot() -> dict[str, Any]:
    """This process's numbers and states as plain data."""
    with _lock:
        return {
            "pid": os.getpid(),
            "host": platform.node(),
            "born": processes.born(),
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
    """The snapshots of all processes of this run, this one's as it is now; unreadable ones as they were last."""
    path = folder()
    mine = _name()
    found = [snapshot()]
    for name in sorted(os.listdir(path)) if path and os.path.isdir(path) else []:
        if not name.startswith("metrics-") or name == mine:
            continue
        try:
            one = _read(str(path), name)
        except Exception as error:
            ledger.logger("metrics").debug("could not read %s: %s", name, error)
            one = _seen.get(name, {})
        if one:
            _seen[name] = one
            found.append(one)
    return found


def _read(path: str, name: str) -> dict[str, Any]:
    """A process's snapshot with its present numbers in it. No counter is less than it was when last read.

    Raises:
        OSError, ValueError, ...: the snapshot cannot be read, or is none.
    """
    one: dict[str, Any] = {}
    present: list[float | None] = []
    for _ in range(2):
        one = _whole(json.loads(numbers.read_file(os.path.join(path, name))))
        if "numbers" not in one:
            break
        try:
            present = numbers.read(os.path.join(path, os.path.basename(one["numbers"])), len(one["values"]))
            break
        except FileNotFoundError:
            present = [None] * len(one["values"])  # the process has ended, or begun another file, as it says by now
    before = {(row[0], *row[1]): row[2] for row in _seen.get(name, {}).get("values", [])}
    for place, row in enumerate(one["values"]):
        known = before.get((row[0], *row[1]))
        if "numbers" in one:
            value = present[place]
            row[2] = value if value is not None else row[2] if known is None else known
        if one["families"][row[0]][0] == "counter" and known is not None:
            row[2] = max(row[2], known)
    return one


def _whole(one: Any) -> dict[str, Any]:
    """A snapshot that has all that its readers count on.

    Raises:
        KeyError, TypeError, ValueError: it has not.
    """
    families = {str(name): (str(kind), str(text)) for name, (kind, text) in one["families"].items()}
    if not {kind for kind, _ in families.values()} <= {"gauge", "counter"}:
        raise ValueError(f"neither gauge nor counter: {families}")
    values = [
        [str(name), [(str(label), str(value)) for label, value in labels], float(number)]
        for name, labels, number in one["values"]
    ]
    states = [(str(patch), str(target), str(state)) for patch, target, state in one["states"]]
    about = {"pid": int(one["pid"]), "host": str(one["host"]), "vllm_version": str(one["vllm_version"])}
    return {**one, **about, "families": families, "values": values, "states": states}


def is_alive(one: dict[str, Any]) -> bool:
    """The process that left a snapshot runs; one on another host is taken to."""
    return processes.is_alive(one) is not False


# -- the end of a process


def _at_exit() -> None:
    """Leave the last numbers. The last process of the run removes its folder."""
    global _ended, _member
    _ended = True
    try:
        path = folder()
        if path is None or not os.path.isdir(path):
            return
        flush(last=True)
        member, _member = _member, None
        if member is not None:
            member.leave()
    except Exception as error:
        ledger.logger("metrics").debug("the run folder was not cleared: %s", error)


def _after_fork() -> None:
    """A forked child counts from zero: what it inherited is its parent's."""
    global _lock, _flushing, _due, _clerk, _written, _numbers, _member, _failure, _ended
    _lock, _flushing, _due = threading.RLock(), threading.RLock(), threading.Event()
    _clerk, _written, _numbers, _failure, _ended = None, 0.0, None, "", False
    _values.clear()
    _places.clear()
    _seen.clear()
    if _member is not None:
        _member.forget()
        _member = None
    _finalize_children()


os.register_at_fork(after_in_child=_after_fork)
