# SPDX-License-Identifier: Apache-2.0
"""The state of each target as a number: ``vllm_omni_patch_info`` is 1 with the target's present state as a label."""

from __future__ import annotations

import math

from vllm_omni_patch import ledger
from vllm_omni_patch.code import installed
from vllm_omni_patch.telemetry import numbers
from vllm_omni_patch.telemetry.number_file import Labels, Number

NAME = "info"
LABELS = ("patch", "target", "state", "vllm_version")
HELP = "State of each target of each asked-for patch: pending, applied, native, skipped or failed."


def update() -> None:
    """Bring the numbers up to what the ledger says. Never raises."""
    try:
        version = str(ledger.process().get("vllm_version", ""))
        now = {
            (NAME, labels(entry.patch, entry.target, entry.state, version)): Number("gauge", HELP, 1.0)
            for entry in ledger.entries()
            if _matters(entry)
        }
        before = {key: Number("gauge", HELP, math.nan) for key in numbers.mine.all() if key[0] == NAME}
        numbers.mine.set({**before, **now})
    except Exception as error:
        ledger.logger("metrics").debug("could not bring the states up to date: %s", error)


def labels(patch: str, target: str, state: str, vllm_version: str) -> Labels:
    """The labels of one row."""
    return tuple(sorted(zip(LABELS, (patch, target, state, vllm_version), strict=True)))


def _matters(entry: ledger.Entry) -> bool:
    """Left out, so that an alert on ``skipped`` means something: what is ordinary not to be here."""
    if entry.state == "pending":
        return installed.is_here(entry.target.partition(".")[0])
    return not (entry.state == "skipped" and entry.optional and entry.verdict == "absent")
