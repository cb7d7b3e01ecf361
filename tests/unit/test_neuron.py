# SPDX-License-Identifier: Apache-2.0
"""The decision of one Neuron worker: mode, settings, policy, and the agreement of compile host and device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.available_memory.neuron.budget import WorkerView, decide, read_settings, usable_stats
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB, BelowMinimumError
from vllm_omni_patch.patches.available_memory.neuron.laid_out import LaidOut

MIB = 1 << 20
CAP = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
COMPILE = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}


def model(bytes_: int, device: str = "meta") -> torch.nn.Module:
    """A module with one parameter of that many bytes; on ``meta`` it takes none."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(bytes_, dtype=torch.uint8, device=device), requires_grad=False)
    return module


def view(used: float = 10, gmu: float = 0.9, **more: Any) -> WorkerView:
    return WorkerView(gpu_memory_utilization=gmu, model=model(int(used * GIB)), **more)


def stats(used: float, free: float) -> Callable[[], tuple[int, int]]:
    return lambda: (int(used * GIB), int(free * GIB))


def no_runtime() -> tuple[int, int]:
    raise RuntimeError("the runtime was asked")


TRN2 = stats(11, 13)  # the runtime always holds more than the model


def by_name(result: Any) -> dict[str, Any]:
    return {item.name: item for item in result.report.inputs}


# -- settings


@pytest.mark.parametrize(
    ("name", "bad", "accepted"),
    [
        *((CAP, value, r"\(0, 1\]") for value in ("0", "-0.1", "1.5", "inf", "nan", "abc", "1e400")),
        *((MINIMUM, value, "finite number of GiB") for value in ("nan", "inf", "-inf", "one")),
        ("VLLM_NEURON_CPU_COMPILE", "maybe", "true"),
        ("VLLM_NEURON_CPU_COMPILE", "2", "true"),
        ("VLLM_NEURON_CPU_MODE", "2", "true"),
        *(("NEURON_LOGICAL_NC_CONFIG", value, "1 or 2") for value in ("0", "3", "1.0", "x", "nan")),
        ("NEURON_RT_VIRTUAL_CORE_SIZE", "4", "1 or 2"),
        ("VLLM_OMNI_PATCH_NEURON_POLICY", "best", "cap, need"),
        ("VLLM_OMNI_PATCH_NEURON_USED_BYTES", "guess", "auto, model, runtime"),
    ],
)
def test_a_bad_value_names_variable_value_and_range(name: str, bad: str, accepted: str) -> None:
    for kind in (RuntimeError, ValueError):  # callers of the worker expect the one, upstream raises the other
        with pytest.raises(kind, match=accepted) as caught:
            decide(view(), TRN2, {name: bad})
        assert name in str(caught.value) and repr(bad) in str(caught.value)


@pytest.mark.parametrize("blank", ["", " "])
def test_empty_is_unset(blank: str) -> None:
    from vllm_omni_patch.patches.available_memory.flags import NEURON_FLAGS

    environ = {flag.name: blank for flag in NEURON_FLAGS}
    assert read_settings(environ) == read_settings({})
    assert decide(view(), TRN2, environ).report.kv_bytes == 6_957_847_019


def test_modes_exclude_each_other() -> None:
    with pytest.raises(RuntimeError, match="exclude each other"):
        decide(view(), TRN2, {**COMPILE, "VLLM_NEURON_CPU_MODE": "1"})


def test_the_older_name_of_lnc_counts_where_the_newer_is_unset() -> None:
    assert read_settings({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}).lnc == 1
    assert read_settings({"NEURON_RT_VIRTUAL_CORE_SIZE": "1", "NEURON_LOGICAL_NC_CONFIG": "2"}).lnc == 2


# -- order of the flow


def test_the_compile_host_asks_no_runtime_and_no_host(tmp_path: Path) -> None:
    # An empty tree: reading host memory there would be an error (B29: compiling needs no RAM for KV).
    assert decide(view(), no_runtime, COMPILE, tmp_path).report.kv_bytes == 6_957_847_019


def test_cpu_mode_asks_no_runtime(tmp_path: Path) -> None:
    host(tmp_path, 256)
    assert decide(view(), no_runtime, {"VLLM_NEURON_CPU_MODE": "1"}, tmp_path).report.policy == "cpu"


