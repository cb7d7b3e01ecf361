# SPDX-License-Identifier: Apache-2.0
"""The buffer that outputs are copied to on the model thread.

A copy into fresh memory costs several times a copy into memory that is mapped already, so the buffer is one ring whose
pages are made ready once, in the background. Outputs leave it in the order in which they came.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from dataclasses import dataclass

import torch

from vllm_omni_patch import ledger

_log = ledger.logger("ec")
_ALIGN = 4096
# Linux's number for "map these pages for writing now, keep what they hold"; not in the mmap module before 3.14.
_POPULATE_WRITE = 23
_POPULATE_STEP = 2 << 20


@dataclass
class Slot:
    """Room for one output. ``memory`` is uint8, one-dimensional, exactly as long as asked for."""

    memory: torch.Tensor
    start: int
    length: int


class Staging:
    """A ring of ``size`` bytes, given out and taken back first in, first out.

    With ``pin`` the memory is page-locked for CUDA, made at the first use (the current device is then the worker's).
    An output larger than the ring gets memory of its own, one such output at a time.
    """

    def __init__(self, size: int, pin: bool = False) -> None:
        self.size = size // _ALIGN * _ALIGN
        self._pin = pin
        self._lock = threading.Lock()
        self._used: deque[Slot] = deque()
        self._memory: torch.Tensor | None = None
        self._map: mmap.mmap | None = None
        self._large = False
        if not pin and self.size:
            # With huge pages the copy misses fewer translations: 10 to 30 % less time.
            self._map = huge_pages(self.size)
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def populate(self) -> None:
        """Map the ring's pages; called once off the model thread. Without kernel support the first puts pay."""
        if self._map is None:
            return
        with contextlib.suppress(OSError, ValueError):
            for start in range(0, self.size, _POPULATE_STEP):
                self._map.madvise(_POPULATE_WRITE, start, min(_POPULATE_STEP, self.size - start))

    def take(self, length: int) -> Slot | None:
        """Room for ``length`` bytes, or ``None`` while there is not enough."""
        rounded = -(-length // _ALIGN) * _ALIGN
        with self._lock:
            if rounded > self.size:
                if self._large:
                    return None
                try:
                    slot = Slot(host_memory(length, self._pin), -1, 0)
                except (MemoryError, RuntimeError):
                    return None
                self._large = True
                return slot
            start = self._place(rounded)
            if start is None:
                return None
            if self._memory is None:
                # Only CUDA comes here.
                self._memory = host_memory(self.size, self._pin)
            slot = Slot(self._memory[start : start + length], start, rounded)
            self._used.append(slot)
            return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot."""
        with self._lock:
            if slot.start < 0:
                self._large = False
                return
            slot.length = -abs(slot.length)
            # Slots come back in order but for a put that failed after it took one.
            while self._used and self._used[0].length < 0:
                self._used.popleft()

    def _place(self, length: int) -> int | None:
        if not self._used:
            return 0
        tail = self._used[0].start
        newest = self._used[-1]
        head = newest.start + abs(newest.length)
        if head > tail:
            if self.size - head >= length:
                return head
            return 0 if tail >= length else None
        return head if tail - head >= length else None


def host_memory(length: int, pin: bool) -> torch.Tensor:
    """uint8 of ``length`` bytes, page-locked if asked for and possible (a container may forbid it)."""
    if pin:
        try:
            return torch.empty(length, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _log.warning(
                "Encoder cache: cannot allocate page-locked memory (%s); copies to and from the device are slower.",
                error,
            )
    return torch.empty(length, dtype=torch.uint8)


def huge_pages(length: int) -> mmap.mmap:
    """Anonymous memory, in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
