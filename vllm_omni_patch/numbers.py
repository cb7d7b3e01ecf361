# SPDX-License-Identifier: Apache-2.0
"""A process's present numbers in a file that is rewritten in place, for another process to read at any time.

A number changes in the middle of a model step. Changing 16 bytes of a mapped file there takes no system call and wakes
nobody; a thread that replaces a whole file now and then takes a core from a model thread each time it runs.

Mapped is only a file that this process has made, in a folder of this user alone (0700) in memory, with its room taken
beforehand: a write cannot find the memory full, and nobody else cuts the file short. Removing it does no harm.

The file holds one pair of equal doubles for each number, in the order of the index that names it (``metrics.py``).
A reader that meets a write halfway sees two halves that differ.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable

_PAIR = struct.Struct("<dd")
_LOOK_AFTER = 64  # writes from one look whether the file is still there to the next
ROOM = 4096  # numbers; more than any process has. What comes after them is left in snapshots only


class Numbers:
    """A new file at ``path``, mode 0600, to be written by this process.

    Raises:
        OSError, ValueError: it cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self._writes = 0
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(self._file, 0, ROOM * _PAIR.size)
            self._memory = mmap.mmap(self._file, ROOM * _PAIR.size)
        except BaseException:
            os.close(self._file)
            os.unlink(path)
            raise

    def put(self, place: int, value: float) -> bool:
        """Write number ``place`` (below ``count``); False when the file has been removed, looked for now and then."""
        _PAIR.pack_into(self._memory, place * _PAIR.size, value, value)
        self._writes += 1
        return self._writes % _LOOK_AFTER != 0 or self.is_there()

    def put_all(self, values: Iterable[float]) -> None:
        """Write all numbers from the first on, as many as there is room for; from then on there are as many."""
        data = b"".join(_PAIR.pack(value, value) for value in values)[: ROOM * _PAIR.size]
        self._memory[: len(data)] = data
        self.count = len(data) // _PAIR.size

    def is_there(self) -> bool:
        """The file has not been removed."""
        return os.fstat(self._file).st_nlink > 0

    def close(self, remove: bool = False) -> None:
        """Write no more. Never raises."""
        with contextlib.suppress(OSError):
            self._memory.close()
            os.close(self._file)
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def read(path: str, count: int) -> list[float | None]:
    """The first ``count`` numbers at ``path``; ``None`` for one that was being written, or is not there yet.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[float | None] = []
    with open(path, "rb", buffering=0) as file:
        data = file.read(count * _PAIR.size) or b""
    for place in range(count):
        pair = data[place * _PAIR.size : (place + 1) * _PAIR.size]
        whole = len(pair) == _PAIR.size and pair[:8] == pair[8:]
        found.append(_PAIR.unpack(pair)[0] if whole else None)
    return found
