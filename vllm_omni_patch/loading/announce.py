# SPDX-License-Identifier: Apache-2.0
"""This process's line in vLLM's log.

It is written when an engine starts in the process. A worker imports most of what is hooked only after that, so its
line waits until a call first goes through a wrapper on worker code, or nothing is left to wait for. An engine core
that runs its worker itself has its line by then, and writes a second one, the last, if the account has changed.

It counts what was asked for. What the loader itself changes is not among it: where one of those is refused, that is a
warning of its own.
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
_told: str | None = None  # the account in the line that was written
_done = False


def at_engine_start() -> None:
    """Write this process's line, or let a worker's wait."""
    global _start
    path = ledger.process().get("activation_path")
    release = installed.live_release("vllm") or "of unknown version"
    _start = f"vllm-omni-patch {__version__}: pid {os.getpid()}, activated by {path}, vLLM {release}: "
    if not (processes.role() in ("worker", "ray worker") and _waiting(ledger.entries())):
        _write()


def at_first_call(target: str) -> None:
    """A call goes through our wrapper on ``target``: what this process uses is imported by now, if it is a worker."""
    if ".worker." in target:
        _write(final=True)


def when_settled() -> None:
    """Something changed: if nothing is left to wait for, the account is final."""
    if not _waiting(ledger.entries()):
        _write(final=True)


def _write(final: bool = False) -> None:
    global _told, _done
    if _start is None or _done:
        return
    now = account(ledger.entries())
    if now != _told:
        text = f"{_start}{now}" if _told is None else f"vllm-omni-patch: pid {os.getpid()}: now {now}"
        ledger.log(logging.INFO, text)
    _told, _done = now, final


def _waiting(entries: list[Entry]) -> list[Entry]:
    """Targets that may still be hooked: pending, in a package that is installed."""
    asked = [e for e in entries if e.patch != own.NAME]
    return [e for e in asked if e.state == "pending" and installed.is_here(e.target.partition(".")[0])]


def account(entries: list[Entry]) -> str:
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
    global _start, _told, _done
    _start, _told, _done = None, None, False


os.register_at_fork(after_in_child=_after_fork)
