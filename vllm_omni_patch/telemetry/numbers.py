# SPDX-License-Identifier: Apache-2.0
"""A process's present numbers in a file that is changed in place, for another process to read at any time.

A number changes in the middle of a model step. Writing 16 bytes to a file in memory takes four microseconds there and
wakes nobody; a thread that replaces a whole file now and then takes a core from a model thread each time it runs.

The file is opened for each write. A mapping would be faster, and end the engine with a signal once somebody cuts the
file short; a descriptor that is kept would write into another file once somebody closed it and opened that one.

The file holds one record for each number, in the order of the index that names it (``metrics.py``): a double and its
checksum. A reader that meets a write halfway, a file cut short, or anything else sees that the two differ.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterable

_DOUBLE, _RECORD = struct.Struct("<d"), struct.Struct("<8sI4x")
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOKS, _PAUSE_S = 5, 0.0002  # how often a reader looks for a record that is being written


class Numbers:
    """A new file at ``path``, mode 0600, to be written by this process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.known = 0  # so many numbers, from the first on, are named where readers look
        os.close(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))

    def put(self, place: int, value: float) -> None:
        """Write number ``place``.

        Raises:
            OSError: the file has been removed, or there is no room for it.
        """
        self._write(place * _RECORD.size, _record(value))

    def put_all(self, values: Iterable[float]) -> None:
        """Write all numbers from the first on.

        Raises:
            OSError: the file has been removed, or there is no room for it.
        """
        self._write(0, b"".join(map(_record, values)))

    def _write(self, start: int, data: bytes) -> None:
        file = os.open(self.path, _FLAGS)
        try:
            if os.pwrite(file, data, start) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        finally:
            os.close(file)


def read(path: str, count: int) -> list[float | None]:
    """The first ``count`` numbers at ``path``; ``None`` for one that is damaged or missing.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[float | None] = []
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        data = read_file(path, count * _RECORD.size)
        found = [_value(data[place * _RECORD.size : (place + 1) * _RECORD.size]) for place in range(count)]
        if None not in found:
            break
    return found


def read_file(path: str, most: int = -1) -> bytes:
    """The first ``most`` bytes of a file of a process, or all; never waits for anybody.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", path)
        return file.read(most)


def _record(value: float) -> bytes:
    raw = _DOUBLE.pack(value)
    return _RECORD.pack(raw, zlib.crc32(raw))


def _value(record: bytes) -> float | None:
    if len(record) < _RECORD.size:
        return None
    raw, checksum = _RECORD.unpack(record)
    return float(_DOUBLE.unpack(raw)[0]) if zlib.crc32(raw) == checksum else None
