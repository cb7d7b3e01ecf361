# SPDX-License-Identifier: Apache-2.0
"""Around ``load_model`` of the model runners. An error in here does not affect the load or its result."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.patch import Hook, Undo

from .charge import Engine
from .collect import collect
from .report import Load
from .watch import WATCH

logger = ledger.logger("model_local_kv")

_inside = threading.local()
"""Per thread: ``runners``, ids of the runners whose ``load_model`` is running; ``native``, those that vLLM-Omni itself
has reported since."""


def install_load_model(hook: Hook) -> Undo:
    """Report after the outermost ``load_model`` of a runner returns; its class chain may hold several of ours."""

    def load_model(wrapped: Callable[..., Any], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running, native = _state()
        key = id(runner)
        if key in running:
            return wrapped(*args, **kwargs)
        running.add(key)
        native.discard(key)
        try:
            result = wrapped(*args, **kwargs)
        finally:
            running.discard(key)
        _quietly(lambda: report_load(runner, key in native))
        native.discard(key)
        return result

    return hook.wrap(load_model)


def install_native_report(hook: Hook) -> Undo:
    """Note that vLLM-Omni reports a load by itself; its NPU runner has the method too, and never calls it."""

    def report(wrapped: Callable[..., Any], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _state()[1].add(id(runner))
        return wrapped(*args, **kwargs)

    return hook.wrap(report)


def report_load(runner: Any, native_report: bool = False) -> Load:
    """Collect the models of ``runner`` and report them. A collection that raises is a report of its own."""
    load = Load(
        runner=f"{type(runner).__module__}.{type(runner).__qualname__}",
        model="",
        where=_where(runner),
        max_num_seqs=max(1, int(runner.scheduler_config.max_num_seqs)),
        engine=engine_of(runner),
        native_report=native_report,
        dp_rank=metrics.dp_rank(getattr(runner, "parallel_config", None)),
    )
    roots: list[tuple[str, Any]] = []
    try:
        roots = models_of(runner)
        load.collection = collect(
            roots,
            max_num_seqs=load.max_num_seqs,
            vllm_config=getattr(runner, "vllm_config", None),
            keep_paths=WATCH.observing,
        )
        load.model = load.collection.root
    except Exception as error:
        load.error = f"{type(error).__name__}: {error}"
        load.model = type(getattr(runner, "model", None)).__name__
    WATCH.loaded(runner, load, roots)
    return load


def models_of(runner: Any) -> list[tuple[str, Any]]:
    """The runner's model (path prefix ``""``), then its draft model: ``drafter`` in V1, ``speculator`` in V2.

    LoRA needs nothing here: the runner's model is then the same tree with wrapped layers.
    """
    roots = [("", runner.model)]
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        if model is not None:
            roots.append((name, model))
    return roots


def engine_of(runner: Any) -> Engine:
    """What the runner and the imported releases say about how the KV budget is made."""
    omni = any(base.__module__.partition(".")[0] == "vllm_omni" for base in type(runner).__mro__)
    cache_config = getattr(runner, "cache_config", None)
    return Engine(
        core=_release("vllm"),
        omni=_release("vllm_omni") if omni else None,
        device=str(getattr(getattr(runner, "device", None), "type", "")),
        kv_size_given=bool(getattr(cache_config, "kv_cache_memory_bytes", None)),
    )


def _release(module: str) -> tuple[int, int] | None:
    from packaging.version import InvalidVersion, Version

    text = getattr(sys.modules.get(module), "__version__", None)
    try:
        release = Version(str(text)).release
    except InvalidVersion:
        return None
    return (release[0], release[1]) if len(release) > 1 else None


def _where(runner: Any) -> str:
    """Stage, device and ranks, so that reports of several processes on one device can be added up."""
    parts = []
    stage = getattr(getattr(runner, "model_config", None), "stage_id", None)
    if stage is not None:
        parts.append(f"stage {stage}")
    device = getattr(runner, "device", None)
    if device is not None:
        parts.append(str(device))
    parallel = getattr(runner, "parallel_config", None)
    dp_rank, rank = metrics.dp_rank(parallel), getattr(parallel, "rank", None)
    if dp_rank is not None:
        parts.append(f"DP rank {dp_rank}")
    if rank is not None:
        parts.append(f"rank {rank}")
    return ", ".join(parts) or "device unknown"


def _state() -> tuple[set[int], set[int]]:
    if not hasattr(_inside, "runners"):
        _inside.runners, _inside.native = set(), set()
    return _inside.runners, _inside.native


def _quietly(action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception:
        logger.warning("The model-local KV report failed. The load is not affected.", exc_info=True)
