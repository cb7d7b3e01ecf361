# SPDX-License-Identifier: Apache-2.0
"""A folder of entries that many processes write and read at once, and its limit.

Layout below the folder's root (mode 0700, files 0600)::

    lock                         held (flock) for the short moments in which the count or the set of files changes;
                                 holds the count of bytes
    tmp/<id>.<bytes>.<pid>.tmp   entries being written, each locked (flock) by its writer for as long as it lives
    <namespace>/<name>.ec        published entries

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
import time

from .entry import FormatError, read_entry
from .folder_listing import Listing, Published, demand_folder, pages
from .folder_lock import Accounting, Busy, FolderLock
from .key import Key

ROOT_NAME = "ec-v1"
OPEN_ENTRY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Where a file system has no locks, a file in tmp is a leftover when it is this old (seconds).
_UNLOCKED_LEFTOVER = 3600.0
# With more files than this an eviction makes some room ahead, so that not every store scans the folder.
_MANY_FILES = 256


class Folder:
    """Locking, counting and evicting for one root. Holds no file open between calls.

    ``limit`` is in bytes, ``None`` for none: then nothing is counted and nothing evicted. ``spare`` bytes of the file
    system stay free for others, whatever the limit says.
    """

    def __init__(self, base: str, limit: int | None, lock_seconds: float = 5.0, spare: int = 0) -> None:
        self.root = base if os.path.basename(os.path.normpath(base)) == ROOT_NAME else os.path.join(base, ROOT_NAME)
        self.limit = limit
        self.listing = Listing(self.root)
        self.lock = FolderLock(self.root, lock_seconds)
        self._spare = spare
        self._scanned = False

    def make(self, parents: bool = True) -> None:
        """Make the root and ``tmp`` where missing, and with ``parents`` the folders above.

        Raises:
            OSError: it cannot be made.
        """
        if parents:
            os.makedirs(os.path.dirname(self.root), 0o700, exist_ok=True)
        for folder in (self.root, self.listing.tmp):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        demand_folder(self.listing.tmp)

    def reserve(self, key: Key, size: int) -> tuple[int, str] | None:
        """Count ``size`` bytes for ``key``, making room, and open the file to write them to (locked).

        Returns (file descriptor, path); ``None`` when another live writer is at the same key. The caller publishes
        with :meth:`publish` or gives up with :meth:`abandon`.

        Raises:
            OSError: the folder cannot be used.
        """
        unique = os.urandom(6).hex()
        identity = hashlib.sha256(key.path.encode()).hexdigest()[:32]
        path = os.path.join(self.listing.tmp, f"{identity}.{size}.{os.getpid()}.{unique}.tmp")
        with self.lock.held() as accounting:
            demand_folder(self.listing.tmp)
            if self._in_flight(identity, accounting):
                return None
            if self.limit is None:
                if not self._scanned:
                    self._clean_temporaries()
                    self._scanned = True
            else:
                if not accounting.known or not self._scanned:
                    self._count(accounting)
                    self._scanned = True
                needed = pages(size)
                if accounting.used + needed > self._limit_now(accounting.used):
                    self._evict(accounting, needed)
                accounting.used += needed
                self.lock.record(accounting)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._own(handle)
        return handle, path

    def publish(self, temporary: str, path: str) -> None:
        """Give the finished file its name, replacing what stood there.

        Raises:
            OSError: it could not be renamed; the caller must still call :meth:`abandon`.
        """
        target = os.path.join(self.root, path)
        with self.lock.held() as accounting:
            replaced = _counted(target) if self.limit is not None else 0
            try:
                demand_folder(os.path.dirname(target))
                os.rename(temporary, target)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(target), 0o700)  # fails where the root is gone too: see ``make``
                os.rename(temporary, target)
            accounting.used -= replaced

    def abandon(self, temporary: str, size: int) -> None:
        """Remove an unpublished file and take its bytes back; never raises."""
        with contextlib.suppress(OSError), self.lock.held(0.5) as accounting:
            os.unlink(temporary)
            accounting.used -= pages(size) if self.limit is not None else 0
        with contextlib.suppress(OSError):
            os.unlink(temporary)

    def fits(self, size: int) -> bool:
        """Whether an entry of ``size`` bytes fits within the limit at all."""
        return self.limit is None or pages(size) <= self.limit

    def shrink(self, size: int) -> bool:
        """Evict entries of at least ``size`` bytes, for a file system that is full before the limit is reached.

        False when there was nothing to evict, or there is no limit: then nothing ever is.

        Raises:
            OSError: the folder cannot be used.
        """
        if self.limit is None:
            return False
        with self.lock.held() as accounting:
            files = self._count(accounting)
            before = accounting.used
            self._drop(accounting, files, before - pages(size))
            return accounting.used < before

    def remove(self, path: str, seen: os.stat_result | None = None) -> bool:
        """Remove an entry, only if it is still the file ``seen`` where given. True when it is gone.

        Does not wait for the lock. Without it the count stays too high until the next scan; taking the bytes off later
        would count a scan between twice.
        """
        target = os.path.join(self.root, path)
        try:
            with self.lock.held(0.0) as accounting:
                gone = self._unlink(target, seen)
                accounting.used -= gone if self.limit is not None else 0
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
        with self.lock.held() as accounting:
            files = self._count(accounting)
        return accounting.used, len(files)

    def counted(self) -> int:
        """The count of bytes as it stands.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.lock.held() as accounting:
            return accounting.used

    @staticmethod
    def _unlink(target: str, seen: os.stat_result | None) -> int:
        """Remove the file if it is ``seen``; returns the counted bytes that went."""
        try:
            demand_folder(os.path.dirname(target))
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

    def _own(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.works = False

    def _in_flight(self, identity: str, accounting: Accounting) -> bool:
        for file in self.listing.temporaries():
            if file.id != identity:
                continue
            if not self._leftover(file.path):
                return True
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            # What its writer had counted is not for its name to say.
            accounting.known = False
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
            if not self.lock.works:
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
        for file in self.listing.temporaries():
            if not self._leftover(file.path):
                reserved += file.reserved
                continue
            try:
                os.unlink(file.path)
            except OSError:
                reserved += pages(file.size)
        return reserved

    def _count(self, accounting: Accounting) -> list[Published]:
        """Set the count right by looking at every file; removes leftovers and empty folders."""
        files = list(self.listing.published())
        accounting.used = sum(pages(file.size) for file in files) + self._clean_temporaries()
        accounting.known = True
        for folder in self.listing.namespaces():
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

    def _evict(self, accounting: Accounting, size: int) -> None:
        """Remove least recently used entries until ``size`` more bytes fit."""
        files = self._count(accounting)
        limit = self._limit_now(accounting.used)
        room = limit - size
        if accounting.used <= room:
            return
        if len(files) > _MANY_FILES:
            room -= min(limit // 32, max(0, room))
        self._drop(accounting, files, room)
        if accounting.used > limit - size:
            raise OSError(errno.ENOSPC, f"no room for {size} bytes within the limit of {limit} bytes")

    @staticmethod
    def _drop(accounting: Accounting, files: list[Published], room: int) -> None:
        """Remove the least recently used of ``files`` until no more than ``room`` bytes are used."""
        for file in sorted(files, key=lambda entry: entry.used):
            if accounting.used <= room:
                return
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            accounting.used -= pages(file.size)


def _counted(path: str) -> int:
    """What the entry's file was counted with; 0 where its header does not vouch for its size.

    Others may have let a file grow: taking off more than was added would make the count too low.
    """
    with contextlib.suppress(OSError, FormatError):
        handle = os.open(path, OPEN_ENTRY)
        try:
            size = os.fstat(handle).st_size
            read_entry(handle, size)
            return pages(size)
        finally:
            os.close(handle)
    return 0
