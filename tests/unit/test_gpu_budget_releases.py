# SPDX-License-Identifier: Apache-2.0
"""The GPU hook around the ``determine_available_memory`` of every release in the matrix.

The method, the snapshot and ``memory_profiling`` are the release's own source text, compiled here without the rest of
it; below them stands the device of numbers. vLLM-Omni's worker runs over the vLLM of the same number, and reads the
scripted NVML library with its own code.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dataclasses
import enum
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from packaging.version import Version

import vllm_omni_patch
from support.gpu_card import GIB, Card, Runner, stand_in_torch
from support.nvml_library import NvmlLibrary
from vllm_omni_patch import ledger
from vllm_omni_patch.code import releases
from vllm_omni_patch.loading.apply import install, remove
from vllm_omni_patch.patches.available_memory import PATCH
from vllm_omni_patch.patches.available_memory.report import report

pytest_plugins = ["support.nvml_library"]
pytestmark = pytest.mark.slow

LISTED = json.loads((Path(vllm_omni_patch.__file__).parent / "matrix" / "matrix.json").read_text())["releases"]
VLLM = LISTED["vllm"]
OMNI = [number for number in LISTED["vllm-omni"] if Version(number) >= Version("0.16")]
STRANGER = 546113
TARGETS = {target.name: target for target in PATCH.targets}
WORKER = TARGETS["vllm.v1.worker.gpu_worker:Worker.determine_available_memory"]
OMNI_WORKER = TARGETS["vllm_omni.worker.base:OmniGPUWorkerBase.determine_available_memory"]


def gib(value: float) -> int:
    return int(value * GIB)


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL = 2


class Platform:
    """An NVIDIA platform: as in vLLM, what it does not know is asked of ``torch.cuda``."""

    current_device = staticmethod(lambda: torch.device("cuda:0"))
    device_name = "cuda"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *args: name in ("is_cuda", "is_cuda_alike")
        return getattr(torch.cuda, name)


class Logger(logging.Logger):
    def info_once(self, text: str, *args: Any, **kwargs: Any) -> None:
        self.info(text, *args)


def definitions(text: str, wanted: dict[str, set[str] | None]) -> list[ast.stmt]:
    """The top-level functions and classes called as ``wanted`` says; of a class, only the named members, if named."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in wanted:
            members = wanted[node.name]
            if isinstance(node, ast.ClassDef) and members is not None:
                node.bases = []
                node.body = [part for part in node.body if getattr(part, "name", "") in members]
            found.append(node)
    return found


def run(text: str, wanted: dict[str, set[str] | None], namespace: dict[str, Any]) -> None:
    """Compile the wanted definitions of a release's module into ``namespace``."""
    body = definitions(text, wanted)
    tree = ast.Module(body=body, type_ignores=[])
    exec(compile(tree, "release", "exec", flags=__future__.annotations.compiler_flag), namespace)


def text_of(distribution: str, number: str, *modules: str) -> str:
    release = releases.fetch(distribution, number)
    for module in modules:
        found = release.text(module)
        text = "" if found is None or found.data is None else found.data.decode()
        if "MemorySnapshot" in text or (text and len(modules) == 1):
            return text
    raise AssertionError(f"{distribution} {number} has none of {modules}")


def vllm_module(number: str) -> ModuleType:
    """``vllm.v1.worker.gpu_worker`` of a release, reduced to what the method needs."""
    module = ModuleType("gpu_worker_of_a_release")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    names = vars(module)
    names.update(
        torch=torch, gc=gc, time=time, math=math, contextlib=contextlib, contextmanager=contextlib.contextmanager,
        nullcontext=contextlib.nullcontext, dataclass=dataclasses.dataclass, field=dataclasses.field,
        logger=Logger("release"), GiB_bytes=GIB, CUDAGraphMode=CUDAGraphMode, current_platform=Platform(),
        format_gib=lambda count: f"{count / GIB:.2f}", GiB=lambda count: count / GIB,
        envs=SimpleNamespace(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=True),
        instrument=lambda **kwargs: lambda function: function,
        set_current_vllm_config=lambda config: contextlib.nullcontext(),
        maybe_apply_startup_plan=lambda worker: None,
        reserve_mm_ipc_gpu_memory=lambda available, *args: available - gib(1.5),
    )  # fmt: skip
    memory = text_of("vllm", number, "vllm.utils.mem_utils", "vllm.utils")
    run(memory, {"MemorySnapshot": None, "MemoryProfilingResult": None, "memory_profiling": None}, names)
    methods = {"determine_available_memory", "_scoped_allocator_max_split"}
    wanted: dict[str, set[str] | None] = {"Worker": methods, "maybe_rocm_profiling_fallback": None}
    run(text_of("vllm", number, "vllm.v1.worker.gpu_worker"), wanted, names)
    names["Worker"]._reserve_mm_ipc_gpu_memory = lambda worker, available: available - gib(1.5)
    return module


