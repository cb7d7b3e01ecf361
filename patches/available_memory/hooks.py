# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's GPU, CPU and XPU workers: the budget of the chosen policy, and one report after each.

With ``VLLM_OMNI_PATCH_GPU_BUDGET=stock`` and no reserve, what vLLM's method returned is returned as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from vllm_omni_patch import flags, ledger
from vllm_omni_patch.patch import Hook, Undo

from . import explain
from .cpu import weights
from .flags import GPU_BUDGET, RESERVE_MODEL_LOCAL_KV
from .gpu import budget
from .gpu.profiling import ProfileWatch, is_unified, own_memory, read_device, torch_memory
from .report import output, report
from .report.units import byte_count, gib

logger = ledger.logger("memory")

_inside = threading.local()
_baselines: WeakKeyDictionary[Any, budget.Baseline] = WeakKeyDictionary()
_reports: WeakKeyDictionary[Any, report.BudgetReport] = WeakKeyDictionary()
_before: weights.Before = WeakKeyDictionary()  # the models of this process, as they were loaded


def install_gpu(hook: Hook) -> Undo:
    """Wrap ``Worker.determine_available_memory`` of a module that profiles with ``memory_profiling``."""

    def determine(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
        return once(wrapped, worker, args, kwargs, lambda: run_gpu(hook.module, wrapped, worker, args, kwargs))

    return hook.wrap(determine)


def install_report(hook: Hook) -> Undo:
    """Wrap ``determine_available_memory`` of a worker whose budget stays its own (CPU, and XPU through 0.15)."""

    def determine(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
        return once(wrapped, worker, args, kwargs, lambda: run_report(wrapped, worker, args, kwargs))

    return hook.wrap(determine)


def install_init(hook: Hook) -> Undo:
    """Wrap ``Worker.init_device``: the reading before any weights, and a refusal that names the neighbours' share.

    The refusal's text is vLLM's own under the ``stock`` policy.
    """

    def init_device(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
        process = flags.read(GPU_BUDGET) == "process"
        try:
            result = wrapped(*args, **kwargs)
        except ValueError as error:
            text = _refusal(worker, error) if process else None
            if text is None:
                raise
            raise ValueError(f"{text} (vLLM: {error})") from error
        _take_baseline(worker)
        return result

    return hook.wrap(init_device)


def install_count(hook: Hook) -> Undo:
    """Wrap ``process_weights_after_loading``: on CPU, what the weights take is counted before vLLM packs them."""

    def process(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            given = dict(zip(("model", "model_config", "target_device"), args, strict=False)) | kwargs
            if given["target_device"].type == "cpu":
                weights.note(given["model"], _before)
        except Exception as error:
            logger.debug("weights were not counted before packing: %s", error)
        return wrapped(*args, **kwargs)

    return hook.wrap(process)


def install_layout(hook: Hook) -> Undo:
    """Wrap ``Worker.initialize_from_config``: once the KV cache is laid out, its block count joins the report."""

    def initialize(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        try:
            known = _reports.get(worker)
            if known is not None:
                explain.add_blocks(known, args[0] if args else kwargs.get("kv_cache_config"))
                output.emit(known, brief=True)
        except Exception as error:
            logger.warning("The KV cache block count could not be reported (%s: %s).", type(error).__name__, error)
        return result

    return hook.wrap(initialize)


def install_plan(hook: Hook) -> Undo:
    """Wrap ``compute_plan_fingerprint`` (0.26 and later): a start-up plan holds a budget, so it belongs to a policy.

    Without this a plan that the ``process`` policy saved would be used by stock runs, and the other way round.
    """

    def fingerprint(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        value = wrapped(*args, **kwargs)
        return f"{value}-process" if flags.read(GPU_BUDGET) == "process" else value

    return hook.wrap(fingerprint)


def once(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any, outermost: Callable[[], Any]) -> Any:
    """Run ``outermost``, or only ``wrapped`` inside another wrapper's call: a subclass may inherit a wrapped method."""
    if getattr(_inside, "worker", None) is worker:
        return wrapped(*args, **kwargs)
    _inside.worker = worker
    try:
        return outermost()
    finally:
        _inside.worker = None


def run_gpu(module: ModuleType, wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    """One budget of a GPU worker, in bytes.

    Raises:
        FlagError: a setting has a value that it does not accept.
        RuntimeError: nothing is left for KV after the reserve for model-local KV.
    """
    policy, reserve = flags.read(GPU_BUDGET), flags.read(RESERVE_MODEL_LOCAL_KV)
    explicit = _explicit(worker)
    watch = ProfileWatch(worker, module, policy == "process", _of(_baselines, worker))
    with watch.installed():
        stock = wrapped(*args, **kwargs)
    value = process_budget(worker, watch, stock) if watch.terms is not None else stock
    return finish(worker, value, stock, policy, reserve, explicit, watch)


def run_report(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    """One budget of a worker that keeps its own formula, in bytes. Raises as :func:`run_gpu`."""
    reserve = flags.read(RESERVE_MODEL_LOCAL_KV)
    explicit = _explicit(worker)
    stock = wrapped(*args, **kwargs)
    return finish(worker, stock, stock, "stock", reserve, explicit, None)


def finish(
    worker: Any, value: Any, stock: Any, policy: str, reserve: bool, explicit: bool, watch: ProfileWatch | None
) -> Any:
    """Take the reserve off ``value`` where asked for, report, and return the number; the report cannot change it."""
    reserved = 0
    if reserve and not explicit:
        reserved = pending_reserve()
        if reserved:
            value = less_reserve(value, reserved)
    try:
        made = explain.build(worker, value, stock, policy, explicit, watch, _before)
        made.reserved_for_model_local_kv = reserved
        _reports[worker] = made
        output.emit(made)
    except Exception as error:
        output.warn_failed(error)
    return value


def process_budget(worker: Any, watch: ProfileWatch, stock: Any) -> int:
    """The number behind vLLM's own arithmetic on the corrected profile, with the bounds that vLLM does not keep.

    vLLM's method has worked from this process's memory already; what is left is a negative graph estimate of a
    release whose runner could not be watched, the host's limit on unified memory, and ``0 <= result <= requested``.
    """
    requested = worker.requested_memory
    available = getattr(worker, "available_kv_cache_memory_bytes", stock)
    non_kv = watch.result.non_kv_cache_memory
    applied = int(requested - non_kv - available)
    reservation = max(int(available) - int(stock), 0)
    limit = _host_limit(watch) if is_unified(worker.device) else None
    made = budget.budget(requested, int(non_kv), applied, limit)
    return max(min(made - reservation, int(requested)), 0)


def pending_reserve() -> int:
    """Bytes of pending model-local KV. Resident parts are never in it: they were measured already.

    0 with one warning when the declaration does not say how much.
    """
    published = ledger.published(report.MODEL_LOCAL_KV)
    if published is None:
        return 0
    pending = byte_count(published.get("pending_bytes")) if isinstance(published, dict) else None
    if pending is None:
        logger.warning("The amount of pending model-local KV is unknown; nothing is reserved for it.")
        return 0
    return pending


def less_reserve(value: Any, reserved: int) -> int:
    """``value`` less ``reserved`` bytes.

    Raises:
        RuntimeError: nothing would be left.
    """
    left = int(value) - reserved
    if left <= 0:
        raise RuntimeError(
            f"No KV cache fits: the budget is {int(value)} bytes ({gib(value)}) and {reserved} bytes "
            f"({gib(reserved)}) of model-local KV are pending. To fix: raise --gpu-memory-utilization, lower "
            f"--max-num-seqs, or unset {RESERVE_MODEL_LOCAL_KV.name}."
        )
    return left


def _explicit(worker: Any) -> bool:
    return bool(getattr(worker.cache_config, "kv_cache_memory_bytes", None))


def _host_limit(watch: ProfileWatch) -> int | None:
    import psutil

    if watch.profile is None:
        return None
    available = int(psutil.virtual_memory().available)
    return budget.unified_limit(available, watch.profile.total, watch.profile.transient_peak or 0)


def _of(table: WeakKeyDictionary[Any, Any], worker: Any) -> Any:
    try:
        return table.get(worker)
    except TypeError:  # a worker class that cannot be hashed or weakly referenced
        return None


def _take_baseline(worker: Any) -> None:
    try:
        reading = read_device(worker.device)  # not checked: later readings are compared with it
        reserved = torch_memory(worker.device).get("reserved")
        if reading.bytes and reserved is not None:
            _baselines[worker] = budget.Baseline(reading.bytes, reserved)
    except Exception as error:
        logger.debug("no reading of own device memory at start: %s", error)


def _refusal(worker: Any, error: ValueError) -> str | None:
    """A fuller text for vLLM's "not enough free memory at start"; ``None`` when ``error`` is about something else."""
    try:
        snapshot = getattr(worker, "init_snapshot", None)
        if snapshot is None or not str(error).startswith("Free memory on device"):
            return None
        wanted = snapshot.total_memory * worker.cache_config.gpu_memory_utilization
        total, free, unified = int(snapshot.total_memory), int(snapshot.free_memory), is_unified(worker.device)
        own = own_memory(worker, in_use=None if unified else total - free).bytes
        return budget.refusal(str(worker.device), total, free, wanted, own, unified)
    except Exception:
        return None
