# SPDX-License-Identifier: Apache-2.0
"""The advice under a budget: each setting that it names is applied to the same device, and the new start must fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_omni_patch import ledger
from vllm_omni_patch.patches.available_memory.report import report
from vllm_omni_patch.patches.available_memory.report.advice import utilization_for
from vllm_omni_patch.patches.available_memory.report.output import complete
from vllm_omni_patch.patches.available_memory.report.report import BudgetReport, Input

GIB = 1 << 30
RESERVE = "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV=1"


class Refused(Exception):
    """vLLM does not start."""


@dataclass(frozen=True)
class World:
    """A device, what is on it, and how vLLM is started on it. Bytes.

    ``context`` is there before vLLM looks at the device, ``outside`` comes beside the weights. ``process``: the budget
    counts this process's own memory, otherwise what the device lost since the start. ``grew``: what neighbours took
    since then; the next start finds it taken.
    """

    total: int
    others: int
    context: int
    weights: int
    outside: int
    peak: int
    graphs: int
    multimodal: int
    pending: int
    uncharged: int
    utilization: float
    explicit: int | None = None
    reserve: bool = False
    process: bool = False
    cpu: bool = False
    grew: int = 0
    reads_free: bool = True

    @property
    def requested(self) -> int:
        return math.ceil(self.total * self.utilization)

    @property
    def own(self) -> int:
        return self.context + self.weights + self.outside + self.uncharged

    @property
    def free(self) -> int:
        return self.total - self.others - self.grew - self.own

    @property
    def to_come(self) -> int:
        """All that is taken after the budget is made, beside the KV cache."""
        return self.pending + (0 if self.cpu else self.peak + self.graphs + self.multimodal)

    def start(self) -> BudgetReport:
        """The report of a start as vLLM would make it.

        Raises:
            Refused: vLLM stops before the report.
        """
        at_start = self.total - self.others - self.context
        if self.free < 0 or (self.requested > at_start and not (self.cpu and self.explicit)):
            raise Refused("not enough free memory at start")
        transient = 0 if self.cpu else self.peak + self.graphs
        multimodal = 0 if self.cpu else self.multimodal
        if self.explicit is not None:
            kv = self.explicit - multimodal
        else:
            counted = self.own if self.process or self.cpu else self.weights + self.outside
            kv = self.requested - counted - transient - multimodal
        if self.cpu and (kv <= 0 or kv > self.free):
            raise Refused("not enough free memory for KV")
        reserved = self.pending if self.reserve and self.explicit is None else 0
        if reserved and kv - reserved <= 0:
            raise Refused("nothing is left beside the reserve")
        inputs = [
            Input.measured(report.DEVICE_TOTAL, self.total, "device"),
            Input(report.REQUESTED, self.requested, "total x utilization", "configured"),
            Input.measured(report.WEIGHTS, self.weights, "weights"),
            Input.measured(report.DEVICE_FREE, self.free if self.reads_free else None, "device"),
        ]
        if not self.cpu:
            inputs.append(Input.measured(report.ACTIVATION_PEAK, self.peak, "torch"))
            inputs.append(Input.measured(report.GRAPH_ESTIMATE, self.graphs, "vLLM"))
            if multimodal:
                inputs.append(Input.measured(report.MULTIMODAL_RESERVATION, multimodal, "vLLM"))
        made = BudgetReport(
            "cpu" if self.cpu else "gpu",
            "Worker",
            "stock",
            kv - reserved,
            inputs=inputs,
            size_given=self.explicit is not None,
            linear_in_requested=self.explicit is None,
            counts_own_process=self.process or self.cpu,
            reserved_for_model_local_kv=reserved,
        )
        ledger.publish(
            report.MODEL_LOCAL_KV,
            {"declared_bytes": self.pending, "pending_bytes": self.pending, "uncharged_bytes": self.uncharged},
        )
        complete(made)
        return made

    def fits(self, made: BudgetReport) -> bool:
        """Whether there is a cache, and everything finds room: on the device, and in the share that was requested."""
        on_device = made.kv_bytes > 0 and made.kv_bytes + self.to_come <= self.free
        if self.explicit is not None:
            return on_device
        inside = self.own if self.process or self.cpu else self.weights + self.outside + self.uncharged
        return on_device and inside + made.kv_bytes + self.to_come <= self.requested


def pieces(line: str) -> list[str]:
    """The alternatives of one line of advice."""
    said = line.split("To fix: ", 1)[1] if "To fix: " in line else line.split(", set ", 1)[1]
    return said.removesuffix(".").split(", or ")


def applied(world: World, piece: str) -> World:
    """``world`` after what ``piece`` says was done, each part of it as far as it must be, and no further."""
    rest = piece
    others = world.others
    for pattern, change in (
        (r"--kv-cache-memory-bytes (\d+)", lambda n: {"explicit": int(n)}),
        (r"--gpu-memory-utilization ([\d.]+)", lambda n: {"utilization": float(n)}),
        (r"free (\d+) more bytes \([^)]*\) for this worker", lambda n: {"others": others - int(n)}),
        (r"lower --max-num-seqs until less than (\d+) bytes are pending", lambda n: {"pending": int(n) - 1}),
        (r"lower --max-num-seqs until at most (\d+) bytes are pending", lambda n: {"pending": int(n)}),
        (rf"({RESERVE})", lambda n: {"reserve": True}),
    ):
        found = re.search(pattern, rest)
        if found:
            world = replace(world, **change(found[1]))
            rest = rest.replace(found[0], "")
    assert rest.replace("with", "").strip() == "", (piece, rest)
    return world


def settled(world: World) -> World:
    """``world`` at the next start."""
    return replace(world, others=world.others + world.grew, grew=0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield
    ledger.publish(report.MODEL_LOCAL_KV, None)


def check(world: World) -> None:
    try:
        made = world.start()
    except Refused:
        return
    if not made.advice:
        assert world.fits(made) or not world.reads_free, "something does not fit, and nothing is said"
        return
    for piece in pieces(made.advice[0]):
        if "then restart" in piece:
            lacking = int(re.search(r"more than (\d+) bytes", piece)[1])  # type: ignore[index]
            assert world.free - world.to_come <= 0 and lacking == world.to_come - world.free
            continue
        after = applied(settled(world), piece)
        again = after.start()
        assert after.fits(again), (piece, again.kv_bytes)
        assert again.advice == [], piece


SIZES = st.integers(0, 8 * GIB) | st.integers(0, 30).map(lambda n: n * GIB)
WORLDS = st.builds(
    World,
    total=st.sampled_from([8 * GIB, 24 * GIB, 48 * GIB, 80 * GIB]),
    others=SIZES,
    context=st.sampled_from([0, GIB // 2]),
    weights=SIZES,
    outside=st.integers(0, GIB),
    peak=st.integers(0, 3 * GIB),
    graphs=st.integers(0, GIB),
    multimodal=st.just(0) | st.integers(0, 2 * GIB),
    pending=st.just(0) | SIZES,
    uncharged=st.just(0) | st.integers(0, GIB),
    utilization=st.integers(1, 100).map(lambda n: n / 100) | st.integers(1, 10_000).map(lambda n: n / 10_000),
    explicit=st.none() | st.none() | st.integers(1, 40 * GIB).map(lambda n: n + 2 * GIB),
    reserve=st.booleans(),
    process=st.booleans(),
    cpu=st.booleans(),
    grew=st.just(0) | SIZES,
).map(lambda world: world if world.cpu or world.process else replace(world, grew=0))
SMALL = World(24 * GIB, 0, 0, 2 * GIB, 0, GIB // 2, 0, 0, 0, 0, 0.9)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(world=WORLDS)
@example(world=replace(SMALL, utilization=0.15, pending=2 * GIB))
@example(world=replace(SMALL, utilization=0.05))
@example(world=replace(SMALL, explicit=GIB, pending=2 * GIB))
@example(world=replace(SMALL, explicit=22 * GIB))
@example(world=replace(SMALL, explicit=21 * GIB, pending=4 * GIB))
@example(world=replace(SMALL, cpu=True, utilization=0.3, pending=12 * GIB))
@example(world=replace(SMALL, process=True, uncharged=GIB, pending=GIB))
@example(world=World(8 * GIB, 0, GIB // 2, 0, 0, 0, 0, 0, 1, 0, 0.19, cpu=True, grew=6420976108))
@example(
    world=replace(SMALL, process=True, weights=0, explicit=2 * GIB, pending=12 * GIB, grew=12 * GIB, utilization=0.51)
)
def test_each_piece_of_advice_leads_to_a_plan_that_fits(world: World) -> None:
    check(world)


@settings(max_examples=300, deadline=None)
@given(world=WORLDS)
def test_without_free_memory_what_is_advised_still_gives_a_cache_within_the_share(world: World) -> None:
    """Whether the device has room is not known; the share is, and so is whether a cache comes out at all."""
    world = replace(world, reads_free=False)
    try:
        made = world.start()
    except Refused:
        return
    for line in made.advice:
        if "Free memory is unknown" in line or "No setting" in line:
            continue
        for piece in pieces(line):
            above = re.fullmatch(
                rf"--gpu-memory-utilization above ([\d.]+)( with {RESERVE})?, as far as memory is free", piece
            )
            if above is None:
                after = applied(settled(world), piece)
            else:
                after = replace(
                    settled(world), utilization=float(above[1]) + 1e-4, reserve=world.reserve or bool(above[2])
                )
            try:
                again = after.start()
            except Refused as error:
                assert str(error) != "nothing is left beside the reserve"
                continue
            assert again.kv_bytes > 0, piece


# The two cases of the field, and what is said


def advice(world: World) -> list[str]:
    return world.start().advice


def test_an_explicit_size_with_room_beside_it_needs_nothing() -> None:
    assert advice(replace(SMALL, explicit=GIB, pending=2 * GIB)) == []


def test_a_share_that_is_too_small_is_raised() -> None:
    (line,) = advice(replace(SMALL, utilization=0.15, pending=2 * GIB))
    assert line.startswith("No KV cache fits: it would have to leave room for 2.00 GiB of pending model-local KV")
    assert f"--gpu-memory-utilization 1 with {RESERVE}" in line
    (line,) = advice(replace(SMALL, utilization=0.05))
    assert line.startswith("No KV cache fits into the requested memory. To fix: --gpu-memory-utilization 1, or ")


def test_room_for_what_is_to_come_within_the_share() -> None:
    world = replace(SMALL, pending=2 * GIB)
    kv = world.requested - 4 * GIB - GIB // 2
    assert advice(world) == [
        f"To leave room for 2.00 GiB of pending model-local KV, set --kv-cache-memory-bytes {kv}, or {RESERVE}."
    ]
    assert advice(replace(world, reserve=True)) == []


def test_what_is_reserved_is_still_pending_on_the_device() -> None:
    """A neighbour has taken what the reserve counted on."""
    world = replace(SMALL, process=True, others=12 * GIB, utilization=0.5, pending=2 * GIB, reserve=True)
    assert advice(world) == []
    (line,) = advice(replace(world, grew=GIB))
    assert line.startswith("To fit into free memory (9.00 GiB are free")
    assert f"--kv-cache-memory-bytes {6 * GIB + GIB // 2} with --gpu-memory-utilization 0.4583" in line


def test_peak_and_graphs_need_room_too() -> None:
    (line,) = advice(replace(SMALL, explicit=22 * GIB))
    assert f"--kv-cache-memory-bytes {22 * GIB - GIB // 2}" in line


def report_with(**more: Any) -> BudgetReport:
    inputs = [
        Input.measured(report.DEVICE_TOTAL, 48 * GIB, "torch"),
        Input(report.REQUESTED, 30 * GIB, "device total x gpu_memory_utilization", "configured"),
    ]
    return BudgetReport("gpu", "Worker", "stock", 17 * GIB, inputs=inputs, **more)


def publish(pending: int | None, uncharged: int = 0) -> None:
    ledger.publish(report.MODEL_LOCAL_KV, {"pending_bytes": pending, "uncharged_bytes": uncharged})


def completed(made: BudgetReport) -> list[str]:
    complete(made)
    return made.advice


def test_nothing_to_set_when_nothing_is_to_come() -> None:
    assert completed(report_with()) == []
    publish(0)
    assert completed(report_with()) == []


def test_an_unknown_amount_gives_no_setting() -> None:
    publish(None)
    assert completed(report_with()) == [
        "The amount of pending model-local KV is unknown, so no setting can be computed for it."
    ]


def test_unknown_free_memory_beside_a_given_size_is_said() -> None:
    publish(2 * GIB)
    assert completed(report_with(size_given=True, linear_in_requested=False)) == [
        "Free memory is unknown, so 2.00 GiB of pending model-local KV may not fit beside the KV cache size that was "
        "set."
    ]


def test_bytes_in_place_that_the_budget_does_not_count() -> None:
    """Reserved blocks of a graph pool are in none of the terms through vLLM 0.26; own memory contains them."""
    publish(0, uncharged=GIB)
    assert completed(report_with()) == [
        "To leave room for 1.00 GiB already allocated that this budget does not count, set --kv-cache-memory-bytes "
        f"{16 * GIB}."
    ]
    assert completed(report_with(counts_own_process=True)) == []


def test_old_cpu_releases_are_set_by_their_variable() -> None:
    """Whole GiB, and never 0, which means the default there."""
    publish(2 * GIB)
    for free, said in ((18, "VLLM_CPU_KVCACHE_SPACE=16"), (2.5, "free 17716740096 more bytes (16.50 GiB) for")):
        made = report_with(kv_setting="VLLM_CPU_KVCACHE_SPACE", linear_in_requested=False, size_given=True)
        made.platform = "cpu"
        made.inputs.append(Input.measured(report.DEVICE_FREE, int(free * GIB), "memory node 0"))
        assert said in completed(made)[0]


def test_a_worker_shares_what_is_free_with_its_neighbours() -> None:
    made = report_with(size_given=True, linear_in_requested=False)
    made.platform = "cpu"
    made.inputs.append(Input.measured(report.DEVICE_FREE, 20 * GIB, "memory node 0"))
    made.inputs.append(Input.measured(report.FREE_SHARE, 10 * GIB, "two workers"))
    assert f"--kv-cache-memory-bytes {10 * GIB}" in completed(made)[0]


@given(
    total=st.integers(1 << 20, 1 << 42),
    utilization=st.floats(0.0001, 1),
    change=st.integers(-(1 << 42), 1 << 42),
)
def test_the_utilization_is_the_largest_that_keeps_the_change(total: int, utilization: float, change: int) -> None:
    requested = math.ceil(total * utilization)
    made = BudgetReport("gpu", "Worker", "stock", 0)
    made.inputs += [
        Input.measured(report.DEVICE_TOTAL, total, "torch"),
        Input(report.REQUESTED, requested, "share", "configured"),
    ]
    value = utilization_for(made, change)
    if value is not None:
        assert math.ceil(total * value) - requested <= change
        assert value == 1 or math.ceil(total * (value + 1e-4)) - requested > change - 2
