# SPDX-License-Identifier: Apache-2.0
"""One tier of entries in files: the CPU tier (a folder in shared memory) and the disk tier are both this.

Readers take no lock. They open a file, trust nothing of it before the header has been checked, and read (never map: a
file cut short under a map kills the process) into fresh memory while summing. Writers write under a name of their own
and rename, so a reader sees a whole entry, the one before it, or none.

An entry is not synced before it is published: a killed process loses nothing, and after a power cut a torn entry fails
its checksum and is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from .entry import PIECE, Entry, FormatError, read_entry
from .folder import OPEN_ENTRY, Folder
from .key import Key

T = TypeVar("T")
Outcome = Literal["stored", "present", "busy", "too large", "address taken"]
# What a device says that has no room. NFS says the second.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BadEntry(Exception):
    """An entry is there and not usable. ``seen`` identifies the file for its removal."""

    def __init__(self, reason: str, seen: os.stat_result) -> None:
        super().__init__(reason)
        self.seen = seen


@dataclass
class OpenEntry:
    """A file opened for reading whose header has been decoded. Close with :meth:`close`."""

    handle: int
    entry: Entry
    status: os.stat_result

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def read_into(self, buffer: memoryview) -> None:
        """Read the payload into ``buffer`` (exactly as long) and compare the checksum.

        Raises:
            BadEntry: shorter than its header says, or the checksum differs: what was read must not be used.
            OSError: the device failed.
        """
        for _ in self._pieces(PIECE, lambda start, end: buffer[start:end]):
            pass

    def copy(self, write: Callable[[memoryview], None], piece: int) -> None:
        """Pass the payload to ``write``, ``piece`` bytes at a time, and compare the checksum at the end. Raises as
        :meth:`read_into` does."""
        buffer = memoryview(bytearray(min(piece, self.entry.payload)))
        for data in self._pieces(piece, lambda start, end: buffer[: end - start]):
            write(data)

    def _pieces(self, size: int, room: Callable[[int, int], memoryview]) -> Iterator[memoryview]:
        """Each piece of the payload, in the memory that ``room(start, end)`` gives; compares the checksum after all."""
        offset, total = len(self.entry.header), self.entry.payload
        check = self.entry.check()
        for start in range(0, total, size):
            data = room(start, min(start + size, total))
            done = 0
            while done < data.nbytes:
                count = os.preadv(self.handle, [data[done:]], offset + start + done)
                if count == 0:
                    raise BadEntry(f"cut off at {start + done} of {total} bytes", self.status)
                done += count
            check.update(data)
            yield data
        if check.hexdigest() != self.entry.checksum:
            raise BadEntry("checksum differs", self.status)


class Blocklist(Protocol):
    """What an engine's processes tell one another about files that cannot be used and cannot be removed."""

    def blocklist(self, path: str) -> None:
        """Put it on the list."""

    def blocklisted(self, path: str) -> bool:
        """Whether it is on the list."""