def test_the_device_asks_the_runtime() -> None:
    with pytest.raises(RuntimeError, match="the runtime was asked"):
        decide(view(), no_runtime, {})


def test_a_compile_host_without_a_target_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="NEURON_PLATFORM_TARGET_OVERRIDE is not set"):
        decide(view(), no_runtime, {"VLLM_NEURON_CPU_COMPILE": "1"})


# -- runtime figures (rows 26 and 27)


@pytest.mark.parametrize("pair", [(-1, -1), (10 * GIB, 0), (-1, 5), (0, 0), (5, -1), None, (1,), ("a", "b"), 7])
def test_unusable_figures_raise(pair: Any) -> None:
    with pytest.raises(RuntimeError, match="memory figures are unusable"):
        decide(view(), lambda: pair, {})


def test_nothing_in_use_is_usable() -> None:
    assert usable_stats((0, 24 * GIB)) == (0, 24 * GIB)


# -- every row of the worked examples through the whole decision, on both sides

ROWS = [
    (1, 10, 0.9, {}, 6_957_847_019),
    (2, 13.5, 0.9, {}, 6_957_847_019),
    (3, 18.12, 0.9, {}, 3_736_621_548),
    (4, 10, 0.92, {}, 7_112_465_841),
    (5, 10, 1.0, {}, 7_730_941_132),
    (6, 10, 0.9, {CAP: "1.0"}, 12_455_405_158),
    (6, 10, 0.9, {CAP: "1"}, 12_455_405_158),
    (7, 18.12, 0.9, {CAP: "0.05"}, 1_159_641_169),
    (8, 18.12, 0.9, {CAP: "0.08"}, 1_855_425_871),
    (9, 10, 0.9, {CAP: "0.046"}, BelowMinimumError),
    (10, 10, 0.9, {CAP: "0.0463"}, 1_073_827_723),
    (11, 10, 0.65, {CAP: "0.15"}, 2_512_555_868),
    (12, 8, 0.9, {CAP: "0.35"}, 8_117_488_189),
    (13, 8, 0.95, {CAP: "0.48"}, 11_751_030_521),
    (14, 21.79, 0.8, {}, BelowMinimumError),
    (15, 21.79, 0.8, {MINIMUM: "0"}, 0),
    (18, 10, 0.9, {CAP: "0"}, RuntimeError),
    (19, 10, 0.9, {CAP: "-0.1"}, RuntimeError),
    (20, 10, 0.9, {CAP: "1.5"}, RuntimeError),
    (20, 10, 0.9, {CAP: "inf"}, RuntimeError),
    (21, 10, 0.9, {CAP: "abc"}, RuntimeError),
    (21, 10, 0.9, {CAP: ""}, 6_957_847_019),
    (22, 10, 0.9, {CAP: "nan"}, RuntimeError),
    (23, 10, 0.9, {CAP: "0.01", MINIMUM: "0"}, 231_928_233),
    (23, 10, 0.9, {CAP: "0.01", MINIMUM: "-5"}, 231_928_233),
    (23, 10, 0.9, {CAP: "0.01", MINIMUM: "nan"}, RuntimeError),
    (24, 10, 0.9, {MINIMUM: "inf"}, RuntimeError),
    (25, 10, 0.9, {CAP: "0.03", MINIMUM: "0.5"}, 695_784_701),
    (28, 10, float("nan"), {}, ValueError),
    (29, 0, 0.05, {CAP: "1", "VLLM_OMNI_PATCH_NEURON_USED_BYTES": "model"}, 1_288_490_188),
    (31, 10, 0.9, {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, 10_436_770_529),
    (32, 10, 0.9, {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}, 4_638_564_679),
    (33, 5, 0.9, {"NEURON_LOGICAL_NC_CONFIG": "1"}, 6_957_847_019),
    # Half of a stack that two cores share: half of the utilisation.
    (34, 5, 0.45, {"NEURON_LOGICAL_NC_CONFIG": "1"}, 3_478_923_509),
]
CORE_GIB = {"trn1": 16, "trn2": 24, "trn3": 36}


@pytest.mark.parametrize(("row", "used", "gmu", "environ", "expected"), ROWS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("short", [0, 3 * MIB], ids=("at the table", "short by 3 MiB"))
def test_compile_host_and_device_agree(
    row: int, used: float, gmu: float, environ: dict[str, str], expected: Any, short: int
) -> None:
    """The same bytes, hence the same blocks (rows 38 to 40), or the same error before anything is compiled."""
    target = environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    total = CORE_GIB[target] * GIB - short
    resident = int(used * GIB) + 100 * MIB

    def on_device() -> int:
        return decide(view(used, gmu), lambda: (resident, total - resident), environ).report.kv_bytes

    def on_compile_host() -> int:
        return decide(view(used, gmu), no_runtime, {**COMPILE, **environ}).report.kv_bytes

    if isinstance(expected, int):
        assert on_device() == on_compile_host() == expected
        for block in (1, 2, 4.5):
            assert on_device() // int(block * MIB) == on_compile_host() // int(block * MIB)
        return
    texts = []
    for side in (on_device, on_compile_host):
        with pytest.raises(expected) as caught:
            side()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_device_far_from_the_table_is_told_loudly() -> None:
    # Used and free make 23.7 GiB: compiled for 3317 blocks of 2 MiB, served with 3276.
    compiled = decide(view(6), no_runtime, COMPILE)
    served = decide(view(6), stats(7.2, 16.5), {})
    assert compiled.report.kv_bytes // (2 * MIB) == 3317
    assert served.report.kv_bytes // (2 * MIB) == 3276
    assert any("block count" in line for line in served.report.notes)
    assert not compiled.report.notes


@given(
    used=st.integers(1, 24 * GIB),
    gmu=st.floats(0.01, 1),
    cap=st.floats(0.01, 1),
    off=st.integers(-64 * MIB, 64 * MIB),
    extra=st.integers(0, 512 * MIB),
)
@settings(max_examples=150, deadline=None)
def test_agreement_holds_for_every_input(used: int, gmu: float, cap: float, off: int, extra: int) -> None:
    environ = {CAP: repr(cap), MINIMUM: "0"}
    worker = WorkerView(gpu_memory_utilization=gmu, model=model(used))
    resident = min(used + extra, 24 * GIB + off - 1)
    device = decide(worker, lambda: (resident, 24 * GIB + off - resident), environ)
    compiled = decide(worker, no_runtime, {**COMPILE, **environ})
    assert device.report.kv_bytes == compiled.report.kv_bytes
    assert 0 <= device.report.kv_bytes <= 24 * GIB


# -- bytes in use


def test_used_is_the_models_not_the_runtimes() -> None:
    for resident in (10.0, 10.5, 14.0):
        assert decide(view(18.12), stats(resident + 8.12, 24 - resident - 8.12), {}).report.kv_bytes == 3_736_621_548


def test_the_runtimes_figure_is_reported_all_the_same() -> None:
    inputs = by_name(decide(view(), TRN2, {}))
    assert (inputs["runtime_used"].value, inputs["runtime_used"].state) == (11 * GIB, "measured")
    assert (inputs["weights"].value, inputs["device_total"].value) == (10 * GIB, 24 * GIB)
    assert "sum over tensors" in inputs["weights"].source


# -- KV that the inference library has laid out while the model loaded (plugin releases 0.1 to 0.5)

PAGE = 16 * MIB
LOADED = stats(21.30, 2.70)  # of 24 GiB: 17 of weights, 4 of KV that is laid out, 0.3 of the runtime's own


def loaded(blocks: int | None, **more: Any) -> WorkerView:
    """A model of NxD Inference: no parameters on the host; it tells of ``blocks``, or of none."""
    told = None if blocks is None else LaidOut(blocks, PAGE, "told")
    return WorkerView(more.pop("gmu", 0.9), torch.nn.Module(), laid_out=lambda: told, **more)


def test_kv_that_is_laid_out_is_counted_once() -> None:
    """Stock plans 172 blocks of the free bytes, 33 are needed, 256 exist. 21.6 - 21.3 GiB would stop this start."""
    assert int(2.70 * GIB) // PAGE == 172
    result = decide(loaded(256), LOADED, {})
    assert (result.report.kv_bytes, result.report.kv_bytes // PAGE) == (4 * GIB, 256)
    assert result.report.policy == "laid out"
    inputs = by_name(result)
    assert inputs["laid_out_blocks"].value == 256 and inputs["runtime_used"].value == int(21.30 * GIB)
    assert "weights" not in inputs  # how much of what is in use is the model is not known, and not guessed


@pytest.mark.parametrize("gmu", [0.05, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("environ", [{}, {CAP: "0.05"}, {MINIMUM: "5"}, {CAP: "1", MINIMUM: "0"}])
@pytest.mark.parametrize("figures", [(21.30, 2.70), (23.9, 0.1), (17.0, 7.0)])
def test_no_setting_stops_a_model_that_is_loaded(
    gmu: float, environ: dict[str, str], figures: tuple[float, float]
) -> None:
    """What compiled and loaded fits: neither utilisation nor cap nor minimum has anything left to protect."""
    assert decide(loaded(33, gmu=gmu), stats(*figures), environ).report.kv_bytes == 33 * PAGE


@pytest.mark.parametrize("pair", [(-1, -1), (10 * GIB, 0), None])
def test_laid_out_blocks_need_no_runtime(pair: Any) -> None:
    result = decide(loaded(33), lambda: pair, {})
    assert result.report.kv_bytes == 33 * PAGE
    assert by_name(result)["runtime_used"].state == "unknown" and "device_free" not in by_name(result)


def test_blocks_set_by_hand_are_obeyed_and_those_that_do_not_exist_are_told() -> None:
    result = decide(loaded(256, num_gpu_blocks_override=200), LOADED, {})
    assert (result.report.kv_bytes, result.report.notes) == (200 * PAGE, [])
    (line,) = decide(loaded(256, num_gpu_blocks_override=300), LOADED, {}).report.notes
    assert "300" in line and "256" in line
    (line,) = decide(loaded(256, kv_cache_memory_bytes=300 * PAGE), LOADED, {}).report.notes
    assert "300" in line and "256" in line
    assert not decide(loaded(256, kv_cache_memory_bytes=4 * GIB), LOADED, {}).report.notes


def test_need_bounds_laid_out_blocks_too() -> None:
    worker = loaded(256, max_num_seqs=4, max_model_len=256, kv_layers=layers(32, PAGE))
    assert decide(worker, LOADED, NEED).report.kv_bytes == 33 * PAGE


def test_a_layout_that_is_not_told_leaves_the_workers_own_number() -> None:
    """Model and KV cannot be told apart in the bytes in use: subtracting both is what stopped starts that work."""
    result = decide(loaded(None), LOADED, {})
    assert (result.report.kv_bytes // PAGE, result.report.policy) == (172, "stock")
    assert by_name(result)["weights"].state == "unknown"
    assert "The worker's own number" in result.report.notes[0]
    # Release 0.1.0 answers with a constant.
    assert decide(loaded(None, own_number=lambda: 1_073_741_824), LOADED, {}).report.kv_bytes == 1_073_741_824


def test_the_runtimes_bytes_are_subtracted_where_that_is_asked_for() -> None:
    environ = {"VLLM_OMNI_PATCH_NEURON_USED_BYTES": "runtime"}
    assert decide(loaded(256), stats(18.12, 5.88), environ).report.kv_bytes == 3_736_621_548
    with pytest.raises(BelowMinimumError):
        decide(loaded(256), LOADED, environ)


def test_only_a_budget_that_can_be_compiled_for_elsewhere_has_a_side() -> None:
    assert decide(view(), TRN2, {}).side == "device"
    assert decide(view(), no_runtime, COMPILE).side == "compile host"
    assert decide(view(num_gpu_blocks_override=8), TRN2, {}).side == "device"
    assert decide(view(kv_cache_memory_bytes=GIB), no_runtime, COMPILE).side == "compile host"
    assert decide(view(kv_cache_memory_bytes=GIB), no_runtime, {"VLLM_NEURON_CPU_MODE": "1"}).side == ""
    for worker in (loaded(256), loaded(None), loaded(256, kv_cache_memory_bytes=GIB)):
        assert decide(worker, LOADED, {}).side == ""


def test_an_empty_host_model_cannot_be_compiled_for() -> None:
    with pytest.raises(RuntimeError, match="no parameters"):
        decide(WorkerView(0.9, torch.nn.Module()), no_runtime, COMPILE)
    with pytest.raises(RuntimeError, match="no parameters"):
        decide(WorkerView(0.9, object()), no_runtime, COMPILE)


def test_a_large_gap_between_runtime_and_model_is_told() -> None:
    result = decide(view(1.63), stats(7.06, 16.94), {})
    assert any("VLLM_OMNI_PATCH_NEURON_USED_BYTES=runtime" in line for line in result.report.notes)
    assert not decide(view(10), stats(10.9, 13.1), {}).report.notes


def test_the_budget_at_another_total_is_that_of_the_same_settings() -> None:
    result = decide(view(6), no_runtime, {**COMPILE, CAP: "0.2"})
    assert result.at_total is not None
    assert result.at_total(24 * GIB) == result.report.kv_bytes
    assert result.at_total(16 * GIB) == int(int(16 * GIB * 0.9) * 0.2)


def test_used_bytes_can_be_chosen() -> None:
    name = "VLLM_OMNI_PATCH_NEURON_USED_BYTES"
    assert decide(view(1), stats(18.12, 5.88), {name: "runtime"}).report.kv_bytes == 3_736_621_548
    assert decide(view(18.12), stats(20, 4), {name: "model"}).report.kv_bytes == 3_736_621_548
    with pytest.raises(RuntimeError, match="needs a device"):
        decide(view(1), no_runtime, {**COMPILE, name: "runtime"})
    with pytest.raises(RuntimeError, match="has no parameters"):
        decide(WorkerView(0.9, object()), TRN2, {name: "model"})


def test_tied_weights_over_two_parameters_count_twice() -> None:
    twice = model(9 * GIB)
    twice.again = torch.nn.Parameter(twice.weight.detach(), requires_grad=False)
    assert by_name(decide(WorkerView(0.9, twice), stats(20, 4), {}))["weights"].value == 18 * GIB


def test_a_drafter_counts() -> None:
    result = decide(view(10, drafter=model(8 * GIB)), stats(19, 5), {})
    assert by_name(result)["weights"].value == 18 * GIB


# -- explicit sizes


def test_explicit_bytes_win_over_everything() -> None:
    # Scenario S8: an explicit 4 GiB stays 4 GiB; nothing is asked, not even a bad setting.
    result = decide(view(23, kv_cache_memory_bytes=4 * GIB), no_runtime, {CAP: "nan"})
    assert (result.report.kv_bytes, result.report.policy) == (4 * GIB, "explicit")


def test_explicit_blocks_are_not_stopped_by_cap_or_minimum(tmp_path: Path) -> None:
    worker = view(23.5, num_gpu_blocks_override=256)
    assert decide(worker, stats(23.5, 0.5), {}).report.kv_bytes == GIB // 2
    assert decide(worker, no_runtime, COMPILE).report.kv_bytes == 24 * GIB
    host(tmp_path, 64)
    assert decide(worker, no_runtime, {"VLLM_NEURON_CPU_MODE": "1"}, tmp_path).report.kv_bytes == 64 * GIB
    # An NxD Inference model cannot be counted on a compile host; with blocks set by hand it need not be.
    empty = WorkerView(0.9, torch.nn.Module(), num_gpu_blocks_override=256)
    assert decide(empty, no_runtime, COMPILE).report.policy == "explicit blocks"


def test_explicit_blocks_do_not_excuse_an_unusable_runtime() -> None:
    with pytest.raises(RuntimeError, match="unusable"):
        decide(view(num_gpu_blocks_override=256), lambda: (-1, -1), {})


# -- CPU mode


def host(root: Path, available: int, limit: int | str | None = None, current: int = 0) -> None:
    def put(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    put("proc/meminfo", f"MemAvailable: {available * GIB // 1024} kB")
    if limit is not None:
        put("proc/self/cgroup", "0::/pod")
        put("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
        put("sys/fs/cgroup/pod/memory.max", str(limit if isinstance(limit, str) else limit * GIB))
        put("sys/fs/cgroup/pod/memory.current", str(current * GIB))


CPU_MODE = {"VLLM_NEURON_CPU_MODE": "1"}


@pytest.mark.parametrize(("gmu", "expected"), [(0.9, 9_277_129_359), (0.92, 9_483_287_789)])
def test_row_37(tmp_path: Path, gmu: float, expected: int) -> None:
    host(tmp_path, 256)
    assert decide(view(gmu=gmu, local_workers=8), no_runtime, CPU_MODE, tmp_path).report.kv_bytes == expected


def test_scenario_s8(tmp_path: Path) -> None:
    host(tmp_path, 256, 64, 8)
    result = decide(view(local_workers=2), no_runtime, CPU_MODE, tmp_path)
    assert result.report.kv_bytes / GIB == pytest.approx(7.56, abs=1e-6)
    assert "memory.max" in by_name(result)["host_available"].source
    host(tmp_path, 256, "max", 8)
    assert decide(view(local_workers=2), no_runtime, CPU_MODE, tmp_path).report.kv_bytes == int(
        int(128 * GIB * 0.9) * 0.3
    )


def test_replicas_share_the_host(tmp_path: Path) -> None:
    """Those that vLLM does not know of are told by a part of the utilisation; the budget is the same."""
    host(tmp_path, 256)
    one = decide(view(local_workers=2), no_runtime, CPU_MODE, tmp_path)
    two = decide(view(local_workers=2, replicas=2), no_runtime, CPU_MODE, tmp_path)
    told = decide(view(gmu=0.45, local_workers=2), no_runtime, CPU_MODE, tmp_path)
    assert one.report.kv_bytes > two.report.kv_bytes == told.report.kv_bytes
    assert two.report.kv_bytes * 4 <= 256 * GIB


def test_cpu_mode_has_no_minimum_but_checks_the_cap(tmp_path: Path) -> None:
    host(tmp_path, 1)
    assert 0 < decide(view(), no_runtime, CPU_MODE, tmp_path).report.kv_bytes < GIB
    with pytest.raises(RuntimeError, match=CAP):
        decide(view(), no_runtime, {**CPU_MODE, CAP: "2"}, tmp_path)


def test_a_full_container_is_an_error(tmp_path: Path) -> None:
    host(tmp_path, 256, 8, 9)
    with pytest.raises(RuntimeError, match="No host memory"):
        decide(view(), no_runtime, CPU_MODE, tmp_path)


# -- further policies, off by default


def layers(block_size: int = 32, block_bytes: int = 2 * MIB) -> Callable[[], tuple[int, int]]:
    return lambda: (block_size, block_bytes)


NEED = {"VLLM_OMNI_PATCH_NEURON_POLICY": "need"}


def test_need_never_gives_more_blocks_than_requests_can_fill() -> None:
    worker = view(max_num_seqs=4, max_model_len=4096, kv_layers=layers())
    result = decide(worker, TRN2, NEED)
    assert result.report.kv_bytes == 513 * 2 * MIB
    assert by_name(result)["needed_blocks"].value == 513
    assert decide(worker, no_runtime, {**COMPILE, **NEED}).report.kv_bytes == result.report.kv_bytes


def test_need_never_gives_more_than_the_cap() -> None:
    worker = view(max_num_seqs=4096, max_model_len=4096, kv_layers=layers())
    assert decide(worker, TRN2, NEED).report.kv_bytes == 6_957_847_019


def test_a_small_need_is_not_stopped_by_the_minimum() -> None:
    worker = view(max_num_seqs=1, max_model_len=64, kv_layers=layers())
    assert decide(worker, TRN2, NEED).report.kv_bytes == 3 * 2 * MIB
    with pytest.raises(BelowMinimumError):
        decide(view(21, max_num_seqs=1, max_model_len=64, kv_layers=layers()), stats(21, 3), NEED)


def test_need_makes_a_total_that_is_off_harmless() -> None:
    worker = view(max_num_seqs=4, max_model_len=4096, kv_layers=layers())
    far = decide(worker, stats(11, 12.5), NEED)
    assert far.report.kv_bytes == decide(worker, no_runtime, {**COMPILE, **NEED}).report.kv_bytes


def test_need_without_a_layout_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="KV cache layout"):
        decide(view(max_num_seqs=4, max_model_len=4096), TRN2, NEED)
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        decide(view(kv_layers=layers()), TRN2, NEED)
