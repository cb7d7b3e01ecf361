# SPDX-License-Identifier: Apache-2.0
"""What to set so that the KV cache and everything allocated later have room. Bytes in, sentences out.

Each setting that is named is enough alone: the cache is larger than 0 bytes; with what is allocated later it stays
within the free memory of the device and, where a share made the size, within that share; and the next start passes
vLLM's check. Where no setting does, the sentence says how much must be freed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import report as reports
from .report import BudgetReport
from .units import GIB, byte_count, gib, largest_utilization

RESERVE = "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV=1"
UTILIZATION = "--gpu-memory-utilization"


@dataclass(frozen=True)
class Plan:
    """The terms of the question, in bytes; ``None`` is unknown.

    ``kv``: the budget. ``pending``: pending model-local KV that the budget does not keep free, ``reserved`` what
    it does. ``uncharged``: in place, and in no term of the budget. ``transient``: activation peak, graphs and the
    multimodal reservation as far as they are known, which come on top of what the process holds now. ``free``: what
    this worker may still take on its device. ``base``: the budget before it was cut off at 0.
    """

    kv: int
    base: int | None
    pending: int
    reserved: int
    uncharged: int
    transient: int
    free: int | None
    share: bool

    @property
    def share_room(self) -> int | None:
        """The largest cache within the requested share; ``None`` where no share made the size."""
        return self.kv - self.pending - self.uncharged if self.share else None

    @property
    def device_room(self) -> int | None:
        """The largest cache that the device has room for; ``None`` when its free memory is unknown."""
        return None if self.free is None else self.free - self.transient - self.pending - self.reserved

    @property
    def best(self) -> int:
        """The largest cache that keeps every bound and is not above the budget."""
        return min([self.kv, *(room for room in (self.share_room, self.device_room) if room is not None)])


def advise(report: BudgetReport) -> list[str]:
    """What to set so that everything fits, as sentences. Empty when nothing needs to change."""
    pending = 0 if report.model_local_kv is None else report.local_kv("pending_bytes")
    if pending is None:
        return ["The amount of pending model-local KV is unknown, so no setting can be computed for it."]
    plan = _plan(report, pending)
    wanted = _wanted(plan)
    if not plan.share and plan.free is None and wanted:
        return [f"Free memory is unknown, so {wanted} may not fit beside the KV cache size that was set."]
    if plan.kv > 0 and plan.best == plan.kv:
        return []
    reason = f"leave room for {wanted}" if wanted else "fit into free memory"
    if plan.device_room is not None and plan.device_room < plan.kv:
        reason += f" ({gib(plan.free)} are free, {gib(plan.transient)} of that for peak and graphs)"
    helps = _smaller(report, plan) if plan.best > 0 else []
    if helps:
        return [f"To {reason}, set {', or '.join(helps)}."]
    helps = _otherwise(report, plan)
    if wanted or plan.kv > 0:
        problem = f"No KV cache fits: it would have to {reason}."
    else:
        problem = "No KV cache fits into the requested memory."
    return [f"{problem} To fix: {', or '.join(helps)}." if helps else f"{problem} No setting can be computed for it."]


def utilization_for(report: BudgetReport, change: int, limit: int | None = None) -> float | None:
    """The largest utilisation of at most four decimals that changes the budget by at most ``change`` bytes.

    vLLM requests ``ceil(total * utilization)``, so the budget moves one for one with the requested memory, where the
    worker's formula is linear in it. ``limit``: further bound on the requested bytes. ``None`` if it is unknown or 0.
    """
    total, requested = byte_count(report.value(reports.DEVICE_TOTAL)), byte_count(report.value(reports.REQUESTED))
    if not report.linear_in_requested or not total or requested is None:
        return None
    return largest_utilization(total, requested + change if limit is None else min(requested + change, limit))


def _plan(report: BudgetReport, pending: int) -> Plan:
    share = report.get(reports.FREE_SHARE)
    names = (reports.ACTIVATION_PEAK, reports.GRAPH_ESTIMATE, reports.MULTIMODAL_RESERVATION)
    base = report.kv_bytes if report.kv_bytes or not report.short_by else -report.short_by
    return Plan(
        kv=report.kv_bytes,
        base=base or None,
        pending=max(pending - report.reserved_for_model_local_kv, 0),
        reserved=min(pending, report.reserved_for_model_local_kv),
        uncharged=0 if report.counts_own_process else report.local_kv("uncharged_bytes") or 0,
        transient=sum(byte_count(report.value(name)) or 0 for name in names),
        free=byte_count(report.value(reports.DEVICE_FREE) if share is None else share.value),
        share=not report.size_given,
    )


def _wanted(plan: Plan) -> str:
    parts = [f"{gib(plan.pending)} of pending model-local KV"] if plan.pending else []
    if plan.uncharged and plan.share:
        parts.append(f"{gib(plan.uncharged)} already allocated that this budget does not count")
    return " and ".join(parts)


def _smaller(report: BudgetReport, plan: Plan) -> list[str]:
    """Settings for a cache of ``plan.best`` bytes, which is smaller than the budget."""
    helps = [_size(report, plan, plan.best)]
    if (
        plan.pending
        and _reservable(report, plan)
        and plan.best == plan.share_room
        and _starts(report, plan, size_given=False)
    ):
        helps.append(RESERVE)
    if plan.share and not plan.pending and not plan.uncharged:
        utilization = utilization_for(report, plan.best - plan.kv, _start_limit(report, plan))
        if utilization is not None and plan.kv + _gain(report, utilization) > 0:
            helps.append(f"{UTILIZATION} {utilization:g}")
    return [text for text in helps if text]


def _otherwise(report: BudgetReport, plan: Plan) -> list[str]:
    """What else leads to a cache when making it smaller does not."""
    helps = []
    room = plan.device_room
    if room is None or room > 0:
        helps.append(_raise(report, plan))
    if room is not None and room > 0:
        helps.append(_size(report, plan, min(plan.kv, room) if plan.kv > 0 else room))
    keeps = plan.kv > 0 and plan.free is not None and plan.kv + plan.transient + plan.reserved <= plan.free
    reservable = plan.kv > 0 and _reservable(report, plan) and _starts(report, plan, size_given=False)
    if plan.pending and reservable and (plan.free is None or keeps):
        helps.append(f"lower --max-num-seqs until less than {plan.kv} bytes are pending with {RESERVE}")
    if plan.pending and not plan.share and plan.free is not None and plan.kv + plan.transient < plan.free:
        most = plan.free - plan.transient - plan.kv
        helps.append(_that_starts(report, plan, f"lower --max-num-seqs until at most {most} bytes are pending"))
    if room is not None and room < plan.kv > 0 and (not plan.share or not plan.pending + plan.uncharged):
        limit, requested = _start_limit(report, plan), byte_count(report.value(reports.REQUESTED))
        checked = limit is not None and requested is not None and not (report.platform == "cpu" and report.size_given)
        asked = requested - limit if checked else 0  # type: ignore[operator]
        lacking = max(plan.kv - room, asked)
        helps.append(f"free {lacking} more bytes ({gib(lacking)}) for this worker")
    helps = [text for text in helps if text]
    if not helps and room is not None and room <= 0:
        return [f"more than {-room} bytes ({gib(-room)}) must become free for this worker; then restart"]
    return helps


def _raise(report: BudgetReport, plan: Plan) -> str:
    """The utilisation whose share holds a cache and what is pending."""
    if plan.base is None or not plan.share or plan.uncharged or (plan.pending and not _reservable(report, plan)):
        return ""
    base = plan.base - plan.pending
    reserve = f" with {RESERVE}" if plan.pending else ""
    if plan.device_room is None:
        floor = utilization_for(report, -base)
        return (
            "" if floor is None or floor >= 1 else f"{UTILIZATION} above {floor:g}{reserve}, as far as memory is free"
        )
    top = utilization_for(report, plan.device_room - base, _start_limit(report, plan))
    if top is None or base + _gain(report, top) <= 0:
        return ""
    return f"{UTILIZATION} {top:g}{reserve}"


def _size(report: BudgetReport, plan: Plan, size: int) -> str:
    """The setting that gives a cache of ``size`` bytes, or of whole GiB below it; empty when there is none."""
    if report.kv_setting == "VLLM_CPU_KVCACHE_SPACE":
        # 0 is not 0 GiB there: it means the default.
        return f"{report.kv_setting}={size // GIB}" if size >= GIB else ""
    if not report.kv_setting:
        return ""
    # vLLM takes the multimodal reservation off a given size too.
    size += byte_count(report.value(reports.MULTIMODAL_RESERVATION)) or 0
    return _that_starts(report, plan, f"{report.kv_setting} {size}")


def _that_starts(report: BudgetReport, plan: Plan, text: str) -> str:
    """``text``, which gives or keeps a size, with the utilisation that the next start needs; empty if there is none."""
    if _starts(report, plan, size_given=True):
        return text
    utilization = _start_utilization(report, plan)
    return "" if utilization is None else f"{text} with {UTILIZATION} {utilization:g}"


def _reservable(report: BudgetReport, plan: Plan) -> bool:
    return plan.share and not plan.uncharged and report.platform != "neuron"


def _gain(report: BudgetReport, utilization: float) -> int:
    """By how many bytes the budget grows with ``utilization``."""
    return math.ceil(report.value(reports.DEVICE_TOTAL) * utilization) - int(report.value(reports.REQUESTED))


def _start_limit(report: BudgetReport, plan: Plan) -> int | None:
    """Bytes that vLLM can find free at its next start, at least: it refuses to start when it requests more."""
    if plan.free is None or report.platform == "neuron":
        return None
    return plan.free + (byte_count(report.value(reports.WEIGHTS)) or 0)


def _starts(report: BudgetReport, plan: Plan, *, size_given: bool) -> bool:
    """Whether the next start passes vLLM's check with the utilisation as it is. With a ``size_given``, CPU has none."""
    limit, requested = _start_limit(report, plan), byte_count(report.value(reports.REQUESTED))
    unchecked = report.platform == "cpu" and size_given
    return unchecked or limit is None or requested is None or requested <= limit


def _start_utilization(report: BudgetReport, plan: Plan) -> float | None:
    total, limit = byte_count(report.value(reports.DEVICE_TOTAL)), _start_limit(report, plan)
    return None if not total or limit is None else largest_utilization(total, limit)
