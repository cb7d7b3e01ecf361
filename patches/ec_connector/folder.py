# SPDX-License-Identifier: Apache-2.0
"""A folder of entries that many processes write and read at once: its lock, its byte count, its limit.

Layout below the folder's root (mode 0700, files 0600)::

    lock                         held (flock) for the short moments in which the count or the set of files changes;
                                 holds the count of bytes
    tmp/<id>.<bytes>.<pid>.tmp   entries being written, each locked (flock) by its writer for as long as it lives
    <binding>/<name>.ec          published entries

Every byte is counted *before* it is written, a file in ``tmp`` with its final size. A killed writer's file is
recognised by its lock being free and is removed by the next process that scans. The count may thus only be too high,
and a scan, which each eviction needs anyway, puts it right: so files removed by hand do no harm either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_omni_patch.patches.ec_connector.identity import Key

ROOT_NAME = "ec-v1"
SUFFIX = ".ec"
_COUNT = struct.Struct("<8sQ")
_COUNT_MAGIC = b"ECBYTES1"
_TEMPORARY = re.compile(r"^(?P<id>[0-9a-f]{32})\.(?P<bytes>\d+)\.(?P<pid>\d+)\.(?P<unique>[0-9a-f]+)\.tmp$")
_BINDING = re.compile(r"^[0-9a-f]{32}$")
# Where a file system has no locks, a file in tmp is a leftover when it is this old (seconds).
_UNLOCKED_LEFTOVER = 3600.0
# With more files than this an eviction makes some room ahead, so that not every store scans the folder.
_MANY_FILES = 256
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Busy(OSError):
    """The folder's lock was held by others for too long."""


@dataclass(frozen=True)
class Published:
    """An entry's file as a scan found it. ``used`` is its time of last use, Unix seconds."""

    path: str
    size: int
    used: float


@dataclass
class Book:
    """The folder's byte count while its lock is held; written back when the lock is released."""

    used: int
    known: bool


