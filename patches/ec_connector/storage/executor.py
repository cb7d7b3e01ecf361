# SPDX-License-Identifier: Apache-2.0
"""Calls that are waited for only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(TimeoutError):
    """A call did not come back in time, or an earlier one still has not."""


class SingleThreadExecutor:
    """Runs calls one at a time on a daemon thread, so that a caller need not wait for one that hangs.

    Not :class:`concurrent.futures.ThreadPoolExecutor`, whose threads an interpreter waits for when it exits.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._condition = threading.Condition()
        self._call: Callable[[], None] | None = None
        self._busy = False
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
            free = self._condition.wait_for(lambda: not self._busy or self._closed, seconds)
            if not free or self._closed:
                raise Stuck(f"{self.name}: an earlier call has not come back")
            self._busy = True
            self._call = work
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread to be had now: the next call tries again
                    self._busy, self._call = False, None
                    raise
                self._thread = thread
            self._condition.notify_all()
        if not done.wait(max(0.0, deadline - time.monotonic())):
            raise Stuck(f"{self.name}: no answer within {seconds:g} s")
        if box[0]:
            result: T = box[1]
            return result
        raise box[1]

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
                self._busy = False
                self._condition.notify_all()
