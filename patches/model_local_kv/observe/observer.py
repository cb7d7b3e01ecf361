# SPDX-License-Identifier: Apache-2.0
"""Follow the transformers caches of this process: who made them, what they hold, the most they ever held.

``Cache.__new__`` is the one place that every cache passes, copies included (``copy.deepcopy`` skips ``__init__``).
The owner is looked for once, at creation: the nearest callers' ``self`` that are modules or objects of the model; a
copy takes over the owner of its source. Only weak references are kept.

Measuring reads metadata: at intervals on a thread of its own that starts with the first cache, and whenever a cache
goes away, which is when it has grown to what it needed. All of it together is held below 1 % of the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .measure import Held, StorageKey, is_pair, measure

SHARE = 0.01
"""Part of the time that measuring may take."""
INTERVAL_S = 1.0
"""Seconds between two measurements, and between two writes; longer where they would take more than ``SHARE``."""

_FRAMES = 40
_SELVES = 3
_PASS = frozenset({"copy", "copyreg", "transformers.cache_utils", __name__})


@dataclass(frozen=True)
class Origin:
    """Where a cache was made: ``site`` is ``file:line function``; ``owners`` are the ids of the nearest callers'
    ``self``, the nearest first, with a reference to each. A cache may outlive them and still belongs to them."""

    site: str
    owners: tuple[tuple[int, weakref.ref[Any]], ...] = ()
    classes: tuple[str, ...] = ()

    def of_the_living(self) -> Origin:
        """Without the callers that are gone: another model's modules may have their ids."""
        return replace(self, owners=tuple(pair for pair in self.owners if pair[1]() is not None))


@dataclass
class Record:
    """One cache that is alive, or was when last looked at."""

    ref: weakref.ref[Any]
    kind: str
    origin: Origin
    group: Hashable = None
    geometry: tuple[int, int] = (0, 0)


