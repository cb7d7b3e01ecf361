# SPDX-License-Identifier: Apache-2.0
"""The targets of the GPU, CPU and XPU workers: applied, refused, twice, off, unknown release, drifted."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.code.contract import check_live, check_source
from vllm_omni_patch.loading.apply import Refused, install, remove
from vllm_omni_patch.matrix import judge
from vllm_omni_patch.patches.available_memory import PATCH, explain, hooks
from vllm_omni_patch.patches.available_memory.cpu import explain_cpu
from vllm_omni_patch.patches.available_memory.host import Bound, HostMemory, host_memory
from vllm_omni_patch.patches.available_memory.report import report
from vllm_omni_patch.telemetry import numbers

TARGETS = {target.name: target for target in PATCH.targets}
GPU = TARGETS["vllm.v1.worker.gpu_worker:Worker.determine_available_memory"]
OMNI = TARGETS["vllm_omni.worker.base:OmniGPUWorkerBase.determine_available_memory"]
CPU = TARGETS["vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory"]
GIB = 1 << 30

SOURCE = """
from vllm.utils.mem_utils import memory_profiling

class Worker:
    def init_device(self):
        self.init_snapshot = None
        self.requested_memory = 0

    def determine_available_memory(self) -> int:
        self.available_kv_cache_memory_bytes = 5
        return 5
