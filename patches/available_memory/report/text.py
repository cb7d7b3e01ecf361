# SPDX-License-Identifier: Apache-2.0
"""Reports as plain text: the table of a KV cache budget, and the lines of a model-local KV report beside it."""

from __future__ import annotations

from typing import Any

from .report import BudgetReport, Input
from .units import byte_count, gib

_LOCAL_KV = ("declared_bytes", "resident_bytes", "uncharged_bytes", "pending_bytes")


def as_text(report: BudgetReport) -> str:
    """``report`` as one table."""
    rank = "" if report.rank is None else f"rank {report.rank}"
    dp_rank = "" if report.dp_rank is None else f"DP rank {report.dp_rank}"
    where = [part for part in (report.device, dp_rank, rank, f"pid {report.pid}") if part]
    rows = [(item.name, _value(item), f"{item.state}: {item.source}") for item in report.inputs]
    source = "no declaration in this process" if report.model_local_kv is None else "declarations of the loaded model"
    for part in ("declared", "resident", "pending"):
        size = report.local_kv(f"{part}_bytes")
        state = "unknown" if size is None else "zero" if size == 0 else "declared"
        rows.append((f"model_local_kv {part}", gib(size), f"{state}: {source}"))
    reserved = report.reserved_for_model_local_kv
    if reserved:
        rows.append(
            ("reserved for model_local_kv", gib(reserved), "configured: VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV")
        )
    rows.append(("KV cache", gib(report.kv_bytes), f"{report.kv_bytes} bytes, policy {report.policy}"))
    per_block = "the cache is not laid out yet" if report.block_bytes is None else f"{report.block_bytes} bytes each"
    rows.append(("KV cache blocks", "unknown" if report.blocks is None else str(report.blocks), per_block))
    left, middle = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [f"KV cache budget of {report.worker} ({', '.join(where)})"]
    lines += [f"  {name:<{left}}  {value:>{middle}}  {text}" for name, value, text in rows]
    if report.formula:
        lines.append(f"  = {report.formula}")
    lines += [f"  note: {note}" for note in report.notes]
    lines += [f"  {line}" for line in report.advice]
    return "\n".join(lines)


def local_kv_text(data: dict[str, Any]) -> str:
    """A ``model-local-kv-<pid>.json`` document, which the patch ``model_local_kv`` writes, as lines of text."""
    lines = [f"Model-local KV (pid {data.get('pid')})"]
    for part in data.get("loads", []):
        lines.append(f"{part.get('model')} in {part.get('runner')}: {part.get('status')}")
        for entry in part.get("entries", []):
            name = f"{entry.get('owner', '')}.{entry.get('name', '')}".strip(".")
            size = byte_count(entry.get("declared_peak"))
            lines.append(f"  {name}: {gib(size)}, {entry.get('charge', 'unknown')}: {entry.get('charge_reason', '')}")
        lines += [f"  failed: {failed}" for failed in part.get("failed", [])]
    figures = data.get("figures") or {}
    known = [f"{key.removesuffix('_bytes')} {gib(byte_count(figures[key]))}" for key in _LOCAL_KV if key in figures]
    if known:
        lines.append("  " + ", ".join(known))
    return "\n".join(lines)


def _value(item: Input) -> str:
    if item.value is None:
        return "unknown"
    if item.unit == "bytes" and not isinstance(item.value, str):
        return gib(item.value)
    text = f"{item.value:g}" if isinstance(item.value, float) else str(item.value)
    return text if item.unit in ("ratio", "text") else f"{text} {item.unit}"
