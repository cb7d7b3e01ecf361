# SPDX-License-Identifier: Apache-2.0
"""Start and end of this process's part in the run."""

from __future__ import annotations

import atexit
import logging
import os
import sys

from vllm_omni_patch import flags
from vllm_omni_patch.telemetry import log_lines, numbers, processes, run_folder

_hooked = False  # multiprocessing calls us in forked children


def start() -> None:
    """Make or join the run folder. Without one, numbers stay within each process. Never raises.

    A Ray worker that is not told of one waits until an engine starts in it. vLLM is imported there when Ray unpickles
    the worker, and vLLM then sets only those of its driver's variables that are not set yet.
    """
    if processes.role() != "ray worker" or os.environ.get(flags.RUN_DIR.name):
        _take_part()
    atexit.register(_end)
    if run_folder.is_multiprocessing_child():
        _end_with_finalizers()
    _end_forked_children()


def engine_starts() -> None:
    """vLLM has loaded its plugins: a Ray worker knows its driver's variables by now, or is a driver itself.
    Never raises."""
    if processes.role() == "ray worker":
        _take_part()


def _take_part() -> None:
    try:
        run_folder.start()
    except OSError as error:
        log_lines.log(logging.INFO, f"no run folder ({error}): numbers of other processes will not be on /metrics")


def _end() -> None:
    try:
        numbers.mine.end()
        run_folder.leave()
    except Exception as error:
        log_lines.logger("metrics").debug("the run folder was not cleared: %s", error)


def _end_with_finalizers() -> None:
    """Children of multiprocessing leave without exit handlers, but run their finalizers."""
    from multiprocessing.util import Finalize

    Finalize(None, _end, exitpriority=-100)


def _end_forked_children() -> None:
    """A child of multiprocessing clears the finalizers that it inherited, and then asks here for its own."""
    global _hooked
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _hooked:
        util.register_after_fork(sys.modules[__name__], lambda _: _end_with_finalizers())
        _hooked = True


os.register_at_fork(after_in_child=_end_forked_children)
