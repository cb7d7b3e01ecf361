# SPDX-License-Identifier: Apache-2.0
"""What compiler and runtime logs say about a KV budget: the budget, the failure and its size, or a finished start.

A serving process leaves its budget in the log as one line (:func:`budget_line`), so that a log can be read without
being told what was tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_patch.patches.available_memory.budget import GIB
from vllm_omni_patch.patches.available_memory.calibrate import Attempt, CalibrationError, Key

_MARK = "Neuron KV budget record:"
_RECORD = re.compile(re.escape(_MARK) + r"\s*(\{.*\})")
# A message may be wrapped over several lines by a log formatter; its numbers are looked for this far behind the code.
_WINDOW = 1500
_NUMBER = r"([\d][\d,]*(?:\.\d+)?)"
_UNIT = r"\s*(bytes|B|GiB|GB)\b"
_FAILURE = re.compile(
    r"(?P<code>NCC_EVRF009|NCC_EOOM00\d)|(?P<runtime>nrt_tensor_allocate[^\n]*status\s*=\s*4|NRT_RESOURCE\b"
    r"|nrt_load_collectives[^\n]*Allocation Failure)"
)
_EVRF009 = re.compile(rf"Needed\s+{_NUMBER}{_UNIT}.*?available\s+{_NUMBER}{_UNIT}", re.DOTALL | re.IGNORECASE)
_EOOM = re.compile(
    rf"peak\s+HBM\s+usage\s+of\s+{_NUMBER}{_UNIT}\s+exceeds\s+HBM\s+limit\s+of\s+{_NUMBER}{_UNIT}",
    re.DOTALL | re.IGNORECASE,
)
_STARTED = re.compile(r"Application startup complete|init engine \(profile, create kv cache, warmup model\) took")
_BELOW_MINIMUM = re.compile(r"Computed KV cache budget is below minimum threshold")


@dataclass(frozen=True)
class Failure:
    """One failure found in a log. ``excess`` in bytes above the HBM limit, ``None`` when the message has no number."""

    code: str
    excess: int | None
    line: int


def budget_line(
    key: Key, kv_bytes: int, total_budget: int, minimum: int, cap: float | None, policy: str, gmu: float
) -> str:
    """The log line that :func:`read_attempts` reads back; one line, bytes as whole numbers."""
    record = {
        "kv_bytes": kv_bytes,
        "total_budget": total_budget,
        "minimum": minimum,
        "cap": cap,
        "policy": policy,
        "gpu_memory_utilization": gmu,
        "key": vars(key),
    }
    return f"{_MARK} {json.dumps(record, sort_keys=True)}"


def read_attempts(name: str, text: str, told: Attempt | None = None) -> list[Attempt]:
    """The starts in a log, in order. ``name`` is the file's name, for the evidence.

    Each budget that differs from the one before opens a start; failures and the end of the start-up behind it belong
    to it, and of several failures (one per rank or bucket) the largest excess counts. ``told`` stands in front of the
    log: what was tried, for a log without budget lines.

    Raises:
        CalibrationError: a failure comes before any budget is known; a budget line is damaged; the log says that the
            worker itself refused the budget, which no lower cap can mend.
    """
    events = sorted(
        [(match.start(), "record", match) for match in _RECORD.finditer(text)]
        + [(match.start(), "failure", match) for match in _FAILURE.finditer(text)]
        + [(match.start(), "started", match) for match in _STARTED.finditer(text)]
        + [(match.start(), "minimum", match) for match in _BELOW_MINIMUM.finditer(text)],
        key=lambda event: event[0],
    )
    starts: list[tuple[Attempt, list[Failure], bool]] = [(told, [], False)] if told else []
    for index, (position, kind, match) in enumerate(events):
        line = text.count("\n", 0, position) + 1
        if kind == "record":
            attempt = _from_record(match.group(1), name, line)
            if not starts or _differs(starts[-1], attempt):
                starts.append((attempt, [], False))
        elif kind == "minimum":
            raise CalibrationError(
                f"{name}:{line}: the worker refused its KV budget as below the minimum; a lower cap makes it smaller "
                "still. Raise gpu_memory_utilization or tensor parallelism, or lower VLLM_NEURON_MIN_KV_BUDGET_GIB."
            )
        elif not starts:
            if kind == "failure":
                raise CalibrationError(
                    f"{name}:{line}: {match.group(0)[:60]!r} without a KV budget before it. Give the serving log that "
                    "has the 'Neuron KV budget record' line first, or --kv-bytes with --total-budget and the key."
                )
        elif kind == "failure":
            end = events[index + 1][0] if index + 1 < len(events) else len(text)
            starts[-1][1].append(_failure(match, text[position : min(end, position + _WINDOW)], line))
        else:
            starts[-1] = (starts[-1][0], starts[-1][1], True)
    return [_judge(name, *start) for start in starts]


def _differs(start: tuple[Attempt, list[Failure], bool], attempt: Attempt) -> bool:
    before = start[0]
    same = (before.key, before.kv_bytes, before.total_budget) == (attempt.key, attempt.kv_bytes, attempt.total_budget)
    return not same or start[2]


def _judge(name: str, attempt: Attempt, failures: Iterable[Failure], started: bool) -> Attempt:
    failures = list(failures)
    if not failures:
        outcome = "worked" if started else "unknown"
        return _with(attempt, outcome, None, ((f"{name}: start-up finished",) if started else ()))
    sizes = [failure.excess for failure in failures if failure.excess is not None]
    evidence = tuple(
        f"{name}:{failure.line}: {failure.code}"
        + ("" if failure.excess is None else f", {failure.excess} bytes above the limit")
        for failure in failures
    )
    return _with(attempt, "failed", max(sizes) if sizes else None, evidence)


def _with(attempt: Attempt, outcome: Any, excess: int | None, evidence: tuple[str, ...]) -> Attempt:
    return replace(attempt, outcome=outcome, excess=excess, evidence=evidence)


def _failure(match: re.Match[str], window: str, line: int) -> Failure:
    code = match.group("code")
    if code is None:
        return Failure(match.group("runtime").split()[0], None, line)
    numbers = (_EVRF009 if code == "NCC_EVRF009" else _EOOM).search(window)
    if numbers is None:
        return Failure(code, None, line)
    # A figure in GB has two decimals at most, so each of the two may be off by half of the last one.
    rounding = GIB // 100 if _in_gib(numbers, 1) or _in_gib(numbers, 3) else 0
    excess = _bytes(numbers, 1) - _bytes(numbers, 3) + rounding
    return Failure(code, excess if excess > 0 else None, line)


def _bytes(match: re.Match[str], group: int) -> int:
    """Bytes of a number and its unit; the compiler's "GB" are GiB (its 24.00GB are 25,769,803,776 bytes)."""
    number = float(match.group(group).replace(",", ""))
    return int(number * GIB) if _in_gib(match, group) else int(number)


def _in_gib(match: re.Match[str], group: int) -> bool:
    return match.group(group + 1).upper() in ("GB", "GIB")


def _from_record(text: str, name: str, line: int) -> Attempt:
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
        return Attempt(
            Key(**record["key"]),
            int(record["kv_bytes"]),
            int(record["total_budget"]),
            "unknown",
            int(record["minimum"]),
            record["cap"],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CalibrationError(f"{name}:{line}: the 'Neuron KV budget record' line is damaged ({error}).") from error
