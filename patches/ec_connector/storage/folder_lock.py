# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder of entries, and the counts of bytes that its file holds.

Each shard has a count of bytes, the number of its changes, and the time at which its files were last counted
(nanoseconds, Unix; 0: never, or the count is known to be wrong). Under the lock a process reads and writes these
numbers and does nothing else, so it is held for microseconds, whatever the folder holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

SHARDS = 256
_MAGIC = b"ECBYTES2"
_ALL = struct.Struct(f"<8s{3 * SHARDS}Q")
_ONE = struct.Struct("<3Q")
# The sum of all counts stays below 2**64.
_MOST = (1 << 56) - 1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Busy(OSError):
    """The folder's lock was held by others for too long."""


class Counts:
    """Bytes in each shard while the folder's lock is held. Every change is written at once.

    A process that is killed leaves a count too high rather than too low: bytes are added before they are written, and
    taken off after a file is gone.
    """

    def __init__(self, handle: int, data: bytes) -> None:
        self._handle = handle
        if len(data) != _ALL.size or not data.startswith(_MAGIC):
            data = _ALL.pack(_MAGIC, *(0,) * (3 * SHARDS))
            os.pwrite(handle, data, 0)
        values = _ALL.unpack(data)
        self._used, self._changes, self.counted_at = list(values[1::3]), values[2::3], values[3::3]

    @property
    def total(self) -> int:
        """Bytes in all shards."""
        return sum(self._used)

    def add(self, shard: int, count: int) -> None:
        """Add ``count`` bytes, which may be negative. A count below zero was wrong: the shard must be counted again."""
        used = self._used[shard] + count
        self._write(shard, used, self.counted_at[shard] if 0 <= used <= _MOST else 0)

    def take_off(self, freed: Mapping[int, int], counted_at: Sequence[int]) -> None:
        """Take off the bytes of files that were removed while the shards' counts were of the times ``counted_at``.

        A shard that was counted since is left alone: the files were perhaps gone by then. So a count errs upwards.
        """
        for shard, count in freed.items():
            if count and counted_at[shard] == self.counted_at[shard]:
                self.add(shard, -count)

    def state(self, shard: int) -> tuple[int, int]:
        """Equal to an earlier one if the count has not changed since."""
        return self._used[shard], self._changes[shard]

    def set(self, shard: int, used: int) -> None:
        """``used`` bytes were found in the shard's files."""
        self._write(shard, used, time.time_ns())

    def _write(self, shard: int, used: int, counted_at: int) -> None:
        self._used[shard] = max(0, min(used, _MOST))
        one = _ONE.pack(self._used[shard], (self._changes[shard] + 1) % (1 << 64), counted_at)
        os.pwrite(self._handle, one, len(_MAGIC) + shard * _ONE.size)


class FolderLock:
    """``lock`` in the folder ``root``, held by one process at a time (flock). Holds no file open between calls.

    ``works`` turns false where the file system has no locks; whoever asks gets the lock then. ``counting``: whether
    bytes are counted at all.
    """

    def __init__(self, root: str, seconds: float, counting: bool) -> None:
        self.counting = counting
        self._root = root
        self._path = os.path.join(root, "lock")
        self._seconds = seconds
        self.works = True

    @contextlib.contextmanager
    def held(self, seconds: float | None = None) -> Iterator[Counts]:
        """Hold the folder's lock.

        Raises:
            Busy: not free within ``seconds``.
            OSError: the folder cannot be used.
        """
        handle = self._acquire(time.monotonic() + (self._seconds if seconds is None else seconds))
        try:
            yield Counts(handle, os.pread(handle, _ALL.size, 0))
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def freeing(self, seconds: float | None = None) -> Iterator[dict[int, int]]:
        """Take off what the block, which removes files, enters as bytes by shard. Not locked meanwhile.

        Where the lock cannot be had within ``seconds`` the counts stay too high until the shards are counted again.
        """
        freed: dict[int, int] = {}
        before: Sequence[int] = ()
        if self.counting:
            with contextlib.suppress(OSError), self.held(seconds) as counts:
                before = counts.counted_at
        try:
            yield freed
        finally:
            if before and freed:
                with contextlib.suppress(OSError), self.held(seconds) as counts:
                    counts.take_off(freed, before)

    def make(self) -> None:
        """Make the lock's file where missing. Only here: what runs in the background must not bring back a folder that
        is being removed.

        Raises:
            OSError: it cannot be made.
        """
        with contextlib.suppress(FileExistsError):  # also what a read-only file system says of one that is there
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def take(self, handle: int) -> bool:
        """Lock an open file at once; False when another process has it locked.

        Raises:
            OSError: the storage failed.
        """
        if not self.works:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.works = False
        return True

    def _acquire(self, deadline: float) -> int:
        pause = 0.0005
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if self.take(handle):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            if time.monotonic() >= deadline:
                raise Busy(errno.EAGAIN, f"lock of {self._root} is held by another process")
            time.sleep(pause)
            pause = min(0.02, pause * 2)
