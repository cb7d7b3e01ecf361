# SPDX-License-Identifier: Apache-2.0
"""This process's line in vLLM's log.

It is written when an engine starts in the process, whatever is applied by then. Workers import most of what is hooked
after that, so where the account has changed by the time a call first goes through one of our wrappers, or nothing is
left to wait for, one more line says so. There are never more than these two.
"""

from __future__ import annotations

import logging
import os

from vllm_omni_patch import __version__, installed, ledger
from vllm_omni_patch.ledger import STATES, Entry

_WORDS = {"pending": "waiting for their modules"}

_told: str = ""  # the account in the line that was written
_done = False


def at_engine_start() -> None:
    """Write this process's line."""
    global _told, _done
    about = ledger.process()
    _told = account(ledger.entries())
    _done = not _waiting(ledger.entries())
    release = installed.live_release("vllm") or "of unknown version"
    road = about.get("road")
    ledger.say(logging.INFO, f"vllm-omni-patch {__version__}: pid {os.getpid()}, road {road}, vLLM {release}: {_told}")


def at_first_call() -> None:
    """A call goes through one of our wrappers: what this process uses is imported by now."""
    _again()


def when_settled() -> None:
    """Something changed: if nothing is left to wait for, the account is final."""
    if not _waiting(ledger.entries()):
        _again()


def _again() -> None:
    global _told, _done
    if _done or not _told:
        return
    _done = True
    now = account(ledger.entries())
    if now != _told:
        _told = now
        ledger.say(logging.INFO, f"vllm-omni-patch: pid {os.getpid()}: now {now}")


def _waiting(entries: list[Entry]) -> list[Entry]:
    """Targets that may still be hooked: pending, in a package that is installed."""
    return [entry for entry in entries if entry.state == "pending" and _is_here(entry.target)]


def _is_here(target: str) -> bool:
    return installed.folder_of(target.partition(".")[0]) is not None


def account(entries: list[Entry]) -> str:
    """Counts of targets by state, and the patches they belong to: ``4 applied (ec_connector 1, ...), ...``."""
    waiting = {id(entry) for entry in _waiting(entries)}
    parts = []
    for state in STATES[1:] + STATES[:1]:
        counts: dict[str, int] = {}
        for entry in entries:
            if entry.state == state and (state != "pending" or id(entry) in waiting):
                counts[entry.patch] = counts.get(entry.patch, 0) + 1
        if counts or state == "applied":
            names = f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
            parts.append(f"{sum(counts.values())} {_WORDS.get(state, state)}{names}")
    return ", ".join(parts)


def _after_fork() -> None:
    global _told, _done
    _told, _done = "", False


os.register_at_fork(after_in_child=_after_fork)
