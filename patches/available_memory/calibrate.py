# SPDX-License-Identifier: Apache-2.0
"""The calibration file: which cap fraction compiled, per model and platform, and how the next one is worked out.

No single cap fits every model, so what one run's compiler said is kept for the next run. The file is read when the
engine starts and written only by ``vllm-omni-patch memory calibrate``; nothing is searched for while serving.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from vllm_omni_patch.ledger import write_json
from vllm_omni_patch.patches.available_memory.budget import GIB

FORMAT = 1
UNKNOWN = "unknown"
# Cap fractions are written with four decimals, rounded down: 2.2 MiB steps of a 21.6 GiB budget.
STEPS = 10_000
# Between what a program needs by the compiler's count and what the device really has left; the same figure that one
# public fork keeps between its estimate and the limit.
DEFAULT_MARGIN = 256 << 20
# Two caps this near are one cap: further halving would move the budget by less than a typical block count.
CONVERGED = 0.005


class CalibrationError(RuntimeError):
    """The file, or what is asked of it, is not usable; the text says what to do."""


@dataclass(frozen=True)
class Key:
    """What a cap holds for. A part that is not known is the word ``unknown``."""

    architecture: str
    quantization: str
    tensor_parallel_size: int
    lnc: int | str
    target: str
    compiler: str

    def __str__(self) -> str:
        return ", ".join(f"{item.name}={getattr(self, item.name)}" for item in fields(self))

    def without_compiler(self) -> Key:
        """The key with the compiler version left out."""
        return replace(self, compiler="")


@dataclass
class Row:
    """One calibrated cap. ``kv_bytes`` is the budget it stands for, an upper bound whatever the utilisation is later.

    ``failed_cap`` is the lowest cap known to fail, ``worked_cap`` the highest known to serve. ``why`` is for people.
    """

    key: Key
    cap: float
    kv_bytes: int
    total_budget: int
    failed_cap: float | None = None
    worked_cap: float | None = None
    why: str = ""
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Attempt:
    """One start of an engine as the logs tell it. Sizes in bytes.

    ``kv_bytes`` is the budget it compiled with, ``total_budget`` HBM x gpu_memory_utilization, ``minimum`` the
    smallest budget that the worker accepts, ``cap`` the cap fraction that was set, which need not be what bound the
    budget. ``excess`` is how far the compiler found it above the limit, ``None``
    when the failure gave no number.
    """

    key: Key
    kv_bytes: int
    total_budget: int
    outcome: Literal["failed", "worked", "unknown"]
    minimum: int = GIB
    cap: float | None = None
    excess: int | None = None
    evidence: tuple[str, ...] = ()


def next_row(attempt: Attempt, earlier: Row | None, margin: int = DEFAULT_MARGIN) -> Row:
    """What to use after ``attempt``, given what the file had for its key.

    A failure with a number gives ``kv_bytes - excess - margin``: KV tensors are inputs and outputs of the program, so
    each byte less is a byte less of what the compiler counted. A failure without one halves the distance to the
    highest cap that served (without one: to the cap of the minimum). A start that served raises ``worked_cap``.

    Raises:
        CalibrationError: no budget above the minimum can fit, or the attempt's numbers make no sense.
    """
    if attempt.total_budget <= 0 or not 0 < attempt.kv_bytes <= attempt.total_budget:
        raise CalibrationError(
            f"A KV budget of {attempt.kv_bytes} bytes out of {attempt.total_budget} bytes cannot be; check the log or "
            "the --kv-bytes and --total-budget given."
        )
    tried = floor_cap(attempt.kv_bytes, attempt.total_budget)
    evidence = list(attempt.evidence)
    failed, worked = (earlier.failed_cap, earlier.worked_cap) if earlier else (None, None)
    if attempt.outcome == "worked":
        worked = max(tried, worked or 0.0)
        if failed is not None and failed <= worked:
            failed = None  # it failed then and serves now: the newer observation stands
        # The very setting that served, so that the block count stays the same and no program is compiled again.
        cap = tried if attempt.cap is None else attempt.cap
        why = f"cap {cap:g} ({_gib(attempt.kv_bytes)} of KV) served; kept."
        return Row(attempt.key, cap, attempt.kv_bytes, attempt.total_budget, failed, worked, why, evidence)
    if attempt.outcome != "failed":
        raise CalibrationError(
            f"Neither a known failure nor a finished start follows the KV budget of {attempt.kv_bytes} bytes in the "
            "log; give the whole log, compiler output included."
        )
    failed = min(attempt.kv_bytes / attempt.total_budget, failed or 1.0)
    if worked is not None and worked >= failed:
        worked = None
    if attempt.excess is None:
        cap, why = _halved(attempt, tried, worked)
    else:
        cap, why = _reduced(attempt, tried, worked, margin)
    return _row(attempt, cap, failed, worked, why, evidence)


def merge(attempts: list[Attempt]) -> list[Attempt]:
    """``attempts`` of several logs (one per rank, say) with those of one budget made into one, in order.

    One failed rank makes the start a failed one, and the largest excess counts.
    """
    merged: dict[tuple[Key, int, int], Attempt] = {}
    for attempt in attempts:
        where = (attempt.key, attempt.kv_bytes, attempt.total_budget)
        other = merged.get(where)
        if other is None:
            merged[where] = attempt
            continue
        outcomes = (other.outcome, attempt.outcome)
        sizes = [excess for excess in (other.excess, attempt.excess) if excess is not None]
        merged[where] = replace(
            other,
            outcome="failed" if "failed" in outcomes else "worked" if "worked" in outcomes else "unknown",
            excess=max(sizes) if sizes else None,
            evidence=other.evidence + attempt.evidence,
        )
    return list(merged.values())


def _reduced(attempt: Attempt, tried: float, worked: float | None, margin: int) -> tuple[float, str]:
    excess = attempt.excess or 0
    if excess <= 0:
        raise CalibrationError(f"The compiler's figures exceed the limit by {excess} bytes, which is no excess.")
    room = attempt.kv_bytes - excess - margin
    if worked is not None and int(attempt.total_budget * worked) >= room:
        return worked, f"cap {tried:g} needs {_gib(excess)} too much; cap {worked:g} is known to serve."
    if room < max(attempt.minimum, 1):
        raise CalibrationError(
            f"{_gib(attempt.kv_bytes)} of KV is {_gib(excess)} too much; less a margin of {_gib(margin)}, "
            f"{room} bytes are left, below the minimum of {attempt.minimum} bytes "
            "(VLLM_NEURON_MIN_KV_BUDGET_GIB). Lower the model's own memory (more tensor parallelism, a smaller "
            "quantisation, smaller buckets), or lower the minimum if such a KV cache is enough."
        )
    return (
        floor_cap(room, attempt.total_budget),
        f"cap {tried:g} gave {_gib(attempt.kv_bytes)} of KV, {_gib(excess)} more than compiled; less a margin of "
        f"{_gib(margin)}, {_gib(room)} of {_gib(attempt.total_budget)} are left.",
    )


def _halved(attempt: Attempt, tried: float, worked: float | None) -> tuple[float, str]:
    floor = worked if worked is not None else _ceil_cap(max(attempt.minimum, 1), attempt.total_budget)
    if floor > tried:
        raise CalibrationError(
            f"cap {tried:g} failed without a number and no lower cap is above the minimum of {attempt.minimum} bytes "
            "(VLLM_NEURON_MIN_KV_BUDGET_GIB). Lower the model's own memory, or lower the minimum."
        )
    if tried - floor <= CONVERGED:
        if worked is None:
            raise CalibrationError(
                f"cap {tried:g} failed without a number and the minimum budget needs {floor:g}; there is nothing "
                "between. Lower the model's own memory, or lower VLLM_NEURON_MIN_KV_BUDGET_GIB."
            )
        return worked, f"cap {tried:g} failed and cap {worked:g} served; they are near enough, {worked:g} stays."
    cap = math.floor((tried + floor) / 2 * STEPS) / STEPS
    what = "known to serve" if worked is not None else "the smallest that the minimum budget allows"
    return cap, f"cap {tried:g} failed without a number; half-way to {floor:g}, {what}."


def floor_cap(kv_bytes: int, total_budget: int) -> float:
    """The largest cap of four decimals whose ``int(total_budget * cap)`` is at most ``kv_bytes``."""
    steps = min(int(kv_bytes / total_budget * STEPS) + 1, STEPS)
    while steps > 0 and int(total_budget * (steps / STEPS)) > kv_bytes:
        steps -= 1
    return steps / STEPS


def _ceil_cap(kv_bytes: int, total_budget: int) -> float:
    steps = math.floor(kv_bytes / total_budget * STEPS)
    while steps < STEPS and int(total_budget * (steps / STEPS)) < kv_bytes:
        steps += 1
    return steps / STEPS


def _row(
    attempt: Attempt, cap: float, failed: float | None, worked: float | None, why: str, evidence: list[str]
) -> Row:
    if cap <= 0:
        raise CalibrationError(f"No cap of four decimals is left below {attempt.kv_bytes} bytes; {why}")
    kv_bytes = int(attempt.total_budget * cap)
    return Row(attempt.key, cap, kv_bytes, attempt.total_budget, failed, worked, why, evidence)


def load(path: str) -> tuple[list[Row], str]:
    """Rows of the calibration file and the first 12 digits of its SHA-256, for the report.

    Raises:
        CalibrationError: the file is missing, or not one that this release writes.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
        data = json.loads(content)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a calibration file of format {FORMAT}")
        rows = [_parse(item) for item in data["rows"]]
    except OSError as error:
        raise CalibrationError(f"Calibration file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CalibrationError(
            f"Calibration file {path} is not usable ({type(error).__name__}: {error}). Write it anew with "
            "'vllm-omni-patch memory calibrate', or unset VLLM_OMNI_PATCH_NEURON_CALIBRATION."
        ) from error
    return rows, hashlib.sha256(content).hexdigest()[:12]


