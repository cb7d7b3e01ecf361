# SPDX-License-Identifier: Apache-2.0
"""The numbers of one process in a file that other processes read at any time.

Each number is a line of text::

                        41.0 5d1c09a2 ["counter", "steps_total", "Steps.", [["kind", "a"]]]

the value in 24 characters, a CRC-32 of value and description, and the description: kind, name, help, labels. A new
number appends a line. A changed one overwrites the first 33 bytes of its line in one call, which takes a few
microseconds in memory and wakes no other thread. A reader that meets a write halfway, or a damaged file, sees that the
checksum differs.

The file is opened for each write. A mapping would be faster, and would end the process with SIGBUS once the file is
truncated; a descriptor that stays open would write into another file once somebody closed it and opened that one.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from vllm_omni_patch.telemetry import processes

Kind = Literal["gauge", "counter"]
Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # name without the prefix, and sorted labels

START = "numbers-"
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_VALUE, _HEAD = 24, 34  # bytes of a value; of value, checksum and a space after each
_READS, _PAUSE_S = 5, 0.0002  # how often a reader looks at a file in which a line is being written


class Number(NamedTuple):
    """One sample of one process. ``value`` is NaN for a gauge that is not known (any more)."""

    kind: Kind
    help: str
    value: float


Numbers = Mapping[Key, Number]


class NumberFile:
    """A new file of this process in ``folder``, mode 0600. The caller keeps two threads from writing at once.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: str) -> None:
        name = f"{START}{platform.node()}-{os.getpid()}-{processes.born()}-{time.time_ns()}"
        self.path = os.path.join(folder, name)
        self._places: dict[Key, tuple[int, int]] = {}  # offset of a line, and checksum of its description
        self._size = 0
        handle = os.open(self.path, _WRITE | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._file = os.fstat(handle)
        finally:
            os.close(handle)

    def write(self, changed: Numbers, everything: Callable[[], Numbers]) -> None:
        """Write the numbers that have ``changed``, or ``everything`` where somebody has truncated the file.

        Raises:
            FileNotFoundError: the file has been removed or replaced.
            OSError: there is no room for it, or it cannot be opened.
        """
        handle = os.open(self.path, _WRITE)
        try:
            size = os.lseek(handle, 0, os.SEEK_END)
            if size != self._size:
                self._mend(handle, size)
                changed = changed if self._size else everything()
            added = []
            for key, number in changed.items():
                place = self._places.get(key)
                if place is not None:
                    _put(handle, _head(number.value, place[1]), place[0])
                else:
                    added.append((key, number))
            if added:
                self._append(handle, added)
        finally:
            os.close(handle)

    def _mend(self, handle: int, size: int) -> None:
        """Cut off a line that there was no room for; begin anew where lines are missing."""
        if not os.path.samestat(os.fstat(handle), self._file):
            raise FileNotFoundError(errno.ENOENT, "replaced by another file", self.path)
        if size < self._size:
            self._places, self._size = {}, 0
        os.ftruncate(handle, self._size)

    def _append(self, handle: int, added: list[tuple[Key, Number]]) -> None:
        places, lines, size = {}, [], self._size
        for key, number in added:
            name, labels = key
            description = json.dumps([number.kind, name, number.help, labels], separators=(",", ":")).encode()
            checksum = zlib.crc32(description)
            lines.append(b"%b%b\n" % (_head(number.value, checksum), description))
            places[key] = size, checksum
            size += len(lines[-1])
        _put(handle, b"".join(lines), self._size)
        self._places.update(places)
        self._size = size


def read(path: str) -> dict[Key, Number]:
    """The numbers in the file at ``path``, without those whose line is damaged.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    found: dict[Key, Number] = {}
    for attempt in range(_READS):
        if attempt:
            time.sleep(_PAUSE_S)
        lines = _bytes(path).split(b"\n")
        rows = [_parse(line) for line in lines[:-1]]
        found = {row[0]: row[1] for row in rows if row is not None}
        if None not in rows and not lines[-1]:
            break
    return found


def written_by(name: str) -> tuple[str, int, int]:
    """Host, process id and start (:func:`processes.born`) of the process that wrote the file of this ``name``.

    Raises:
        ValueError: it is not the name of a file of numbers.
    """
    host, pid, born, _ = name.removeprefix(START).rsplit("-", 3)
    return host, int(pid), int(born)


def _bytes(path: str) -> bytes:
    handle = os.open(path, _READ)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read()


def _parse(line: bytes) -> tuple[Key, Number] | None:
    """A line as key and number; ``None`` for a damaged one."""
    value, checksum, description = line[:_VALUE], line[_VALUE + 1 : _HEAD - 1], line[_HEAD:]
    if b"%08x" % zlib.crc32(value, zlib.crc32(description)) != checksum:
        return None
    kind, name, text, labels = json.loads(description)
    return (name, tuple((label, one) for label, one in labels)), Number(kind, text, float(value))


def _head(value: float, checksum: int) -> bytes:
    text = b"%24b" % repr(value).encode()
    return b"%b %08x " % (text, zlib.crc32(text, checksum))


def _put(handle: int, data: bytes, offset: int) -> None:
    if os.pwrite(handle, data, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
