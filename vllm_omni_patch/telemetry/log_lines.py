# SPDX-License-Identifier: Apache-2.0
"""Loggers of this package, and log lines that are held until vLLM has set up its log."""

from __future__ import annotations

import atexit
import logging
import os
import threading

_lock = threading.RLock()
_held: list[tuple[str, int, str]] = []


def logger(name: str) -> logging.Logger:
    """A logger below vLLM's root logger, so that its format, level and handlers hold for our lines too."""
    return logging.getLogger(f"vllm.omni_patch.{name}" if name else "vllm.omni_patch")


def log(level: int, text: str, name: str = "") -> None:
    """Log ``text``, or hold it back until vLLM has set up its log: before that it would be lost or look foreign.

    Releases up to 0.30 set it up when ``vllm.logger`` is imported, later ones when an engine's settings are known.
    """
    with _lock:
        _held.append((name, level, text))
    release()


def release(force: bool = False) -> None:
    """Log the lines that were held back, if there is a log by now; with ``force``, in any case."""
    if not _held or not (force or logger("").hasHandlers()):
        return
    with _lock:
        held = _held[:]
        _held.clear()
    for name, level, text in held:
        logger(name).log(level, "%s", text)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(release, True)