"""


def module_of(folder: Path, source: str = SOURCE) -> ModuleType:
    """The source as an imported module with a file, as contracts and fingerprints read it."""
    path = folder / "worker_for_test.py"
    path.write_text(source.replace("from vllm.utils.mem_utils import memory_profiling", "memory_profiling = None"))
    spec = importlib.util.spec_from_file_location("worker_for_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_for_test"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("import memory_profiling", "import profile_memory", "memory_profiling"),
        ("self.requested_memory = 0", "self.budget = 0", "requested_memory"),
        ("self.init_snapshot = None", "pass", "init_snapshot"),
        ("self.available_kv_cache_memory_bytes = 5", "pass", "available_kv_cache_memory_bytes"),
        ("def determine_available_memory(self)", "def determine_available_memory(self, headroom)", "headroom"),
    ],
)
def test_a_drifted_worker_is_refused(old: str, new: str, missing: str) -> None:
    assert check_source(GPU.contract, SOURCE, GPU.qualname) == []
    found = check_source(GPU.contract, SOURCE.replace(old, new), GPU.qualname)
    assert found and missing in " ".join(found)


@pytest.mark.parametrize("target", [GPU, OMNI, CPU], ids=lambda target: target.module)
@pytest.mark.parametrize("release", ["99.0.0", "dev", None])
def test_an_unknown_release_of_unknown_code_is_skipped(
    target: Any, release: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_OMNI_PATCH_UNLISTED", raising=False)
    name = target.qualname.split(".")[0]
    module = module_of(tmp_path, SOURCE.replace("class Worker", f"class {name}"))
    decision = judge.decide(PATCH, target, release, module)
    assert decision.verdict == "unlisted" and not decision.apply, decision


def test_applied_twice_is_refused_and_removed_without_trace(tmp_path: Path) -> None:
    module = module_of(tmp_path)
    original = module.Worker.determine_available_memory
    done = install(PATCH, GPU, module, lambda: None)
    assert module.Worker.determine_available_memory is not original
    with pytest.raises(Refused, match="already holds"):
        install(PATCH, GPU, module, lambda: None)
    assert remove(done) == ""
    assert module.Worker.determine_available_memory is original


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_OMNI_PATCH_GPU_BUDGET", "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "VLLM_OMNI_PATCH_REPORT_DIR"):
        monkeypatch.delenv(name, raising=False)
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield
    ledger.publish(report.MODEL_LOCAL_KV, None)


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[report.BudgetReport]:
    found: list[report.BudgetReport] = []
    emit = report.emit

    def noting(made: report.BudgetReport, brief: bool = False) -> Any:
        found.append(made)
        return emit(made, brief)

    monkeypatch.setattr(report, "emit", noting)
    return found


def test_a_subclass_that_inherits_the_wrapped_method_reports_once(
    tmp_path: Path, emitted: list[report.BudgetReport]
) -> None:
    """XPUWorker of 0.16 and later; another package may wrap it there again."""
    module = module_of(tmp_path)
    module.__dict__["Sub"] = type("Sub", (module.Worker,), {})
    done = install(PATCH, GPU, module, lambda: None)
    inner = module.Sub.determine_available_memory
    module.Sub.determine_available_memory = lambda self: hooks.once(
        inner.__get__(self), self, (), {}, lambda: hooks.run_report(inner.__get__(self), self, (), {})
    )
    worker = module.Sub()
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    worker.model_runner = SimpleNamespace()
    assert worker.determine_available_memory() == 5
    assert len(emitted) == 1
    remove(done)


# CPU and XPU workers of each era, as far as the report reads them


def cpu_worker(**attributes: Any) -> Any:
    config = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5, **attributes.pop("cache", {})}
    return SimpleNamespace(
        device=SimpleNamespace(type="cpu", index=None),
        rank=0,
        local_rank=0,
        cache_config=SimpleNamespace(**config),
        model_runner=SimpleNamespace(),
        **attributes,
    )


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def as_worker(worker: Any) -> Any:
    return Hashable(**vars(worker))


def inputs(made: report.BudgetReport) -> dict[str, report.Input]:
    return {item.name: item for item in made.inputs}


def test_cpu_through_0_19(emitted: list[report.BudgetReport]) -> None:
    worker = as_worker(cpu_worker(cache={"cpu_kvcache_space_bytes": 4 * GIB}))
    assert hooks.run_report(lambda: 4 * GIB, worker, (), {}) == 4 * GIB
    made = emitted[0]
    assert made.policy == "stock" and made.kv_setting == "VLLM_CPU_KVCACHE_SPACE"
    assert inputs(made)["cpu_kvcache_space"].value == 4 * GIB
    assert inputs(made)["requested"].state == "unknown"
    assert not made.linear_in_requested


def test_cpu_from_0_20(emitted: list[report.BudgetReport]) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    found = inputs(emitted[0])
    assert found["own_process"].value == 3 * GIB
    assert found["requested"].value == 10 * GIB
    assert found["weights"].state == "unknown"
    assert found["graph_estimate"].state == "zero"
    assert emitted[0].linear_in_requested


def test_cpu_with_a_size_given(emitted: list[report.BudgetReport]) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, cache={"kv_cache_memory_bytes": GIB}))
    assert hooks.run_report(lambda: GIB, worker, (), {}) == GIB
    made = emitted[0]
    assert made.policy == "explicit kv_cache_memory_bytes"
    assert inputs(made)["own_process"].value != 9 * GIB


def test_cpu_in_a_container(monkeypatch: pytest.MonkeyPatch, emitted: list[report.BudgetReport]) -> None:
    """vllm pull 45086: the number stays vLLM's, and the report says that the container leaves less than it."""
    bounds = [
        Bound("MemAvailable of /proc/meminfo", None, None, 600 * GIB, "measured"),
        Bound("memory.max of /sys/fs/cgroup/pod", 15 * GIB, 10 * GIB, 5 * GIB, "measured"),
    ]
    monkeypatch.setattr(explain_cpu, "host_memory", lambda: HostMemory(5 * GIB, bounds[1].source, bounds))
    monkeypatch.setattr(explain_cpu, "_node_memory", lambda: (692 * GIB, 600 * GIB, "memory node 0"))
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    made = emitted[0]
    assert inputs(made)["container_limit"].value == 15 * GIB
    assert inputs(made)["device_free"].value == 5 * GIB
    assert made.notes == ["memory.max of /sys/fs/cgroup/pod leaves 5.00 GiB, less than this KV cache"]
    assert made.advice[0].startswith(
        "To fit into what is free (5.00 GiB are free, 0.00 MiB of that for peak and graphs)"
    )
    assert "--kv-cache-memory-bytes 5368709120" in made.advice[0]


