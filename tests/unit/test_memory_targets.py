# SPDX-License-Identifier: Apache-2.0
"""What the GPU target relies on, and the reports of CPU and XPU workers."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.code import runtime
from vllm_omni_patch.code.contract import check_source
from vllm_omni_patch.loading.apply import install, remove
from vllm_omni_patch.patches.available_memory import PATCH, explain, hooks
from vllm_omni_patch.patches.available_memory.cpu import explain_cpu
from vllm_omni_patch.patches.available_memory.report import report
from vllm_omni_patch.telemetry import numbers

TARGETS = {target.name: target for target in PATCH.targets}
GPU = TARGETS["vllm.v1.worker.gpu_worker:Worker.determine_available_memory"]
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


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_OMNI_PATCH_GPU_BUDGET", "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "VLLM_OMNI_PATCH_REPORT_DIR"):
        monkeypatch.delenv(name, raising=False)
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield
    ledger.publish(report.MODEL_LOCAL_KV, None)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(folder))
    return folder


def written(reports: Path) -> report.BudgetReport:
    (path,) = reports.glob("memory-*.json")
    return report.BudgetReport.from_json(json.loads(path.read_text()))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A host whose memory node has ``total`` and ``free`` GiB, in a container with a limit of 15 GiB and 10 in use."""

    def make(total: int, free: int, unreadable: str = "", container: bool = True) -> None:
        files = {"proc/meminfo": f"MemAvailable: {600 * GIB // 1024} kB"}
        if container:
            files |= {
                "proc/self/cgroup": "0::/pod",
                "sys/fs/cgroup/pod/memory.max": str(15 * GIB),
                "sys/fs/cgroup/pod/memory.current": str(10 * GIB),
                "sys/fs/cgroup/pod/memory.stat": "inactive_file 0",
            }
        for name, text in files.items():
            path = tmp_path / "host" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == unreadable:
                path.mkdir()  # a folder in its place cannot be read by anybody, root included
            else:
                path.write_text(f"{text}\n")
        monkeypatch.setattr(explain_cpu, "HOST_ROOT", str(tmp_path / "host"))
        monkeypatch.setattr(explain_cpu, "node_memory", lambda: (total * GIB, free * GIB, "memory node 0"))

    return make


def test_a_subclass_that_inherits_the_wrapped_method_reports_once(
    tmp_path: Path, reports: Path, caplog: pytest.LogCaptureFixture
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
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO):
        assert worker.determine_available_memory() == 5
    assert caplog.text.count("KV cache budget of Sub") == 1
    assert written(reports).kv_bytes == 5
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


def test_cpu_through_0_19(reports: Path) -> None:
    worker = as_worker(cpu_worker(cache={"cpu_kvcache_space_bytes": 4 * GIB}))
    assert hooks.run_report(lambda: 4 * GIB, worker, (), {}) == 4 * GIB
    made = written(reports)
    assert made.policy == "stock" and made.kv_setting == "VLLM_CPU_KVCACHE_SPACE"
    assert inputs(made)["cpu_kvcache_space"].value == 4 * GIB
    assert inputs(made)["requested"].state == "unknown"
    assert not made.linear_in_requested


def test_cpu_from_0_20(reports: Path) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    found = inputs(written(reports))
    assert found["own_process"].value == 3 * GIB
    assert found["requested"].value == 10 * GIB
    assert found["weights"].state == "unknown"
    assert found["graph_estimate"].state == "zero"
    assert written(reports).linear_in_requested


def test_cpu_with_a_size_given(reports: Path) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, cache={"kv_cache_memory_bytes": GIB}))
    assert hooks.run_report(lambda: GIB, worker, (), {}) == GIB
    made = written(reports)
    assert made.policy == "explicit kv_cache_memory_bytes"
    assert inputs(made)["own_process"].value != 9 * GIB