@dataclass
class Peak:
    """Largest figures seen for one group of caches. Bytes; ``rows`` counts batch entries over all live caches.

    ``row_bytes`` and ``row_storage_bytes``: the most that one row of one cache showed and pinned; 0 where no
    allocation said what a row of it is. ``unmeasured``: caches alive at once whose layout is not known; above 0 the
    byte figures are floors. ``rowless``: something held bytes and did not say how many rows, so ``rows`` is a floor.
    """

    storage_bytes: int = 0
    view_bytes: int = 0
    rows: int = 0
    row_bytes: int = 0
    row_storage_bytes: int = 0
    live_bytes: int = 0
    created: int = 0
    unmeasured: int = 0
    rowless: bool = False
    kinds: set[str] = field(default_factory=set)
    sites: set[str] = field(default_factory=set)

    def note(self, held: Held) -> None:
        """Take the row figures of one cache."""
        if held.rows:
            self.row_bytes = max(self.row_bytes, held.view_bytes // held.rows)
            self.row_storage_bytes = max(self.row_storage_bytes, held.storage_bytes // held.rows)

    def marks(self) -> tuple[Any, ...]:
        """The figures of a report that only grow."""
        rows = (self.rows, self.row_bytes, self.row_storage_bytes, self.rowless)
        return (self.storage_bytes, self.view_bytes, *rows, self.unmeasured, self.created > 0)


Grouper = Callable[[Origin, tuple[int, int]], Hashable]
"""From origin and ``(kv_heads, head_dim)`` to the group under which a cache is counted."""


class Observer:
    """Follows every instance of one ``Cache`` class and its subclasses from :meth:`install` to the undo.

    ``group`` maps a cache to its owner; it may be replaced when the model is known, which restarts the counting.
    ``on_round`` is called on the measuring thread after each round, with whether a peak has risen since the last.
    ``failures`` counts what went wrong in here, first with ``failure``: above 0, something may have been missed.
    """

    def __init__(self, interval: float = INTERVAL_S, on_round: Callable[[bool], None] | None = None) -> None:
        self.interval = interval
        self.on_round = on_round
        self.peaks: dict[Hashable, Peak] = {}
        self.samples = 0
        self.seconds = 0.0
        self.failures = 0
        self.failure = ""
        self._group: Grouper = lambda origin, geometry: origin.site
        self._records: dict[int, Record] = {}
        self._fixed: dict[Hashable, Held] = {}
        self._busy = threading.Lock()
        self._not_before = 0.0
        self._risen = False
        self._marks: dict[Hashable, tuple[Any, ...]] = {}
        self._wake = threading.Event()
        self._thread_of: int | None = None
        self._stopped = False

    def install(self, cache_class: type) -> Callable[[], None]:
        """Follow ``cache_class``; returns the undo, after which the class behaves as before.

        Raises:
            RuntimeError: the class makes or ends its instances in its own way, or is followed already.
        """
        for name in ("__new__", "__del__"):
            for own in [vars(base)[name] for base in cache_class.__mro__[:-1] if name in vars(base)]:
                function = getattr(own, "__func__", own)
                if function is _plain_new:
                    continue
                if getattr(function, "__module__", "") == __name__:
                    raise RuntimeError(f"{cache_class.__name__} is followed already")
                raise RuntimeError(f"{cache_class.__name__} has its own {name}; its instances cannot be followed")
        observer = self
        # torch is there: cache_utils imports it. While torch.compile traces, the branch below is a constant, so a
        # full graph stays one; a cache made inside it is not followed.
        from torch.compiler import is_compiling

        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            instance: Any = object.__new__(cls)
            if not is_compiling():
                observer._born(instance, sys._getframe(1))
            return instance

        def __del__(instance: Any) -> None:
            observer._gone(instance)

        setattr(cache_class, "__new__", __new__)  # noqa: B010 - a name that type checkers treat in a special way
        setattr(cache_class, "__del__", __del__)  # noqa: B010

        def undo() -> None:
            self._stopped = True
            self._wake.set()
            # Deleting __new__ would leave a slot that rejects arguments of __init__.
            setattr(cache_class, "__new__", staticmethod(_plain_new))  # noqa: B010
            if vars(cache_class).get("__del__") is __del__:
                delattr(cache_class, "__del__")
            self._records.clear()

        return undo

    def regroup(self, group: Grouper) -> None:
        """Count by ``group`` from now on; what is alive is sorted in again."""
        with self._busy:
            self._group = group
            created = list(self._records.copy().values())
            self.peaks = {}
            self._fixed = {}
            for record in created:
                record.origin = record.origin.of_the_living()
                record.group = None
                self._count(record)
        self.sample()

    def hold(self, tensors: Mapping[Hashable, Held]) -> None:
        """Add memory that is no transformers cache (ring buffers on modules) to its groups, until the next call."""
        self._fixed = dict(tensors)

    def live(self) -> list[tuple[Any, Record]]:
        """The caches alive now."""
        pairs = [(record.ref(), record) for record in self._records.copy().values()]
        return [(cache, record) for cache, record in pairs if cache is not None]

    def sample(self) -> bool:
        """Measure everything that is alive, now. ``False`` when a measurement is running already."""
        if not self._busy.acquire(blocking=False):
            return False
        start = time.perf_counter()
        try:
            self._sample()
        finally:
            now = time.perf_counter()
            self.samples += 1
            self.seconds += now - start
            self._not_before = now + (now - start) / SHARE
            self._busy.release()
        return True

    def _sample(self) -> None:
        # For each group its storages and [bytes shown, rows, caches that cannot be measured].
        totals: dict[Hashable, tuple[dict[StorageKey, int], list[int]]] = {}
        for key, record in self._records.copy().items():
            cache = record.ref()
            if cache is None:
                self._records.pop(key, None)
                continue
            if is_pair(cache):  # its halves are followed by themselves
                self._forget(self._records.pop(key, record))
                continue
            held = measure(cache)
            group = self._settle(record, held)
            storages, sums = totals.setdefault(group, ({}, [0, 0, 0]))
            if held is None:
                sums[2] += 1
            else:
                self._add(group, held, storages, sums)
                self.peaks[group].note(held)
        for group, held in self._fixed.items():
            storages, sums = totals.setdefault(group, ({}, [0, 0, 0]))
            self.peaks.setdefault(group, Peak())  # several allocations at once: what one row of them is, is not known
            self._add(group, held, storages, sums)
        for group, peak in self.peaks.items():
            storages, (view, rows, unmeasured) = totals.get(group, ({}, [0, 0, 0]))
            live = sum(storages.values())
            peak.live_bytes = live
            peak.storage_bytes = max(peak.storage_bytes, live)
            peak.view_bytes = max(peak.view_bytes, view)
            peak.rows = max(peak.rows, rows)
            peak.unmeasured = max(peak.unmeasured, unmeasured)
        marks = {group: peak.marks() for group, peak in self.peaks.items()}
        self._risen, self._marks = self._risen or marks != self._marks, marks

    def _add(self, group: Hashable, held: Held, storages: dict[StorageKey, int], sums: list[int]) -> None:
        storages.update(held.storages)
        sums[0] += held.view_bytes
        sums[1] += held.rows
        if held.storages and not held.rows:
            self.peaks[group].rowless = True

    def _settle(self, record: Record, held: Held | None) -> Hashable:
        """The record's group; asked again once the cache has its first tensors and with them a geometry."""
        geometry = (held.kv_heads, held.head_dim) if held is not None else (0, 0)
        if record.group is None or (geometry != (0, 0) and geometry != record.geometry):
            self._forget(record)
            record.geometry = geometry
            self._count(record)
        return record.group

    def _forget(self, record: Record) -> None:
        before = self.peaks.get(record.group)
        if before is not None:
            before.created -= 1
        record.group = None

    def _count(self, record: Record) -> None:
        record.group = self._group(record.origin, record.geometry)
        peak = self.peaks.setdefault(record.group, Peak())
        peak.created += 1
        peak.kinds.add(record.kind)
        peak.sites.add(record.origin.site)

    def _born(self, instance: Any, frame: Any) -> None:
        try:
            record = Record(weakref.ref(instance), type(instance).__name__, self._origin(frame))
            self._records[id(instance)] = record
            if self._thread_of != os.getpid():
                self.start()
        except Exception as error:  # a raising __new__ would end a request
            self._failed(error)

    def _gone(self, instance: Any) -> None:
        try:
            record = self._records.get(id(instance))
            if record is None or record.ref() is not instance:
                return
            # The first cache of a group to hold anything is always measured: "never seen" must be true.
            known = self.peaks.get(record.group) if record.group is not None else None
            fresh = known is None or not known.row_bytes
            if time.perf_counter() >= self._not_before or (fresh and _holds_something(instance)):
                self.sample()
            if record.group is None:
                self._count(record)
            self._records.pop(id(instance), None)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """A gap in the report."""
        self.failures += 1
        self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _origin(self, frame: Any) -> Origin:
        site = ""
        selves: list[Any] = []
        for _ in range(_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            module = frame.f_globals.get("__name__")
            if module == "copy" and code.co_name == "_reconstruct" and not site:
                source = self._records.get(id(_local(frame, "x")))
                if source is not None:
                    return source.origin
            elif module not in _PASS:
                site = site or f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                if code.co_argcount and code.co_varnames[0] == "self":
                    owner = _local(frame, "self")
                    if owner is not None and not any(owner is known for known in selves):
                        selves.append(owner)
                        if len(selves) == _SELVES:
                            break
            frame = frame.f_back
        classes = tuple(f"{type(owner).__module__}.{type(owner).__qualname__}" for owner in selves)
        owners = tuple((id(owner), ref) for owner in selves if (ref := _weak(owner)) is not None)
        return Origin(site or "unknown", owners, classes)

    def start(self) -> None:
        """Start the measuring thread, once per process; a forked child's first cache starts the child's own."""
        if self._thread_of == os.getpid():
            return
        if self._thread_of is not None:
            self._busy = threading.Lock()  # the parent's thread may have held the old one at the fork
        self._thread_of = os.getpid()
        if self.interval > 0:
            threading.Thread(target=self._run, name="vllm-omni-patch-observe-kv", daemon=True).start()

    def _run(self) -> None:
        while not self._stopped and self._thread_of == os.getpid():
            cost = max(0.0, self._not_before - time.perf_counter())
            if self._wake.wait(max(self.interval, cost)):
                return
            try:
                self.sample()
                risen, self._risen = self._risen, False
                if self.on_round is not None:
                    self.on_round(risen)
            except Exception as error:  # the next round may succeed; a thread that dies would end the report for good
                self._failed(error)


def follows_class(cache_class: type) -> bool:
    """Whether the instances of ``cache_class`` are followed."""
    own = vars(cache_class).get("__new__")
    function = getattr(own, "__func__", own)
    return getattr(function, "__module__", "") == __name__ and function is not _plain_new


def _holds_something(cache: Any) -> bool:
    held = measure(cache)
    return held is None or bool(held.storages)


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


def _local(frame: Any, name: str) -> Any:
    """One local variable of a function's frame, without leaving a snapshot that would keep the others alive."""
    values = frame.f_locals
    value = values.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & 0x1:
        values.clear()
    return value


def _weak(value: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
