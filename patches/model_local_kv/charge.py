# SPDX-License-Identifier: Apache-2.0
"""Has the KV budget charged an entry already? Decided from where its bytes are and from how the release budgets.

The budget is computed after ``load_model``; what is in place by then may or may not be in one of its terms:

``legacy``: vLLM core up to 0.26, vLLM-Omni 0.14 and 0.30. Weights (allocated during the load), the rise of torch's peak
    during profiling, and the rise of memory that torch does not hold. Blocks that a graph pool keeps *reserved* without
    a live tensor are in none of the three.
``consumed``: vLLM core from 0.27. Everything by which free memory fell, reserved blocks included, plus the transient
    part of the peak.
``process``: vLLM-Omni 0.16 to 0.28. The process's own memory as the driver reports it, which contains reserved blocks,
    or the legacy formula where the driver does not list the process. Which of the two is known only when it runs.
``rss``: CPU worker from 0.20. Resident memory of the process; a transient peak is not in it.
``fixed``: the KV size is given (``kv_cache_memory_bytes``, ``VLLM_CPU_KVCACHE_SPACE``, CPU before 0.20): nothing is
    subtracted from it.
``unknown``: any other worker.

Source: ``determine_available_memory`` of each release; vLLM-Omni's is in ``vllm_omni/worker/base.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .specs import ModelLocalKVScope, Residency

Charge = Literal["charged", "pending", "uncharged", "unknown"]
"""``charged``: in one of the budget's terms. ``pending``: allocated after the budget was set. ``uncharged``: in
place, and in none of the terms. ``unknown``: cannot be decided."""

Path = Literal["legacy", "consumed", "process", "rss", "fixed", "unknown"]


@dataclass(frozen=True)
class Engine:
    """What decides the budget path: releases as ``(major, minor)`` (``omni`` is ``None`` for core runners), the kind of
    device, and whether the KV size is given by the user."""

    core: tuple[int, int] | None
    omni: tuple[int, int] | None = None
    device: str = ""
    kv_size_given: bool = False


def budget_path(engine: Engine) -> Path:
    """How this engine's worker computes its KV budget."""
    if engine.kv_size_given:
        return "fixed"
    if engine.device == "cpu" and engine.core is not None:
        return "rss" if engine.core >= (0, 20) else "fixed"
    if engine.device not in ("cuda", "rocm"):
        return "unknown"
    if engine.omni is not None:
        if (0, 16) <= engine.omni <= (0, 28):
            return "process"
        return "legacy" if engine.omni in ((0, 14), (0, 30)) else "unknown"
    if engine.core is None:
        return "unknown"
    return "consumed" if engine.core >= (0, 27) else "legacy"


def resolve_residency(residency: str, scope: str) -> str:
    """``residency`` where the declaration states it; else what the scope alone makes certain.

    Requests and sessions begin after the budget was set. When an ``invocation`` or ``model`` cache appears, the scope
    does not say.
    """
    if residency == Residency.UNKNOWN.value and scope in (
        ModelLocalKVScope.REQUEST.value,
        ModelLocalKVScope.SESSION.value,
    ):
        return Residency.LATER.value
    return residency


def charge(residency: str, path: Path) -> tuple[Charge, str]:
    """The state of an entry and the reason in words. ``residency`` as :func:`resolve_residency` gives it."""
    if residency == Residency.LATER.value:
        return "pending", "allocated while serving, after the KV budget was set"
    if residency == Residency.UNKNOWN.value:
        return "unknown", "the declaration does not say when the bytes appear"
    if path == "unknown":
        return "unknown", "how this worker computes its KV budget is not known"
    if path == "fixed":
        if residency == Residency.PROFILED.value:
            return "pending", "transient, and the KV size is given: nothing is subtracted from it"
        return "uncharged", "in place, and the KV size is given: nothing is subtracted from it"
    if residency == Residency.AT_LOAD.value:
        return "charged", _AT_LOAD[path]
    if residency == Residency.PROFILED.value:
        if path == "rss":
            return "pending", "transient; the budget subtracts what the process holds between steps"
        return "charged", "inside the peak of the profiling run"
    if residency == Residency.GRAPH_POOL.value:
        return _GRAPH_POOL[path]
    return "unknown", f"residency {residency!r} is not known here"


_AT_LOAD: dict[str, str] = {
    "legacy": "allocated during the load: part of the weights' figure",
    "consumed": "allocated during the load: free memory fell by it before profiling",
    "process": "allocated during the load: part of the process's memory and of the weights' figure",
    "rss": "resident memory of the process",
}

_GRAPH_POOL: dict[str, tuple[Charge, str]] = {
    "legacy": ("uncharged", "reserved by a graph pool without live tensors: in none of the budget's terms"),
    "consumed": ("charged", "reserved by a graph pool: free memory fell by it before profiling"),
    "process": ("unknown", "charged where the driver lists this process, not charged where it does not"),
    "rss": ("unknown", "graph pools do not exist on a CPU"),
}
