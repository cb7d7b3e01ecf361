# SPDX-License-Identifier: Apache-2.0
"""The Neuron arithmetic: published worked examples to the byte, and properties that hold for every input."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_patch.patches.available_memory.neuron import kv_budget
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import (
    GIB,
    BelowMinimumError,
    compute_kv_budget,
)

TRN1, TRN2, TRN3 = 16 * GIB, 24 * GIB, 36 * GIB
MIB = 1 << 20


def gib(number: float) -> int:
    return int(number * GIB)


def available(*terms: Any) -> int:
    return compute_kv_budget(*terms).available


# (row, total, used, gmu, cap, bytes)
GOLDEN = [
    (1, TRN2, 10 * GIB, 0.9, 0.30, 6_957_847_019),
    (2, TRN2, gib(13.5), 0.9, 0.30, 6_957_847_019),
    (3, TRN2, gib(18.12), 0.9, 0.30, 3_736_621_548),
    (4, TRN2, 10 * GIB, 0.92, 0.30, 7_112_465_841),
    (5, TRN2, 10 * GIB, 1.0, 0.30, 7_730_941_132),
    (6, TRN2, 10 * GIB, 0.9, 1.0, 12_455_405_158),
    (7, TRN2, gib(18.12), 0.9, 0.05, 1_159_641_169),
    (8, TRN2, gib(18.12), 0.9, 0.08, 1_855_425_871),
    (10, TRN2, 10 * GIB, 0.9, 0.0463, 1_073_827_723),
    (11, TRN2, 10 * GIB, 0.65, 0.15, 2_512_555_868),
    (12, TRN2, 8 * GIB, 0.9, 0.35, 8_117_488_189),
    (13, TRN2, 8 * GIB, 0.95, 0.48, 11_751_030_521),
    (29, TRN2, 0, 0.05, 1.0, 1_288_490_188),
    (31, TRN3, 10 * GIB, 0.9, 0.30, 10_436_770_529),
    (32, TRN1, 10 * GIB, 0.9, 0.30, 4_638_564_679),
    (33, TRN2, 5 * GIB, 0.9, 0.30, 6_957_847_019),
    (34, TRN2 // 2, 5 * GIB, 0.9, 0.30, 3_478_923_509),
]


@pytest.mark.parametrize(("row", "total", "used", "gmu", "cap", "expected"), GOLDEN, ids=lambda value: str(value))
def test_golden_rows(row: int, total: int, used: int, gmu: float, cap: float, expected: int) -> None:
    assert available(total, used, gmu, cap) == expected


def test_requested_bytes_of_the_golden_rows() -> None:
    assert compute_kv_budget(TRN2, 10 * GIB, 0.9).total_budget == 23_192_823_398
    assert compute_kv_budget(TRN2, 10 * GIB, 0.92).total_budget == 23_708_219_473


def test_which_term_binds() -> None:
    assert compute_kv_budget(TRN2, 10 * GIB, 0.9).is_capped
    assert not compute_kv_budget(TRN2, gib(18.12), 0.9).is_capped


@pytest.mark.parametrize(("used", "gmu", "cap"), [(10 * GIB, 0.9, 0.046), (gib(21.79), 0.8, 0.30)], ids=("9", "14"))
def test_rows_below_the_minimum(used: int, gmu: float, cap: float) -> None:
    with pytest.raises(BelowMinimumError, match="below minimum threshold") as caught:
        compute_kv_budget(TRN2, used, gmu, cap)
    text = str(caught.value)
    assert "VLLM_NEURON_MIN_KV_BUDGET_GIB" in text and "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION" in text
    assert f"{cap:g}" in text and "24.00 GiB" in text and f"{used / GIB:.2f} GiB" in text
    assert isinstance(caught.value, RuntimeError)


def test_row_15_no_minimum_gives_zero() -> None:
    assert available(TRN2, gib(21.79), 0.8, 0.30, 0) == 0


def test_rows_16_and_17_equal_passes_and_one_byte_less_does_not() -> None:
    requested = kv_budget.requested_bytes(TRN2, 0.9)
    assert available(TRN2, requested - GIB, 0.9, 1.0) == 1_073_741_824
    with pytest.raises(BelowMinimumError) as caught:
        compute_kv_budget(TRN2, requested - GIB + 1, 0.9, 1.0)
    # Both print as 1.00 GiB, so the bytes have to tell them apart.
    assert "1073741823 bytes" in str(caught.value) and "1073741824 bytes" in str(caught.value)


@pytest.mark.parametrize("cap", [0.0, -0.1, 1.5, float("inf"), float("nan")], ids=("18", "19", "20a", "20b", "22"))
def test_rows_of_bad_caps(cap: float) -> None:
    with pytest.raises(RuntimeError, match=r"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION must be in \(0, 1\]\. Got"):
        compute_kv_budget(TRN2, 10 * GIB, 0.9, cap)


def test_the_cap_is_looked_at_before_the_minimum() -> None:
    with pytest.raises(RuntimeError, match=r"\(0, 1\]"):
        compute_kv_budget(TRN2, TRN2, 0.9, 2.0)


def test_row_23_no_minimum() -> None:
    assert available(TRN2, 10 * GIB, 0.9, 0.01, 0) == 231_928_233
    assert available(TRN2, 10 * GIB, 0.9, 0.01, -5 * GIB) == 231_928_233


def test_row_25_lower_minimum() -> None:
    assert available(TRN2, 10 * GIB, 0.9, 0.03, GIB // 2) == 695_784_701


@pytest.mark.parametrize("gmu", [float("nan"), float("inf"), 0.0, -0.5, 1.0001])
def test_row_28_bad_utilisation(gmu: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be in \(0, 1\]"):
        compute_kv_budget(TRN2, 10 * GIB, gmu)


def test_row_30_negative_use_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        compute_kv_budget(TRN2, -1, 0.9, 1.0)


@pytest.mark.parametrize("total", [0, -1])
def test_no_memory_at_all_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        compute_kv_budget(total, 0, 0.9)


def test_row_36_the_old_constant_is_more_than_the_budget() -> None:
    assert 20 * GIB / available(TRN2, 10 * GIB, 0.9) == pytest.approx(3.09, abs=0.005)


@pytest.mark.parametrize(("gmu", "expected"), [(0.9, 9_277_129_359), (0.92, 9_483_287_789)])
def test_row_37_cpu_mode(gmu: float, expected: int) -> None:
    assert kv_budget.host_kv_budget(256 * GIB, 8, gmu) == expected


@pytest.mark.parametrize(("block", "at_table", "short"), [(1, 6635, 6634), (2, 3317, 3317), (4.5, 1474, 1474)])
def test_rows_38_to_40_blocks(block: float, at_table: int, short: int) -> None:
    size = int(block * MIB)
    assert available(TRN2, 10 * GIB, 0.9) // size == at_table
    # What a device total short by 3 MiB would do to the count; the table's figure is used to avoid it.
    assert available(TRN2 - 3 * MIB, 10 * GIB, 0.9) // size == short


# Scenario S7: HBM 24 GiB, utilisation 0.9.
@pytest.mark.parametrize(
    ("total", "weights", "cap", "expected"),
    [(24, 10, 0.30, 6.48), (24, 20, 0.30, 1.60), (24, 20.6, 0.30, 1.00), (24, 10, 0.5, 10.80), (12, 4, 0.30, 3.24)],
)
def test_weights_against_cap_and_floor(total: int, weights: float, cap: float, expected: float) -> None:
    assert available(total * GIB, gib(weights), 0.9, cap) / GIB == pytest.approx(expected, abs=0.005)


def test_weights_that_leave_too_little_are_refused() -> None:
    with pytest.raises(BelowMinimumError):
        compute_kv_budget(24 * GIB, 21 * GIB, 0.9)
    with pytest.raises(BelowMinimumError):  # more than a half-size core has
        compute_kv_budget(12 * GIB, gib(13.5), 0.9)


def test_exactly_one_gib_left_is_served() -> None:
    requested = kv_budget.requested_bytes(24 * GIB, 0.9)
    assert available(24 * GIB, requested - GIB, 0.9) == GIB


# Scenario S8: limit 64 GiB, 8 in use.
@pytest.mark.parametrize(("ranks", "expected"), [(2, 7.56), (1, 15.12)])
def test_ranks_share_a_container(ranks: int, expected: float) -> None:
    assert kv_budget.host_kv_budget((64 - 8) * GIB, ranks, 0.9) / GIB == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("host", "workers", "text"), [(0, 1, "0 bytes"), (-5, 1, "-5 bytes"), (3, 4, "4 workers")])
def test_nothing_to_share_is_an_error(host: int, workers: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        kv_budget.host_kv_budget(host, workers, 0.9)


def test_needed_blocks_round_up_and_keep_the_null_block() -> None:
    assert kv_budget.needed_blocks(4, 4096, 32) == 513
    assert kv_budget.needed_blocks(4, 4097, 32) == 517
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        kv_budget.needed_blocks(0, 4096, 32)


TOTALS = st.integers(1, 1 << 50)
USED = st.integers(0, 1 << 50)
FRACTIONS = st.floats(0, 1, exclude_min=True)


@given(TOTALS, USED, FRACTIONS, FRACTIONS)
def test_finite_and_bounded(total: int, used: int, gmu: float, cap: float) -> None:
    terms = compute_kv_budget(total, used, gmu, cap, 0)
    assert type(terms.available) is int
    assert 0 <= terms.available <= terms.total_budget <= total
    assert terms.available <= terms.heuristic_cap
    assert terms.available == 0 or terms.available + used <= terms.total_budget


@given(TOTALS, USED, USED, FRACTIONS, FRACTIONS)
def test_more_use_never_gives_more(total: int, one: int, other: int, gmu: float, cap: float) -> None:
    low, high = sorted((one, other))
    assert compute_kv_budget(total, low, gmu, cap, 0).available >= compute_kv_budget(total, high, gmu, cap, 0).available


@given(TOTALS, USED, FRACTIONS, FRACTIONS, FRACTIONS)
def test_a_higher_cap_never_gives_less(total: int, used: int, gmu: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert (
        compute_kv_budget(total, used, gmu, low, 0).available <= compute_kv_budget(total, used, gmu, high, 0).available
    )


@given(TOTALS, USED, FRACTIONS, FRACTIONS, FRACTIONS)
def test_a_higher_utilisation_never_gives_less(total: int, used: int, one: float, other: float, cap: float) -> None:
    low, high = sorted((one, other))
    assert (
        compute_kv_budget(total, used, low, cap, 0).available <= compute_kv_budget(total, used, high, cap, 0).available
    )


@given(TOTALS, USED, FRACTIONS, FRACTIONS)
def test_the_nesting_of_the_two_roundings(total: int, used: int, gmu: float, cap: float) -> None:
    assert compute_kv_budget(total, used, gmu, cap, 0).heuristic_cap == int(int(total * gmu) * cap)


@given(TOTALS, st.integers(0, 64), FRACTIONS, FRACTIONS)
def test_shares_of_a_host_fit_it_together(host: int, workers: int, gmu: float, cap: float) -> None:
    try:
        share = kv_budget.host_kv_budget(host, workers, gmu, cap)
    except RuntimeError:
        assert host // max(workers, 1) == 0
        return
    assert 0 <= share * max(workers, 1) <= host


def test_the_module_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import vllm_omni_patch.patches.available_memory.neuron.kv_budget;"
        "print([n for n in ('torch', 'vllm', 'wrapt') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
