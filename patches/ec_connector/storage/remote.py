# SPDX-License-Identifier: Apache-2.0
"""The remote tier: deadlines and a circuit breaker in front of a server or a shared folder.

A lookup is waited for ``lookup_deadline`` at most, a load ``load_deadline``; what takes longer is a miss and opens the
breaker, so that the scheduler does not wait again before a pause that grows from ``retry_seconds`` to a minute. Every
failure also drops the connection, because LMCache's connectors do not reconnect by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from vllm_omni_patch import ledger

from ..config import ECConfig, without_userinfo
from ..stats import ECStats
from .breaker import CircuitBreaker
from .entry import Entry, FormatError
from .executor import SingleThreadExecutor, Stuck
from .key import Key

_log = ledger.logger("ec")
# A first connection imports LMCache and may take this long; lookups meanwhile are misses.
_CONNECT_SECONDS = 60.0
# Threads left behind in calls that never came back; with this many the remote is given up.
_MAX_STUCK = 4
T = TypeVar("T")


class Gone(Exception):
    """The entry went away, or was replaced by another, between its header and its payload. Nobody damaged it."""


class Remote(Protocol):
    """What the tier needs of a remote. Calls may block and raise anything."""

    def connect(self) -> None:
        """Make ready for calls."""

    def drop(self) -> None:
        """Forget the connection; never waits for the other side."""

    def find(self, key: Key, seconds: float) -> Entry | None:
        """The entry at ``key``'s address, as its header describes it.

        Raises:
            FormatError: what is there is no entry.
        """

    def read(self, key: Key, entry: Entry) -> memoryview:
        """The payload of ``entry``, verified.

        Raises:
            Gone: it went away or was replaced meanwhile.
            FormatError: it is damaged or incomplete.
        """

    def write(self, key: Key, entry: Entry, payload: memoryview, seconds: float) -> str:
        """Store an entry, replacing one at the same address; the outcome as of :meth:`FileStore.write`."""

    def remove(self, key: Key) -> bool:
        """Remove an entry."""


class RemoteTier:
    """A :class:`Remote` behind threads and a circuit breaker. Loads and lookups never raise and are bounded in time.

    ``blocklist`` is called with the path of a damaged entry that cannot be removed, ``first_to_find`` with that of any.
    """

    def __init__(
        self,
        name: str,
        remote: Remote,
        config: ECConfig,
        stats: ECStats,
        blocklist: Callable[[str], None] = lambda path: None,
        first_to_find: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self.name = name = without_userinfo(name)
        self._blocklist = blocklist
        self._first_to_find = first_to_find
        self._remote = remote
        self._config = config
        self._stats = stats
        self._breaker = CircuitBreaker(f"Encoder cache lookups and loads in {name}", config.retry_seconds)
        self._lookups = SingleThreadExecutor("ec-remote-lookup")
        self._loads = SingleThreadExecutor("ec-remote-load")
        self._stores = SingleThreadExecutor("ec-remote-store")
        self._stuck = 0
        self._closed = False
        self._connected = False
        self._stale = False  # a lost connection is still to be dropped
        self._mutex = threading.Lock()
        # Set while no connection attempt runs.
        self._settled = threading.Event()
        self._settled.set()
        self._connect_behind()

    def wait_ready(self, seconds: float) -> bool:
        """Wait for a running connection attempt to end; whether there is a connection then."""
        return self._settled.wait(seconds) and self._connected

    def contains(self, key: Key, rows: int | None) -> bool:
        """Whether a matching header is there, as far as can be told within ``lookup_deadline``."""
        limit = self._config.lookup_deadline

        def look() -> bool:
            try:
                found = self._remote.find(key, limit)
            except FormatError as error:
                self._bad(key, error)
                return False
            return found is not None and found.matches(key, rows)

        return bool(self._guarded("_lookups", look, limit, False))

    def load(self, key: Key, rows: int | None) -> tuple[Entry, memoryview] | None:
        """The matching entry and its verified payload, within ``load_deadline``."""
        limit = self._config.load_deadline

        def load() -> tuple[Entry, memoryview] | None:
            try:
                found = self._remote.find(key, limit)
                if found is None or not found.matches(key, rows):
                    return None
                return found, self._remote.read(key, found)
            except Gone:
                return None
            except FormatError as error:
                self._bad(key, error)
                return None

        return self._guarded("_loads", load, limit, None)

    def write(self, key: Key, entry: Entry, payload: memoryview, *, force: bool = False) -> str:
        """See ``writer.Tier``.

        Raises:
            OSError: failed or took longer than ``store_deadline``.
        """
        if not self._connected and self._breaker.allows():
            self._connect_behind()
        if self._closed or not self.wait_ready(_CONNECT_SECONDS):
            raise ConnectionError("not connected")
        limit = self._config.store_deadline

        def store() -> str:
            if not force and self._present(key, entry, limit):
                return "present"
            return self._remote.write(key, entry, payload, limit)

        try:
            return self._stores.run(store, limit * 1.5)
        except Exception as error:
            self._lost("_stores", error)
            shown = _for_log(error)
            raise shown if isinstance(shown, OSError) else OSError(f"{type(error).__name__}: {error}") from error

    def recover(self) -> None:
        """See ``writer.Tier``; the next write connects again."""

    def discard(self, key: Key) -> bool:
        """Remove an entry, within ``load_deadline``; True when it is gone."""
        return bool(self._guarded("_loads", lambda: self._remove(key), self._config.load_deadline, False))

    def close(self, seconds: float) -> None:
        """Drop the connection and end the threads that come back within ``seconds``."""
        self._closed = True
        deadline = time.monotonic() + max(0.1, seconds)
        closer = threading.Thread(target=self._remote.drop, name="ec-remote-close", daemon=True)
        self._settled.wait(min(1.0, seconds))
        if _started(closer):
            closer.join(min(max(0.1, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        for executor in (self._lookups, self._loads, self._stores):
            executor.close(max(0.1, min(1.0, deadline - time.monotonic())))

    def _connect_behind(self) -> None:
        """Begin to connect, unless that is under way: it may take seconds, which no lookup has."""
        with self._mutex:
            if self._closed or self._connected or not self._settled.is_set():
                return
            self._settled.clear()
        try:
            threading.Thread(target=self._connect, name="ec-remote-connect", daemon=True).start()
        except RuntimeError as error:
            self._breaker.failed(error)
            self._stats.add("remote_failures")
            self._settled.set()

    def _connect(self) -> None:
        try:
            if self._stale:
                self._stale = False
                self._remote.drop()
            self._remote.connect()
            if self._closed:
                self._remote.drop()
                return
            self._connected = True
        except Exception as error:
            self._breaker.failed(_for_log(error))
            self._stats.add("remote_failures")
        finally:
            self._settled.set()

    def _present(self, key: Key, new: Entry, limit: float) -> bool:
        try:
            old = self._remote.find(key, limit)
        except FormatError:
            return False
        return old is not None and old.matches(key, new.rows) and (old.columns, old.dtype) == (new.columns, new.dtype)

    def _bad(self, key: Key, error: FormatError) -> None:
        gone = self._remove(key)
        if not gone:
            self._blocklist(key.path)
        if self._first_to_find(key.path):
            bad_entry(self._stats, key, self.name, error, gone)

    def _remove(self, key: Key) -> bool:
        try:
            return self._remote.remove(key)
        except Exception as error:
            _log.debug("cannot remove an entry from %s: %s", self.name, error)
            return False

    def _guarded(self, name: str, call: Callable[[], T], seconds: float, otherwise: T) -> T:
        if self._closed or not self._breaker.allows():
            return otherwise
        if not self._connected:
            self._connect_behind()
            return otherwise
        try:
            result = getattr(self, name).run(call, seconds)
        except Exception as error:
            self._breaker.failed(_for_log(error))
            self._lost(name, error)
            return otherwise
        self._breaker.worked()
        return result

    def _lost(self, name: str, error: BaseException) -> None:
        """After a failure: drop the connection, and leave a thread behind that is in a call which may never return."""
        self._stats.add("remote_failures")
        with self._mutex:
            if self._closed:
                return
            self._connected = False
            if isinstance(error, Stuck):
                if self._stuck >= _MAX_STUCK:
                    return
                self._leave(self._renew(name))
        self._stale = not _started(threading.Thread(target=self._remote.drop, name="ec-remote-drop", daemon=True))

    def _renew(self, name: str) -> SingleThreadExecutor:
        """Put a new executor in the place of the one that is returned; with the mutex held."""
        old: SingleThreadExecutor = getattr(self, name)
        setattr(self, name, SingleThreadExecutor(old.name))
        return old

    def _leave(self, executor: SingleThreadExecutor) -> None:
        """Leave an executor to itself until its call comes back; with the mutex held."""
        if _started(threading.Thread(target=self._retire, args=(executor,), name="ec-remote-retire", daemon=True)):
            self._stuck += 1
        else:
            executor.close(0.0)

    def _retire(self, executor: SingleThreadExecutor) -> None:
        if executor.close(600.0):
            with self._mutex:
                self._stuck -= 1


def bad_entry(stats: ECStats, key: Key, place: str, error: Exception, gone: bool) -> None:
    """Count an entry that was found damaged or incomplete, and say what became of it."""
    stats.add("bad_entries")
    outcome = "It was removed" if gone else "This engine no longer offers it"
    _log.warning("Encoder cache: entry %s in %s is unusable (%s). %s.", key.path, place, error, outcome)


def _started(thread: threading.Thread) -> bool:
    """Start ``thread``; False where the system has none left."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _for_log(error: BaseException) -> BaseException:
    """``error``, or one that says the same without the password of a URL in it."""
    text = str(error)
    shown = without_userinfo(text)
    return error if shown == text else OSError(f"{type(error).__name__}: {shown}")
