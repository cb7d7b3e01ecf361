# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker: storage that fails is left alone for a while."""

from __future__ import annotations

import threading
import time

from vllm_omni_patch import ledger

_log = ledger.logger("ec")
_MAX_PAUSE = 60.0


class CircuitBreaker:
    """Whether a place may be tried. After a failure not for ``first`` seconds, doubling to 60 while it keeps failing.

    ``what`` (plural) opens the messages: one warning when it begins to fail, one line when it works again.
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

    def allows(self) -> bool:
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
            _log.warning("%s paused (%s); they resume automatically.", self._what, text)

    def worked(self) -> None:
        """Note a success."""
        with self._lock:
            before, self._pause, self._until = self._pause, 0.0, 0.0
        if before:
            _log.info("%s resumed.", self._what)
