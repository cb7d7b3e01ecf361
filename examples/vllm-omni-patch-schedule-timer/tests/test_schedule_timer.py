# SPDX-License-Identifier: Apache-2.0
"""The hook alone, on a class that looks like vLLM's scheduler."""

import time
import types

import pytest
import schedule_timer

from vllm_omni_patch import metrics
from vllm_omni_patch.patch import Hook

FAST = ("schedule_timer_steps_total", (("slow", "False"),))
SLOW = ("schedule_timer_steps_total", (("slow", "True"),))


class Scheduler:
    def schedule(self, seconds: float = 0.0) -> str:
        time.sleep(seconds)
        if seconds < 0:
            raise ValueError(seconds)
        return "output"


@pytest.fixture
def hooked(monkeypatch):
    """A scheduler class of its own for each test, hooked with a limit of 20 ms; undone afterwards."""
    from schedule_timer.hooks import install

    monkeypatch.setenv("VLLM_OMNI_PATCH_SCHEDULE_TIMER_MS", "20")
    module = types.ModuleType("scheduler_module")
    module.Scheduler = type("Scheduler", (Scheduler,), {"schedule": Scheduler.schedule})
    original = module.Scheduler.schedule
    target = schedule_timer.PATCH.targets[0]
    undo = install(Hook(schedule_timer.PATCH, target, module, module.Scheduler, "schedule", original))
    yield module.Scheduler
    undo()
    assert module.Scheduler.schedule is original


def test_steps_are_counted_and_the_result_is_vllms(hooked):
    before = metrics.values()
    assert hooked().schedule() == "output"
    assert hooked().schedule(seconds=0.03) == "output"
    after = metrics.values()
    assert after[FAST] - before.get(FAST, 0) == 1
    assert after[SLOW] - before.get(SLOW, 0) == 1


def test_an_exception_of_vllm_passes_through(hooked):
    with pytest.raises(ValueError):
        hooked().schedule(-1)


def test_a_failure_of_ours_does_not(hooked, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no metrics today")

    monkeypatch.setattr(metrics, "add", broken)
    assert hooked().schedule() == "output"
