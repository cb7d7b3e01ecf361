# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the process budget: golden scenarios, vLLM's formulas of each era, and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_patch.patches.available_memory.gpu.budget import (
    NON_TORCH_ALLOWANCE,
    UNIFIED_RESERVE,
    Baseline,
    Profile,
    budget,
    possible,
    terms,
    trust,
    unified_limit,
)
from vllm_omni_patch.patches.available_memory.gpu.nvml import Reading

GIB = 1 << 30
UNKNOWN = Reading.unknown("not listed")


def gib(value: float) -> int:
    return int(value * GIB)


def measured(count: int) -> Reading:
    return Reading("measured", count, "UUID")


def profile(
    total: float = 48,
    weights: float = 10,
    peak: float = 2,
    other: float = 1,
    foreign: float = 0,
    consumed: bool = True,
    persistent: float = 0,
) -> Profile:
    """A profile as vLLM would measure it: ``foreign`` is by how much neighbours grew, ``persistent`` what torch keeps
    beside the weights. All in GiB; ``consumed`` chooses the era of 0.27."""
    allocated = gib(weights) + gib(persistent)
    before = gib(40)
    return Profile(
        total=gib(total),
        free_before=before,
        free_after=before - allocated - gib(other) - gib(foreign),
        weights=gib(weights),
        torch_peak=allocated + gib(peak),
        torch_before=allocated,
        torch_reserved=allocated,
        torch_allocated=allocated,
        non_torch_increase=gib(other) + gib(foreign),
        total_consumed=allocated + gib(other) + gib(foreign) if consumed else None,
    )


def stock_sum(found: Profile, non_torch: int, consumed: int) -> int:
    """vLLM's own arithmetic on terms: three terms through 0.26, ``total_consumed`` and the transient peak from 0.27."""
    if found.total_consumed is None:
        return non_torch + (found.torch_peak - found.torch_before) + found.weights
    assert found.torch_allocated is not None
    return consumed + (found.torch_peak - found.torch_allocated)


@pytest.mark.parametrize("consumed", [True, False])
@pytest.mark.parametrize("foreign", [0, 5, -7.23])
def test_terms_put_own_bytes_into_the_formula_of_each_era(consumed: bool, foreign: float) -> None:
    found = profile(consumed=consumed, foreign=foreign)
    made = terms(measured(gib(11)), found)
    assert made.exact
    assert made.non_kv == gib(11) + gib(2)
    assert stock_sum(found, made.non_torch_increase, made.total_consumed) == made.non_kv


def test_memory_outside_the_weight_loader() -> None:
    """vllm-omni issue 7839: weights 12, from constructors 3, other 0.5, peak 2 of 60 requested: 42.50, not 45.50."""
    for consumed in (True, False):
        found = profile(total=80, weights=12, persistent=3, other=0.5, consumed=consumed)
        assert budget(gib(60), terms(measured(gib(15.5)), found).non_kv) == gib(42.5)
        assert budget(gib(60), terms(UNKNOWN, found).non_kv) <= gib(43)


def test_impossible_torch_figures_are_rejected() -> None:
    assert possible(gib(40), gib(24)) is None
    assert possible(-1, gib(24)) is None
    assert possible(gib(24), gib(24)) == gib(24)
    assert trust(measured(gib(19)), gib(24), gib(40), gib(15)).bytes == gib(19)
    assert trust(measured(gib(3)), gib(24), gib(40), gib(15)).state == "unknown"
    found = replace(profile(total=24, weights=15), torch_reserved=gib(40))
    made = terms(UNKNOWN, found)
    assert made.non_kv == found.stock_non_kv


def test_the_fallback_is_near_the_truth() -> None:
    for weights, peak, other, truth in ((0.93, 0.59, 0.11, 34.70), (8.61, 1.70, 0.11, 25.90)):
        for consumed in (True, False):
            found = profile(weights=weights, peak=peak, other=other, consumed=consumed)
            value = budget(gib(36.33), terms(UNKNOWN, found).non_kv)
            assert value <= gib(truth) * 1.005
            assert value >= gib(truth) * 0.99


@pytest.mark.parametrize("graphs", [-35.69, 0.0])
def test_a_negative_estimate_never_enlarges(graphs: float) -> None:
    assert budget(gib(96), gib(50), gib(graphs)) == gib(46)


@pytest.mark.parametrize(
    ("own", "reserved", "state"),
    [
        (11, 10, "measured"),
        (10, 10, "measured"),
        (9.97, 10, "measured"),
        (9.9, 10, "unknown"),
        (40, 15, "unknown"),
        (19, 15, "measured"),
        (20, 15, "unknown"),
        (200, 15, "unknown"),
        (0, 0, "unknown"),
    ],
)
def test_trust(own: float, reserved: float, state: str) -> None:
    """Another process with our number on the host is far above or below what torch reserved."""
    reading = Reading("zero" if own == 0 else "measured", gib(own), "UUID")
    assert trust(reading, gib(48), gib(reserved)).state == state


