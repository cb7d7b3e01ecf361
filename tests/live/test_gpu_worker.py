# SPDX-License-Identifier: Apache-2.0
"""The GPU hook around vLLM's real ``Worker.determine_available_memory``, on a device that is only numbers."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
# The device of numbers and the scripted NVML library serve the unit tests too.
from support.gpu_card import GIB, Card, Lines, Runner, make_worker, stand_in
from support.nvml_library import ALL_ONES, NvmlLibrary
from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.loading.apply import install, remove
from vllm_omni_patch.patches.available_memory import PATCH, explain, hooks
from vllm_omni_patch.patches.available_memory.gpu import budget, profiling
from vllm_omni_patch.patches.available_memory.report import output, picture, report
from vllm_omni_patch.patches.available_memory.report.report import BudgetReport
from vllm_omni_patch.telemetry import numbers

pytest_plugins = ["support.nvml_library"]

WORKER = "vllm.v1.worker.gpu_worker"
STRANGER = 546113
OWN_PID = os.getpid()


def gib(value: float) -> int:
    return int(value * GIB)


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("vllm.omni_patch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("VLLM_OMNI_PATCH_GPU_BUDGET", "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path / "reports"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield
    ledger.publish(report.MODEL_LOCAL_KV, None)


@pytest.fixture
def card_of(nvml_library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Card]:
    def make(total: float, context: float = 0) -> Card:
        card = Card(gib(total), nvml_library, gib(context))
        stand_in(monkeypatch, card)
        return card

    return make


@pytest.fixture
def installed() -> Iterator[None]:
    """The hooks of vLLM's GPU worker, put in and taken out as the loader does it."""
    import importlib

    done = []
    for target in PATCH.targets:
        if target.module in (WORKER, "vllm.v1.worker.startup_plan"):
            done.append(install(PATCH, target, importlib.import_module(target.module), lambda: None))
    yield
    for entry in reversed(done):
        assert remove(entry) == ""


@pytest.fixture
def process(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")


def written(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "reports" / f"memory-{OWN_PID}.json").read_text())


def inputs(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in data["inputs"]}


# vLLM's own number stays as it is


