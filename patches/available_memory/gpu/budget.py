# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the ``process`` budget of a GPU worker, in bytes. Touches neither torch nor vLLM.

``requested - (own bytes + transient peak + graph estimate)``: own bytes are what this process holds after
profiling with torch's cache emptied, the transient peak is torch's peak above what stays allocated. vLLM 0.27 and later
(vllm/v1/worker/gpu_worker.py) compute the same from the free memory of the whole device, into which every neighbour
counts; releases before that from weights, torch's peak and non-torch memory, of which the last is device-wide too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..report.units import GIB, MIB, gib, largest_utilization
from .nvml import Reading

# NVML counts the CUDA context too, so its figure is never below what torch reserved; the slack is for rounding and
# for a segment that is freed between the two reads.
BELOW_TORCH_SLACK = 64 * MIB
# Context, NCCL and communication buffers, workspaces outside torch. A larger reading belongs to another
# process with the same PID number.
NON_TORCH_ALLOWANCE = 4 * GIB
NON_TORCH_FRACTION = 0.10
# Host and device share one pool: what is kept for the operating system and page cache when KV takes the rest.
UNIFIED_RESERVE = 1 * GIB


@dataclass(frozen=True)
class Profile:
    """What vLLM's ``memory_profiling`` measured around its dummy forward pass, in bytes.

    ``torch_reserved`` and ``torch_allocated``: torch's figures of this process after the pass, cache emptied; ``None``
    when they could not be read. ``torch_peak`` and ``torch_before``: peak during the pass and the allocation at its
    start. ``non_torch_increase`` and ``total_consumed``: vLLM's device-wide terms (the latter from 0.27 on, else
    ``None``). ``weights``: what loading the model took.
    """

    total: int
    free_before: int
    free_after: int
    weights: int
    torch_peak: int
    torch_before: int
    torch_reserved: int | None
    torch_allocated: int | None
    non_torch_increase: int
    total_consumed: int | None = None

    @property
    def transient_peak(self) -> int | None:
        """Transient peak: torch's peak less what stays allocated; ``None`` when torch's figure is missing."""
        return None if self.torch_allocated is None else max(self.torch_peak - self.torch_allocated, 0)

    @property
    def stock_non_kv(self) -> int:
        """vLLM's own non-KV memory of this release, before any graph estimate."""
        if self.total_consumed is not None and self.torch_allocated is not None:
            return self.total_consumed + (self.torch_peak - self.torch_allocated)
        return self.non_torch_increase + (self.torch_peak - self.torch_before) + self.weights


@dataclass(frozen=True)
class Baseline:
    """This process's figures when the device had been initialised and no weights were loaded, in bytes."""

    own: int
    torch_reserved: int


@dataclass(frozen=True)
class Terms:
    """vLLM's profiling terms for the own bytes.

    Its arithmetic reads them, and its warm-up reads them again through the worker's attributes ``total_consumed``,
    ``non_torch_memory`` and ``peak_activation_memory``. ``exact``: from a trusted reading of the own process.
    Otherwise the larger of vLLM's term and what torch alone proves, and ``reason`` says why.
    """

    own: int
    exact: bool
    reason: str
    non_torch_increase: int
    total_consumed: int
    non_kv: int


def trust(
    reading: Reading,
    total: int,
    torch_reserved: int | None,
    weights: int = 0,
    baseline: Baseline | None = None,
    in_use: int | None = None,
) -> Reading:
    """``reading`` when it can be this process's, else an unknown reading with the reason. All sizes in bytes.

    The one check of a process's own memory, for every policy, the report and the refusal at start.

    Catches a PID number that another process has on the host (vllm-omni pull 1274): the value must not be below what
    torch reserved here, nor above it by more than non-torch memory can explain, and it must have grown with it.
    ``in_use`` is what the whole device has in use at that time, where it is known: one process holds no more than that.
    A ``torch_reserved`` that no device could hold comes from a pluggable allocator (vllm issue 40256): not compared.
    """
    if reading.bytes is None:
        return reading
    own = reading.bytes
    if own == 0:
        return Reading.unknown("NVML reports 0 bytes for this process, which holds a context on the device")
    if own > total:
        return Reading.unknown(f"NVML reports {own} bytes for this process on a device of {total} bytes")
    if in_use is not None and own > in_use + BELOW_TORCH_SLACK:
        return Reading.unknown(
            f"NVML reports {gib(own)} for this PID while the whole device has {gib(in_use)} in use: another process"
        )
    reserved = possible(torch_reserved, total)
    if reserved is None:
        if own < weights - BELOW_TORCH_SLACK:
            return Reading.unknown(f"NVML reports {gib(own)} for this PID, less than the {gib(weights)} of weights")
        return reading
    allowance = max(NON_TORCH_ALLOWANCE, int(total * NON_TORCH_FRACTION))
    if own < reserved - BELOW_TORCH_SLACK:
        return Reading.unknown(
            f"NVML reports {gib(own)} for this PID while torch holds {gib(reserved)}: another process"
        )
    if own > reserved + allowance:
        return Reading.unknown(
            f"NVML reports {gib(own)} for this PID while torch holds {gib(reserved)}; {gib(own - reserved)} outside "
            "torch is not plausible: another process"
        )
    if baseline is not None:
        extra = (own - baseline.own) - (reserved - baseline.torch_reserved)
        if not -BELOW_TORCH_SLACK <= extra <= allowance:
            return Reading.unknown(
                f"the value for this PID changed by {own - baseline.own} bytes since start while torch's changed by "
                f"{reserved - baseline.torch_reserved}: another process"
            )
    return reading


