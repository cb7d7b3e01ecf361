# SPDX-License-Identifier: Apache-2.0
"""Whether the process that wrote a file runs. Its id alone does not say: the system gives it to another one later."""

from __future__ import annotations

import os
import platform
from typing import Any

_mine: int | None = None


def born() -> int:
    """When this process began: clock ticks from the start of the host; 0 where that cannot be told. The same at each
    call, also once no file can be opened."""
    global _mine
    if _mine is None:
        _mine = _look(os.getpid())[1]
    return _mine


def is_alive(one: dict[str, Any]) -> bool | None:
    """Whether the process with the ``pid``, ``host`` and :func:`born` (``"born"``) of a file runs; ``None`` for one on
    another host. One that has ended and that its parent did not ask for yet (a zombie) does not run.

    Raises:
        KeyError, ValueError, TypeError: the file does not say.
    """
    if one["host"] != platform.node():
        return None
    pid = int(one["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's
    state, began = _look(pid)
    return state not in ("Z", "X") and (not began or not one.get("born") or one["born"] == began)


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