def test_trust_asks_for_common_growth() -> None:
    """A stranger near our size that does not grow as we do."""
    started = Baseline(own=gib(13), torch_reserved=0)
    assert trust(measured(gib(13)), gib(80), gib(12), 0, started).state == "unknown"
    assert trust(measured(gib(13)), gib(80), gib(12), 0, Baseline(gib(0.5), 0)).state == "measured"


def test_trust_keeps_the_reason_of_an_unknown_reading() -> None:
    assert trust(UNKNOWN, gib(48), gib(10)) is UNKNOWN


def test_a_missing_torch_figure_is_not_exact() -> None:
    found = replace(profile(consumed=False), torch_allocated=None)
    made = terms(measured(gib(11)), found)
    assert not made.exact
    assert "torch's allocated bytes" in made.reason
    assert made.non_kv == found.stock_non_kv
    assert found.transient_peak is None


@pytest.mark.parametrize("requested", [float("nan"), float("inf"), -1.0])
def test_budget_refuses_what_is_no_size(requested: float) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        budget(requested, 0)


def test_unified_limit() -> None:
    assert unified_limit(gib(30), gib(119), gib(20)) == gib(10) - UNIFIED_RESERVE
    assert unified_limit(gib(5), gib(119), gib(20)) == 0
    assert unified_limit(gib(120), gib(94), 0) == gib(94) - UNIFIED_RESERVE
    assert budget(gib(83), gib(50), 0, gib(9)) == gib(9)


SIZES = st.integers(0, 1 << 42)
CHANGES = st.integers(-(1 << 42), 1 << 42)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    allocated = draw(SIZES)
    return Profile(
        total=draw(st.integers(1, 1 << 42)),
        free_before=draw(SIZES),
        free_after=draw(SIZES),
        weights=draw(SIZES),
        torch_peak=allocated + draw(SIZES),
        torch_before=draw(SIZES),
        torch_reserved=draw(st.none() | CHANGES),
        torch_allocated=draw(st.none() | st.just(allocated)),
        non_torch_increase=draw(CHANGES),
        total_consumed=draw(st.none() | CHANGES),
    )


READINGS = st.just(UNKNOWN) | SIZES.map(lambda n: Reading("measured" if n else "zero", n, "UUID"))


@given(
    found=profiles(), reading=READINGS, requested=st.floats(0, 1e13) | SIZES, graphs=CHANGES, limit=st.none() | SIZES
)
def test_budget_is_bounded_and_whole(
    found: Profile, reading: Reading, requested: float, graphs: int, limit: int | None
) -> None:
    made = terms(trust(reading, found.total, found.torch_reserved, found.weights), found)
    value = budget(requested, made.non_kv, graphs, limit)
    assert type(value) is int
    assert 0 <= value <= requested
    if limit is not None:
        assert value <= limit


@given(found=profiles(), requested=SIZES, graphs=SIZES)
def test_unknown_is_never_more_than_vllms_own(found: Profile, requested: int, graphs: int) -> None:
    """Where the process cannot be read, the fallback gives at most vLLM's figure of this release."""
    value = budget(requested, terms(UNKNOWN, found).non_kv, graphs)
    assert value <= max(requested - found.stock_non_kv - graphs, 0) or found.torch_allocated is None


@given(found=profiles(), own=SIZES, more=SIZES, requested=SIZES)
def test_budget_falls_with_used_and_rises_with_requested(found: Profile, own: int, more: int, requested: int) -> None:
    found = replace(found, torch_allocated=found.torch_peak)
    low, high = (terms(measured(count), found).non_kv for count in (own, own + more))
    assert budget(requested, high) <= budget(requested, low)
    assert budget(requested, low) <= budget(requested + more, low)


@given(found=profiles(), own=st.integers(1, 1 << 42), shift=CHANGES)
def test_a_neighbour_does_not_enter_a_measured_budget(found: Profile, own: int, shift: int) -> None:
    """Whatever free memory and vLLM's device-wide terms say, a trusted reading gives the same terms."""
    found = replace(found, torch_allocated=min(found.torch_peak, 1 << 41))
    other = replace(
        found,
        free_after=found.free_after + shift,
        non_torch_increase=found.non_torch_increase - shift,
        total_consumed=None if found.total_consumed is None else found.total_consumed - shift,
    )
    assert terms(measured(own), found) == terms(measured(own), other)


@given(own=st.integers(0, 1 << 42), reserved=st.integers(0, 1 << 42), total=st.integers(1, 1 << 42))
def test_trusted_readings_are_near_torch(own: int, reserved: int, total: int) -> None:
    reading = trust(Reading("measured" if own else "zero", own, "UUID"), total, reserved)
    if reading.state == "measured" and reserved <= total:
        assert reserved - (64 << 20) <= own <= reserved + max(NON_TORCH_ALLOWANCE, int(total * 0.1))