def omni_module(number: str) -> ModuleType:
    """``vllm_omni.worker.base`` of a release over the vLLM of the same number, with its own NVML reading."""
    import pynvml

    module = vllm_module(number)
    names = vars(module)
    names.update(
        os=os,
        detect_pid_host=lambda: True,
        current_omni_platform=Platform(),
        nvmlInit=pynvml.nvmlInit,
        nvmlShutdown=pynvml.nvmlShutdown,
        nvmlDeviceGetHandleByIndex=pynvml.nvmlDeviceGetHandleByIndex,
        nvmlDeviceGetComputeRunningProcesses=pynvml.nvmlDeviceGetComputeRunningProcesses,
    )
    reading = text_of("vllm-omni", number, "vllm_omni.worker.gpu_memory_utils")
    base = text_of("vllm-omni", number, "vllm_omni.worker.base")
    if "get_process_gpu_memory" in base:
        wanted = ("is_process_scoped_memory_available", "parse_cuda_visible_devices", "get_device_handle")
        reading = reading.replace("from vllm.third_party.pynvml import", "from pynvml import")
        run(reading, dict.fromkeys((*wanted, "get_process_gpu_memory")), names)
    run(base, {"OmniGPUWorkerBase": {"determine_available_memory"}}, names)
    return module


@contextlib.contextmanager
def hooked(module: ModuleType, target: Any) -> Iterator[None]:
    done = install(PATCH, target, module, lambda: None)
    try:
        yield
    finally:
        assert remove(done) == ""


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """vLLM collects garbage twice per profile; walking all of torch each time takes most of the test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path / "reports"))
    for name in ("VLLM_OMNI_PATCH_GPU_BUDGET", "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV"):
        monkeypatch.delenv(name, raising=False)
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield


@pytest.fixture
def card_of(nvml_library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Card]:
    def make() -> Card:
        card = Card(gib(80), nvml_library, gib(0.5))
        stand_in_torch(monkeypatch, card)
        card.set_neighbour(STRANGER, gib(30))
        return card

    return make


def make_worker(module: ModuleType, card: Card, name: str = "Worker", graphs: float = 0.75, late: float = 0) -> Any:
    """A worker of the release: requested 40, weights 12 and ``late`` after the load, peak 2, other 0.25 GiB."""
    worker = vars(module)[name]()
    worker.device, worker.rank, worker.local_rank = torch.device("cuda:0"), 0, 0
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    worker.parallel_config = SimpleNamespace()
    worker.model_config = SimpleNamespace(enforce_eager=False, multimodal_config=None)
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL))
    worker.randomize_dummy_inputs = False
    worker.init_snapshot = module.MemorySnapshot()
    worker.requested_memory = float(gib(40))
    card.allocate(gib(12) + gib(late))
    worker.model_runner = Runner(card, gib(12), gib(2), gib(0.25), gib(graphs))
    return worker


def has_graphs(number: str) -> bool:
    return Version(number) >= Version("0.18")


def reservation(number: str) -> int:
    return gib(1.5) if Version(number) >= Version("0.25") else 0


def expected(number: str, late: float = 0) -> int:
    own = gib(0.5) + gib(12) + gib(late) + gib(0.25)
    return gib(40) - own - gib(2) - (gib(0.75) if has_graphs(number) else 0) - reservation(number)


def warmed_up(worker: Any) -> int:
    """Non-KV memory as ``compile_or_warm_up_model`` adds it up from the worker's attributes, before its graphs."""
    if hasattr(worker, "total_consumed"):
        return int(worker.total_consumed + worker.peak_activation_memory)
    return int(worker.model_runner.model_memory_usage + worker.peak_activation_memory + worker.non_torch_memory)


@pytest.mark.parametrize("number", VLLM)
def test_stock_is_untouched(number: str, card_of: Callable[[], Card]) -> None:
    module = vllm_module(number)
    alone = make_worker(module, card_of())
    value = alone.determine_available_memory()
    with hooked(module, WORKER):
        worker = make_worker(module, card_of())
        assert worker.determine_available_memory() == value
    assert warmed_up(worker) == warmed_up(alone)


