# SPDX-License-Identifier: Apache-2.0
"""This process's line in vLLM's log.

It is written when an engine starts in the process. A worker imports most hooked modules after that, so its line waits
until a call first reaches a wrapper on worker code, or no target is pending. An engine core that runs its worker itself
has written its line by then; it writes a second and last one if the counts have changed.

The line counts what was asked for. The loader's own targets are left out: one that is skipped has a warning of its own.
"""

from __future__ import annotations

import logging
import os

from vllm_omni_patch import __version__, ledger
from vllm_omni_patch.code import installed
from vllm_omni_patch.ledger import STATES, Entry
from vllm_omni_patch.loading import own
from vllm_omni_patch.telemetry import processes

_WORDS = {"pending": "waiting for their modules"}

_start: str | None = None  # the beginning of the line, once an engine has started
_written: str | None = None  # the counts in the line that was written
_done = False


def at_engine_start() -> None:
    """Write this process's line; a worker's waits."""
    global _start
    path = ledger.process().get("activation_path")
    release = installed.running_release("vllm") or "of unknown version"
    _start = f"vllm-omni-patch {__version__}: pid {os.getpid()}, activated by {path}, vLLM {release}: "
    if not (processes.role() in ("worker", "ray worker") and _waiting(ledger.entries())):
        _write()


def at_first_call(target: str) -> None:
    """A call has reached our wrapper on ``target``. In a worker, what it uses has been imported by then."""
    if ".worker." in target:
        _write(final=True)


def when_settled() -> None:
    """A module has been hooked. If no target is pending, the counts are final."""
    if not _waiting(ledger.entries()):
        _write(final=True)


def _write(final: bool = False) -> None:
    global _written, _done
    if _start is None or _done:
        return
    now = counts_of(ledger.entries())
    if now != _written:
        text = f"{_start}{now}" if _written is None else f"vllm-omni-patch: pid {os.getpid()}: now {now}"
        ledger.log(logging.INFO, text)
    _written, _done = now, final


def _waiting(entries: list[Entry]) -> list[Entry]:
    """Targets that may still be hooked: pending, in a package that is installed."""
    asked = [e for e in entries if e.patch != own.NAME]
    return [e for e in asked if e.state == "pending" and installed.is_here(e.target.partition(".")[0])]


def counts_of(entries: list[Entry]) -> str:
    """Counts of targets by state, and the patches they belong to: ``4 applied (ec_connector 1, ...), ...``."""
    waiting = {id(entry) for entry in _waiting(entries)}
    parts = []
    for state in STATES[1:] + STATES[:1]:
        counts: dict[str, int] = {}
        for entry in entries:
            if entry.patch != own.NAME and entry.state == state and (state != "pending" or id(entry) in waiting):
                counts[entry.patch] = counts.get(entry.patch, 0) + 1
        if counts or state == "applied":
            names = f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
            parts.append(f"{sum(counts.values())} {_WORDS.get(state, state)}{names}")
    return ", ".join(parts)


def _after_fork() -> None:
    global _start, _written, _done
    _start, _written, _done = None, None, False


os.register_at_fork(after_in_child=_after_fork)
