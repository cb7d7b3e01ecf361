# SPDX-License-Identifier: Apache-2.0
"""Report files: JSON in the report folder, written so that a reader sees the old file or the whole new one."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.telemetry import log_lines

_warned: set[str] = set()


def are_wanted() -> bool:
    """Whether a report folder is set."""
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
        if name not in _warned:
            _warned.add(name)
            to_fix = f"To fix: set {flags.REPORT_DIR.name} to a writable folder."
            log_lines.log(logging.WARNING, f"could not write the {name} report: {error}. {to_fix}", "ledger")
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
            # One text in one call: json.dump would write each token by itself.
            file.write(json.dumps(payload, indent=1, default=str))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