def possible(torch_reserved: int | None, total: int | None) -> int | None:
    """torch's reserved bytes when a device of ``total`` bytes can hold them, else ``None``."""
    fits = torch_reserved is not None and total is not None and 0 <= torch_reserved <= total
    return torch_reserved if fits else None


def terms(reading: Reading, profile: Profile) -> Terms:
    """The profiling terms that put this process's own memory into vLLM's formula, whichever release it is.

    With ``non_torch_increase = own - torch_allocated + torch_before - weights`` the sum of the three terms of 0.26
    and earlier is ``own + (torch_peak - torch_allocated)``; with ``total_consumed = own`` so is the sum of 0.27.

    Without a trusted reading, vLLM's terms stay, raised where torch's reserved bytes or the weights of this process
    alone already exceed them; a neighbour that freed memory can then not enlarge the budget.
    """
    floor = max(possible(profile.torch_reserved, profile.total) or 0, profile.weights)
    allocated = profile.torch_before if profile.torch_allocated is None else profile.torch_allocated
    measured = reading.bytes if reading.state == "measured" and profile.torch_allocated is not None else None
    own = floor if measured is None else measured
    non_torch = own - allocated + profile.torch_before - profile.weights
    consumed = own
    if measured is None:
        non_torch = max(non_torch, profile.non_torch_increase)
        consumed = max(consumed, profile.total_consumed or 0)
    if profile.total_consumed is None:
        non_kv = non_torch + (profile.torch_peak - profile.torch_before) + profile.weights
    else:
        non_kv = consumed + profile.torch_peak - allocated
    reason = reading.reason
    if measured is None and reading.state == "measured":
        reason = "torch's allocated bytes could not be read"
    return Terms(own, measured is not None, reason, non_torch, consumed, non_kv)


def budget(requested: float, non_kv: int, graph_estimate: int = 0, host_limit: int | None = None) -> int:
    """KV bytes: ``requested`` less ``non_kv`` and a graph estimate that is taken as 0 when negative (vllm pull 46932).

    ``requested`` is a float through vLLM 0.13. The result is an int with ``0 <= result <= requested``; ``host_limit``
    is a further upper bound on unified memory.

    Raises:
        ValueError: ``requested`` is negative or not finite.
    """
    if not math.isfinite(requested) or requested < 0:
        raise ValueError(f"requested memory of {requested!r} bytes is not a size")
    result = int(requested - max(non_kv, 0) - max(graph_estimate, 0))
    if host_limit is not None:
        result = min(result, host_limit)
    return max(min(result, int(requested)), 0)


def unified_limit(host_available: int, total: int, transient_peak: int) -> int:
    """Upper bound of KV where host and device share memory: available now, less the transient peak and a reserve."""
    return max(min(host_available, total) - max(transient_peak, 0) - UNIFIED_RESERVE, 0)


def refusal(device: str, total: int, free: int, wanted: float, own: int | None, unified: bool) -> str:
    """Why a worker cannot start: free, wanted and the neighbours' share of the device, all in bytes."""
    fits = largest_utilization(total, free)
    lower = "" if fits is None else f"lower --gpu-memory-utilization to at most {fits:g}, or "
    if unified:
        return (
            f"{device} uses unified memory, shared with the host: {wanted / GIB:.2f} GiB wanted, {free / GIB:.2f} GiB "
            f"available of {total / GIB:.2f} GiB. To fix: {lower}free memory on the host."
        )
    share = "" if own is None else f"; other processes hold {gib(max(total - free - own, 0))}, this one {gib(own)}"
    return (
        f"{device}: {wanted / GIB:.2f} GiB wanted, {free / GIB:.2f} GiB free of {total / GIB:.2f} GiB{share}. To fix: "
        f"{lower}stop another process on this device."
    )
