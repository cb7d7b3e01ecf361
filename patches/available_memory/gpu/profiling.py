# SPDX-License-Identifier: Apache-2.0
"""Watches one call of a GPU worker's ``determine_available_memory``.

vLLM's method stays in charge: it profiles, estimates CUDA graphs, sets the attributes that warm-up reads, subtracts
the multimodal reservation. For the length of the call its module sees ``memory_profiling`` through a wrapper that
notes the result. With the ``process`` policy the wrapper also puts this process's own memory into that result, so
that everything behind it, in whichever release, works from the right figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from vllm_omni_patch import ledger

from ..report.units import byte_count, gib
from ..swap import swapped
from . import budget, nvml
from .devices import DeviceIdentity

logger = ledger.logger("memory")


class ProfileWatch:
    """What happened during one call, and the corrections made to it.

    ``result`` is vLLM's profiling result, ``profile`` the same as plain numbers *before* any correction, ``reading``
    this process's memory, ``terms`` what was put into the result (``process`` policy only), ``graph_estimate`` the
    estimate as the model runner gave it where it was watched. They stay ``None`` when the call took a path without
    profiling, such as an explicit ``kv_cache_memory_bytes``.
    """

    def __init__(self, worker: Any, module: ModuleType, process: bool, baseline: budget.Baseline | None = None) -> None:
        self.worker = worker
        self.module = module
        self.process = process
        self.baseline = baseline
        self.result: Any = None
        self.profile: budget.Profile | None = None
        self.terms: budget.Terms | None = None
        self.reading: nvml.Reading | None = None
        self.graph_estimate: int | None = None
        self.notes: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the wrappers in place for the length of the block; they are removed however it ends."""
        with ExitStack() as stack:
            original = getattr(self.module, "memory_profiling", None)
            if original is not None:
                stack.enter_context(swapped(self.module, "memory_profiling", self._watching(original)))
            runner = getattr(self.worker, "model_runner", None)
            estimate = getattr(runner, "profile_cudagraph_memory", None)
            if self.process and callable(estimate):
                try:
                    stack.enter_context(swapped(runner, "profile_cudagraph_memory", self._estimating(estimate)))
                except (AttributeError, TypeError) as error:
                    self.notes.append(f"CUDA graph memory is estimated from the whole device: {error}")
            yield

    def read(self, in_use: int | None = None) -> nvml.Reading:
        """This process's memory on the worker's device, as NVML reports it now; unknown unless it is plausible."""
        return own_memory(self.worker, self.baseline, in_use)

    def _total(self) -> int:
        return int(self.worker.init_snapshot.total_memory)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def memory_profiling(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with original(*args, **kwargs) as result:
                yield result
            try:
                self._profiled(result)
            except Exception as error:
                self._warn(
                    f"The memory profile could not be read ({type(error).__name__}: {error}); vLLM's figures are used"
                )

        return memory_profiling

    def _profiled(self, result: Any) -> None:
        self.result = result
        self.profile = profile_of(result, self.worker)
        unified = is_unified(self.worker.device)  # free memory is then the host's, of which this process has a part
        self.reading = self.read(None if unified else self.profile.total - self.profile.free_after)
        if not self.process:
            return
        terms = budget.terms(self.reading, self.profile)
        if not terms.exact:
            self._warn(
                f"This process's device memory is unknown: {terms.reason}. vLLM's profiling terms are used instead"
            )
        before, after = self.profile.free_before, self.profile.free_after
        if after >= before:
            self._warn(
                f"Free memory on the device was {gib(before)} before and {gib(after)} after profiling, although this "
                "process took some: another process released memory. The budget does not depend on it"
            )
        result.non_torch_increase = terms.non_torch_increase
        result.non_kv_cache_memory = terms.non_kv
        if self.profile.total_consumed is not None:
            result.total_consumed = terms.total_consumed
        # vLLM stops the engine when memory became free during profiling (through 0.15 also when nothing changed);
        # with the process's own figures in place, that does not concern this engine.
        if after >= before:
            result.after_profile.free_memory = before - 1
        self.terms = terms

    def _estimating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM estimates graphs from the free memory of the whole device; show it this process's memory instead."""

        def profile_cudagraph_memory(*args: Any, **kwargs: Any) -> Any:
            estimate = self._estimate(lambda: original(*args, **kwargs))
            self.graph_estimate = estimate
            if isinstance(estimate, (int, float)) and estimate < 0:
                self._warn(f"The CUDA graph estimate is negative ({gib(estimate)}); it is taken as 0")
                return 0
            return estimate

        return profile_cudagraph_memory

    def _estimate(self, original: Callable[[], Any]) -> Any:
        try:
            view = OwnMemoryView(self.worker.device, self._total(), self.read)
        except Exception as error:
            self._warn(f"CUDA graph memory is estimated from the whole device ({type(error).__name__}: {error})")
            return original()
        if not view.usable:
            return original()
        with view.installed():
            estimate = original()
        if view.failed:
            self._warn(
                f"This process's memory could not be read during the graph estimate ({view.failed}); estimated again"
            )
            return original()
        return estimate

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        logger.warning("%s.", text)


class OwnMemoryView:
    """Free memory of a device as if this process were alone on it: ``total - own``, for the length of a block.

    ``failed`` is the reason when a reading was missed in between; what was computed in the block is then not usable.
    """

    def __init__(self, device: Any, total: int, read: Callable[[], nvml.Reading]) -> None:
        self.device = device
        self.total = total
        self.failed = ""
        self._read = read
        first = read()
        self.usable = first.state == "measured" and first.bytes is not None
        self._last = first.bytes or 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """``torch.accelerator.get_memory_info`` and ``torch.cuda.mem_get_info`` answer with this view."""
        import torch

        with ExitStack() as stack:
            for owner, name in (
                (getattr(torch, "accelerator", None), "get_memory_info"),
                (torch.cuda, "mem_get_info"),
            ):
                original = getattr(owner, name, None)
                if owner is not None and original is not None:
                    stack.enter_context(swapped(owner, name, self._view(original)))
            yield

    def _view(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def memory_info(device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._is_ours(device):
                return original(device, *args, **kwargs)
            reading = self._read()
            if reading.state == "measured" and reading.bytes is not None:
                self._last = reading.bytes
            else:
                self.failed = reading.reason
            return self.total - self._last, self.total

        return memory_info

    def _is_ours(self, device: Any) -> bool:
        if device is None:
            return True
        index = device if isinstance(device, int) else getattr(device, "index", None)
        return index is None or index == self.device.index


def profile_of(result: Any, worker: Any) -> budget.Profile:
    """vLLM's ``MemoryProfilingResult`` (any release from 0.10.2) as plain numbers, in bytes.

    ``torch_allocated`` is in the snapshot from 0.27 on; before, torch is asked.

    Raises:
        AttributeError: the result lacks a field that every release has.
    """
    before, after = result.before_profile, result.after_profile
    allocated = getattr(after, "torch_allocated", None)
    if allocated is None:
        allocated = torch_memory(getattr(worker, "device", None)).get("allocated")
    consumed = getattr(result, "total_consumed", None)
    return budget.Profile(
        total=int(after.total_memory or worker.init_snapshot.total_memory),
        free_before=int(worker.init_snapshot.free_memory),
        free_after=int(after.free_memory),
        weights=int(result.weights_memory),
        torch_peak=int(after.torch_peak),
        torch_before=int(before.torch_peak),
        torch_reserved=None if after.torch_memory is None else int(after.torch_memory),
        torch_allocated=None if allocated is None else int(allocated),
        non_torch_increase=int(result.non_torch_increase),
        total_consumed=None if consumed is None else int(consumed),
    )


def torch_memory(device: Any) -> dict[str, int]:
    """``allocated`` and ``reserved`` bytes of this process in torch's allocator; a figure torch lacks is left out."""
    import torch

    stats: dict[str, Any] = {}
    for owner in (getattr(torch, "accelerator", None), torch.cuda):
        function = getattr(owner, "memory_stats", None)
        if function is None:
            continue
        try:
            stats = function(device)
            break
        except (RuntimeError, AssertionError, ValueError, AttributeError):
            continue
    keys = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
    return {name: int(stats[key]) for name, key in keys.items() if key in stats}


def own_memory(worker: Any, baseline: budget.Baseline | None = None, in_use: int | None = None) -> nvml.Reading:
    """Device memory of this process on ``worker``'s device: NVML's row, unknown unless it can be ours.

    The only source of this figure, for decisions and reports; ``in_use`` as in :func:`budget.trust`.

    Raises:
        Exception: the worker lacks ``device`` or ``init_snapshot``, or torch failed.
    """
    reading = read_device(worker.device)
    stats = torch_memory(worker.device)
    weights = byte_count(getattr(getattr(worker, "model_runner", None), "model_memory_usage", None)) or 0
    total = int(worker.init_snapshot.total_memory)
    return budget.trust(reading, total, stats.get("reserved"), weights, baseline, in_use)


def device_memory(device: Any) -> tuple[int, int] | None:
    """(free, total) bytes of the whole device, as torch reports it now; ``None`` where it does not."""
    import torch

    for owner, name in ((getattr(torch, "accelerator", None), "get_memory_info"), (torch.cuda, "mem_get_info")):
        function = getattr(owner, name, None)
        try:
            if function is not None:
                free, total = function(device)
                return int(free), int(total)
        except (RuntimeError, AssertionError, ValueError, AttributeError):
            continue
    return None


def read_device(device: Any) -> nvml.Reading:
    """NVML's row for this process on a ``torch.device``, before :func:`own_memory` has checked it."""
    try:
        import torch

        if getattr(device, "type", None) != "cuda" or torch.version.hip:
            kind = "a ROCm device" if torch.version.hip else f"a device of type {getattr(device, 'type', None)}"
            return nvml.Reading.unknown(f"NVML does not cover {kind}")
        return nvml.read_own(DeviceIdentity.of_torch(device), load=_binding)
    except Exception as error:
        return nvml.Reading.unknown(f"the device could not be identified ({type(error).__name__}: {error})")


def is_unified(device: Any) -> bool:
    """Whether host and device share one memory, by the device's own property; ``False`` when torch cannot say."""
    try:
        import torch

        return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    except Exception:
        return False


def _binding() -> Any:
    """``nvidia-ml-py`` where it is installed, else the copy of it that vLLM carries."""
    try:
        import pynvml

        return pynvml
    except ImportError:
        from vllm.third_party import pynvml as carried

        return carried
