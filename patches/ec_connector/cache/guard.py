# SPDX-License-Identifier: Apache-2.0
"""Patience with storage: a pause after failures, and calls that are waited for only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_omni_patch import ledger

_log = ledger.logger("ec")
_MAX_PAUSE = 60.0
T = TypeVar("T")


class Pause:
    """Whether a place may be tried. After a failure not for ``first`` seconds, doubling to 60 while it keeps failing.

    ``what`` opens the messages: one warning when it begins to fail, one line when it works again.
    """

    def __init__(self, what: str, first: float) -> None:
        self._what = what
        self._first = first
        self._pause = 0.0
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def failing(self) -> bool:
        """The last attempt failed."""
        return self._pause > 0

    def open(self) -> bool:
        """Whether an attempt is due."""
        return time.monotonic() >= self._until

    def failed(self, error: BaseException) -> None:
        """Note a failure; warns about the first of a row."""
        with self._lock:
            first = not self.failing
            self._pause = min(max(self._first, self._pause * 2), _MAX_PAUSE) or 1e-9
            self._until = time.monotonic() + self._pause
        if first:
            text = str(error) or type(error).__name__
            _log.warning("%s stop: %s. Serving goes on; they resume when it works again.", self._what, text)

    def worked(self) -> None:
        """Note a success."""
        with self._lock:
            before, self._pause, self._until = self._pause, 0.0, 0.0
        if before:
            _log.info("%s work again.", self._what)


class Stuck(TimeoutError):
    """A call did not come back in time, or an earlier one still has not."""


class Lane:
    """Runs calls one at a time on a daemon thread, so that a caller need not wait for one that hangs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._condition = threading.Condition()
        self._call: Callable[[], None] | None = None
        self._busy_since: float | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """Result of ``call``, or what it raises.

        Raises:
            Stuck: not finished within ``seconds`` (it goes on, its result is lost), or another call is running.
        """
        done = threading.Event()
        box: list[Any] = []

        def work() -> None:
            try:
                box.extend((True, call()))
            except BaseException as error:
                box.extend((False, error))
            done.set()

        deadline = time.monotonic() + seconds
        with self._condition:
            free = self._condition.wait_for(lambda: self._busy_since is None or self._closed, seconds)
            if not free or self._closed:
                raise Stuck(f"{self.name}: an earlier call has not come back")
            self._busy_since = time.monotonic()
            self._call = work
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread to be had now: the next call tries again
                    self._busy_since = self._call = None
                    raise
                self._thread = thread
            self._condition.notify_all()
        if not done.wait(max(0.0, deadline - time.monotonic())):
            raise Stuck(f"{self.name}: no answer within {seconds:g} s")
        if box[0]:
            result: T = box[1]
            return result
        raise box[1]

    def busy_for(self) -> float:
        """Seconds since the running call began; 0 when none runs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, seconds: float) -> bool:
        """End the thread; False when its call has not come back within ``seconds``."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._call is not None or self._closed)
                call, self._call = self._call, None
            if call is None:
                return
            call()
            with self._condition:
                self._busy_since = None
                self._condition.notify_all()
