# SPDX-License-Identifier: Apache-2.0
"""Verified outputs in sealed memory files, which another process of the engine maps instead of copying.

The file (``memfd_create``) has no name and is sealed once it is filled: nobody, not even its owner, can cut it short or
write to it, so a process that maps it cannot be killed by it, which holds for no file in a folder. A process of the
same user reaches it through ``/proc/PID/fd``. Its bytes are not limited by the size of ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..storage.entry import Entry
from ..storage.key import Key

if TYPE_CHECKING:
    import torch

# From <linux/fcntl.h>; the fcntl module has them, but not in a Python built against an old C library.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE = 1, 2, 4, 8
_ALL_SEALS = _SEAL | _SHRINK | _GROW | _WRITE
# Written piece by piece from a buffer that stays in a processor cache: 11 ms for 32 MiB, where reading into a map of
# the file takes 21, because each of its pages is then touched for the first time.
PIECE = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where an output lies and what it is. Travels from the scheduler to the workers with a step.

    ``host``: see :func:`here`. ``handle`` is a descriptor in process ``pid``; ``device`` and ``inode`` tell its file
    from another one that took the number since. ``[rows, columns]`` of ``dtype`` (torch's name), ``size`` bytes.
    ``id_bytes`` and ``namespace_digest`` are the entry's, so that a worker can tell another output, or other weights.
    """

    host: str
    pid: int
    handle: int
    device: int
    inode: int
    size: int
    rows: int
    columns: int
    dtype: str
    id_bytes: bytes
    namespace_digest: bytes

    def is_of(self, key: Key) -> bool:
        """Whether the output is the one that ``key`` means."""
        return (self.id_bytes, self.namespace_digest) == (key.id_bytes, key.namespace_digest)


class MemoryFile:
    """One output: written piece by piece, sealed, then offered as a :class:`Place`.

    Goes with the last who holds it; ``given_back`` is then called with its size, from whichever thread that is.

    Raises:
        MemoryError: no memory or descriptor to be had, or a kernel without memory files.
    """

    def __init__(self, entry: Entry, given_back: Callable[[int], object]) -> None:
        self.size = entry.payload
        self._given_back = given_back
        self._handle = -1
        with _as_memory_error():
            host = here()
            self._handle = os.memfd_create("vllm-omni-patch-ec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            file = os.fstat(self._handle)
        self.place = Place(
            host,
            os.getpid(),
            self._handle,
            file.st_dev,
            file.st_ino,
            self.size,
            entry.rows,
            entry.columns,
            entry.dtype,
            entry.id_bytes,
            entry.namespace_digest,
        )

    def append(self, data: memoryview) -> None:
        """Write the next bytes of the output.

        Raises:
            MemoryError: there is no room for them.
        """
        with _as_memory_error():
            while data:
                data = data[os.write(self._handle, data) :]

    def seal(self) -> None:
        """Make the bytes final.

        Raises:
            MemoryError: the kernel refuses.
        """
        with _as_memory_error():
            fcntl.fcntl(self._handle, _ADD_SEALS, _ALL_SEALS)

    def __del__(self) -> None:
        # What others have mapped stays theirs.
        if self._handle >= 0:
            os.close(self._handle)
            self._given_back(self.size)


@contextlib.contextmanager
def _as_memory_error() -> Iterator[None]:
    """An error of the memory file must not look like one of the storage that is read."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"a memory file cannot be made or filled: {error}") from error


@lru_cache(maxsize=1)
def here() -> str:
    """The same text in all processes that see one another under the same process ids: the host's boot, and the PID
    namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def open_place(place: Place) -> torch.Tensor:
    """The output at ``place`` as [rows, columns], mapped: no byte is copied, and what is written to the tensor goes to
    pages of its own.

    Raises:
        OSError: not reachable from this process: another host or container, or the file is gone.
    """
    import torch

    if place.host != here():
        raise OSError(errno.EXDEV, "the output is in the memory of another host or container")
    handle = os.open(f"/proc/{place.pid}/fd/{place.handle}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino, status.st_size) != (place.device, place.inode, place.size):
            raise OSError(errno.ESTALE, "the output is no longer in memory")
        if fcntl.fcntl(handle, _GET_SEALS) & _ALL_SEALS != _ALL_SEALS:
            raise OSError(errno.EPERM, "the output's memory is not sealed")
        # torch maps the file privately and keeps no descriptor, of which a process has few.
        memory = torch.from_file(f"/proc/self/fd/{handle}", shared=False, size=place.size, dtype=torch.uint8)
    finally:
        os.close(handle)
    return memory.view(getattr(torch, place.dtype)).view(place.rows, place.columns)
