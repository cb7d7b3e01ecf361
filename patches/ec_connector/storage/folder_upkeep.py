# SPDX-License-Identifier: Apache-2.0
"""What keeps a folder of entries right and clean, in the background of a process that stores.

Counts go wrong where a process is killed or somebody removes files by hand, and killed writers leave files. No store
waits for the repair: a daemon thread looks at one shard after another and rests in between.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
import time

from vllm_omni_patch import ledger

from .folder_listing import Listing, demand_folder, pages
from .folder_lock import SHARDS, FolderLock

_log = ledger.logger("ec")
# Seconds after which a shard is counted again: 1.2 s of work for all shards of 300,000 entries.
_PERIOD = 1800.0
# Seconds between two passes at least, however wrong a count is.
_PAUSE = 5.0
# The thread rests this many times as long as it computed: the model's thread needs the interpreter more.
_REST = 9
# Where a file system has no locks, a file in tmp is a leftover when it is this old (seconds).
_UNLOCKED_LEFTOVER = 3600.0
_OPEN_TEMPORARY = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Upkeep:
    """Counts the files of a folder again and removes leftovers."""

    def __init__(self, listing: Listing, lock: FolderLock) -> None:
        self._listing = listing
        self._lock = lock
        self._next = 0.0
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start_if_due(self, wrong: bool) -> None:
        """Begin a pass in the background, at the first call and then each ``_PERIOD``; sooner where a count is
        ``wrong``."""
        now = time.monotonic()
        if now < self._next - (_PERIOD - _PAUSE if wrong else 0.0):
            return
        with self._mutex:
            if self._thread is not None and self._thread.is_alive():
                return
            self._next = now + _PERIOD
            self._ended.clear()
            thread = threading.Thread(target=self._run, name="ec-upkeep", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had now
                thread.start()
                self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait for a pass that is under way; False when it takes longer."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def stop(self) -> None:
        """End a pass that is under way; what is left is for the next."""
        self._ended.set()
        self.wait(1.0)

    def everything(self) -> None:
        """Remove all leftovers and count every shard, now.

        Raises:
            OSError: the folder cannot be used.
        """
        self._ended.clear()
        self._pass(rest=0, age=0.0)

    def drop_leftover(self, path: str, shard: int) -> bool:
        """Remove a file in ``tmp`` if its writer is dead; False when it lives. ``shard`` is where it was counted."""
        try:
            handle = os.open(path, _OPEN_TEMPORARY)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or not self._lock.take(handle):
                return False
            if not self._lock.works and abs(time.time() - status.st_mtime) < _UNLOCKED_LEFTOVER:
                return False
            with self._lock.freeing() as freed:
                # Its writer may have published it and ended since it was opened.
                if os.path.samestat(os.lstat(path), status):
                    os.unlink(path)
                    if shard >= 0:
                        freed[shard] = pages(status.st_size)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    def _run(self) -> None:
        try:
            self._pass(rest=_REST, age=_PERIOD)
        except OSError as error:
            _log.debug("encoder cache: upkeep of %s ended: %s", self._listing.root, error)

    def _pass(self, rest: int, age: float) -> None:
        """``age``: seconds for which a count stands."""
        if self._move_old(rest):
            age = 0.0
        for file in self._listing.temporaries():
            began = time.thread_time()
            self.drop_leftover(file.path, file.shard)
            if self._ended.wait(rest * (time.thread_time() - began)):
                return
        if not self._lock.counting:
            return
        for shard in random.sample(range(SHARDS), SHARDS):
            began = time.thread_time()
            with self._lock.held() as counts:
                counted_at = counts.counted_at[shard]
            # Another process may have counted it just now. A time in the future says nothing.
            if not 0 <= time.time_ns() - counted_at < age * 1e9:
                self._count(shard)
            if self._ended.wait(rest * (time.thread_time() - began)):
                return

    def _count(self, shard: int) -> None:
        """Set a shard's count right: unlocked, and again where the count has changed meanwhile."""
        for _ in range(3):
            with self._lock.held() as counts:
                before = counts.state(shard)
            # What is being written first: it may be published meanwhile, and must not be missed.
            sizes = {(file.entry, file.inode): file.size for file in self._listing.temporaries() if file.shard == shard}
            for one in self._listing.published(f"{shard:02x}"):
                if self._ended.is_set():
                    return
                sizes[os.path.basename(one.path), one.inode] = one.size
            with self._lock.held() as counts:
                if counts.state(shard) == before:
                    counts.set(shard, sum(map(pages, sizes.values())))
                    return

    def _move_old(self, rest: int) -> bool:
        """Move the entries of the layout before shards to their places; whether there were any."""
        _, folders = self._listing.folders()
        for folder in folders:
            for file in self._listing.published(folder):
                began = time.thread_time()
                name = os.path.basename(file.path)
                place = os.path.join(self._listing.root, name[:2])
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place, 0o700)
                demand_folder(place)
                target = os.path.join(place, f"{folder}@{name}")
                with contextlib.suppress(FileNotFoundError):
                    if os.path.lexists(target):
                        os.unlink(file.path)
                    else:
                        os.rename(file.path, target)
                if self._ended.wait(rest * (time.thread_time() - began)):
                    return True
            # Fails on a folder that holds anything, which is the point.
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self._listing.root, folder))
        return bool(folders)
