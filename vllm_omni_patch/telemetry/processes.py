# SPDX-License-Identifier: Apache-2.0
"""Whether the process that wrote a file runs. An id alone does not tell: the system reuses it."""

from __future__ import annotations

import os
import platform

_mine: int | None = None


def born() -> int:
    """When this process began: clock ticks from the start of the host; 0 where that cannot be told. The same at each
    call, also once no file can be opened."""
    global _mine
    if _mine is None:
        _mine = _look(os.getpid())[1]
    return _mine


def is_alive(host: str, pid: int, began: int) -> bool | None:
    """Whether the process with this id that :func:`began <born>` then runs; ``None`` for one on another host.

    A zombie (ended, and not waited for by its parent) does not run. ``began`` is 0 where the process
    could not tell.
    """
    if host != platform.node():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's
    state, now = _look(pid)
    return state not in ("Z", "X") and (not now or not began or began == now)


def _look(pid: int) -> tuple[str, int]:
    """State, and when it began, of a living process of this host; empty and 0: not known here."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def _after_fork() -> None:
    global _mine
    _mine = None


os.register_at_fork(after_in_child=_after_fork)
