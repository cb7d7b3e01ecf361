# SPDX-License-Identifier: Apache-2.0
"""Declares the patch ``schedule_timer``. Imports data classes only; ``hooks`` is imported after vLLM."""

from pathlib import Path

from vllm_omni_patch.flags import Flag
from vllm_omni_patch.patch import Contract, Patch, Target

LIMIT_MS = Flag(
    "VLLM_OMNI_PATCH_SCHEDULE_TIMER_MS",
    "float",
    50.0,
    "A scheduling step that takes longer than this many milliseconds is counted and logged.",
    minimum=0,
)

PATCH = Patch(
    name="schedule_timer",
    summary="Counts and logs scheduling steps that took longer than a limit.",
    why="A slow scheduler delays every request, and vLLM shows only the latency that it causes.",
    scope="Scheduler.schedule in the engine core. The step itself is not changed.",
    fragility="Needs a method of that name that can be called without arguments.",
    remove_when="vLLM exports the duration of a scheduling step as a metric.",
    effect="reports",
    flags=(LIMIT_MS,),
    matrix=str(Path(__file__).with_name("matrix.json")),
    targets=(
        Target(
            module="vllm.v1.core.sched.scheduler",
            qualname="Scheduler.schedule",
            contract=Contract(parameters=()),
            install="schedule_timer.hooks:install",
        ),
    ),
)
