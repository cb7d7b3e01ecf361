# SPDX-License-Identifier: Apache-2.0
"""A folder of entries that many processes write and read at once: its lock, its byte count, its limit.

Layout below the folder's root (mode 0700, files 0600)::

    lock                         held (flock) for the short moments in which the count or the set of files changes;
                                 holds the count of bytes
    tmp/<id>.<bytes>.<pid>.tmp   entries being written, each locked (flock) by its writer for as long as it lives
    <binding>/<name>.ec          published entries

Every byte is counted *before* it is written, a file in ``tmp`` with its final size, each file in whole pages. A killed
writer's file is recognised by its lock being free and is removed by the next process that scans. The count may thus
only be too high, and a scan, which each eviction needs anyway, puts it right: so files removed by hand do no harm
either. A count that cannot be right is forgotten, and the next writer scans.

What does not have a name of these forms, or is a symbolic link, is somebody else's: neither counted nor removed.
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

from . import entry
from .key import Key

ROOT_NAME = "ec-v1"
_COUNT = struct.Struct("<8sQ")
_COUNT_MAGIC = b"ECBYTES1"
_COUNT_MOST = (1 << 64) - 1
# Matched against whole names.
_TEMPORARY = re.compile(r"(?P<id>[0-9a-f]{32})\.(?P<bytes>[0-9]+)\.[0-9]+\.[0-9a-f]+\.tmp")
_BINDING = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"[0-9a-f]{16}@[0-9]+@[0-9]+@[A-Za-z0-9_]+\.ec")
# What a file takes of a file system comes in pages: in shared memory of this size, on disks mostly too.
_PAGE = 4096
OPEN_ENTRY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
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


@dataclass(frozen=True)
class Temporary:
    """A file in ``tmp``: the entry it is for (``id``) and the bytes its writer has reserved."""

    path: str
    id: str
    reserved: int
    size: int


@dataclass
class Book:
    """The folder's byte count while its lock is held; written back when the lock is released, if it is ``known``."""

    used: int
    known: bool


