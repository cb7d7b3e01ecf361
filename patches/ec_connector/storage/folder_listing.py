# SPDX-License-Identifier: Apache-2.0
"""What is in a folder of entries. Other names and symbolic links are somebody else's: they are not listed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import random
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

# Matched against whole names.
_SHARD = re.compile(r"[0-9a-f]{2}")
_NAME = r"(?P<shard>[0-9a-f]{2})[0-9a-f]{14}@[0-9]+@[0-9]+@[A-Za-z0-9_]+\.ec"
_ENTRY = re.compile(rf"[0-9a-f]{{32}}@{_NAME}")
_TEMPORARY = re.compile(rf"(?P<entry>[0-9a-f]{{32}}@{_NAME})\.[0-9a-f]{{8}}\.tmp")
# The layout before shards: one folder for each namespace, and temporary files with the size in their name.
_OLD_FOLDER = re.compile(r"[0-9a-f]{32}")
_OLD_ENTRY = re.compile(_NAME)
_OLD_TEMPORARY = re.compile(r"[0-9a-f]{32}\.[0-9]+\.[0-9]+\.[0-9a-f]+\.tmp")
# What a file takes of a file system comes in pages: in shared memory of this size, on disks mostly too.
_PAGE = 4096
# So far in the future (seconds) a time says nothing; less is the difference of two hosts' clocks.
_FUTURE = 60.0
_OPEN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


@dataclass(frozen=True)
class Published:
    """An entry's file. ``used`` is its time of last use, Unix seconds. ``shard``: -1 in the layout before shards."""

    path: str
    shard: int
    size: int
    used: float
    inode: int

    def age(self, now: float) -> float:
        """Seconds since its last use; infinite for a time in the future, which a wrong clock has set."""
        return now - self.used if self.used <= now + _FUTURE else math.inf


@dataclass(frozen=True)
class Temporary:
    """A file in ``tmp``, of its final size; ``entry`` is the name that it will get, in ``shard`` (-1: see above)."""

    path: str
    shard: int
    entry: str
    size: int
    inode: int


class Listing:
    """The files below ``root``. Looks at the folder at each call."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tmp = os.path.join(root, "tmp")

    def folders(self) -> tuple[list[str], list[str]]:
        """The names of the folders of entries: shards, and namespaces of the layout before."""
        # The slash: where the root itself is a symbolic link, the operator made it.
        names = _names(self.root + "/")
        return list(filter(_SHARD.fullmatch, names)), list(filter(_OLD_FOLDER.fullmatch, names))

    def published(self, folder: str) -> Iterator[Published]:
        """The entries' files in one of :meth:`folders`; files that vanish meanwhile are left out."""
        with _opened(os.path.join(self.root, folder)) as handle:
            if handle >= 0:
                yield from self._found(folder, handle, _list(handle))

    def sample(self, wanted: int) -> tuple[list[Published], bool]:
        """About ``wanted`` entries' files, drawn at random, and whether they are all that there are.

        Lists as many folders as that takes: one where they are large.
        """
        folders, _ = self.folders()
        random.shuffle(folders)
        found: list[Published] = []
        for folder in folders:
            with _opened(os.path.join(self.root, folder)) as handle:
                if handle < 0:
                    continue
                names = _list(handle)
                if len(names) > wanted - len(found):
                    found += self._found(folder, handle, random.sample(names, wanted - len(found)))
                    return found, False
                found += self._found(folder, handle, names)
        return found, True

    def closed(self) -> Iterator[tuple[str, str]]:
        """(path, reason) of every folder of entries that this user may not list: what is in it is not known."""
        for folder in itertools.chain(*self.folders()):
            path = os.path.join(self.root, folder)
            try:
                os.close(os.open(path, _OPEN_FOLDER))
            except PermissionError as error:
                yield path, str(error)
            except OSError:  # gone by now, or somebody else's
                continue

    def temporaries(self) -> Iterator[Temporary]:
        """Every file that is being written or that a killed writer left."""
        for name in _names(self.tmp):
            match = _TEMPORARY.fullmatch(name)
            if match is None and _OLD_TEMPORARY.fullmatch(name) is None:
                continue
            path = os.path.join(self.tmp, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    shard, entry = (int(match["shard"], 16), match["entry"]) if match else (-1, "")
                    yield Temporary(path, shard, entry, status.st_size, status.st_ino)

    def _found(self, folder: str, handle: int, names: list[str]) -> Iterator[Published]:
        shard = int(folder, 16) if _SHARD.fullmatch(folder) else -1
        form = _ENTRY if shard >= 0 else _OLD_ENTRY
        start = os.path.join(self.root, folder, "")
        for name in filter(form.fullmatch, names):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Published(start + name, shard, status.st_size, status.st_mtime, status.st_ino)


def pages(size: int) -> int:
    """What a file of ``size`` bytes counts."""
    return -(-size // _PAGE) * _PAGE


def demand_folder(path: str) -> None:
    """Raise unless ``path`` itself is a folder: behind a symbolic link are somebody else's files."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "a symbolic link or a file is where a folder should be; remove it", path
        )


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    """A descriptor of ``folder``; -1 where it cannot be opened or is a symbolic link."""
    try:
        handle = os.open(folder, _OPEN_FOLDER)
    except OSError:
        yield -1
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _names(folder: str) -> list[str]:
    with _opened(folder) as handle:
        return _list(handle) if handle >= 0 else []


def _list(handle: int) -> list[str]:
    try:
        return os.listdir(handle)
    except OSError:
        return []