CASES = (
    {"utilization": 0.9, "weights": gib(6), "peak": gib(2), "outside": gib(0.3)},
    {"utilization": 0.5, "weights": gib(6), "peak": gib(2), "graphs": gib(0.7)},
    {"requested": gib(23) + 1, "weights": gib(3) + 7, "peak": 12345, "outside": 678, "graphs": 91},
    {"utilization": 0.2, "weights": gib(9), "peak": gib(2)},
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reports", [True, False])
def test_with_stock_no_attribute_of_the_worker_changes(
    card_of: Callable[..., Card],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    case: dict[str, Any],
    reports: bool,
) -> None:
    def budget() -> tuple[Any, dict[str, Any]]:
        card = card_of(40, 0.5)
        card.set_neighbour(STRANGER, gib(3))
        worker = make_worker(card, **case)
        value = worker.determine_available_memory()
        names = ("total_consumed", "peak_activation_memory", "cudagraph_memory_estimate")
        names += ("available_kv_cache_memory_bytes",)
        return value, {name: getattr(worker, name) for name in names}

    if not reports:
        monkeypatch.delenv("VLLM_OMNI_PATCH_REPORT_DIR")
    alone = budget()
    request.getfixturevalue("installed")
    assert budget() == alone


def test_stock_still_refuses_when_a_neighbour_frees_memory(card_of: Callable[..., Card], installed: None) -> None:
    card = card_of(93.58)
    card.set_neighbour(STRANGER, gib(10))
    worker = make_worker(card, requested=gib(56.15), weights=gib(5), peak=gib(2))
    card.on_read = lambda: card.set_neighbour(STRANGER, 0)
    with pytest.raises(AssertionError, match="Error in memory profiling"):
        worker.determine_available_memory()


def test_the_hook_goes_away_without_trace() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    names = ("determine_available_memory", "init_device", "initialize_from_config")
    before = [vars(Worker)[name] for name in names]
    targets = [target for target in PATCH.targets if target.module == WORKER]
    done = [install(PATCH, target, sys.modules[WORKER], lambda: None) for target in targets]
    # By identity: a wrapper says that it equals what it wraps.
    assert all(vars(Worker)[name] is not old for name, old in zip(names, before, strict=True))
    assert [remove(entry) for entry in reversed(done)] == [""] * len(names)
    assert all(vars(Worker)[name] is old for name, old in zip(names, before, strict=True))


# The process budget


def test_process_budget(card_of: Callable[..., Card], process: None, tmp_path: Path) -> None:
    card = card_of(80, 0.5)
    card.set_neighbour(STRANGER, gib(20))
    worker = make_worker(card, requested=gib(40), weights=gib(12), peak=gib(2), outside=gib(0.25), graphs=gib(0.5))
    value = worker.determine_available_memory()
    own = gib(0.5) + gib(12) + gib(0.25)
    assert value == gib(40) - own - gib(2) - gib(0.5)
    assert type(value) is int
    # Attributes that compile_or_warm_up_model reads.
    assert worker.total_consumed == own
    assert worker.peak_activation_memory == gib(2) + gib(0.5)
    assert worker.available_kv_cache_memory_bytes == value
    assert worker.cudagraph_memory_estimate == gib(0.5)
    found = inputs(written(tmp_path))
    assert found["own_process"]["value"] == own and found["own_process"]["state"] == "measured"
    assert found["other_processes"]["value"] == gib(20)
    assert found["graph_estimate"]["value"] == gib(0.5)
    assert found["activation_peak"]["value"] == gib(2)
    assert found["weights"]["value"] == gib(12)
    assert card.library.memory_queries == 0


@pytest.mark.parametrize("freed", [7.23, 17.6])
def test_a_neighbour_frees_memory(card_of: Callable[..., Card], process: None, lines: Lines, freed: float) -> None:
    """Free 82.94 before; 90.17 after, or nearly equal. Requested 56.15, weights 15, peak 2, other 0.6: 38.55 GiB."""
    card = card_of(200, 0.1)
    card.set_neighbour(STRANGER, gib(200 - 0.1 - 82.94))
    worker = make_worker(card, requested=gib(56.15), weights=gib(15), peak=gib(2), outside=gib(0.5))
    held = card.neighbours[STRANGER]
    card.on_read = lambda: card.set_neighbour(STRANGER, held - gib(15.6 + 7.23) if freed == 7.23 else held - gib(15.5))
    assert worker.determine_available_memory() / GIB == pytest.approx(38.55, abs=0.001)
    assert any("another process released memory" in text for text in lines.warnings())


def test_own_memory_unknown(card_of: Callable[..., Card], process: None, lines: Lines) -> None:
    """A process-local estimate, weights and peak: at most 39.15; one line says why; no abort."""
    card = card_of(200, 0.1)
    card.listed = False
    card.set_neighbour(STRANGER, gib(200 - 0.1 - 82.94))
    worker = make_worker(card, requested=gib(56.15), weights=gib(15), peak=gib(2), outside=gib(0.5))
    held = card.neighbours[STRANGER]
    card.on_read = lambda: card.set_neighbour(STRANGER, held - gib(22.83))
    value = worker.determine_available_memory()
    assert value / GIB == pytest.approx(39.15, abs=0.001)
    reasons = [text for text in lines.warnings() if "is not among" in text]
    assert len(reasons) == 1


def test_second_instance_on_a_busy_card(card_of: Callable[..., Card], process: None) -> None:
    card = card_of(60.96, 0.1)
    card.set_neighbour(STRANGER, gib(24.4))
    worker = make_worker(card, utilization=0.4, weights=gib(2.2), peak=gib(0.6))
    assert worker.determine_available_memory() / GIB == pytest.approx(21.48, abs=0.01)


def test_a_slice_without_values(
    nvml_library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch, process: None, tmp_path: Path
) -> None:
    """Decimal GB as in the report: total 16, utilisation 0.9, weights 6, peak 1: 7.4 for KV."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0000")
    card = Card(16_000_000_000, nvml_library)
    card.row = 141_000_000_000  # what the parent would say
    stand_in(monkeypatch, card)
    worker = make_worker(card, utilization=0.9, weights=6_000_000_000, peak=1_000_000_000)
    assert worker.determine_available_memory() == 7_400_000_000
    found = inputs(written(tmp_path))
    assert found["device_total"]["value"] == 16_000_000_000
    assert found["own_process"]["state"] == "unknown" and "MIG-0000" in found["own_process"]["source"]
    assert written(tmp_path)["policy"] == "process, own memory unknown"


ROWS = {
    "listed": (True, None),
    "absent": (False, None),
    "without a value": (True, ALL_ONES),
    "zero": (True, 0),
    "absurd": (True, ALL_ONES - 4096),
    "larger than the device": (True, gib(500)),
}


@pytest.mark.parametrize("how", ROWS)
def test_a_miss_is_never_zero_bytes(card_of: Callable[..., Card], process: None, lines: Lines, how: str) -> None:
    """vllm-omni issue 6243: 30 requested, weights 10, peak 2, other 1: 17 GiB however the lookup ends."""
    card = card_of(48)
    card.listed, card.row = ROWS[how]
    card.set_neighbour(STRANGER, gib(11))
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    assert worker.determine_available_memory() == gib(17)
    assert len([text for text in lines.warnings() if "device memory is unknown" in text]) == (how != "listed")


def test_nvml_that_fails_is_a_miss(card_of: Callable[..., Card], process: None) -> None:
    card = card_of(48)
    card.extra = ("rc nvmlDeviceGetComputeRunningProcesses 999",)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    assert worker.determine_available_memory() == gib(17)


@pytest.mark.parametrize("held", [40.0, 3.0, 13.5])
def test_a_stranger_with_our_pid_number(card_of: Callable[..., Card], process: None, lines: Lines, held: float) -> None:
    """The host has another process of our number. Far above or below what torch holds, or near and never moving."""
    card = card_of(140, 0.5)
    card.row = gib(held)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    hooks._baselines[worker] = budget.Baseline(own=gib(held), torch_reserved=0)
    value = worker.determine_available_memory()
    assert value == gib(17)
    assert any("another process" in text for text in lines.warnings())


STRANGERS = {"far above": 45.0, "far below": 3.0, "near, and never moving": 13.5, "more than is in use": 16.0}


@pytest.mark.parametrize("how", STRANGERS)
@pytest.mark.parametrize("policy", ["stock", "process"])
@pytest.mark.parametrize("explicit", [False, True])
def test_no_report_believes_a_stranger(
    card_of: Callable[..., Card],
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    how: str,
    policy: str,
    explicit: bool,
) -> None:
    """80 GiB, 12 GiB of weights, and a row of our PID number that is a stranger's: in no policy, and in no figure that
    is made from it, is it taken for ours; not in the file, the gauges or the picture."""
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", policy)
    card = card_of(80, 0.5)
    card.row = gib(STRANGERS[how])
    worker = init_device(monkeypatch, card, 0.5)
    card.allocate(gib(12))
    worker.model_runner = Runner(card, gib(12), gib(1), gib(0.25), 0)
    worker.model_config = SimpleNamespace(multimodal_config=None)
    if explicit:
        worker.cache_config.kv_cache_memory_bytes = gib(8)
    monkeypatch.setattr(numbers, "mine", numbers.ProcessNumbers())
    worker.determine_available_memory()
    data = written(tmp_path)
    found = inputs(data)
    for name in ("own_process", "other_processes", "non_torch"):
        assert (found[name]["state"], found[name]["value"]) == ("unknown", None), name
    assert "another process" in found["own_process"]["source"]
    gauges = {name for name, _ in metrics.values()}
    assert not gauges & {"memory_own_process_bytes", "memory_other_processes_bytes", "memory_non_torch_bytes"}
    parts = dict(picture.bar(BudgetReport.from_json(data)).parts)
    assert "other processes" not in parts and "not claimed" not in parts and "not claimed, or not known" in parts


@pytest.mark.parametrize("policy", ["stock", "process"])
@pytest.mark.parametrize("reserved", [10**15, gib(13)], ids=["impossible", "more than the process has"])
def test_what_torch_cannot_have_reserved_is_not_subtracted(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    policy: str, reserved: int,
) -> None:  # fmt: skip
    """A pluggable allocator's figure: memory outside torch is then unknown, and not zero."""
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", policy)
    card = card_of(80, 0.5)
    worker = make_worker(card, requested=gib(40), weights=gib(12), peak=gib(2), outside=gib(0.25), graphs=0)
    profile_of = profiling.profile_of
    monkeypatch.setattr(profiling, "profile_of", lambda *args: replace(profile_of(*args), torch_reserved=reserved))
    worker.determine_available_memory()
    found = inputs(written(tmp_path))
    assert (found["non_torch"]["state"], found["non_torch"]["value"]) == ("unknown", None)
    assert ("torch_reserved" in found) == (reserved < 10**15)


def test_the_refusal_does_not_believe_a_stranger(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(60.96)
    card.set_neighbour(STRANGER, gib(24.26))
    card.row = gib(30)
    with pytest.raises(ValueError, match=r"42.67 GiB wanted, 36.70 GiB free") as refused:
        init_device(monkeypatch, card, 0.7)
    assert "other processes hold" not in str(refused.value)


@pytest.mark.parametrize("neighbour", [0, 60])
def test_the_fallback_does_not_depend_on_a_neighbour(
    card_of: Callable[..., Card], process: None, neighbour: float
) -> None:
    card = card_of(192)
    card.listed = False
    card.set_neighbour(STRANGER, gib(neighbour))
    worker = make_worker(card, requested=gib(120), weights=gib(59.16), peak=gib(2))
    assert worker.determine_available_memory() / GIB == pytest.approx(120 - 59.16 - 2, abs=1e-6)


def test_a_neighbour_wakes_inside_the_window(card_of: Callable[..., Card], process: None) -> None:
    card = card_of(142, 0.1)
    worker = make_worker(card, requested=gib(65.32), weights=gib(0.93), peak=gib(0.34), outside=gib(0.04))
    card.on_read = lambda: card.set_neighbour(STRANGER, gib(32.26))
    assert worker.determine_available_memory() / GIB == pytest.approx(63.91, abs=0.001)


def test_a_negative_graph_estimate(card_of: Callable[..., Card], process: None, lines: Lines) -> None:
    card = card_of(180)
    worker = make_worker(card, requested=gib(96), weights=gib(48), peak=gib(2), graphs=0)
    worker.model_runner.graph_shift = -gib(35.69)
    assert worker.determine_available_memory() == gib(46)
    assert worker.peak_activation_memory == gib(2)
    assert any("-35.69 GiB" in text for text in lines.warnings())


def test_a_negative_estimate_of_a_runner_that_cannot_be_watched(card_of: Callable[..., Card], process: None) -> None:
    class Fixed:
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        model_memory_usage = gib(48)

        def profile_run(self, randomize_inputs: bool = False) -> None:
            self.inner.profile_run(randomize_inputs)

        def profile_cudagraph_memory(self) -> int:
            return -gib(35.69)

    card = card_of(180)
    worker = make_worker(card, requested=gib(96), weights=gib(48), peak=gib(2), graphs=0)
    worker.model_runner = Fixed(worker.model_runner)
    assert worker.determine_available_memory() == gib(46)


def test_a_neighbour_that_grows_while_graphs_are_estimated(card_of: Callable[..., Card], process: None) -> None:
    card = card_of(180, 0.5)
    worker = make_worker(card, requested=gib(60), weights=gib(20), peak=gib(2), graphs=gib(1))

    def grow() -> None:
        card.set_neighbour(STRANGER, card.neighbours.get(STRANGER, 0) + gib(5))

    card.on_read = grow
    assert worker.determine_available_memory() == gib(60) - gib(20.5) - gib(2) - gib(1)


INSTANCES = {
    # The two instances of vllm issue 55827, on a card of 31.36 GiB.
    "A": {"utilization": 0.35, "weights": gib(5), "peak": gib(0.5), "outside": gib(0.26), "graphs": gib(0.2)},
    "B": {"utilization": 0.20, "weights": gib(2.5), "peak": gib(0.3), "outside": gib(0.15), "graphs": gib(0.1)},
}


@pytest.mark.parametrize("who", INSTANCES)
def test_two_instances_in_any_interleaving(card_of: Callable[..., Card], process: None, who: str) -> None:
    """200 orders: at every look at the device the other instance may load, profile, capture or release."""
    other = INSTANCES["B" if who == "A" else "A"]

    def steps() -> list[int]:
        held, found = gib(0.3), []
        for change in ("weights", "peak", "outside", "graphs"):
            held += other[change]
            found.append(held)
            if change in ("peak", "graphs"):
                held -= other[change]
                found.append(held)
        return [gib(0.3), *found]

    def alone() -> int:
        card = card_of(31.36, 0.4)
        return make_worker(card, **INSTANCES[who]).determine_available_memory()

    expected = alone()
    for seed in range(200):
        order = random.Random(seed)
        card = card_of(31.36, 0.4)
        plan = steps()
        at = order.randrange(len(plan))
        card.set_neighbour(STRANGER, plan[at])

        def act(order: random.Random = order, card: Card = card, plan: list[int] = plan) -> None:
            held = card.neighbours[STRANGER]
            later = plan[plan.index(held) + 1 :]
            if later and order.random() < 0.6:
                card.set_neighbour(STRANGER, later[order.randrange(min(3, len(later)))])

        worker = make_worker(card, **INSTANCES[who])
        card.on_read = act
        assert worker.determine_available_memory() == expected, f"order {seed}"


# What has precedence, and what is subtracted besides


def test_an_explicit_size_is_kept_and_compared_with_what_is_free(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    ledger.publish(report.MODEL_LOCAL_KV, {"declared_bytes": gib(2), "resident_bytes": 0, "pending_bytes": gib(2)})
    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2))
    worker.cache_config.kv_cache_memory_bytes = 7_160_348_160
    assert worker.determine_available_memory() == 7_160_348_160
    assert worker.model_runner.profiled == 1
    assert not hasattr(worker, "peak_activation_memory")
    data = written(tmp_path)
    assert data["policy"] == "explicit kv_cache_memory_bytes"
    found = inputs(data)
    assert found["device_free"]["value"] == card.free and found["own_process"]["value"] == card.own
    assert data["advice"] == []  # the device has room for both
    worker.cache_config.kv_cache_memory_bytes = card.free
    assert worker.determine_available_memory() == card.free
    assert f"--kv-cache-memory-bytes {card.free - gib(2)}" in written(tmp_path)["advice"][0]


@pytest.mark.parametrize(("utilization", "pending"), [(0.15, 2.0), (0.15, 0.0), (0.9, 3.0), (0.3, 20.0)])
def test_what_is_advised_leads_to_a_real_start_that_needs_no_more(
    card_of: Callable[..., Card],
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    utilization: float,
    pending: float,
) -> None:
    """Every setting of the advice, given to vLLM's own worker on the same card."""

    def start(utilization: float, size: int | None) -> tuple[int, list[str], int]:
        ledger.publish(report.MODEL_LOCAL_KV, {"declared_bytes": gib(pending), "pending_bytes": gib(pending)})
        card = card_of(40, 0.5)
        worker = make_worker(card, utilization=utilization, weights=gib(5), peak=gib(1.5), outside=gib(0.25))
        worker.cache_config.kv_cache_memory_bytes = size
        value = worker.determine_available_memory()
        left = card.total - card.outside_torch - card.allocated - gib(1.5) - value - gib(pending)
        return value, written(tmp_path)["advice"], left

    _, (line,), _ = start(utilization, None)
    settings = re.split(", set |To fix: ", line.removesuffix("."))[-1].split(", or ")
    assert len(settings) > 1
    for setting in settings:
        size = re.search(r"--kv-cache-memory-bytes (\d+)", setting)
        share = re.search(r"--gpu-memory-utilization ([\d.]+)", setting)
        if "--max-num-seqs" in setting:
            continue
        monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1" if "RESERVE" in setting else "0")
        value, advice, left = start(float(share[1]) if share else utilization, int(size[1]) if size else None)
        assert value > 0 and left >= 0, setting
        assert advice == [], setting


def test_the_multimodal_reservation_stays(card_of: Callable[..., Card], process: None, tmp_path: Path) -> None:
    from vllm.config.multimodal import MultiModalConfig

    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    worker.model_config = SimpleNamespace(multimodal_config=MultiModalConfig(mm_ipc_gpu_memory_gb=1.5))
    assert worker.determine_available_memory() == gib(15.5)
    assert inputs(written(tmp_path))["multimodal_reservation"]["value"] == gib(1.5)


def test_a_neighbour_cannot_make_the_multimodal_reservation_fail(card_of: Callable[..., Card], process: None) -> None:
    from vllm.config.multimodal import MultiModalConfig

    card = card_of(80)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    worker.model_config = SimpleNamespace(multimodal_config=MultiModalConfig(mm_ipc_gpu_memory_gb=1.5))
    card.on_read = lambda: card.set_neighbour(STRANGER, gib(40))
    assert worker.determine_available_memory() == gib(15.5)


@pytest.mark.parametrize("policy", ["stock", "process"])
def test_reserve_takes_the_pending_part_once(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    """The resident part is in the measurement already; subtracting it too would count it twice."""
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", policy)
    declared = {"declared_bytes": gib(3), "resident_bytes": gib(1), "pending_bytes": gib(2), "entries": []}

    def budget() -> int:
        card = card_of(48)
        worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
        return worker.determine_available_memory()

    ledger.publish(report.MODEL_LOCAL_KV, declared)
    plain = budget()
    assert "--kv-cache-memory-bytes" in written(tmp_path)["advice"][0]
    assert "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV=1" in written(tmp_path)["advice"][0]
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    assert budget() == plain - gib(2)
    data = written(tmp_path)
    assert data["reserved_for_model_local_kv"] == gib(2)
    assert data["advice"] == []


def test_reserve_with_an_unknown_amount_subtracts_nothing(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    ledger.publish(report.MODEL_LOCAL_KV, {"declared_bytes": None, "resident_bytes": None, "pending_bytes": None})
    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    assert worker.determine_available_memory() == gib(17)
    assert any("is unknown; nothing is reserved" in text for text in lines.warnings())


def test_reserve_that_leaves_nothing_says_so(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    ledger.publish(report.MODEL_LOCAL_KV, {"pending_bytes": gib(17)})
    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    with pytest.raises(RuntimeError, match=r"No KV cache fits: the budget is 18253611008 bytes .*--max-num-seqs"):
        worker.determine_available_memory()


def test_a_start_up_plan_belongs_to_its_policy(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import startup_plan

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *a: SimpleNamespace())
    for name in ("get_device_capability", "get_device_name", "get_device_total_memory"):
        monkeypatch.setattr(startup_plan.current_platform, name, lambda *a, **k: 1)
    worker = make_worker(card_of(48), requested=gib(30))
    stock = startup_plan.compute_plan_fingerprint(worker.vllm_config, 0, 1)
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")
    assert startup_plan.compute_plan_fingerprint(worker.vllm_config, 0, 1) == f"{stock}-process"


# Unified memory


def test_unified_memory_is_bounded_by_the_host(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm issue 46307: own 50 and peak 2 of 119; the host has 20 left, so KV gets what that leaves beside the peak."""
    card = card_of(119)
    card.integrated = True
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib(100), total=gib(119)))
    worker = make_worker(card, requested=gib(83), weights=gib(50), peak=gib(2))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib(20), total=gib(119)))
    assert worker.determine_available_memory() == gib(20) - gib(2) - budget.UNIFIED_RESERVE
    assert card.library.memory_queries == 0


def init_device(monkeypatch: pytest.MonkeyPatch, card: Card, utilization: float) -> Any:
    """Run vLLM's real ``init_device`` up to the memory check, without process groups."""
    import torch
    from vllm.v1.worker import gpu_worker

    worker = make_worker(card, utilization=0.01)
    worker.device_config = SimpleNamespace(device_type="cuda", device="cuda")
    worker.load_config = worker.vllm_config.load_config
    worker.distributed_init_method = ""
    worker.model_config = SimpleNamespace(dtype=torch.float16, seed=0)
    worker.cache_config.gpu_memory_utilization = utilization
    for name in ("init_worker_distributed_environment", "warn_if_flashinfer_kernels_missing", "set_random_seed"):
        monkeypatch.setattr(gpu_worker, name, lambda *a, **k: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(gpu_worker.current_platform, "check_if_supports_dtype", lambda dtype: None)
    monkeypatch.setattr(gpu_worker.current_platform, "logical_device_id_to_visible_device_id", lambda index: index)
    monkeypatch.setattr(gpu_worker.Worker, "_init_workspace_and_model_runner", lambda self: None)
    worker.init_device()
    return worker


def test_refusal_names_the_neighbours(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(60.96)
    card.take_outside_torch(gib(0.1))
    card.set_neighbour(STRANGER, gib(24.26))
    with pytest.raises(ValueError, match="Free memory on device") as refused:
        init_device(monkeypatch, card, 0.7)
    for part in ("42.67 GiB wanted", "36.60 GiB free", "other processes hold 24.26 GiB", "at most 0.6003"):
        assert part in str(refused.value)


def test_refusal_mentions_unified_memory(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(119.56)
    card.integrated = True
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib(56.3), total=gib(119.56)))
    with pytest.raises(ValueError, match="unified memory") as refused:
        init_device(monkeypatch, card, 0.5)
    assert "59.78 GiB wanted, 56.30 GiB available" in str(refused.value)
    assert card.library.memory_queries == 0


def test_stock_refusal_is_vllms_own(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(60.96)
    card.set_neighbour(STRANGER, gib(24.26))
    with pytest.raises(ValueError) as refused:
        init_device(monkeypatch, card, 0.7)
    assert "other processes hold" not in str(refused.value)


def test_the_baseline_is_taken_before_the_weights(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(60, 0.4)
    worker = init_device(monkeypatch, card, 0.5)
    assert hooks._baselines[worker] == budget.Baseline(own=gib(0.4), torch_reserved=0)


# Our own failures


@pytest.mark.parametrize("policy", ["stock", "process"])
@pytest.mark.parametrize("broken", ["build", "emit", "write_report", "set_gauge"])
def test_a_failing_report_changes_nothing(
    card_of: Callable[..., Card],
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    lines: Lines,
    policy: str,
    broken: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    owner = {"build": explain, "emit": output, "write_report": ledger, "set_gauge": metrics}[broken]
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", policy)
    monkeypatch.setattr(owner, broken, fail)
    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1))
    assert worker.determine_available_memory() == gib(17)
    assert any("broken on purpose" in text for text in lines.warnings())


@pytest.mark.parametrize("broken", ["profile_of", "read_device", "torch_memory"])
def test_a_failing_reading_leaves_vllms_figures(
    card_of: Callable[..., Card], process: None, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(profiling, broken, fail)
    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), peak=gib(2), outside=gib(1), graphs=gib(1))
    assert worker.determine_available_memory() == gib(16)


def test_a_wrong_setting_is_an_error(
    card_of: Callable[..., Card], installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "mine")
    worker = make_worker(card_of(48), requested=gib(30))
    with pytest.raises(RuntimeError, match="VLLM_OMNI_PATCH_GPU_BUDGET='mine' is not accepted; use stock, process"):
        worker.determine_available_memory()


def test_vllms_own_error_passes_and_nothing_stays_swapped(card_of: Callable[..., Card], process: None) -> None:
    import torch
    from vllm.v1.worker import gpu_worker

    card = card_of(48)
    worker = make_worker(card, requested=gib(30), weights=gib(10), graphs=gib(1))
    before = (gpu_worker.memory_profiling, torch.accelerator.get_memory_info)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    worker.model_runner.profile_run = fail
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        worker.determine_available_memory()
    assert (gpu_worker.memory_profiling, torch.accelerator.get_memory_info) == before
    assert "profile_cudagraph_memory" not in vars(worker.model_runner)
