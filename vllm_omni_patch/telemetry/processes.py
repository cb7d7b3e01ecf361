# SPDX-License-Identifier: Apache-2.0
"""What this process is, and whether the process that wrote a file runs.

An id alone does not tell: the system reuses it.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

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


def role() -> str:
    """What this process is to vLLM, from its name and command: ``worker``, ``engine core``, ``api server``, ..."""
    module = sys.modules.get("multiprocessing.process")
    name = str(module.current_process().name) if module is not None else "MainProcess"
    words = " ".join(sys.orig_argv)
    for text, found in (("enginecore", "engine core"), ("worker", "worker"), ("apiserver", "api server")):
        if text in name.lower():
            return found
    if "vllm.model_executor.models.registry" in words:
        return "model inspection"
    if "default_worker.py" in words:
        return "ray worker"
    if "api_server" in words or os.path.basename(sys.argv[0] if sys.argv else "") in ("vllm", "vllm-omni"):
        return "api server"
    return "main" if name == "MainProcess" else name


def parallel() -> dict[str, Any]:
    """How this process works with others, as far as it shows: ``rank`` and ``world_size`` of torch's default group,
    and ``ray`` where vLLM's Ray executor is imported. Imports nothing. Never raises.
    """
    known: dict[str, Any] = {}
    try:
        torch = sys.modules.get("torch.distributed")
        if torch is not None and torch.is_available() and torch.is_initialized():
            known.update(rank=torch.get_rank(), world_size=torch.get_world_size())
    except Exception:  # torch is still being imported, or ends
        pass
    if any(name in sys.modules for name in ("vllm.v1.executor.ray_executor", "vllm.v1.executor.ray_executor_v2")):
        known["ray"] = True
    return known


def command() -> str:
    """The command without its arguments: they may hold keys."""
    words = list(sys.orig_argv)
    if "-m" in words[:-1]:
        return f"{words[0]} -m {words[words.index('-m') + 1]}"
    return words[0] if "-c" in words or len(words) < 2 else f"{words[0]} {words[1]}"


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
