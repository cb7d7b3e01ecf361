# SPDX-License-Identifier: Apache-2.0
"""The wrapper around ``Scheduler.schedule``. Its own errors are logged, and vLLM's result is returned."""

import time

from schedule_timer import LIMIT_MS
from vllm_omni_patch import flags, ledger, metrics

log = ledger.logger("schedule_timer")


def install(hook):
    """Wrap the target; returns the undo."""
    limit = flags.read(LIMIT_MS) / 1000

    def schedule(wrapped, instance, args, kwargs):
        start = time.perf_counter()
        try:
            return wrapped(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start, limit)

    return hook.wrap(schedule)


def observe(seconds: float, limit: float) -> None:
    """Count one step of ``seconds``; never raises."""
    try:
        metrics.add("schedule_timer_steps_total", "Scheduling steps, by whether they were slow.", slow=seconds > limit)
        if seconds > limit:
            log.warning("a scheduling step took %.0f ms (limit %.0f ms)", seconds * 1000, limit * 1000)
    except Exception as error:
        log.warning("could not count a scheduling step: %s", error)
