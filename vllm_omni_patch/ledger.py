# SPDX-License-Identifier: Apache-2.0
"""What happened in this process: one state per target, what patches publish for each other, and the report files.

Nothing here raises into a caller: a report that cannot be written is a log line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_omni_patch import flags

State = Literal["pending", "applied", "native", "skipped", "failed"]


def logger(name: str) -> logging.Logger:
    """A logger below vLLM's root logger, so that its format, level and handlers hold for our lines too."""
    return logging.getLogger(f"vllm.omni_patch.{name}" if name else "vllm.omni_patch")


@dataclass
class Entry:
    """State of one target of one patch in this process. ``reason`` says why, for every state but ``pending``."""

    patch: str
    target: str
    state: State
    reason: str = ""
    traceback: str = ""
    group: str = ""
    verdict: str = ""
    release: str = ""
    foreign: list[str] = field(default_factory=list)


_lock = threading.RLock()
_entries: dict[tuple[str, str], Entry] = {}
_facts: dict[str, Any] = {}
_process: dict[str, Any] = {}


def record(entry: Entry) -> None:
    """Set the state of one target; the newest call stands."""
    with _lock:
        _entries[(entry.patch, entry.target)] = entry


def entries() -> list[Entry]:
    """Every target's state, in the order of registration."""
    with _lock:
        return list(_entries.values())


def describe_process(**facts: Any) -> None:
    """Note facts about this process (road, vLLM version, role) for the log line and the report."""
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


def snapshot() -> dict[str, Any]:
    """This process's ledger as plain data."""
    with _lock:
        rows = [asdict(entry) for entry in _entries.values()]
        about = dict(_process)
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "argv": list(getattr(sys, "argv", [])),
        "time": time.time(),
        "process": about,
        "entries": rows,
    }


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
        logger("ledger").warning("could not write the %s report: %s", name, error)
        return None


def write_json(path: str, payload: Any) -> None:
    """Write ``payload`` to ``path`` so that a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder or file cannot be written.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(payload, file, indent=1, default=str)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
