# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the Neuron KV budget: integers in, integers out. Imports neither torch nor vLLM.

Every size is in bytes and every result is a finite ``int`` >= 0. The same arguments give the same bytes on any host,
which is what lets a program compiled without a device be found again on one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..report.units import GIB

CAP_VARIABLE = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM_VARIABLE = "VLLM_NEURON_MIN_KV_BUDGET_GIB"


class BelowMinimumError(RuntimeError):
    """The KV budget is too small to serve with."""


class KvBudget(NamedTuple):
    """The terms of a budget, in bytes; ``available`` is the number that vLLM gets."""

    total_budget: int
    user_budget: int
    heuristic_cap: int
    available: int

    @property
    def is_capped(self) -> bool:
        """Whether the cap set ``available``; otherwise the bytes in use leave no more than the cap."""
        return self.heuristic_cap < self.user_budget


def requested_bytes(total_bytes: int, gmu: float) -> int:
    """``int(total_bytes * gmu)``, the memory that ``gpu_memory_utilization`` asks for.

    Source: determine_available_memory design, section 1.

    Raises:
        ValueError: ``total_bytes`` is not positive.
        ValueError: ``gmu`` is not in (0, 1]. vLLM checks that itself from 0.11.1; before, nan got through.
    """
    if total_bytes <= 0:
        raise ValueError(f"Total memory must be positive. Got {total_bytes} bytes.")
    if not (math.isfinite(gmu) and 0 < gmu <= 1):
        raise ValueError(f"gpu_memory_utilization must be in (0, 1]. Got {gmu}.")
    return int(total_bytes * gmu)


def capped_bytes(total_budget: int, cap_fraction: float) -> int:
    """``int(total_budget * cap_fraction)``.

    Raises:
        RuntimeError: ``cap_fraction`` is not in (0, 1].
    """
    if not (math.isfinite(cap_fraction) and 0 < cap_fraction <= 1):
        raise RuntimeError(f"{CAP_VARIABLE} must be in (0, 1]. Got {cap_fraction}.")
    return int(total_budget * cap_fraction)


def compute_kv_budget(
    total_hbm_bytes: int, bytes_used: int, gmu: float, cap_fraction: float = 0.30, minimum_bytes: int = GIB
) -> KvBudget:
    """The KV budget of one logical core with ``total_hbm_bytes`` of HBM, ``bytes_used`` of them taken by the model.

    Source: determine_available_memory design, section 4 (``_compute_kv_budget``). The nesting
    ``int(int(total * gmu) * cap)`` is part of the contract: one product of all three differs by a byte often enough to
    change a block count. A ``minimum_bytes`` of 0 or less is no minimum; a budget equal to it is enough.

    Raises:
        BelowMinimumError: ``available`` is below ``minimum_bytes``.
        RuntimeError, ValueError: as :func:`requested_bytes` and :func:`capped_bytes`, which are checked before the
            minimum; ``bytes_used`` is negative.
    """
    total_budget = requested_bytes(total_hbm_bytes, gmu)
    heuristic_cap = capped_bytes(total_budget, cap_fraction)
    if bytes_used < 0:
        raise ValueError(f"Used memory must not be negative. Got {bytes_used} bytes.")
    user_budget = max(total_budget - bytes_used, 0)
    available = max(min(user_budget, heuristic_cap), 0)
    if minimum_bytes > 0 and available < minimum_bytes:
        raise BelowMinimumError(
            f"Computed KV cache budget is below minimum threshold: {available / GIB:.2f} GiB ({available} bytes) "
            f"against {minimum_bytes / GIB:.2f} GiB ({minimum_bytes} bytes). HBM {total_hbm_bytes / GIB:.2f} GiB x "
            f"gpu_memory_utilization {gmu:g} = {total_budget / GIB:.2f} GiB, used {bytes_used / GIB:.2f} GiB, cap "
            f"fraction {cap_fraction:g} = {heuristic_cap / GIB:.2f} GiB. Raise gpu_memory_utilization or "
            f"tensor_parallel_size, raise {CAP_VARIABLE} if the cap is the smaller term, or lower {MINIMUM_VARIABLE}."
        )
    return KvBudget(total_budget, user_budget, heuristic_cap, available)


def needed_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that ``max_num_seqs`` requests of ``max_model_len`` tokens fill, and the null block that vLLM keeps.

    Raises:
        ValueError: an argument is not positive.
    """
    if min(max_num_seqs, max_model_len, block_size) <= 0:
        raise ValueError(
            f"Block need of max_num_seqs={max_num_seqs}, max_model_len={max_model_len}, block_size={block_size} "
            "cannot be computed; all three must be positive."
        )
    return max_num_seqs * -(-max_model_len // block_size) + 1


def host_kv_budget(host_bytes: int, workers: int, gmu: float, cap_fraction: float = 0.30) -> int:
    """KV bytes of one of ``workers`` equal workers on a host that has ``host_bytes`` to give (Neuron CPU mode).

    Source: determine_available_memory design, section 4 (``_determine_available_memory_cpu``). There is no minimum
    here, and weights are not subtracted, since they are resident when the host is asked.

    Raises:
        RuntimeError: nothing to share, or nothing left for one worker.
        RuntimeError, ValueError: utilisation or cap out of range.
    """
    if host_bytes <= 0:
        raise RuntimeError(
            f"No host memory is available for KV: {host_bytes} bytes. Free memory on the host or raise its limit."
        )
    share = host_bytes // max(workers, 1)
    if share <= 0:
        raise RuntimeError(f"{host_bytes} bytes of host memory leave nothing for each of {workers} workers.")
    return capped_bytes(requested_bytes(share, gmu), cap_fraction)