UNREADABLE = {
    "the limit": ("memory.max", "memory.max cannot be read"),
    "its use": ("memory.current", "memory.current cannot be read"),
    "its cache": ("memory.stat", "memory.stat cannot be read"),
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("workers", [1, 4])
def test_cpu_in_a_container_whose_files_cannot_be_read(
    what: str, workers: int, monkeypatch: pytest.MonkeyPatch, emitted: list[report.BudgetReport], tmp_path: Path
) -> None:
    """What the container leaves is then unknown, whatever the node says; no advice and no gauge is made from it, and
    what is certain to be too much for all workers together is said."""
    file, note = UNREADABLE[what]
    for path, text in (
        ("proc/meminfo", f"MemAvailable: {600 * GIB // 1024} kB"),
        ("proc/self/cgroup", "0::/pod"),
        ("sys/fs/cgroup/pod/memory.max", str(15 * GIB)),
        ("sys/fs/cgroup/pod/memory.current", str(10 * GIB)),
        ("sys/fs/cgroup/pod/memory.stat", "inactive_file 0"),
    ):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.name == file:
            target.mkdir()  # a folder in its place cannot be read by anybody, root included
        else:
            target.write_text(f"{text}\n")
    monkeypatch.setattr(explain_cpu, "host_memory", lambda: host_memory(tmp_path))
    monkeypatch.setattr(explain_cpu, "_node_memory", lambda: (692 * GIB, 600 * GIB, "memory node 0"))
    monkeypatch.setattr(numbers, "mine", numbers.ProcessNumbers())
    parallel = SimpleNamespace(local_world_size=workers, data_parallel_size_local=1)
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, parallel_config=parallel))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    made = emitted[0]
    assert inputs(made)["device_free"].state == "unknown"
    assert "cannot be read" in inputs(made)["device_free"].source
    assert any(note in each for each in made.notes)
    assert made.advice == []
    assert not {name for name, _ in metrics.values()} & {
        "memory_device_free_bytes",
        "memory_free_for_this_worker_bytes",
    }
    known = {"the limit": 600, "its use": 15, "its cache": 5}[what] * GIB
    too_much = [each for each in made.notes if "less than this KV cache" in each]
    assert bool(too_much) == (workers * made.kv_bytes > known)
    if workers > 1:
        assert inputs(made)["free_for_this_worker"].state == "unknown"


@pytest.mark.parametrize("workers", [2, 3])
def test_what_workers_are_told_fits_all_of_them(
    workers: int, monkeypatch: pytest.MonkeyPatch, emitted: list[report.BudgetReport]
) -> None:
    monkeypatch.setattr(explain_cpu, "host_memory", lambda: HostMemory(600 * GIB, "MemAvailable", []))
    monkeypatch.setattr(explain_cpu, "_node_memory", lambda: (20 * GIB, 10 * GIB, "memory node 0"))
    parallel = SimpleNamespace(local_world_size=workers, data_parallel_size_local=1)
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, parallel_config=parallel))
    hooks.run_report(lambda: 7 * GIB, worker, (), {})
    made = emitted[0]
    found = re.search(r"--kv-cache-memory-bytes (\d+)", made.advice[0])
    assert found is not None and 0 < int(found[1]) * workers <= 10 * GIB
    assert inputs(made)["free_for_this_worker"].value == 10 * GIB // workers


def test_cpu_reserve(monkeypatch: pytest.MonkeyPatch, emitted: list[report.BudgetReport]) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    ledger.publish(report.MODEL_LOCAL_KV, {"declared_bytes": 3 * GIB, "resident_bytes": GIB, "pending_bytes": 2 * GIB})
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 5 * GIB
    assert inputs(emitted[0])["own_process"].value == 3 * GIB