class FileStore:
    """Entries in the files of one :class:`Folder`. Thread-safe and process-safe.

    ``base``, ``limit`` and ``spare`` are as for :class:`Folder`. A file on the ``blocklist`` is as good as absent,
    until another one is in its place. Methods raise ``OSError`` for trouble with the storage; a caller decides what
    that means.
    """

    def __init__(
        self,
        base: str,
        limit: int | None,
        *,
        touch_seconds: float = 10.0,
        spare: int = 0,
        blocklist: Blocklist | None = None,
    ) -> None:
        self.folder = Folder(base, limit, spare=spare)
        self._blocklist = blocklist
        self._blocked: set[str] = set()  # by this process, for the case that the list cannot be written
        self.limit = limit
        self._touch_seconds = touch_seconds

    def open(self, key: Key) -> OpenEntry | None:
        """Open the entry at ``key``'s address and decode its header; ``None`` when there is none.

        Whether it *is* the entry that ``key`` means is for :meth:`Entry.matches` to say.

        Raises:
            BadEntry: something is there that is no sound entry.
            OSError: the storage failed.
        """
        try:
            found = open_path(os.path.join(self.folder.root, key.path))
        except FileNotFoundError:
            return None
        except BadEntry as error:
            if self._is_blocked(key, error.seen):
                return None
            raise
        if self._is_blocked(key, found.status):
            found.close()
            return None
        return found

    def find(self, key: Key, rows: int | None = None) -> Entry | None:
        """What the header says of the entry that matches ``key`` and ``rows``; ``None``: no such.

        Raises:
            BadEntry: see :meth:`open`.
            OSError: the storage failed.
        """
        found = self.open(key)
        if found is None:
            return None
        found.close()
        return found.entry if found.entry.matches(key, rows) else None

    def has(self, key: Key, rows: int, columns: int, dtype: str) -> bool:
        """Whether a put of this shape and dtype would only write what is there already."""
        return _would_change_nothing(self._there(key), key, rows, columns, dtype)

    def read(self, key: Key, rows: int | None, allocate: Callable[[Entry], memoryview]) -> Entry | None:
        """Read and verify the entry that matches ``key`` and ``rows`` into ``allocate(entry)``; ``None``: no such.

        Raises:
            BadEntry: the entry is damaged; what is in the buffer must not be used.
            OSError: the storage failed.
            MemoryError, RuntimeError: from ``allocate``.
        """

        def take(found: OpenEntry) -> Entry:
            found.read_into(allocate(found.entry))
            return found.entry

        return self.use(key, rows, take)

    def use(self, key: Key, rows: int | None, take: Callable[[OpenEntry], T | None]) -> T | None:
        """What ``take`` makes of the entry that matches ``key`` and ``rows``; ``None``: no such, or it made nothing.

        Raises:
            BadEntry: see :meth:`open`; and what ``take`` raises.
            OSError: the storage failed.
        """
        found = self.open(key)
        if found is None:
            return None
        try:
            if not found.entry.matches(key, rows):
                return None
            taken = take(found)
            if taken is not None:
                self._touch(found)
            return taken
        finally:
            found.close()

    def write(self, key: Key, entry: Entry, payload: memoryview, *, force: bool = False) -> Outcome:
        """Publish an entry. ``force`` writes it even when an equal one seems to be there.

        Raises:
            OSError: the storage failed; nothing is left behind.
        """
        if not self.folder.fits(entry.size):
            return "too large"
        if not force and self.has(key, entry.rows, entry.columns, entry.dtype):
            return "present"
        try:
            return self._write(key, entry, payload, force)
        except OSError as error:
            # Full before the limit is reached: others keep things there too.
            if error.errno not in _FULL or not self.folder.shrink(entry.size):
                raise
        return self._write(key, entry, payload, force)

    def _write(self, key: Key, entry: Entry, payload: memoryview, force: bool) -> Outcome:
        """Reserve, write, publish."""
        reserved = self.folder.reserve(key, entry.size)
        if reserved is None:
            return "busy"
        handle, temporary = reserved
        try:
            outcome = self._fill(handle, temporary, key, entry, payload, force)
        except BaseException:
            # The error that counts is the first one.
            with contextlib.suppress(OSError):
                os.close(handle)
            raise
        try:
            os.close(handle)
        except OSError:
            # Only now says NFS that the bytes did not arrive.
            if outcome == "stored":
                self.remove(key)
            raise
        return outcome

    def _fill(self, handle: int, temporary: str, key: Key, entry: Entry, payload: memoryview, force: bool) -> Outcome:
        try:
            # Another writer may have published between the first look and the reservation.
            there = self._there(key)
            if not force and _would_change_nothing(there, key, entry.rows, entry.columns, entry.dtype):
                self.folder.abandon(temporary, key, entry.size)
                return "present"
            _write_all(handle, [memoryview(entry.header), payload])
            # A damaged entry may have grown: what its header does not vouch for is not taken off the count.
            self.folder.publish(temporary, key, 0 if there is None else there.size)
        except IsADirectoryError:
            # Somebody's folder stands where this one entry belongs; the storage works.
            self.folder.abandon(temporary, key, entry.size)
            return "address taken"
        except BaseException:
            self.folder.abandon(temporary, key, entry.size)
            raise
        return "stored"

    def _there(self, key: Key) -> Entry | None:
        """The sound entry at ``key``'s address, of whatever id."""
        try:
            found = self.open(key)
        except (BadEntry, OSError):
            return None
        if found is None:
            return None
        found.close()
        return found.entry

    def remove(self, key: Key, seen: os.stat_result | None = None) -> bool:
        """Remove the entry at ``key``'s address. True when nothing is there afterwards."""
        return self.folder.remove(key, seen)

    def reject(self, key: Key, seen: os.stat_result | None = None, *, remove: bool = True) -> bool:
        """Remove an entry that cannot be used, if it is still the file ``seen`` where given; put it on the blocklist
        where that fails, or at once without ``remove``. True when it is gone."""
        if remove and self.remove(key, seen):
            return True
        try:
            mark = self._mark(key, seen or os.lstat(os.path.join(self.folder.root, key.path)))
        except OSError:
            return False
        self._blocked.add(mark)
        if self._blocklist is not None:
            self._blocklist.blocklist(mark)
        return False

    def _is_blocked(self, key: Key, status: os.stat_result) -> bool:
        if not self._blocked and self._blocklist is None:
            return False
        mark = self._mark(key, status)
        return mark in self._blocked or (self._blocklist is not None and self._blocklist.blocklisted(mark))

    def _mark(self, key: Key, status: os.stat_result) -> str:
        # The time of a file that cannot be used does not change: only a load sets it.
        return f"{self.folder.root}/{key.path} {status.st_ino} {status.st_mtime_ns}"

    def _touch(self, found: OpenEntry) -> None:
        now = time.time()
        if abs(now - found.status.st_mtime) > self._touch_seconds:
            # Another user's file or a read-only mount: then its age stays what it is.
            with contextlib.suppress(OSError):
                os.utime(found.handle)


def open_path(path: str) -> OpenEntry:
    """Open an entry by its file's path and decode its header.

    Raises:
        BadEntry: something is there that is no sound entry.
        OSError: the storage failed.
    """
    handle = os.open(path, OPEN_ENTRY)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadEntry("not a regular file", status)
        try:
            return OpenEntry(handle, read_entry(handle, status.st_size), status)
        except FormatError as error:
            raise BadEntry(str(error), status) from None
    except BaseException:
        os.close(handle)
        raise


def _would_change_nothing(there: Entry | None, key: Key, rows: int, columns: int, dtype: str) -> bool:
    return there is not None and there.matches(key, rows) and (there.columns, there.dtype) == (columns, dtype)


def _write_all(handle: int, parts: list[memoryview]) -> None:
    while parts:
        count = os.writev(handle, parts)
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if count:
            parts[0] = parts[0][count:]
