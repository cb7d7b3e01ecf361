# SPDX-License-Identifier: Apache-2.0
"""A folder of entries that many processes write and read at once, and its limit.

Layout below the folder's root (mode 0700, files 0600)::

    lock                              held (flock) while counts change; holds the count of bytes of each shard
    tmp/<namespace>@<name>.<host>.tmp entries being written, each locked (flock) by its writer for as long as it lives
    <shard>/<namespace>@<name>.ec     published entries; the shard is the first byte of the hash in the name

A store takes the lock once, for a few small reads and writes, and looks at no other entry. What a file takes, in whole
pages, is counted *before* it is written; the file has its final size by then, so whoever counts a shard again finds the
same. When the limit is reached, a random sample of entries is looked at and the least recently used of it are removed,
as Redis does it: that costs the same in any number of entries. A folder that is smaller than a sample thus evicts in
the exact order.

Counts err upwards only, where a process was killed or somebody removed files by hand; ``folder_upkeep`` puts them
right.

What does not have a name of these forms, or is a symbolic link, is somebody else's: neither counted nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterable

from .folder_listing import Listing, Published, demand_folder, pages
from .folder_lock import FolderLock
from .folder_upkeep import Upkeep
from .key import Key

ROOT_NAME = "ec-v1"
OPEN_ENTRY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# Entries that an eviction looks at. It removes an eighth of them at least, so that few stores pay for a sample, and a
# quarter at most, so that none goes that is among the younger; an entry that needs more takes larger samples.
_SAMPLE = 128
_LARGEST_SAMPLE = 4096


class Folder:
    """Locking, counting and evicting for one root. Holds no file open between calls.

    ``limit`` is in bytes, ``None`` for none: then nothing is counted and nothing evicted. ``spare`` bytes of the file
    system stay free for others, whatever the limit says.
    """

    def __init__(self, base: str, limit: int | None, lock_seconds: float = 5.0, spare: int = 0) -> None:
        self.root = base if os.path.basename(os.path.normpath(base)) == ROOT_NAME else os.path.join(base, ROOT_NAME)
        self.limit = limit
        self.listing = Listing(self.root)
        self.lock = FolderLock(self.root, lock_seconds, counting=limit is not None)
        self.upkeep = Upkeep(self.listing, self.lock)
        self._spare = spare
        # Where locks hold within a host only, two hosts must not write to one file.
        self._host = hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]

    def make(self, parents: bool = True) -> None:
        """Make the root, ``tmp`` and the lock where missing, and with ``parents`` the folders above.

        Raises:
            OSError: it cannot be made.
        """
        if parents:
            os.makedirs(os.path.dirname(self.root), 0o700, exist_ok=True)
        for folder in (self.root, self.listing.tmp):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        demand_folder(self.listing.tmp)
        if self.lock.counting:
            self.lock.make()

    def reserve(self, key: Key, size: int) -> tuple[int, str] | None:
        """Make room for ``size`` bytes, count them, and open the file to write them to (locked, and of that size).

        Returns (file descriptor, path); ``None`` when another process of this host is writing the same entry. The
        caller publishes with :meth:`publish` or gives up with :meth:`abandon`.

        Raises:
            OSError: the folder cannot be used.
        """
        demand_folder(self.listing.tmp)
        path = os.path.join(self.listing.tmp, f"{key.file}.{self._host}.tmp")
        created = self._create(path, key.shard)
        if created is None:
            return None
        handle, now = created
        try:
            wrong = self.limit is not None and self._count_in(key.shard, size, handle, now)
            self.upkeep.start_if_due(wrong)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)
            raise
        return handle, path

    def publish(self, temporary: str, key: Key, replaced: int) -> None:
        """Give the finished file its name. ``replaced``: bytes of the entry that it replaces, as it was counted.

        Raises:
            OSError: it could not be renamed; the caller must still call :meth:`abandon`.
        """
        target = os.path.join(self.root, key.path)
        if replaced:
            with self.lock.freeing() as freed:
                _rename(temporary, target)
                freed[key.shard] = pages(replaced)
        else:
            _rename(temporary, target)

    def abandon(self, temporary: str, key: Key, size: int) -> None:
        """Remove an unpublished file and take its bytes back; never raises."""
        with contextlib.suppress(OSError), self.lock.freeing(0.5) as freed:
            os.unlink(temporary)
            freed[key.shard] = pages(size)

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
        return self._evict(pages(size), self.limit, time.time(), *self.listing.sample(_SAMPLE)) > 0

    def remove(self, key: Key, seen: os.stat_result | None = None) -> bool:
        """Remove an entry, only if it is still the file ``seen`` where given. True when it is gone.

        Waits 5 ms for the lock at most: the model's thread may be here.
        """
        target = os.path.join(self.root, key.path)
        with contextlib.suppress(OSError), self.lock.freeing(0.005) as freed:
            demand_folder(os.path.dirname(target))
            status = os.lstat(target)
            if seen is None or os.path.samestat(status, seen):
                os.unlink(target)
                freed[key.shard] = pages(status.st_size)
        try:
            left = os.lstat(target)
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)
        return seen is not None and not os.path.samestat(left, seen)

    def drop(self, files: Iterable[Published]) -> list[Published]:
        """Remove entries' files; returns those that went."""
        gone = []
        with self.lock.freeing() as freed:
            for file in files:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
                    gone.append(file)
                    if file.shard >= 0:
                        freed[file.shard] = freed.get(file.shard, 0) + pages(file.size)
        return gone

    def usage(self) -> tuple[int, int]:
        """(bytes in whole pages, entries) by looking at every file; sets the counts right and removes leftovers and
        empty folders.

        Raises:
            OSError: the folder cannot be used.
        """
        self.upkeep.everything()
        shards, _ = self.listing.folders()
        for shard in shards:
            # Fails on a folder that holds anything, which is the point.
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self.root, shard))
        return self.counted(), sum(1 for shard in shards for _ in self.listing.published(shard))

    def counted(self) -> int:
        """The count of bytes as it stands.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.lock.held() as counts:
            return counts.total

    def _create(self, path: str, shard: int) -> tuple[int, float] | None:
        """Make and lock the file to write to; returns it and the time by the file system's clock. ``None``: a live
        writer has it."""
        for _ in range(4):
            try:
                handle = os.open(path, _CREATE, 0o600)
            except FileExistsError:
                if self.upkeep.drop_leftover(path, shard):
                    continue
                return None
            try:
                # Before it was locked it looked like a leftover, and another process may have removed it.
                made = os.fstat(handle)
                if self.lock.take(handle) and os.path.samestat(made, os.lstat(path)):
                    return handle, made.st_mtime
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        return None

    def _count_in(self, shard: int, size: int, handle: int, now: float) -> bool:
        """Count the bytes of an entry, with room made for it; whether a count is known to be wrong."""
        needed = pages(size)
        recounted = False
        while True:
            # Whoever counts the shard again sees these bytes from now on, for a moment twice rather than never.
            os.ftruncate(handle, size)
            with self.lock.held() as counts:
                used = counts.total
                limit = self._limit_now(used)
                if used + needed <= limit:
                    counts.add(shard, needed)
                    return not all(counts.counted_at)
            os.ftruncate(handle, 0)
            files, whole = self.listing.sample(_SAMPLE)
            if needed <= limit and whole and not recounted and self._is_less(files, used):
                # Processes were killed, or files removed by hand. Of so few files the counts are quickly put right.
                self.upkeep.everything()
                recounted = True
            elif needed > limit or not self._evict(used + needed - limit, limit, max(now, time.time()), files, whole):
                raise OSError(errno.ENOSPC, f"no room for {size} bytes within the limit of {limit} bytes")

    def _is_less(self, files: list[Published], used: int) -> bool:
        """Whether all of the folder's ``files`` are less than was counted."""
        sizes = [file.size for file in files] + [file.size for file in self.listing.temporaries()]
        return sum(map(pages, sizes)) < used

    def _limit_now(self, used: int) -> int:
        """The limit, or less where others have filled the file system but for ``spare`` bytes."""
        limit = self.limit or 0
        if self._spare:
            status = os.statvfs(self.root)
            limit = max(0, min(limit, used + status.f_bavail * status.f_frsize - self._spare))
        return limit

    def _evict(self, wanted: int, limit: int, now: float, files: list[Published], whole: bool) -> int:
        """Remove ``wanted`` bytes of entries, the least recently used of a sample, and of larger samples where that is
        not enough. ``whole``: there are no more than ``files``. Returns how many bytes went."""
        freed, size = 0, _SAMPLE
        while True:
            files.sort(key=lambda file: file.age(now), reverse=True)
            victims: list[Published] = []
            total = freed
            for file in files:
                enough = total >= wanted and (whole or len(victims) >= size // 8 or total >= limit // 32)
                if enough or (not whole and len(victims) >= size // 4):
                    break
                victims.append(file)
                total += pages(file.size)
            gone = sum(pages(file.size) for file in self.drop(victims))
            freed += gone
            if freed >= wanted or whole or not gone:
                return freed
            size = min(2 * size, _LARGEST_SAMPLE)
            files, whole = self.listing.sample(size)


def _rename(temporary: str, target: str) -> None:
    folder = os.path.dirname(target)
    try:
        demand_folder(folder)
        os.rename(temporary, target)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # fails where the root is gone too: see ``make``
        os.rename(temporary, target)
