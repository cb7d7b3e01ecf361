# SPDX-License-Identifier: Apache-2.0
"""Publish a budget's report: log table, ``memory-<pid>.json`` and gauges.

Nothing in here is read by the arithmetic that sets the budget, and :func:`emit` never raises: the budget is the same
with and without a report.
"""

from __future__ import annotations

import time

from vllm_omni_patch import ledger, metrics

from .advice import advise
from .report import MODEL_LOCAL_KV, STANDARD, BudgetReport, Input
from .text import as_text
from .units import byte_count

logger = ledger.logger("memory")


def emit(report: BudgetReport, brief: bool = False) -> str | None:
    """Log ``report`` as one table, write ``memory-<pid>.json`` and set the gauges; returns the file's path, if any.

    Never raises: a failure is one warning. Completes ``report`` in place. ``brief``: the table was logged before and
    only the block count is new.
    """
    try:
        complete(report)
        report.time = time.time()
        if brief:
            logger.info("KV cache laid out: %s blocks of %s bytes", report.blocks, report.block_bytes)
        else:
            logger.info("%s", as_text(report))
        _set_gauges(report)
        return ledger.write_report("memory", report.to_json())
    except Exception as error:
        warn_failed(error)
        return None


def warn_failed(error: Exception) -> None:
    """One warning that no report was made. Never raises."""
    try:
        logger.warning("The memory report failed (%s: %s). The budget is not affected.", type(error).__name__, error)
    except Exception:  # a broken log handler must not reach the worker either
        pass


def complete(report: BudgetReport) -> None:
    """Fill in what every report has: the standard inputs, the model-local KV, the advice. Safe to call again."""
    for name, unit in STANDARD:
        if report.get(name) is None:
            report.inputs.append(Input.unknown(name, "not measured by this worker", unit))
    published = ledger.published(MODEL_LOCAL_KV)
    if isinstance(published, dict):
        report.model_local_kv = published
    report.advice = advise(report)


def _set_gauges(report: BudgetReport) -> None:
    """Every known number of bytes as ``memory_<name>_bytes``; an unknown one is left out, since 0 would be a claim."""
    numbers = {item.name: item.value for item in report.inputs if item.unit == "bytes"}
    for part in ("declared", "resident", "pending"):
        numbers[f"{MODEL_LOCAL_KV}_{part}"] = report.local_kv(f"{part}_bytes")
    numbers["kv_cache"] = report.kv_bytes
    labels: dict[str, object] = {"rank": "" if report.rank is None else report.rank}
    if report.dp_rank is not None:
        labels["dp_rank"] = report.dp_rank
    for name, value in numbers.items():
        count = byte_count(value)
        if count is not None:
            bare = name.removesuffix("_bytes")
            text = f"KV cache budget: {bare.replace('_', ' ')}, in bytes."
            metrics.set_gauge(f"memory_{bare}_bytes", text, count, **labels)
    if report.blocks is not None:
        metrics.set_gauge("memory_kv_cache_blocks", "KV cache blocks.", report.blocks, **labels)
