# SPDX-License-Identifier: Apache-2.0
"""The loads of this process, and what is observed in it: logged, published, written. Touches transformers, not vLLM."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

from vllm_omni_patch import ledger
from vllm_omni_patch.patch import Hook, Undo

from . import report
from .collect import modules, unwrap
from .observe.observer import INTERVAL_S, SHARE, Observer, follows_class
from .observe.reconcile import Assignment, Group, Row, reconcile
from .observe.suspects import Suspect, find, merge

WALK_FIRST, WALK_EVERY = 1.0, 30.0
"""Seconds between two walks for suspects, each of which ends in a write: at first, doubling, and in the long run."""

logger = ledger.logger("model_local_kv")


class Watch:
    """The loads of a process and, when asked for, the observation of its caches."""

    def __init__(self) -> None:
        self._loads: weakref.WeakKeyDictionary[Any, tuple[report.Load, list[tuple[str, Any]]]]
        self._loads = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()
        self._assignment = Assignment([], {})
        self._observer: Observer | None = None
        self._undo: Callable[[], None] | None = None
        self._end: tuple[int, Finalize] | None = None
        self._reported: list[report.Load] = []
        self._suspects: list[Suspect] = []
        self._walk_pause = WALK_FIRST
        self._walk_at = 0.0
        self._write_at = 0.0
        self._unwritten = False
        self._logged: set[tuple[str, ...]] = set()

    @property
    def observing(self) -> bool:
        """Whether caches are followed in this process."""
        return self._observer is not None

    def after_fork(self) -> None:
        """In a child: the parent's thread does not exist here and may have held the lock."""
        self._lock = threading.RLock()

    def loads(self) -> list[report.Load]:
        """The loads whose runner is alive."""
        return [load for load, _ in list(self._loads.values())]

    def follow(self, cache_class: type) -> Undo:
        """Follow the instances of ``cache_class`` from now on; returns the undo.

        Raises:
            RuntimeError: the class makes or ends its instances in its own way.
        """
        with self._lock:
            self.stop()  # of a class that a reload has replaced
            observer = Observer(INTERVAL_S, self._round)
            self._undo = observer.install(cache_class)
            self._observer = observer
            for load in self.loads()[-1:]:
                self._regroup(load)
        return self.stop

    def stop(self) -> None:
        """End the observation and forget its peaks."""
        with self._lock:
            if self._undo is not None:
                self._undo()
            if self._end is not None:
                self._end[1].cancel()
            self._observer = self._undo = self._end = None
            self._suspects = []
            self._logged.clear()

    def end(self) -> None:
        """Write what was seen since the last time, as the process ends. Never raises."""
        if not self._lock.acquire(timeout=2.0):
            return
        try:
            self.refresh()
        except Exception as error:
            logger.warning("The last model-local KV report was not written (%s: %s).", type(error).__name__, error)
        finally:
            self._lock.release()

    def loaded(self, runner: Any, load: report.Load, roots: Sequence[tuple[str, Any]]) -> None:
        """Take in a finished load: log it unless the same was logged for this runner, publish, write."""
        with self._lock:
            before = self._loads.get(runner)
            self._loads[runner] = (load, [(prefix, weakref.ref(unwrap(model))) for prefix, model in roots])
            if before is None or _content(before[0]) != _content(load):
                report.log(load)
            self._reported = loads = self.loads()
            ledger.publish(report.FACT, report.figures(loads))
            self._regroup(load)
            self._write()

    def _regroup(self, last: report.Load) -> None:
        """Count caches by what the loads, of which ``last`` is the newest, declare."""
        if self._observer is None:
            return
        loads = self.loads()
        self._assignment = Assignment(
            [entry for each in loads for entry in each.collection.entries],
            {key: path for each in loads for key, path in each.collection.paths.items()},
            last.collection.root,
        )
        self._walk_pause = WALK_FIRST
        self._observer.regroup(self._assignment)
        self._walk()
        self._observer.start()
        if self._end is None or self._end[0] != os.getpid():
            # Runs at the end of a main process and of a child of multiprocessing, which has no exit handlers and drops
            # what was to run at its parent's end.
            self._end = os.getpid(), Finalize(None, self.end, exitpriority=10)

    def refresh(self) -> dict[str, Any]:
        """Measure and walk now, bring gauges and file up to date; returns the report as plain data."""
        with self._lock:
            if self._observer is not None:
                self._walk()
                self._observer.sample()
            return self._write()

    def rows(self) -> list[Row]:
        """Declared against observed, as of the last measurement; empty when nothing is observed."""
        if self._observer is None:
            return []
        peaks = {group: peak for group, peak in self._observer.peaks.copy().items() if isinstance(group, Group)}
        return reconcile(self._assignment, peaks)

    def _round(self, risen: bool) -> None:
        with self._lock:
            self._unwritten = self._unwritten or risen
            now = time.monotonic()
            walked = now >= self._walk_at
            if walked:
                self._walk()
            if walked or (self._unwritten and now >= self._write_at):
                self._write()

    def _walk(self) -> None:
        """Look for suspects; those that a declaration covers are what it holds, the others are listed."""
        start = time.monotonic()
        seen: set[int] = set()
        found: list[Suspect] = []
        alive = False
        for _, roots in list(self._loads.values()):
            for prefix, ref in roots:
                root = ref()
                if root is not None:
                    alive = True
                    found += find(_paths(root, prefix, seen))
        covered: dict[Group, list[Suspect]] = {}
        rest = []
        for suspect in found:
            group = self._assignment.at(suspect.owner, suspect.heads_and_size())
            if group is None:
                rest.append(suspect)
            else:
                covered.setdefault(group, []).append(suspect)
        if alive:  # of a model that is gone, the last finding is kept
            self._suspects = rest
        if self._observer is not None:
            self._observer.hold({group: merge(suspects) for group, suspects in covered.items()})
            self._observer.sample()
        now = time.monotonic()
        self._walk_at = now + max(self._walk_pause, (now - start) / SHARE)
        self._walk_pause = min(WALK_EVERY, 2 * self._walk_pause)

    def _write(self) -> dict[str, Any]:
        start = time.monotonic()
        self._unwritten = False
        rows = self.rows()
        loads = self.loads() or self._reported
        report.gauges(loads, rows)
        observer = self._observer
        if observer is not None and observer.failures:
            self._log_failure(observer)
        for row in rows:
            self._log_row(row)
        for suspect in self._suspects:
            self._log_suspect(suspect)
        document = report.document(
            loads,
            None if observer is None else rows,
            None if observer is None else self._suspects,
            None
            if observer is None
            else {"samples": observer.samples, "seconds": observer.seconds, "failures": observer.failures},
        )
        ledger.write_report("model-local-kv", document)
        now = time.monotonic()
        self._write_at = now + max(INTERVAL_S, (now - start) / SHARE)
        return document

    def _log_failure(self, observer: Observer) -> None:
        """One line; how many there are is in the file."""
        if ("failure",) not in self._logged:
            self._logged.add(("failure",))
            logger.warning(
                "Model-local KV: a cache could not be followed (%s), so the report may be incomplete. Serving is not "
                "affected; 'failures' in the report counts these errors.",
                observer.failure,
            )

    def _log_row(self, row: Row) -> None:
        """One line per finding and process; later growth is in the file and in the gauges."""
        key = (row.owner, *row.names, row.status)
        if row.status not in ("under-declared", "undeclared") or key in self._logged:
            return
        self._logged.add(key)
        name = f"{row.owner}.{'+'.join(row.names)}" if row.names else row.owner
        logger.warning(
            "Model-local KV %s: %s: %s so far; %s", row.status, name, report.mib(row.observed_peak), row.text
        )

    def _log_suspect(self, suspect: Suspect) -> None:
        key = ("suspect", suspect.owner, suspect.attribute)
        if key in self._logged:
            return
        self._logged.add(key)
        logger.info(
            "Model-local KV suspected: %s.%s: %s in %d tensor(s) of shape %s (%s)",
            suspect.owner,
            suspect.attribute,
            report.mib(suspect.storage_bytes),
            suspect.tensors,
            suspect.shape,
            suspect.why,
        )


def _paths(root: Any, prefix: str, seen: set[int]) -> list[tuple[str, Any]]:
    joined = []
    for parent, name, module in modules(root, seen):
        path = ".".join(part for part in (prefix, parent, name) if part)
        joined.append((path, module))
    return joined


def _content(load: report.Load) -> tuple[Any, ...]:
    """The content of the log block, without what changes from call to call."""
    rows = [
        (row["owner"], row["name"], row["declared_peak"], row["storage_peak"], row["charge"]) for row in load.rows()
    ]
    found = load.collection
    return (load.status, load.error, rows, found.inert, [(bad.owner, bad.reason) for bad in found.failed])


WATCH = Watch()
"""This process's."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: WATCH.after_fork())


def install(hook: Hook) -> Undo:
    """Follow the transformers caches of this process."""
    return WATCH.follow(hook.original)


def follows(hook: Hook) -> bool:
    """Read back: new instances of the class pass by us."""
    return follows_class(hook.original)


def refresh(worker: Any = None) -> dict[str, Any]:
    """Measure this process's model-local KV now and return the report.

    For ``LLM.collective_rpc(refresh)``, which calls it with the ``worker``; nothing is asked of it.
    """
    return WATCH.refresh()