def test_cpu_in_a_container(host: Callable[..., None], reports: Path) -> None:
    """vllm pull 45086: the number stays vLLM's, and the report says that the container leaves less than it."""
    host(692, 600)
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    made = written(reports)
    assert inputs(made)["container_limit"].value == 15 * GIB
    assert inputs(made)["device_free"].value == 5 * GIB
    assert made.notes == ["cgroup v2 /sys/fs/cgroup/pod/memory.max leaves 5.00 GiB, less than this KV cache"]
    assert made.advice[0].startswith(
        "To fit into free memory (5.00 GiB are free, 0.00 MiB of that for peak and graphs)"
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
    what: str, workers: int, monkeypatch: pytest.MonkeyPatch, host: Callable[..., None], reports: Path
) -> None:
    """What the container leaves is then unknown, whatever the node says; no advice and no gauge is made from it, and
    what is certain to be too much for all workers together is said."""
    file, note = UNREADABLE[what]
    host(692, 600, unreadable=file)
    monkeypatch.setattr(numbers, "mine", numbers.ProcessNumbers())
    parallel = SimpleNamespace(local_world_size=workers, data_parallel_size_local=1)
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, parallel_config=parallel))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 7 * GIB
    made = written(reports)
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
def test_what_workers_are_told_fits_all_of_them(workers: int, host: Callable[..., None], reports: Path) -> None:
    host(20, 10, container=False)
    parallel = SimpleNamespace(local_world_size=workers, data_parallel_size_local=1)
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB, parallel_config=parallel))
    hooks.run_report(lambda: 7 * GIB, worker, (), {})
    made = written(reports)
    found = re.search(r"--kv-cache-memory-bytes (\d+)", made.advice[0])
    assert found is not None and 0 < int(found[1]) * workers <= 10 * GIB
    assert inputs(made)["free_for_this_worker"].value == 10 * GIB // workers


def test_cpu_reserve(monkeypatch: pytest.MonkeyPatch, reports: Path) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV", "1")
    ledger.publish(report.MODEL_LOCAL_KV, {"declared_bytes": 3 * GIB, "resident_bytes": GIB, "pending_bytes": 2 * GIB})
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    assert hooks.run_report(lambda: 7 * GIB, worker, (), {}) == 5 * GIB
    assert inputs(written(reports))["own_process"].value == 3 * GIB


def test_xpu_through_0_15(monkeypatch: pytest.MonkeyPatch, reports: Path) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device=None: (20 * GIB, 48 * GIB))
    stats = {"allocated_bytes.all.peak": 12 * GIB, "allocated_bytes.all.current": 10 * GIB}
    monkeypatch.setattr(torch.xpu, "memory_stats", lambda device=None: stats)
    worker = as_worker(cpu_worker())
    worker.device = SimpleNamespace(type="xpu", index=0)
    worker.model_runner = SimpleNamespace(model_memory_usage=10 * GIB)
    assert hooks.run_report(lambda: 11 * GIB, worker, (), {}) == 11 * GIB
    made = written(reports)
    found = inputs(made)
    assert made.platform == "xpu"
    assert found["requested"].value == 24 * GIB
    assert found["activation_peak"].value == 2 * GIB
    assert found["non_torch"].value == GIB
    assert found["other_processes"].state == "unknown"


def test_a_report_without_any_attribute_is_a_log_line(reports: Path) -> None:
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


def test_blocks_come_from_the_layout(reports: Path) -> None:
    worker = as_worker(cpu_worker(requested_cpu_memory=10 * GIB))
    hooks.run_report(lambda: 7 * GIB, worker, (), {})
    layout = SimpleNamespace(
        num_blocks=448, kv_cache_tensors=[SimpleNamespace(size=448 * (8 << 20)), SimpleNamespace(size=448 * (8 << 20))]
    )
    made = written(reports)
    explain.add_blocks(made, layout)
    assert (made.blocks, made.block_bytes) == (448, 16 << 20)


@pytest.mark.parametrize("layout", [None, SimpleNamespace(num_blocks=3), "nonsense"])
def test_a_layout_of_another_shape_does_not_disturb(tmp_path: Path, layout: Any) -> None:
    module = module_of(
        tmp_path, SOURCE + "\n    def initialize_from_config(self, kv_cache_config):\n        return 'initialized'\n"
    )
    target = TARGETS["vllm.v1.worker.gpu_worker:Worker.initialize_from_config"]
    assert runtime.check(target.contract, module, target.qualname) == []
    done = install(PATCH, target, module, lambda: None)
    worker = module.Worker()
    hooks._reports[worker] = report.BudgetReport("gpu", "Worker", "stock", 5)
    assert worker.initialize_from_config(layout) == "initialized"
    assert remove(done) == ""
