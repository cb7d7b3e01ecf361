# SPDX-License-Identifier: Apache-2.0
"""A folder that several processes share and that goes with the last of them, however each ends.

Each process keeps a shared lock on the file ``alive`` in it, which the kernel drops when it has taken the process
apart. Unlike a process id, a lock means the same in every container that shares the folder.

Three remove it, each only while it holds that lock alone:

* the last process, when it leaves by itself;
* the keeper, a small process that the folder's maker starts and that sleeps in the kernel until the lock is free. It
  is there because nobody else is where the last process was killed, or stopped until all others had gone;
* the next start (:func:`sweep`), where the keeper was killed too: the end of a container, or an out-of-memory killer
  that takes a whole group.

What takes longer than a moment is always left to a keeper: neither the end nor the start of a process waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable

ALIVE = "alive"
PREFIX = "vllm-omni-patch-"  # every shared folder's name begins so
STALE_S = 24 * 3600.0
# As a text, in an interpreter without site packages: some 7 MiB, and 16 ms of CPU to start. It leaves its parent, so
# that nobody has a child that they know nothing of, and what ends a group or a terminal's session (SIGTERM, SIGHUP,
# SIGINT) does not concern it: it ends with the others anyway. No path is on its command line, where
# "pkill -9 -f vllm" would look.
_KEEPER = f"""\
# Removes the folder that it was started in, once every process that takes part in it has ended.
import fcntl, os, shutil, signal
for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(one, signal.SIG_IGN)
if os.fork():
    os._exit(0)
path = os.getcwd()
alive = os.open("{ALIVE}", os.O_RDWR | os.O_NOFOLLOW)
os.chdir("/")
fcntl.flock(alive, fcntl.LOCK_EX)
if os.path.samestat(os.fstat(alive), os.stat(os.path.join(path, "{ALIVE}"))):
    os.chdir(path)
    for name in set(os.listdir()) - {{"{ALIVE}"}}:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
        else:
            os.unlink(name)
    os.unlink("{ALIVE}")
    os.rmdir(path)
"""
_KEEPER_STARTS_S = 5.0
# Longest time that a process removes files itself: some 5,000 files.
_CLEAR_S = 0.1


class Member:
    """This process's part in folder ``path``, which is made (mode 0700) where it is missing.

    Raises:
        OSError: the folder cannot be made, is not this user's alone, or its file system knows no locks.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle, self._file = _join(path)

    def is_there(self) -> bool:
        """This process still takes part: the folder has not been removed, nor made anew by others."""
        with contextlib.suppress(OSError):
            return self._is_ours() and os.path.samestat(self._file, os.stat(os.path.join(self.path, ALIVE)))
        return False

    def leave(self) -> None:
        """Take part no more; remove the folder when nobody else does. Never raises."""
        if self.is_there() and _alone(self._handle):
            _clear(self.path)
        self.forget()

    def forget(self) -> None:
        """Take part no more, and leave the folder as it is: for a forked child, whose parent still does."""
        if self._is_ours():
            os.close(self._handle)

    def _is_ours(self) -> bool:
        """Where somebody closed the handle behind our back, its number may stand for another file now."""
        with contextlib.suppress(OSError):
            here = os.fstat(self._handle)
            # The folder goes when our lock does, and another file may get our file's inode. Nobody writes to ours.
            return os.path.samestat(self._file, here) and self._file.st_mtime_ns == here.st_mtime_ns
        return False


def _join(path: str) -> tuple[int, os.stat_result]:
    alive = os.path.join(path, ALIVE)
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            _check(path)
            handle, made = _open(alive)
        except FileNotFoundError:
            continue  # the last of others has just removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            file = os.fstat(handle)
            # Another process may have removed the folder before the lock was had.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(file, os.stat(alive)):
                    if made:
                        _start_keeper(path)
                    return handle, file
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _check(path: str) -> None:
    """Raises:
    OSError: the folder is a link or no folder, another user's, or open to others.
    """
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of user {os.getuid()}; remove it")


def _open(alive: str) -> tuple[int, bool]:
    """The file, and whether this call made it: exactly one process does, for each folder."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileExistsError):
        return os.open(alive, flags | os.O_EXCL, 0o600), True
    return os.open(alive, flags & ~os.O_CREAT), False


def _start_keeper(path: str) -> bool:
    """Start the process that removes the folder after its last member. Never raises: without one (False), the last to
    leave by itself does, or the next start."""
    if not sys.executable or getattr(sys, "frozen", False):
        return False
    with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", "-c", _KEEPER]
        first = subprocess.Popen(command, cwd=path, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        first.wait(_KEEPER_STARTS_S)
        return True
    return False


def remove_if_left(path: str, deadline: float | None = None) -> bool:
    """Remove folder ``path`` when all that took part in it have ended; False when somebody does, or nobody ever did.
    What is not done at ``deadline`` (of the monotonic clock) is left to a keeper."""
    try:
        handle = os.open(os.path.join(path, ALIVE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        left = _alone(handle)
        if left:
            _clear(path, deadline)
    finally:
        os.close(handle)
    return left


def _clear(path: str, deadline: float | None = None) -> None:
    """Remove the folder, whose lock this process has alone: the locked file last. What is not done at ``deadline``, or
    in ``_CLEAR_S``, is left to a keeper, which begins when this process gives the lock back. Whoever is killed
    half-way, or has a thread that still writes there, leaves it to the keeper or to the next start. Never raises."""
    deadline = time.monotonic() + _CLEAR_S if deadline is None else deadline
    while not _empty(path, deadline):
        if _start_keeper(path):
            return
        deadline = math.inf
    with contextlib.suppress(OSError):
        if os.listdir(path) == [ALIVE]:
            os.unlink(os.path.join(path, ALIVE))
            os.rmdir(path)


def _empty(folder: str, deadline: float) -> bool:
    """Remove what is in ``folder`` and no file ``alive``; False when ``deadline`` came first. Never raises."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for one in entries:
            if one.name == ALIVE:
                continue
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(OSError):
                if not one.is_dir(follow_symlinks=False):
                    os.unlink(one.path)
                elif _empty(one.path, deadline):
                    os.rmdir(one.path)
                else:
                    return False
    return True


def sweep(parent: str, ours: Callable[[str], bool]) -> None:
    """Remove the shared folders of this user in ``parent`` that all who took part in them have left. Never raises.

    ``ours``: whether a folder of this name may be judged here. One in which nobody ever took part (its process was
    killed at once) stays.
    """
    deadline = time.monotonic() + _CLEAR_S  # for all of them
    for path in folders(parent, PREFIX):
        if ours(os.path.basename(path)):
            remove_if_left(path, deadline)


def remove_stale(parent: str, start: str) -> None:
    """Remove this user's folders in ``parent`` whose names begin with ``start``, which nobody joined, after a day.
    Never raises."""
    for path in folders(parent, start):
        with contextlib.suppress(OSError):
            joined = os.path.lexists(os.path.join(path, ALIVE))
            if not joined and time.time() - os.lstat(path).st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def folders(parent: str, start: str) -> list[str]:
    """Paths of this user's folders in ``parent`` whose names begin with ``start``; links are none."""
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for one in entries:
            if not one.name.startswith(start):
                continue
            with contextlib.suppress(OSError):
                about = one.stat(follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                    found.append(one.path)
    return found


def _alone(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