def find(rows: list[Row], key: Key) -> Row | None:
    """The row for ``key``, or ``None``.

    A key whose compiler version is unknown (a serving host without the compiler) takes the one row that agrees in
    everything else; no other unknown part matches anything.

    Raises:
        CalibrationError: the compiler is unknown and rows of several compilers agree in the rest.
    """
    others = (key.architecture, key.quantization, str(key.lnc), key.target)
    if UNKNOWN in others:
        return None
    exact = [row for row in rows if row.key == key]
    if exact or key.compiler != UNKNOWN:
        return exact[-1] if exact else None
    near = [row for row in rows if row.key.without_compiler() == key.without_compiler()]
    if len({row.key.compiler for row in near}) > 1:
        compilers = ", ".join(sorted({row.key.compiler for row in near}))
        raise CalibrationError(
            f"The calibration file has caps of several compilers ({compilers}) for {key}, and the version of the one "
            "used here is not known. Keep one of them, or set VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION."
        )
    return near[-1] if near else None


def save(path: str, rows: list[Row]) -> None:
    """Write ``rows`` to ``path``, atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_json(os.path.abspath(path), {"format": FORMAT, "rows": [asdict(row) for row in rows]})


def with_row(rows: list[Row], row: Row) -> list[Row]:
    """``rows`` with ``row`` in the place of the one of the same key."""
    return [other for other in rows if other.key != row.key] + [row]


def _parse(item: dict[str, Any]) -> Row:
    row = Row(**{**item, "key": Key(**item["key"])})
    for name in ("cap", "failed_cap", "worked_cap"):
        value = getattr(row, name)
        if value is None and name != "cap":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1]. Got {value!r}")
    for name in ("kv_bytes", "total_budget"):
        value = getattr(row, name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{name} must be a positive number of bytes. Got {value!r}")
    return row


def _gib(value: int) -> str:
    return f"{value / GIB:.2f} GiB"