class Folder:
    """Locking, counting and evicting for one root. Holds no file open between calls.

    ``limit`` is in bytes, ``None`` for none: then nothing is counted and nothing evicted.
    """

    def __init__(self, base: str, limit: int | None, lock_seconds: float = 5.0) -> None:
        self.root = base if os.path.basename(os.path.normpath(base)) == ROOT_NAME else os.path.join(base, ROOT_NAME)
        self.limit = limit
        self._lock_seconds = lock_seconds
        self._locks = True
        self._scanned = False

    def make(self) -> None:
        """Make the root and ``tmp`` where missing.

        Raises:
            OSError: it cannot be made.
        """
        os.makedirs(os.path.dirname(self.root), 0o700, exist_ok=True)
        for folder in (self.root, self.temporaries):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    @property
    def temporaries(self) -> str:
        """Folder of the entries being written."""
        return os.path.join(self.root, "tmp")

    @contextlib.contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[Book]:
        """Hold the folder's lock.

        Raises:
            Busy: not free within ``seconds``.
            OSError: the folder cannot be used.
        """
        handle = self._acquire(time.monotonic() + (self._lock_seconds if seconds is None else seconds))
        try:
            data = os.pread(handle, _COUNT.size, 0)
            known = len(data) == _COUNT.size and data.startswith(_COUNT_MAGIC)
            book = Book(_COUNT.unpack(data)[1] if known else 0, known)
            before = book.used
            try:
                yield book
            finally:
                if book.used != before or not known:
                    os.pwrite(handle, _COUNT.pack(_COUNT_MAGIC, max(0, book.used)), 0)
        finally:
            os.close(handle)

    def reserve(self, key: Key, size: int) -> tuple[int, str] | None:
        """Count ``size`` bytes for ``key``, making room, and open the file to write them to (locked).

        Returns (file descriptor, path); ``None`` when another live writer is at the same key. The caller publishes
        with :meth:`publish` or gives up with :meth:`abandon`.

        Raises:
            OSError: the folder cannot be used.
        """
        unique = os.urandom(6).hex()
        identity = hashlib.sha256(key.path.encode()).hexdigest()[:32]
        path = os.path.join(self.temporaries, f"{identity}.{size}.{os.getpid()}.{unique}.tmp")
        with self.locked() as book:
            if self._in_flight(identity, book):
                return None
            if self.limit is None:
                if not self._scanned:
                    self._clean_temporaries()
                    self._scanned = True
            else:
                if not book.known or not self._scanned:
                    book.used = self._scan(clean=True)[0]
                    self._scanned = True
                if book.used + size > self.limit:
                    self._evict(book, size)
                book.used += size
                # Written now: should this process be killed before the lock is released, the count is too high, not
                # too low.
                self._write_count(book)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._own(handle)
        return handle, path

    def publish(self, handle: int, temporary: str, path: str, size: int) -> None:
        """Give the finished file its name, replacing what stood there. Closes ``handle``.

        Raises:
            OSError: it could not be renamed; the caller must still call :meth:`abandon`.
        """
        target = os.path.join(self.root, path)
        with self.locked() as book:
            replaced = 0
            with contextlib.suppress(OSError):
                replaced = os.lstat(target).st_size
            try:
                os.rename(temporary, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                os.rename(temporary, target)
            book.used -= replaced if self.limit is not None else 0
        os.close(handle)

    def abandon(self, handle: int, temporary: str, size: int) -> None:
        """Remove an unpublished file and take its bytes back. Closes ``handle``; never raises."""
        with contextlib.suppress(OSError), self.locked(0.5) as book:
            os.unlink(temporary)
            book.used -= size if self.limit is not None else 0
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        with contextlib.suppress(OSError):
            os.close(handle)

    def remove(self, path: str, seen: os.stat_result | None = None) -> bool:
        """Remove an entry, only if it is still the file ``seen`` where given. True when it is gone.

        Does not wait for the lock. Without it the count stays too high until the next scan; taking the bytes off later
        would count a scan between twice.
        """
        target = os.path.join(self.root, path)
        try:
            with self.locked(0.0) as book:
                gone = self._unlink(target, seen)
                book.used -= gone if self.limit is not None else 0
        except Busy:
            with contextlib.suppress(OSError):
                self._unlink(target, seen)
        except OSError:
            pass
        return not os.path.lexists(target) or self._other(target, seen)

    def usage(self, clean: bool = True) -> tuple[int, int]:
        """(bytes, entries) by looking at every file; sets the count right and removes leftovers.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.locked() as book:
            used, files = self._scan(clean)
            book.used = used
        return used, len(files)

    def counted(self) -> int:
        """The count of bytes as it stands.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.locked() as book:
            return book.used

    def published(self) -> Iterator[Published]:
        """Every published entry's file, unordered; files that vanish meanwhile are left out."""
        for folder in self._list(self.root):
            if not _BINDING.match(folder.name):
                continue
            for file in self._list(folder.path):
                if not file.name.endswith(SUFFIX):
                    continue
                with contextlib.suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Published(file.path, status.st_size, status.st_mtime)

    @staticmethod
    def _unlink(target: str, seen: os.stat_result | None) -> int:
        """Remove the file if it is ``seen``; returns the bytes that went."""
        try:
            now = os.lstat(target)
            if seen is not None and not os.path.samestat(now, seen):
                return 0
            os.unlink(target)
        except FileNotFoundError:
            return 0
        return now.st_size

    @staticmethod
    def _other(target: str, seen: os.stat_result | None) -> bool:
        try:
            return seen is not None and not os.path.samestat(os.lstat(target), seen)
        except OSError:
            return True

    def _acquire(self, deadline: float) -> int:
        path = os.path.join(self.root, "lock")
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if self._take(handle, deadline) and self._same(handle, path):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            # Somebody removed the folder meanwhile: the lock that was taken guards nothing any more.
            os.close(handle)

    def _take(self, handle: int, deadline: float) -> bool:
        pause = 0.0005
        while self._locks:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    self._locks = False
                    return True
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                raise Busy(errno.EAGAIN, f"lock of {self.root} is held by another process")
            time.sleep(pause)
            pause = min(0.02, pause * 2)
        return True

    @staticmethod
    def _same(handle: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(path))
        except FileNotFoundError:
            return False

    def _write_count(self, book: Book) -> None:
        with contextlib.suppress(OSError):
            handle = os.open(os.path.join(self.root, "lock"), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(handle, _COUNT.pack(_COUNT_MAGIC, book.used), 0)
            finally:
                os.close(handle)

    def _own(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._locks = False

    def _in_flight(self, identity: str, book: Book) -> bool:
        for file in self._list(self.temporaries):
            match = _TEMPORARY.match(file.name)
            if match is None or match["id"] != identity:
                continue
            if not self._leftover(file.path):
                return True
            with contextlib.suppress(OSError):
                os.unlink(file.path)
                book.used = max(0, book.used - int(match["bytes"]))
        return False

    def _leftover(self, path: str) -> bool:
        """Whether the writer of a file in ``tmp`` is dead. Asked with the folder's lock held."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            if not self._locks:
                return time.time() - os.fstat(handle).st_mtime > _UNLOCKED_LEFTOVER
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)

    def _clean_temporaries(self, clean: bool = True) -> int:
        """Remove what killed writers left in ``tmp``; returns the bytes that live writers have reserved."""
        reserved = 0
        for file in self._list(self.temporaries):
            match = _TEMPORARY.match(file.name)
            if clean and (match is None or self._leftover(file.path)):
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
                    continue
            reserved += int(match["bytes"]) if match else 0
        return reserved

    def _scan(self, clean: bool) -> tuple[int, list[Published]]:
        files = list(self.published())
        used = sum(file.size for file in files)
        used += self._clean_temporaries(clean)
        if clean:
            for folder in self._list(self.root):
                if _BINDING.match(folder.name):
                    # Fails on a folder that holds anything, which is the point.
                    with contextlib.suppress(OSError):
                        os.rmdir(folder.path)
        return used, files

    def _evict(self, book: Book, size: int) -> None:
        """Remove least recently used entries until ``size`` more bytes fit."""
        limit = self.limit or 0
        book.used, files = self._scan(clean=True)
        room = limit - size
        if book.used <= room:
            return
        if len(files) > _MANY_FILES:
            room -= min(limit // 32, max(0, room))
        for file in sorted(files, key=lambda entry: entry.used):
            if book.used <= room:
                return
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            book.used -= file.size
        if book.used > limit - size:
            raise OSError(errno.ENOSPC, f"no room for {size} bytes within the limit of {limit} bytes")

    @staticmethod
    def _list(folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except OSError:
            return []
