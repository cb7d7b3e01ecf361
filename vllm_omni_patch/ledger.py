# SPDX-License-Identifier: Apache-2.0
"""What happened in this process: one state per target, what patches publish for each other, and the report files.

Nothing here raises into a caller: a report that cannot be written is a log line.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_omni_patch import flags
from vllm_omni_patch.telemetry import processes

State = Literal["pending", "applied", "native", "skipped", "failed"]
OWN = "loader"  # the patch that holds what the loader itself changes
STATES: tuple[State, ...] = ("pending", "applied", "native", "skipped", "failed")


def logger(name: str) -> logging.Logger:
    """A logger below vLLM's root logger, so that its format, level and handlers hold for our lines too."""
    return logging.getLogger(f"vllm.omni_patch.{name}" if name else "vllm.omni_patch")


@dataclass
class Entry:
    """State of one target of one patch in this process. ``reason`` says why, for every state but ``pending``.

    ``target`` is empty where the patch as a whole is meant (it cannot be imported, or nobody knows the name).
    ``foreign`` lists wrappers of other packages around the same attribute; ``partial`` says where the original can
    still be reached (a subclass overrides the method, a module copied the function by name). ``optional``: a release
    without the target is ordinary. ``called``: a call has reached what is installed, in this process.
    """

    patch: str
    target: str
    state: State
    reason: str = ""
    traceback: str = ""
    group: str = ""
    verdict: str = ""
    release: str = ""
    foreign: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    optional: bool = False
    called: bool = False


_lock = threading.RLock()
_started = time.time()
_entries: dict[tuple[str, str], Entry] = {}
_facts: dict[str, Any] = {}
_process: dict[str, Any] = {}
_inspectors: list[Callable[[], None]] = []
_held: list[tuple[str, int, str]] = []  # lines from before vLLM set up its log


def record(entry: Entry) -> None:
    """Set the state of one target; the newest call stands."""
    with _lock:
        _entries[(entry.patch, entry.target)] = entry


def entries() -> list[Entry]:
    """Every target's state, in the order of registration."""
    with _lock:
        return list(_entries.values())


def describe_process(**facts: Any) -> None:
    """Note facts about this process (road, vLLM version) for the log line and the report."""
    with _lock:
        _process.update(facts)


def process() -> dict[str, Any]:
    """What :func:`describe_process` was told."""
    with _lock:
        return dict(_process)


def publish(name: str, value: Any) -> None:
    """Leave ``value`` for other patches under ``name`` (``"model_local_kv"``: declared bytes, for the budget)."""
    with _lock:
        _facts[name] = value


def published(name: str, default: Any = None) -> Any:
    """What a patch of this process published under ``name``."""
    with _lock:
        return _facts.get(name, default)


# -- lines


def say(level: int, text: str, name: str = "") -> None:
    """Log ``text``, or hold it back until vLLM has set up its log: before that it would be lost or look foreign.

    Releases up to 0.30 set it up when ``vllm.logger`` is imported, later ones when an engine's settings are known.
    """
    with _lock:
        _held.append((name, level, text))
    release_lines()


def release_lines(force: bool = False) -> None:
    """Let out the lines that were held back, if there is a log by now; with ``force``, in any case."""
    if not _held or not (force or logger("").hasHandlers()):
        return
    with _lock:
        held = _held[:]
        _held.clear()
    for name, level, text in held:
        logger(name).log(level, "%s", text)


def role() -> str:
    """What this process is to vLLM, from its name and command: ``worker``, ``engine core``, ``api server``, ..."""
    module = sys.modules.get("multiprocessing.process")
    name = str(module.current_process().name) if module is not None else "MainProcess"
    command = " ".join(sys.orig_argv)
    for text, found in (("enginecore", "engine core"), ("worker", "worker"), ("apiserver", "api server")):
        if text in name.lower():
            return found
    if "vllm.model_executor.models.registry" in command:
        return "model inspection"
    if "default_worker.py" in command:
        return "ray worker"
    if "api_server" in command or os.path.basename(sys.argv[0] if sys.argv else "") in ("vllm", "vllm-omni"):
        return "api server"
    return "main" if name == "MainProcess" else name


def _command() -> str:
    """The command without its arguments: they may hold keys."""
    words = list(sys.orig_argv)
    if "-m" in words[:-1]:
        return f"{words[0]} -m {words[words.index('-m') + 1]}"
    return words[0] if "-c" in words or len(words) < 2 else f"{words[0]} {words[1]}"


# -- reports


def inspect_with(inspector: Callable[[], None]) -> None:
    """Call ``inspector`` before each snapshot: it may record what has changed since."""
    with _lock:
        _inspectors.append(inspector)


def snapshot() -> dict[str, Any]:
    """This process's ledger as plain data."""
    for inspector in list(_inspectors):
        try:
            inspector()
        except Exception as error:
            logger("ledger").debug("an inspection failed: %s", error)
    with _lock:
        rows = [asdict(entry) for entry in _entries.values()]
        about = dict(_process)
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "host": platform.node(),
        "born": processes.born(),
        "role": role(),
        "command": _command(),
        "started": _started,
        "time": time.time(),
        "process": {**about, "run": os.path.basename(os.environ.get(flags.RUN_DIR.name, "").rstrip("/"))},
        "entries": rows,
    }


def save() -> str | None:
    """Write ``ledger-<pid>.json`` when a report folder is set; returns its path."""
    return write_report("ledger", snapshot()) if _wants_reports() else None


def _wants_reports() -> bool:
    try:
        return bool(flags.read(flags.REPORT_DIR))
    except flags.FlagError:
        return False


def write_report(name: str, payload: Any) -> str | None:
    """Write ``payload`` as ``<name>-<pid>.json`` in the report folder, atomically; returns the path.

    ``None`` when no folder is set or the file could not be written (one warning then).
    """
    try:
        folder = flags.read(flags.REPORT_DIR)
        if not folder:
            return None
        path = os.path.join(folder, f"{name}-{os.getpid()}.json")
        write_json(path, payload)
        return path
    except Exception as error:
        way_out = f"Set {flags.REPORT_DIR.name} to a writable folder."
        _warn_once(name, f"could not write the {name} report: {error}. {way_out}")
        return None


_warned: set[str] = set()


def _warn_once(name: str, text: str) -> None:
    with _lock:
        if name in _warned:
            return
        _warned.add(name)
    say(logging.WARNING, text, "ledger")


def write_json(path: str, payload: Any, compact: bool = False) -> None:
    """Write ``payload`` to ``path`` so that a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder or file cannot be written.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            # One text in one call: json.dump, and an indent, take an encoder that is ten times slower.
            file.write(json.dumps(payload, default=str) if compact else json.dumps(payload, indent=1, default=str))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _after_fork() -> None:
    global _lock, _started
    _lock, _started = threading.RLock(), time.time()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(release_lines, True)
