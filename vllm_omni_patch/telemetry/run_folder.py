# SPDX-License-Identifier: Apache-2.0
"""The run folder: where the processes of one engine leave their numbers for the one that serves ``/metrics``.

The first process of an engine makes it and names it in ``VLLM_OMNI_PATCH_RUN_DIR``, which its children inherit. By
default it is in ``/dev/shm``: numbers change all the time and live as long as the engine. It is removed with the last
process that takes part in it (``shared_folder.py``). A folder that the user has named stays.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile

from vllm_omni_patch import flags
from vllm_omni_patch.telemetry import processes, shared_folder

FOLDER = f"{shared_folder.PREFIX}run"  # start of the run folder's name; the host's name follows
MEMORY = "/dev/shm"

_member: shared_folder.Member | None = None


def start() -> None:
    """Make the run folder, or take the one that was inherited.

    Raises:
        OSError: there is no place for one.
    """
    named = flags.read(flags.RUN_DIR)
    if not named or _is_of_another_server(named):
        os.environ[flags.RUN_DIR.name] = _make()
    elif not os.path.isdir(named) and not _is_of_another_host(named):
        os.makedirs(named, mode=0o700)
    join()


def path() -> str | None:
    """The run folder, where there is one that this process can reach."""
    named = os.environ.get(flags.RUN_DIR.name, "").strip()
    return named if named and (os.path.isdir(named) or not _is_of_another_host(named)) else None


def is_in_memory(folder: str) -> bool:
    """Whether a write to ``folder`` cannot wait for a disk or a network."""
    return os.path.realpath(folder).startswith(MEMORY + os.sep)


def join() -> None:
    """Take part in the run folder, so that it is there as long as this process.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    global _member
    folder = path()
    if _member is not None and _member.path == folder and _member.is_there():
        return
    leave()
    if folder is not None and os.path.basename(folder).startswith(_own_start()):
        _member = shared_folder.Member(folder)


def leave() -> None:
    """Take part no more. The last process to leave removes the folder. Never raises."""
    global _member
    member, _member = _member, None
    if member is not None:
        member.leave()


def is_multiprocessing_child() -> bool:
    """Whether another process of the engine started this one through multiprocessing."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # While a child still imports what it is to run, it does not know its parent yet.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def _make() -> str:
    parents = [MEMORY] if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK | os.X_OK) else []
    parents.append(tempfile.gettempdir())
    for parent in parents:
        _sweep(parent)
    failure: OSError | None = None
    for parent in parents:
        try:
            return tempfile.mkdtemp(prefix=f"{_own_start()}{os.getpid()}-", dir=parent)
        except OSError as error:
            failure = error
    raise failure or OSError("no place for it")


def _sweep(parent: str) -> None:
    """Remove what earlier runs left when they were killed, with whatever they shared beside their numbers.

    A folder in memory is of this machine, whatever its container was called. Other folders may be on a file system
    that several hosts share and whose locks hold on one of them only.
    """
    shared_folder.sweep(parent, lambda name: parent == MEMORY or not _is_of_another_host(name))
    shared_folder.remove_stale(parent, _own_start())


def _own_start() -> str:
    return f"{FOLDER}-{platform.node()}-"


def _is_of_another_server(folder: str) -> bool:
    """Whether this is a server of its own, and ``folder`` that of the program that started it, perhaps with other
    servers. The API servers of one engine are children of multiprocessing.
    """
    name = os.path.basename(folder.rstrip("/"))
    by_another = name.startswith(_own_start()) and not name.startswith(f"{_own_start()}{os.getpid()}-")
    return by_another and processes.role() == "api server" and not is_multiprocessing_child()


def _is_of_another_host(folder: str) -> bool:
    """Whether a process on another host made the run folder: its path means nothing here."""
    name = os.path.basename(folder.rstrip("/"))
    return name.startswith(f"{FOLDER}-") and not name.startswith(_own_start())


def _after_fork() -> None:
    """A forked child takes part itself, once it has numbers: its parent's lock is its parent's."""
    global _member
    if _member is not None:
        _member.forget()
        _member = None


os.register_at_fork(after_in_child=_after_fork)