@pytest.mark.parametrize("number", VLLM)
def test_process(number: str, card_of: Callable[[], Card], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quiet neighbour, one that frees, one that grows, and late memory that old formulas miss."""
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")
    module = vllm_module(number)
    with hooked(module, WORKER):
        for late, neighbour in ((0.0, None), (0.0, 1.0), (0.0, 45.0), (3.0, None), (3.0, 0.0)):
            card = card_of()
            worker = make_worker(module, card, late=late)
            if neighbour is not None:
                card.on_read = lambda card=card, to=neighbour: card.set_neighbour(STRANGER, gib(to))
            value = worker.determine_available_memory()
            assert value == expected(number, late), (late, neighbour)
            assert type(value) is int
            own = gib(0.5) + gib(12) + gib(late) + gib(0.25)
            assert warmed_up(worker) in (own + gib(2), own + gib(2) + gib(0.75))


@pytest.mark.parametrize("number", VLLM)
def test_unknown_falls_back(number: str, card_of: Callable[[], Card], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not listed: vLLM's own terms when neighbours are quiet; no abort and nothing claimed when one frees memory."""
    module = vllm_module(number)
    quiet = make_worker(module, card_of()).determine_available_memory()
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")
    with hooked(module, WORKER):
        card = card_of()
        card.listed = False
        assert make_worker(module, card).determine_available_memory() == quiet
        card = card_of()
        card.listed = False
        worker = make_worker(module, card)
        card.on_read = lambda: card.set_neighbour(STRANGER, 0)
        value = worker.determine_available_memory()
        graphs = gib(0.75) if has_graphs(number) else 0
        # In 0.27 and later graphs are estimated from the whole device after the neighbour has gone; before that
        # within the window. What is left over is torch's own memory and the peak.
        assert value <= gib(40) - gib(12) - gib(2) - reservation(number)
        assert value >= gib(40) - gib(12) - gib(2) - gib(0.75) - graphs - reservation(number)


@pytest.mark.parametrize("number", VLLM)
def test_an_explicit_size_wins(number: str, card_of: Callable[[], Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")
    module = vllm_module(number)
    with hooked(module, WORKER):
        worker = make_worker(module, card_of())
        worker.cache_config.kv_cache_memory_bytes = gib(8)
        assert worker.determine_available_memory() == gib(8) - reservation(number)
        assert not hasattr(worker, "peak_activation_memory")


# vLLM-Omni


def omni_expected() -> int:
    return gib(40) - gib(0.5) - gib(12) - gib(0.25) - gib(2)


@pytest.mark.parametrize("number", OMNI)
def test_omni_stock_is_untouched(number: str, card_of: Callable[[], Card]) -> None:
    module = omni_module(number)
    value = make_worker(module, card_of(), "OmniGPUWorkerBase").determine_available_memory()
    with hooked(module, OMNI_WORKER):
        assert make_worker(module, card_of(), "OmniGPUWorkerBase").determine_available_memory() == value


@pytest.mark.parametrize("number", OMNI)
@pytest.mark.parametrize("listed", [True, False])
def test_omni_process(number: str, listed: bool, card_of: Callable[[], Card], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.16 to 0.28 alone: a miss claims everything that was requested, and a hit leaves no room for the peak."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # what vLLM-Omni reads; torch's own identity is the same device
    module = omni_module(number)
    card = card_of()
    card.listed = listed
    alone = make_worker(module, card, "OmniGPUWorkerBase").determine_available_memory()
    reads_nvml = hasattr(module, "get_process_gpu_memory")
    assert reads_nvml == (Version(number) <= Version("0.28"))
    if reads_nvml:
        assert alone == (omni_expected() + gib(2) if listed else gib(40))
    monkeypatch.setenv("VLLM_OMNI_PATCH_GPU_BUDGET", "process")
    with hooked(module, OMNI_WORKER):
        card = card_of()
        card.listed = listed
        value = make_worker(module, card, "OmniGPUWorkerBase").determine_available_memory()
    # Not listed: vLLM's terms, which do not hold the context that was there before the snapshot.
    assert value == (omni_expected() if listed else omni_expected() + gib(0.5))


@pytest.mark.parametrize("number", OMNI)
def test_omni_says_that_it_read_nothing(
    number: str, card_of: Callable[[], Card], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    module = omni_module(number)
    with hooked(module, OMNI_WORKER), caplog.at_level(logging.WARNING, logger="vllm.omni_patch"):
        card = card_of()
        card.listed = False
        make_worker(module, card, "OmniGPUWorkerBase").determine_available_memory()
    assert ("reads 0 bytes" in caplog.text) == (Version(number) <= Version("0.28"))
