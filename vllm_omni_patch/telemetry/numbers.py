# SPDX-License-Identifier: Apache-2.0
"""The numbers of this process, and when they are written to its file in the run folder.

Where the folder is in memory, whoever changes a number writes it, at once. Anywhere else a write may wait for a disk or
a network, in the middle of a model step: there a thread writes what has changed, at most twice a second. The same
thread tries again where a write failed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping

from vllm_omni_patch import flags
from vllm_omni_patch.telemetry import log_lines, processes, run_folder
from vllm_omni_patch.telemetry.number_file import Key, Number, NumberFile

INTERVAL_S = 0.5  # between two writes of the thread
RETRY_S = 5.0  # from a write that failed to the next try


class ProcessNumbers:
    """Safe for threads, signal handlers and finalizers; nothing here raises because of the file."""

    def __init__(self) -> None:
        self._numbers: dict[Key, Number] = {}
        self._changed: dict[Key, None] = {}  # not written yet
        self._lock = threading.RLock()  # guards these two, and is never held during a write
        self._writing = threading.RLock()  # guards the rest; taken first where both are
        self._named: str | None = None  # value of VLLM_OMNI_PATCH_RUN_DIR that the next two are for
        self._folder: str | None = None
        self._at_once = False
        self._file: NumberFile | None = None
        self._busy = self._again = False
        self._failure = ""
        self._warned = False
        self._ended = False
        self._due = threading.Event()
        self._flusher: threading.Thread | None = None

    def set(self, numbers: Mapping[Key, Number]) -> None:
        """Keep ``numbers`` and have those written that differ from before."""
        with self._lock:
            for key, number in numbers.items():
                before = self._numbers.get(key)
                if number != before and not (before is None and math.isnan(number.value)):
                    self._numbers[key] = number
                    self._changed[key] = None
        self._publish()

    def add(self, key: Key, help: str, amount: float) -> None:
        """Add ``amount`` to a counter."""
        with self._lock:
            before = self._numbers.get(key)
            self._numbers[key] = Number("counter", help, amount if before is None else before.value + amount)
            self._changed[key] = None
        self._publish()

    def all(self) -> dict[Key, Number]:
        """The numbers as they are now."""
        with self._lock:
            return dict(self._numbers)

    def file_name(self) -> str:
        """Name of this process's file in the run folder; empty where there is none."""
        file = self._file
        return os.path.basename(file.path) if file is not None else ""

    def flush(self) -> None:
        """Write what has changed, from this thread."""
        with self._writing:
            if self._busy:  # a signal handler or a finalizer counts, in the middle of this thread's write
                self._again = True
                return
            self._busy = True
            try:
                self._write()
                while self._again:
                    self._write()
                self._failure, self._warned = "", False
            except Exception as error:
                self._failure = str(error) or type(error).__name__
            finally:
                self._busy = False
        if self._failure and not self._ended:
            self._wake()

    def end(self) -> None:
        """Write the last counts and take the gauges back; a file without counts is removed."""
        self._ended = True
        numbers = self.all()
        gauges = {key: one._replace(value=math.nan) for key, one in numbers.items() if one.kind == "gauge"}
        if len(gauges) < len(numbers):
            self.set(gauges)
        elif self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._file.path)

    def _publish(self) -> None:
        if os.environ.get(flags.RUN_DIR.name) != self._named:
            self._look_for_folder()
        if self._folder is None:
            return
        if self._ended or (self._at_once and not self._failure):
            self.flush()
        else:
            self._wake()

    def _look_for_folder(self) -> None:
        """Ray sets the environment of a worker when it runs already: its numbers move to its engine's folder."""
        with self._writing:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._file.path)
            self._file, self._named = None, os.environ.get(flags.RUN_DIR.name)
            self._folder = run_folder.path()
            self._at_once = self._folder is not None and run_folder.is_in_memory(self._folder)
            with self._lock:
                self._changed = dict.fromkeys(self._numbers)

    def _write(self) -> None:
        self._again = False
        if self._folder is None or not self._changed:
            return
        with self._lock:
            changed, self._changed = self._changed, {}
            numbers = {key: self._numbers[key] for key in changed}
        try:
            if self._file is not None:
                try:
                    return self._file.write(numbers, self.all)
                except FileNotFoundError:
                    self._file = None  # removed; all numbers go into another one
            if not self._ended:  # the last process to end has removed the folder
                with contextlib.suppress(OSError):
                    run_folder.join()
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
            self._file = NumberFile(self._folder)
            self._file.write(self.all(), self.all)
        except BaseException:
            with self._lock:
                self._changed = {**changed, **self._changed}
            raise

    # -- the thread

    def _wake(self) -> None:
        if self._flusher is None:
            with self._lock:
                if self._flusher is None:
                    thread = threading.Thread(target=self._keep_writing, name="vllm-omni-patch-metrics", daemon=True)
                    with contextlib.suppress(RuntimeError):  # too many threads; or at exit, which writes by itself
                        thread.start()
                        self._flusher = thread
        if not self._due.is_set():
            self._due.set()

    def _keep_writing(self) -> None:
        while not self._ended:
            self._due.wait()
            if self._failure and not self._warned:
                self._warned = True
                who = f"process {os.getpid()} ({processes.role()})"
                text = f"{who} cannot write its numbers for /metrics: {self._failure}; trying again every {RETRY_S:g} s"
                log_lines.log(logging.WARNING, text, "metrics")
            if self._failure:
                time.sleep(RETRY_S)
            self._due.clear()
            self.flush()
            time.sleep(0 if self._failure else INTERVAL_S)


mine = ProcessNumbers()


def _after_fork() -> None:
    """A forked child counts from zero: what it inherited is its parent's."""
    global mine
    mine = ProcessNumbers()


os.register_at_fork(after_in_child=_after_fork)