def test_xpu_through_0_15(monkeypatch: pytest.MonkeyPatch, emitted: list[report.BudgetReport]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device=None: (20 * GIB, 48 * GIB))
    stats = {"allocated_bytes.all.peak": 12 * GIB, "allocated_bytes.all.current": 10 * GIB}
    monkeypatch.setattr(torch.xpu, "memory_stats", lambda device=None: stats)
    worker = as_worker(cpu_worker())
    worker.device = SimpleNamespace(type="xpu", index=0)
    worker.model_runner = SimpleNamespace(model_memory_usage=10 * GIB)
    assert hooks.run_report(lambda: 11 * GIB, worker, (), {}) == 11 * GIB
    made = emitted[0]
    found = inputs(made)
    assert made.platform == "xpu"
    assert found["requested"].value == 24 * GIB
    assert found["activation_peak"].value == 2 * GIB
    assert found["non_torch"].value == GIB
    assert found["other_processes"].state == "unknown"


def test_a_report_without_any_attribute_is_a_log_line(emitted: list[report.BudgetReport]) -> None:
    """A worker of another make: nothing can be read, and the number is still the worker's."""
    worker = as_worker(SimpleNamespace(cache_config=SimpleNamespace()))
    assert hooks.run_report(lambda: 7, worker, (), {}) == 7


@pytest.mark.parametrize("error", [ValueError("no memory on the node"), KeyboardInterrupt()])
def test_the_workers_own_error_passes(error: BaseException) -> None:
    def fail() -> int:
        raise error

    worker = as_worker(cpu_worker())
    with pytest.raises(type(error)):
        hooks.once(fail, worker, (), {}, lambda: hooks.run_report(fail, worker, (), {}))
    assert hooks._inside.worker is None


def test_blocks_come_from_the_layout(emitted: list[report.BudgetReport]) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    hooks.run_report(lambda: 7 * GIB, worker, (), {})
    layout = SimpleNamespace(
        num_blocks=448, kv_cache_tensors=[SimpleNamespace(size=448 * (8 << 20)), SimpleNamespace(size=448 * (8 << 20))]
    )
    explain.add_blocks(emitted[0], layout)
    assert (emitted[0].blocks, emitted[0].block_bytes) == (448, 16 << 20)


@pytest.mark.parametrize("layout", [None, SimpleNamespace(num_blocks=3), "nonsense"])
def test_a_layout_of_another_shape_does_not_disturb(tmp_path: Path, layout: Any) -> None:
    module = module_of(
        tmp_path, SOURCE + "\n    def initialize_from_config(self, kv_cache_config):\n        return 'initialized'\n"
    )
    target = TARGETS["vllm.v1.worker.gpu_worker:Worker.initialize_from_config"]
    assert check_live(target.contract, module, target.qualname) == []
    done = install(PATCH, target, module, lambda: None)
    worker = module.Worker()
    hooks._reports[worker] = report.BudgetReport("gpu", "Worker", "stock", 5)
    assert worker.initialize_from_config(layout) == "initialized"
    assert remove(done) == ""


def test_declaring_imports_nothing_heavy() -> None:
    """The declaration names its installers; importing it brings in neither the hooks nor torch."""
    import subprocess

    code = (
        "import sys; import vllm_omni_patch.patches.available_memory; "
        "heavy = [n for n in ('torch', 'vllm', 'wrapt', 'pynvml', 'vllm_omni_patch.patches.available_memory.hooks') "
        "if n in sys.modules]; print(heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_own_memory_has_one_judge() -> None:
    """NVML's row reaches nobody but through ``own_memory``; the baseline is what the judge compares it with."""
    import ast

    folder = Path(explain.__file__).parent
    users = set()
    for path in folder.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = {
                    getattr(node.func, "id", getattr(node.func, "attr", ""))
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call)
                }
                users |= {(path.name, function.name, name) for name in called & {"read_own", "read_device", "trust"}}
    assert users == {
        ("profiling.py", "read_device", "read_own"),
        ("profiling.py", "own_memory", "read_device"),
        ("profiling.py", "own_memory", "trust"),
        ("hooks.py", "_take_baseline", "read_device"),
    }
