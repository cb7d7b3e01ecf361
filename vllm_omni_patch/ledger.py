# SPDX-License-Identifier: Apache-2.0
"""What happened in this process: one state per target, and what patches publish for each other.

For patches, ``logger``, ``log``, ``write_report`` and ``write_json`` are found here too. Only ``write_json`` raises.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.patch import State
from vllm_omni_patch.telemetry import processes, report_files, run_folder
from vllm_omni_patch.telemetry.log_lines import log, logger
from vllm_omni_patch.telemetry.report_files import write_json, write_report

__all__ = [
    "Entry",
    "State",
    "describe_process",
    "entries",
    "inspect_with",
    "log",
    "logger",
    "process",
    "publish",
    "published",
    "record",
    "save",
    "snapshot",
    "write_json",
    "write_report",
]

STATES: tuple[State, ...] = ("pending", "applied", "native", "skipped", "failed")


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


def record(entry: Entry) -> None:
    """Set the state of one target; a later call replaces it."""
    with _lock:
        _entries[(entry.patch, entry.target)] = entry


def entries() -> list[Entry]:
    """Every target's state, in the order of registration."""
    with _lock:
        return list(_entries.values())


def describe_process(**facts: Any) -> None:
    """Note facts about this process (activation path, vLLM version) for the log line and the report."""
    with _lock:
        _process.update(facts)


def process() -> dict[str, Any]:
    """The facts that :func:`describe_process` noted."""
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
        "role": processes.role(),
        "command": processes.command(),
        "started": _started,
        "time": time.time(),
        "process": {
            **about,
            "run": os.path.basename(os.environ.get(flags.RUN_DIR.name, "").rstrip("/")),
            "run_reachable": run_folder.path() is not None,
            **processes.parallel(),
        },
        "entries": rows,
    }


def save() -> str | None:
    """Write ``ledger-<pid>.json`` when a report folder is set; returns its path."""
    return write_report("ledger", snapshot()) if report_files.are_wanted() else None


def _after_fork() -> None:
    global _lock, _started
    _lock, _started = threading.RLock(), time.time()


os.register_at_fork(after_in_child=_after_fork)
