# SPDX-License-Identifier: Apache-2.0
"""Entries on their way from storage into memory, in the background.

The scheduler's process fetches (``Fetcher.fetch``): it sees a request first, there is one of it for all ranks, and it
may promise what it has verified. Each tier is read by threads of its own, so that one which hangs holds up no other; a
tier whose threads do not come back within the load deadline is left out until they do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from vllm_omni_patch import ledger

from ..stats import ECStats
from ..storage.breaker import CircuitBreaker
from ..storage.entry import Entry
from ..storage.executor import Stuck
from ..storage.key import Key
from .memory import PIECE, MemoryFile
from .tiers import FileTier, RemoteTier, Tiers

_log = ledger.logger("ec")
# Threads of one tier. Two, so that a small entry need not wait for a large one.
_THREADS = 2
# Outputs in memory at once: each holds a descriptor.
_MOST_FILES = 128
# Seconds that a fetch waits for memory that other requests hold. Longer, and encoding would have been faster.
_ROOM_SECONDS = 0.5


class Fetch:
    """One entry that is wanted. ``memory`` is set once it is verified in memory; settled without it is a miss."""

    def __init__(self, key: Key, rows: int | None, seconds: float) -> None:
        self.key = key
        self.rows = rows
        self.memory: MemoryFile | None = None
        self.asked = 1
        self.began = time.monotonic()
        self._seconds = seconds
        self._done = threading.Event()

    def settled(self, seconds: float = 0.0) -> bool:
        """Whether it is known, within ``seconds``, if the entry is there. It is a miss where its deadline passed."""
        return self._done.is_set() or (seconds > 0 and self._done.wait(seconds)) or self.late()

    def late(self) -> bool:
        """Whether nobody waits any more."""
        return time.monotonic() - self.began >= self._seconds

    def settle(self, memory: MemoryFile | None) -> None:
        """The answer."""
        self.memory = memory
        self._done.set()


class Fetcher:
    """Fetches entries of ``tiers`` into sealed memory files and keeps the last ones, up to ``budget`` bytes.

    What is in use by a request counts, too. Thread-safe; nothing raises, and nothing but :meth:`close` waits.
    ``keep`` is told of an entry that came from a remote.
    """

    def __init__(
        self,
        tiers: Tiers,
        stats: ECStats,
        *,
        budget: int,
        deadline: float,
        retry_seconds: float,
        keep: Callable[[Key, Entry, memoryview], None],
    ) -> None:
        self._tiers = tiers
        self._stats = stats
        self._budget = budget
        self._deadline = deadline
        self._keep = keep
        places: list[FileTier | RemoteTier] = [*tiers.local, *tiers.remote]
        self._readers = [_Reader(tier, deadline, retry_seconds) for tier in places]
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int | None], Fetch] = {}
        self._kept: OrderedDict[str, Fetch] = OrderedDict()
        self._used = 0
        self._given_back: deque[int] = deque()

    def fetch(self, key: Key, rows: int | None) -> Fetch:
        """Begin to fetch the entry of ``key`` with ``rows`` rows, or join who does; settled at once if in memory."""
        self._stats.add("lookups")
        with self._lock:
            found = self._kept.get(key.path)
            if found is not None and self._matches(found, key, rows):
                self._kept.move_to_end(key.path)
                self._stats.add("lookup_hits")
                return found
            asked = (key.path, rows)
            fetch = self._running.get(asked)
            if fetch is not None and fetch.key == key and not fetch.late():
                fetch.asked += 1
                return fetch
            fetch = Fetch(key, rows, self._deadline)
            self._running[asked] = fetch
        self._read(fetch, 0)
        return fetch

    def serves(self, fetch: Fetch, key: Key | None) -> bool:
        """Whether ``fetch`` may be promised now that its item's key is ``key``."""
        return fetch.memory is not None and fetch.key == key and not self._tiers.run_folder.blocklisted(fetch.key.path)

    def discard(self, key: Key) -> None:
        """Forget an entry."""
        with self._lock:
            self._kept.pop(key.path, None)

    def close(self, seconds: float) -> None:
        """End the threads that come back within ``seconds``."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._kept.clear()

    def _matches(self, found: Fetch, key: Key, rows: int | None) -> bool:
        memory = found.memory
        if memory is None or found.key != key or (rows is not None and memory.place.rows != rows):
            return False
        if self._tiers.run_folder.blocklisted(key.path):
            del self._kept[key.path]
            return False
        return True

    def _read(self, fetch: Fetch, index: int) -> None:
        """Ask the tiers from ``index`` on; each passes the fetch on where it does not have the entry."""
        for place in range(index, len(self._readers)):
            reader = self._readers[place]
            if isinstance(reader.tier, RemoteTier) and not fetch.key.shared:
                continue

            def read(reader: _Reader = reader, place: int = place) -> None:
                memory = None
                if not fetch.late():
                    try:
                        memory = self._read_tier(reader.tier, fetch)
                    except Exception as error:
                        self._stats.unexpected("a lookup", error)
                if memory is None and not fetch.late():
                    self._read(fetch, place + 1)
                else:
                    self._settle(fetch, memory)

            if reader.submit(read):
                return
        self._settle(fetch, None)

    def _settle(self, fetch: Fetch, memory: MemoryFile | None) -> None:
        self._stats.add("lookup_seconds", time.monotonic() - fetch.began)
        with self._lock:
            if self._running.get((fetch.key.path, fetch.rows)) is fetch:
                del self._running[fetch.key.path, fetch.rows]
            fetch.settle(memory)
            if memory is not None:
                self._kept[fetch.key.path] = fetch
                self._kept.move_to_end(fetch.key.path)
        if memory is not None:
            self._stats.add("lookup_hits", fetch.asked)

    def _read_tier(self, tier: FileTier | RemoteTier, fetch: Fetch) -> MemoryFile | None:
        if self._tiers.run_folder.blocklisted(fetch.key.path):
            return None
        if isinstance(tier, FileTier):
            return self._tiers.load_local(
                tier,
                fetch.key,
                fetch.rows,
                lambda found: self._filled(found.entry, fetch, lambda append: found.copy(append, PIECE)),
            )
        loaded = tier.load(fetch.key, fetch.rows)
        if loaded is None:
            return None
        entry, payload = loaded
        memory = self._filled(entry, fetch, lambda append: append(payload))
        self._keep(fetch.key, entry, payload)
        return memory

    def _filled(
        self, entry: Entry, fetch: Fetch, fill: Callable[[Callable[[memoryview], None]], None]
    ) -> MemoryFile | None:
        memory = self._memory(entry, fetch)
        if memory is not None:
            fill(memory.append)
            memory.seal()
        return memory

    def _memory(self, entry: Entry, fetch: Fetch) -> MemoryFile | None:
        """Memory for ``entry``, after older outputs have made room; ``None`` where requests hold all of it."""
        until = time.monotonic() + _ROOM_SECONDS
        while not self._reserve(entry.payload):
            if entry.payload > self._budget or fetch.late() or time.monotonic() >= until:
                _log.debug("no memory for %d bytes of a stored output: %d in use", entry.payload, self._used)
                return None
            time.sleep(0.002)
        try:
            return MemoryFile(entry, self._given_back.append)
        except BaseException:
            self._given_back.append(entry.payload)
            raise

    def _reserve(self, size: int) -> bool:
        with self._lock:
            while True:
                while self._given_back:
                    self._used -= self._given_back.popleft()
                if self._used + size <= self._budget and len(self._kept) < _MOST_FILES:
                    self._used += size
                    return True
                if not self._kept:
                    return False
                # A file goes with the last who holds it: here, or a request that was promised it.
                self._kept.popitem(last=False)


class _Reader:
    """The threads of one tier. They start with their first work."""

    def __init__(self, tier: FileTier | RemoteTier, deadline: float, retry_seconds: float) -> None:
        self.tier = tier
        self._deadline = deadline
        self._breaker = CircuitBreaker(f"Encoder cache reads from {tier.name}", retry_seconds)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._since: dict[int, float] = {}  # thread -> when its present call began
        self._closed = False

    def submit(self, call: Callable[[], None]) -> bool:
        """Queue a call; False where the tier hangs, or is closed."""
        if self._closed or self._hangs():
            return False
        if len(self._threads) < _THREADS and len(self._since) == len(self._threads):
            thread = threading.Thread(target=self._run, name="ec-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had now
                if not self._threads:
                    return False
            else:
                self._threads.append(thread)
        self._work.put(call)
        return True

    def close(self, seconds: float) -> None:
        """End the threads that come back within ``seconds``."""
        self._closed = True
        deadline = time.monotonic() + seconds
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _hangs(self) -> bool:
        running = list(self._since.values())
        if len(running) < _THREADS or time.monotonic() - max(running) < self._deadline:
            return False
        if not self._breaker.failing:
            self._breaker.failed(Stuck(f"no answer within {self._deadline:g} s"))
        return True

    def _run(self) -> None:
        mine = threading.get_ident()
        while True:
            call = self._work.get()
            if call is None:
                return
            self._since[mine] = time.monotonic()
            try:
                call()
            finally:
                del self._since[mine]
            if self._breaker.failing:
                self._breaker.worked()
