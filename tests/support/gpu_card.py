# SPDX-License-Identifier: Apache-2.0
"""A GPU that is only numbers, under vLLM's real ``gpu_worker.Worker``.

Only the lowest edge is stood in for: torch's memory functions, the platform's answers about the device, the two model
runner methods that would need a device, and a scripted ``libnvidia-ml.so.1`` below the real ``nvidia-ml-py``. Snapshot,
profiling, formula, assertion and reservation are vLLM's own code.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.nvml_library import GIB, PCI, UUIDS, NvmlLibrary

__all__ = ["GIB", "Card", "Lines", "Runner", "make_worker", "stand_in", "stand_in_torch"]


class Card:
    """One device: this process's torch and other memory, and neighbours by PID. All in bytes.

    ``on_read`` is called before every look at the device's free memory: a neighbour may act there. ``listed`` says
    whether NVML's table shows this process, and ``row`` overrides the value that it shows.
    """

    def __init__(self, total: int, library: NvmlLibrary, context: int = 0) -> None:
        self.total = total
        self.library = library
        self.outside_torch = context
        self.allocated = self.reserved = self.peak = 0
        self.neighbours: dict[int, int] = {}
        self.on_read: Callable[[], None] = lambda: None
        self.listed = True
        self.row: int | None = None
        self.integrated = False
        self.extra: tuple[str, ...] = ()
        self.config: Any = None
        self.publish()

    @property
    def own(self) -> int:
        return self.reserved + self.outside_torch

    @property
    def free(self) -> int:
        return self.total - self.own - sum(self.neighbours.values())

    def allocate(self, count: int) -> None:
        self.allocated += count
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)
        self.publish()

    def release(self, count: int) -> None:
        self.allocated -= count

    def take_outside_torch(self, count: int) -> None:
        self.outside_torch += count
        self.publish()

    def set_neighbour(self, pid: int, count: int) -> None:
        self.neighbours[pid] = count
        self.publish()

    def publish(self) -> None:
        """Write NVML's process table; CUDA's first device is NVML's second."""
        rows = [f"process {UUIDS[1]} {pid} {count}" for pid, count in self.neighbours.items()]
        if self.listed:
            rows.append(f"process {UUIDS[1]} {os.getpid()} {self.own if self.row is None else self.row}")
        self.library.write(*rows, *self.extra, devices=2)

    def memory_info(self, device: Any = None) -> tuple[int, int]:
        self.on_read()
        return self.free, self.total

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": self.peak,
            "allocated_bytes.all.current": self.allocated,
            "reserved_bytes.all.current": self.reserved,
        }

    def empty_cache(self) -> None:
        self.reserved = self.allocated
        self.publish()

    def reset_peak(self, device: Any = None) -> None:
        self.peak = self.allocated


class Runner:
    """The part of a model runner that ``determine_available_memory`` calls."""

    def __init__(self, card: Card, weights: int, peak: int, outside: int, graphs: int) -> None:
        self.card = card
        self.model_memory_usage = weights
        self.peak, self.outside, self.graphs = peak, outside, graphs
        self.graph_shift = 0
        self.profiled = 0

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.profiled += 1
        self.card.allocate(self.peak)
        self.card.on_read()
        self.card.release(self.peak)
        self.card.take_outside_torch(self.outside)

    def profile_cudagraph_memory(self) -> int:
        before = torch.accelerator.get_memory_info()[0]
        self.card.take_outside_torch(self.graphs)
        after = torch.accelerator.get_memory_info()[0]
        self.card.take_outside_torch(-self.graphs)
        return before - after + self.graph_shift


@functools.cache
def _config() -> Any:
    """One vLLM configuration, made before the platform claims to be CUDA: making it would look for CUDA's kernels."""
    importlib.import_module("vllm.v1.worker.gpu_worker")
    from vllm.config import VllmConfig

    config = VllmConfig()
    gc.freeze()  # vLLM collects garbage twice per profile; walking all of torch and vLLM each time takes seconds
    return config


def stand_in_torch(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    """Put ``card`` below torch's memory functions, of ``torch.accelerator`` and of ``torch.cuda``."""
    for name, value in (
        ("get_memory_info", card.memory_info),
        ("memory_stats", card.memory_stats),
        ("memory_reserved", lambda device=None: card.reserved),
        ("empty_cache", card.empty_cache),
        ("reset_peak_memory_stats", card.reset_peak),
        ("synchronize", lambda device=None: None),
    ):
        monkeypatch.setattr(torch.accelerator, name, value)
    for name, value in (
        ("mem_get_info", card.memory_info),
        ("memory_stats", card.memory_stats),
        ("memory_reserved", lambda device=None: card.reserved),
        ("memory_allocated", lambda device=None: card.allocated),
        ("empty_cache", card.empty_cache),
        ("reset_peak_memory_stats", card.reset_peak),
        ("synchronize", lambda device=None: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "none")
    domain, bus, slot = (int(part.split(".")[0], 16) for part in PCI[1].split(":"))
    properties = SimpleNamespace(
        uuid=UUIDS[1].removeprefix("GPU-"),
        pci_domain_id=domain,
        pci_bus_id=bus,
        pci_device_id=slot,
        is_integrated=False,
        major=9,
        minor=0,
    )

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        properties.is_integrated = card.integrated
        return properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)


def stand_in(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    """Put ``card`` below torch and the installed vLLM's platform."""
    from vllm.platforms import current_platform

    card.config = _config()
    stand_in_torch(monkeypatch, card)
    for name, value in (
        ("is_cuda_alike", lambda: True),
        ("is_cuda", lambda: True),
        ("is_xpu", lambda: False),
        ("is_rocm", lambda: False),
        ("is_integrated_gpu", lambda index=0: card.integrated),
    ):
        monkeypatch.setattr(current_platform, name, value)


def make_worker(
    card: Card,
    *,
    utilization: float | None = None,
    requested: int | None = None,
    weights: int = 0,
    peak: int = 0,
    outside: int = 0,
    graphs: int | None = None,
) -> Any:
    """vLLM's ``Worker`` as it stands before ``determine_available_memory``: device initialised, weights loaded."""
    from vllm.config import CUDAGraphMode
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.utils import request_memory

    worker = Worker.__new__(Worker)
    config = card.config
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE if graphs is None else CUDAGraphMode.FULL
    worker.vllm_config = config
    worker.cache_config, worker.parallel_config = config.cache_config, config.parallel_config
    worker.model_config = SimpleNamespace(multimodal_config=None)
    worker.device, worker.rank, worker.local_rank = torch.device("cuda:0"), 0, 0
    worker.use_v2_model_runner = False
    worker.cache_config.kv_cache_memory_bytes = None
    if requested is not None:
        utilization = requested / card.total
    worker.cache_config.gpu_memory_utilization = utilization
    worker.init_snapshot = MemorySnapshot(device=worker.device)
    worker.requested_memory = request_memory(worker.init_snapshot, worker.cache_config)
    if requested is not None:
        worker.requested_memory = requested
    card.allocate(weights)
    worker.model_runner = Runner(card, weights, peak, outside, graphs or 0)
    return worker


class Lines(logging.Handler):
    """Collects what the patch logs; vLLM's logger does not hand records on to pytest."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")

    def warnings(self) -> list[str]:
        return [text for text in self.texts if text.startswith("WARNING")]
