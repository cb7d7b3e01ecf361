# SPDX-License-Identifier: Apache-2.0
"""Entries into tensors: mapped from the memory that the scheduler loaded them into, or read from storage."""

from __future__ import annotations

import errno
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from vllm_omni_patch import ledger

from ..config import MIB
from ..stats import ECStats
from ..storage.entry import Entry, bytes_of
from ..storage.executor import SingleThreadExecutor
from ..storage.files import OpenEntry
from ..storage.key import Key
from .memory import Place, open_place
from .staging import host_memory, huge_pages
from .tiers import Tiers

_log = ledger.logger("ec")
# Page-locked memory for loads grows to this much; larger entries go through ordinary memory.
_LOAD_BUFFER = 64 * MIB
_HUGE_PAGE = 2 * MIB


class Loads:
    """Loads of one engine. ``keep`` is told of an entry that came from a remote; ``deadline`` in seconds."""

    def __init__(
        self, tiers: Tiers, stats: ECStats, deadline: float, keep: Callable[[Key, Entry, memoryview], None]
    ) -> None:
        self._tiers = tiers
        self._stats = stats
        self._deadline = deadline
        self._keep = keep
        self._memory = Recycled()
        self._buffer = LoadBuffer(_LOAD_BUFFER)
        self._direct = SingleThreadExecutor("ec-load")
        self._unreachable = False

    def close(self) -> None:
        """Wait for nothing."""
        self._direct.close(0.0)

    def open(self, key: Key, place: Place, device: str) -> torch.Tensor | None:
        """See :meth:`ECCacheEngine.open`; ``key`` is the entry's.

        Raises:
            TimeoutError: this process had to load the entry itself, and it took longer than the deadline.
        """
        tensor: torch.Tensor | None
        try:
            tensor = open_place(place)
        except OSError as error:
            if not self._unreachable and error.errno != errno.ESTALE:
                self._unreachable = True
                _log.info(
                    "Encoder cache: this process cannot map what the scheduler has loaded (%s), so it loads entries "
                    "from storage itself.",
                    error,
                )
            tensor = self._direct.run(lambda: self.get(key, "cpu", place.rows), self._deadline)
        return None if tensor is None else self._to_device(tensor, device)

    def _to_device(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """``tensor`` on ``device``; to CUDA through page-locked memory on a stream of its own, which the present
        stream waits for."""
        if torch.device(device).type != "cuda":
            return tensor if torch.device(device).type == "cpu" else tensor.to(device)
        with self._buffer.lock:
            pinned = self._buffer.take(tensor.numel() * tensor.element_size())
            pinned.copy_(tensor.view(-1).view(torch.uint8))
            return self._buffer.send(pinned.view(tensor.dtype).view(tensor.shape), device)

    def get(self, key: Key, device: str, rows: int | None) -> torch.Tensor | None:
        """See :meth:`ECCacheEngine.get`; ``key`` is the entry's."""
        for tier in self._tiers.local:
            tensor = self._tiers.load_local(tier, key, rows, self._read)
            if tensor is not None:
                return self._to_device(tensor, device)
        loaded = self._tiers.load_remote(key, rows)
        if loaded is None:
            return None
        entry, payload = loaded
        self._keep(key, entry, payload)
        return self._to_device(_shaped(torch.frombuffer(payload, dtype=torch.uint8), entry), device)

    def _read(self, found: OpenEntry) -> torch.Tensor:
        memory = self._memory.take(found.entry.payload)
        found.read_into(bytes_of(memory))
        return _shaped(memory, found.entry)


def _shaped(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    return memory.view(getattr(torch, entry.dtype)).view(entry.rows, entry.columns)


class LoadBuffer:
    """One page-locked buffer through which entries go to a CUDA device; grows to the largest entry below ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory: torch.Tensor | None = None
        self._sent: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.lock = threading.Lock()

    def take(self, length: int) -> torch.Tensor:
        """uint8 of ``length`` bytes, valid until the next call; hold ``lock`` meanwhile.

        Raises:
            MemoryError, RuntimeError: no such memory.
        """
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
        if length > self._limit:
            return torch.empty(length, dtype=torch.uint8)
        if self._memory is None or self._memory.numel() < length:
            self._memory = None
            self._memory = host_memory(max(length, 1 << 20), True)
        return self._memory[:length]

    def send(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """A copy of ``tensor``, which lies in this buffer, on the CUDA ``device``; hold ``lock``.

        The copy runs on a stream of its own; the present stream waits for it, the calling thread does not.
        """
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        current = torch.cuda.current_stream(out.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(out.device)
        self._stream.wait_stream(current)  # ``out`` may lie where earlier work still reads
        with torch.cuda.stream(self._stream):
            out.copy_(tensor, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record(self._stream)
        current.wait_event(self._sent)
        return out


class Recycled:
    """Memory for loads into ordinary memory: what a tensor gave back serves the next one, in huge pages where the
    kernel has them. Touching fresh pages costs several times the copy into them."""

    def __init__(self, most: int = 256 * MIB) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self, length: int) -> torch.Tensor:
        """uint8 of ``length`` bytes, for as long as the tensor or a view of it lives."""
        rounded = -(-length // _HUGE_PAGE) * _HUGE_PAGE
        with self._lock:
            fitting = [memory for memory in self._free if rounded <= len(memory) <= 2 * rounded]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free.remove(memory)
        if memory is None:
            memory = huge_pages(rounded)
        owner = np.frombuffer(memory, dtype=np.uint8, count=length)
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return torch.from_numpy(owner)

    def _give_back(self, memory: mmap.mmap) -> None:
        # Called by whichever thread drops the tensor, perhaps in the middle of ``take``.
        if self._lock.acquire(blocking=False):
            try:
                if len(memory) + sum(map(len, self._free)) <= self._most:
                    self._free.append(memory)
            finally:
                self._lock.release()
