# SPDX-License-Identifier: Apache-2.0
"""A folder that several processes share and that goes with the last of them, however each ends.

Each process keeps a shared lock on the file ``alive`` in it, which the kernel drops when the process is killed too.
Unlike a process id, a lock means the same in every container that shares the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil

ALIVE = "alive"


class Member:
    """This process's part in folder ``path``, which is made where it is missing.

    Raises:
        OSError: the folder cannot be made, or its file system knows no locks.
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
            shutil.rmtree(self.path, ignore_errors=True)
        self.forget()

    def forget(self) -> None:
        """Take part no more, and leave the folder as it is: for a forked child, whose parent still does."""
        if self._is_ours():
            os.close(self._handle)

    def _is_ours(self) -> bool:
        """Where somebody closed the handle behind our back, its number may stand for another file now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._file, os.fstat(self._handle))
        return False


def _join(path: str) -> tuple[int, os.stat_result]:
    alive = os.path.join(path, ALIVE)
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            handle = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            if os.path.islink(path):
                raise  # it leads nowhere
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            file = os.fstat(handle)
            # Another process may have removed the folder before the lock was had.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(file, os.stat(alive)):
                    return handle, file
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def remove_if_left(path: str) -> bool:
    """Remove folder ``path`` when all that took part in it have ended; False when somebody does, or nobody ever did."""
    try:
        handle = os.open(os.path.join(path, ALIVE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        left = _alone(handle)
        if left:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
    return left


def _alone(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