class Folder:
    """Locking, counting and evicting for one root. Holds no file open between calls.

    ``limit`` is in bytes, ``None`` for none: then nothing is counted and nothing evicted. ``spare`` bytes of the file
    system stay free for others, whatever the limit says.
    """

    def __init__(self, base: str, limit: int | None, lock_seconds: float = 5.0, spare: int = 0) -> None:
        self.root = base if os.path.basename(os.path.normpath(base)) == ROOT_NAME else os.path.join(base, ROOT_NAME)
        self.limit = limit
        self._spare = spare
        self._lock_seconds = lock_seconds
        self._locks = True
        self._scanned = False

    def make(self, parents: bool = True) -> None:
        """Make the root and ``tmp`` where missing, and with ``parents`` the folders above.

        Raises:
            OSError: it cannot be made.
        """
        if parents:
            os.makedirs(os.path.dirname(self.root), 0o700, exist_ok=True)
        for folder in (self.root, self.temporaries):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        _demand_folder(self.temporaries)

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
                if book.known and book.used >= 0:
                    if book.used != before or not known:
                        os.pwrite(handle, _record(book.used), 0)
                elif known:
                    os.ftruncate(handle, 0)
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
            _demand_folder(self.temporaries)
            if self._in_flight(identity, book):
                return None
            if self.limit is None:
                if not self._scanned:
                    self._clean_temporaries()
                    self._scanned = True
            else:
                if not book.known or not self._scanned:
                    self._count(book)
                    self._scanned = True
                pages = _pages(size)
                if book.used + pages > self._limit_now(book.used):
                    self._evict(book, pages)
                book.used += pages
                # Written now: should this process be killed before the lock is released, the count is too high, not
                # too low.
                self._write_count(book)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._own(handle)
        return handle, path

    def publish(self, temporary: str, path: str) -> None:
        """Give the finished file its name, replacing what stood there.

        Raises:
            OSError: it could not be renamed; the caller must still call :meth:`abandon`.
        """
        target = os.path.join(self.root, path)
        with self.locked() as book:
            replaced = _counted(target) if self.limit is not None else 0
            try:
                _demand_folder(os.path.dirname(target))
                os.rename(temporary, target)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(target), 0o700)  # fails where the root is gone too: see ``make``
                os.rename(temporary, target)
            book.used -= replaced

    def abandon(self, temporary: str, size: int) -> None:
        """Remove an unpublished file and take its bytes back; never raises."""
        with contextlib.suppress(OSError), self.locked(0.5) as book:
            os.unlink(temporary)
            book.used -= _pages(size) if self.limit is not None else 0
        with contextlib.suppress(OSError):
            os.unlink(temporary)

    def fits(self, size: int) -> bool:
        """Whether an entry of ``size`` bytes fits within the limit at all."""
        return self.limit is None or _pages(size) <= self.limit

    def shrink(self, size: int) -> bool:
        """Evict entries of at least ``size`` bytes, for a file system that is full before the limit is reached.

        False when there was nothing to evict, or there is no limit: then nothing ever is.

        Raises:
            OSError: the folder cannot be used.
        """
        if self.limit is None:
            return False
        with self.locked() as book:
            files = self._count(book)
            before = book.used
            self._drop(book, files, before - _pages(size))
            return book.used < before

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

    def usage(self) -> tuple[int, int]:
        """(bytes in whole pages, entries) by looking at every file; sets the count right and removes leftovers.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.locked() as book:
            files = self._count(book)
        return book.used, len(files)

    def counted(self) -> int:
        """The count of bytes as it stands.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.locked() as book:
            return book.used

    def published(self) -> Iterator[Published]:
        """Every published entry's file, unordered; files that vanish meanwhile are left out."""
        for folder in self._bindings():
            for name in filter(_ENTRY.fullmatch, _names(folder)):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        yield Published(path, status.st_size, status.st_mtime)

    def closed(self) -> Iterator[tuple[str, str]]:
        """(path, reason) of every folder of entries that this user may not list: what is in it is not known."""
        for folder in self._bindings():
            try:
                os.listdir(folder)
            except PermissionError as error:
                yield folder, str(error)
            except OSError:  # gone by now, or somebody else's
                continue

    def in_tmp(self) -> Iterator[Temporary]:
        """Every file that is being written or that a killed writer left."""
        for name in _names(self.temporaries):
            match = _TEMPORARY.fullmatch(name)
            if match is None:
                continue
            path = os.path.join(self.temporaries, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield Temporary(path, match["id"], _pages(int(match["bytes"])), status.st_size)

    def _bindings(self) -> list[str]:
        # The slash: where the root itself is a symbolic link, the operator made it.
        return [os.path.join(self.root, name) for name in _names(self.root + "/") if _BINDING.fullmatch(name)]

    @staticmethod
    def _unlink(target: str, seen: os.stat_result | None) -> int:
        """Remove the file if it is ``seen``; returns the counted bytes that went."""
        try:
            _demand_folder(os.path.dirname(target))
            if seen is not None and not os.path.samestat(os.lstat(target), seen):
                return 0
            counted = _counted(target)
            os.unlink(target)
        except FileNotFoundError:
            return 0
        return counted

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
            if time.monotonic() >= deadline:
                raise Busy(errno.EAGAIN, f"lock of {self.root} is replaced by others again and again")
            time.sleep(0.0005)

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
                os.pwrite(handle, _record(book.used), 0)
            finally:
                os.close(handle)

    def _own(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._locks = False

    def _in_flight(self, identity: str, book: Book) -> bool:
        for file in self.in_tmp():
            if file.id != identity:
                continue
            if not self._leftover(file.path):
                return True
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            # What its writer had counted is not for its name to say.
            book.known = False
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

    def _clean_temporaries(self) -> int:
        """Remove what killed writers left in ``tmp``; returns the bytes that live writers have reserved."""
        reserved = 0
        for file in self.in_tmp():
            if not self._leftover(file.path):
                reserved += file.reserved
                continue
            try:
                os.unlink(file.path)
            except OSError:
                reserved += _pages(file.size)
        return reserved

    def _count(self, book: Book) -> list[Published]:
        """Set the count right by looking at every file; removes leftovers and empty folders."""
        files = list(self.published())
        book.used = sum(_pages(file.size) for file in files) + self._clean_temporaries()
        book.known = True
        for folder in self._bindings():
            # Fails on a folder that holds anything, which is the point.
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return files

    def _limit_now(self, used: int) -> int:
        """The limit, or less where others have filled the file system but for ``spare`` bytes."""
        limit = self.limit or 0
        if self._spare:
            status = os.statvfs(self.root)
            limit = max(0, min(limit, used + status.f_bavail * status.f_frsize - self._spare))
        return limit

    def _evict(self, book: Book, size: int) -> None:
        """Remove least recently used entries until ``size`` more bytes fit."""
        files = self._count(book)
        limit = self._limit_now(book.used)
        room = limit - size
        if book.used <= room:
            return
        if len(files) > _MANY_FILES:
            room -= min(limit // 32, max(0, room))
        self._drop(book, files, room)
        if book.used > limit - size:
            raise OSError(errno.ENOSPC, f"no room for {size} bytes within the limit of {limit} bytes")

    @staticmethod
    def _drop(book: Book, files: list[Published], room: int) -> None:
        """Remove the least recently used of ``files`` until no more than ``room`` bytes are used."""
        for file in sorted(files, key=lambda entry: entry.used):
            if book.used <= room:
                return
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            book.used -= _pages(file.size)


def _pages(size: int) -> int:
    """What a file of ``size`` bytes counts."""
    return -(-size // _PAGE) * _PAGE


def _record(used: int) -> bytes:
    return _COUNT.pack(_COUNT_MAGIC, min(used, _COUNT_MOST))


def _counted(path: str) -> int:
    """What the entry's file was counted with; 0 where its header does not vouch for its size.

    Others may have let a file grow: taking off more than was added would make the count too low.
    """
    with contextlib.suppress(OSError, entry.FormatError):
        handle = os.open(path, OPEN_ENTRY)
        try:
            size = os.fstat(handle).st_size
            entry.read_header(handle, size)
            return _pages(size)
        finally:
            os.close(handle)
    return 0


def _demand_folder(path: str) -> None:
    """Raise unless ``path`` itself is a folder: behind a symbolic link are somebody else's files."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "a symbolic link or a file is where a folder should be; remove it", path
        )


def _names(folder: str) -> list[str]:
    """What is in ``folder``; nothing where it cannot be listed or is a symbolic link."""
    try:
        handle = os.open(folder, _OPEN_FOLDER)
    except OSError:
        return []
    try:
        return os.listdir(handle)
    except OSError:
        return []
    finally:
        os.close(handle)
