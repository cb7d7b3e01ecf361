# SPDX-License-Identifier: Apache-2.0
"""What is in a folder of entries. Other names and symbolic links are somebody else's: they are not listed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

# Matched against whole names.
_TEMPORARY = re.compile(r"(?P<id>[0-9a-f]{32})\.(?P<bytes>[0-9]+)\.[0-9]+\.[0-9a-f]+\.tmp")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"[0-9a-f]{16}@[0-9]+@[0-9]+@[A-Za-z0-9_]+\.ec")
# What a file takes of a file system comes in pages: in shared memory of this size, on disks mostly too.
_PAGE = 4096
_OPEN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


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


class Listing:
    """The files below ``root``. Looks at the folder at each call."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tmp = os.path.join(root, "tmp")

    def published(self) -> Iterator[Published]:
        """Every published entry's file, unordered; files that vanish meanwhile are left out."""
        for folder in self.namespaces():
            for name in filter(_ENTRY.fullmatch, names(folder)):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        yield Published(path, status.st_size, status.st_mtime)

    def closed(self) -> Iterator[tuple[str, str]]:
        """(path, reason) of every folder of entries that this user may not list: what is in it is not known."""
        for folder in self.namespaces():
            try:
                os.listdir(folder)
            except PermissionError as error:
                yield folder, str(error)
            except OSError:  # gone by now, or somebody else's
                continue

    def temporaries(self) -> Iterator[Temporary]:
        """Every file that is being written or that a killed writer left."""
        for name in names(self.tmp):
            match = _TEMPORARY.fullmatch(name)
            if match is None:
                continue
            path = os.path.join(self.tmp, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield Temporary(path, match["id"], pages(int(match["bytes"])), status.st_size)

    def namespaces(self) -> list[str]:
        """The folders of entries, one for each namespace digest."""
        # The slash: where the root itself is a symbolic link, the operator made it.
        return [os.path.join(self.root, name) for name in names(self.root + "/") if _NAMESPACE.fullmatch(name)]


def pages(size: int) -> int:
    """What a file of ``size`` bytes counts."""
    return -(-size // _PAGE) * _PAGE


def demand_folder(path: str) -> None:
    """Raise unless ``path`` itself is a folder: behind a symbolic link are somebody else's files."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "a symbolic link or a file is where a folder should be; remove it", path
        )


def names(folder: str) -> list[str]:
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
