# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder of entries, and the count of bytes that its file holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

_COUNT = struct.Struct("<8sQ")
_COUNT_MAGIC = b"ECBYTES1"
_COUNT_MOST = (1 << 64) - 1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Busy(OSError):
    """The folder's lock was held by others for too long."""


@dataclass
class Accounting:
    """The folder's byte count while its lock is held; written back when the lock is released, if it is ``known``."""

    used: int
    known: bool


class FolderLock:
    """``lock`` in the folder ``root``, held by one process at a time (flock). Holds no file open between calls.

    ``works`` turns false where the file system has no locks; whoever asks gets the lock then.
    """

    def __init__(self, root: str, seconds: float) -> None:
        self._root = root
        self._path = os.path.join(root, "lock")
        self._seconds = seconds
        self.works = True

    @contextlib.contextmanager
    def held(self, seconds: float | None = None) -> Iterator[Accounting]:
        """Hold the folder's lock.

        Raises:
            Busy: not free within ``seconds``.
            OSError: the folder cannot be used.
        """
        handle = self._acquire(time.monotonic() + (self._seconds if seconds is None else seconds))
        try:
            data = os.pread(handle, _COUNT.size, 0)
            known = len(data) == _COUNT.size and data.startswith(_COUNT_MAGIC)
            accounting = Accounting(_COUNT.unpack(data)[1] if known else 0, known)
            before = accounting.used
            try:
                yield accounting
            finally:
                if accounting.known and accounting.used >= 0:
                    if accounting.used != before or not known:
                        os.pwrite(handle, _record(accounting.used), 0)
                elif known:
                    os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def _acquire(self, deadline: float) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if self._take(handle, deadline) and self._same(handle):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            # Somebody removed the folder meanwhile: the lock that was taken protects nothing any more.
            os.close(handle)
            if time.monotonic() >= deadline:
                raise Busy(errno.EAGAIN, f"lock of {self._root} is replaced by others again and again")
            time.sleep(0.0005)

    def _take(self, handle: int, deadline: float) -> bool:
        pause = 0.0005
        while self.works:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    self.works = False
                    return True
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                raise Busy(errno.EAGAIN, f"lock of {self._root} is held by another process")
            time.sleep(pause)
            pause = min(0.02, pause * 2)
        return True

    def _same(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        except FileNotFoundError:
            return False

    def record(self, accounting: Accounting) -> None:
        """Write the count now: a process killed before it releases the lock leaves it too high, not too low."""
        with contextlib.suppress(OSError):
            handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(handle, _record(accounting.used), 0)
            finally:
                os.close(handle)


def _record(used: int) -> bytes:
    return _COUNT.pack(_COUNT_MAGIC, min(used, _COUNT_MOST))
