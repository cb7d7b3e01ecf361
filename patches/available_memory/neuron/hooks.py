# SPDX-License-Identifier: Apache-2.0
"""The hook on vllm-neuron's worker (plugin releases 0.1 to 0.5).

Release 0.1 returns 1 GiB whatever the device has; the others the free bytes and, when anything fails, 20 GiB. An error
of ours is therefore raised; the original method would replace it by a guess.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.patch import Hook, Undo

from ..report import output
from ..report.report import BudgetReport
from ..swap import swapped
from . import budget, laid_out, record
from .releases import NEW_MODULE

logger = ledger.logger("memory")

NATIVE_SIGNS = ("_compute_kv_budget", "_get_kv_cap_fraction")
# Plugin 0.5: block-KV layouts call the first, contiguous layouts the second.
FREE_BYTES_METHOD = "_query_runtime_memory"
CONTIGUOUS_METHOD = "_calculate_contiguous_kv_memory"
EXPLICIT = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
# The packages that register torch.classes.neuron, older and newer.
RUNTIME_PACKAGES = ("torch_neuronx", "libtorch_neuronx_lite")


def install(hook: Hook) -> Undo:
    """Wrap ``NeuronWorker.determine_available_memory``.

    Raises:
        RuntimeError: the worker computes a budget itself, or its branches cannot be told apart; it is left alone.
    """
    signs = [name for name in NATIVE_SIGNS if hasattr(hook.owner, name)]
    if signs or hook.target.module == NEW_MODULE:
        raise RuntimeError(f"{hook.target.name} computes its own KV budget ({', '.join(signs) or 'by its path'})")
    if hasattr(hook.owner, CONTIGUOUS_METHOD) and not hasattr(hook.owner, FREE_BYTES_METHOD):
        raise RuntimeError(
            f"{hook.target.name} has {CONTIGUOUS_METHOD} but not {FREE_BYTES_METHOD}, so its block-KV branch cannot "
            "be told from the contiguous one"
        )
    return hook.wrap(_determine_available_memory)


def _determine_available_memory(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not hasattr(type(instance), CONTIGUOUS_METHOD):
        return _settle(instance, _decide(instance, lambda: wrapped(*args, **kwargs)))
    with _free_bytes_replaced(instance) as seen:
        stock = wrapped(*args, **kwargs)
    if seen.error is not None:
        # The original may have swallowed it and answered with its constant.
        raise seen.error
    if seen.budget is None or seen.contiguous:
        _report_original(instance, stock)
        return stock
    # A further bound of the worker's own (a fork's slab limit) holds; a larger answer is not ours to give.
    made = seen.budget.report
    if isinstance(stock, int) and stock < made.kv_bytes:
        made.notes.append(f"The worker lowered the KV budget from {made.kv_bytes} to {stock} bytes.")
        made.kv_bytes, made.linear_in_requested = stock, False
        seen.budget.at_total = None
    return _settle(instance, seen.budget)


class _Seen:
    """Which branch the original took, and what came of it."""

    def __init__(self) -> None:
        self.budget: budget.NeuronBudget | None = None
        self.error: Exception | None = None
        self.contiguous = False


@contextmanager
def _free_bytes_replaced(instance: Any) -> Iterator[_Seen]:
    """While open, the worker's question for free bytes is answered with our budget.

    Whether a worker has a block-KV layout, a contiguous one or a pooling model is the original's decision; only its
    block-KV branch asks. That is how the branches are told apart without knowing which attribute decides.
    """
    seen = _Seen()
    original = getattr(instance, FREE_BYTES_METHOD)

    def free_bytes(*args: Any, **kwargs: Any) -> int:
        try:
            seen.budget = _decide(instance, lambda: original(*args, **kwargs))
            return seen.budget.report.kv_bytes
        except Exception as error:
            seen.error = error
            raise

    contiguous = getattr(instance, CONTIGUOUS_METHOD)

    def contiguous_bytes(*args: Any, **kwargs: Any) -> Any:
        seen.contiguous = True
        return contiguous(*args, **kwargs)

    with swapped(instance, FREE_BYTES_METHOD, free_bytes), swapped(instance, CONTIGUOUS_METHOD, contiguous_bytes):
        yield seen


def _decide(worker: Any, own_number: Callable[[], int]) -> budget.NeuronBudget:
    try:
        view = view_of(worker)
        view.own_number = own_number
        return budget.decide(view, runtime_stats)
    except (RuntimeError, ValueError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"The Neuron KV budget could not be computed ({type(error).__name__}: {error}); this worker lacks what "
            "every published release has. Leave available_memory out of VLLM_OMNI_PATCH to use the worker's own number."
        ) from error


def runtime_stats() -> tuple[int, int]:
    """(used, free) bytes of this process's logical core, from the Neuron runtime.

    Raises:
        RuntimeError: the runtime's torch class is not registered, or the call fails.
    """
    import torch

    for package in (*RUNTIME_PACKAGES, ""):
        try:
            runtime = torch.classes.neuron.Runtime()
            break
        except (RuntimeError, AttributeError) as error:
            if not package:
                raise RuntimeError(
                    f"The Neuron runtime cannot be asked for memory: {error} Install torch-neuronx or "
                    "libtorch-neuronx-lite from the Neuron SDK."
                ) from error
        try:
            importlib.import_module(package)
        except ImportError:
            continue
    used, free = budget.usable_stats(runtime.get_vnc_memory_stats())
    return used, free


def view_of(worker: Any) -> budget.WorkerView:
    """What the budget needs of ``worker``; bytes are not looked at yet.

    Raises:
        AttributeError: the worker lacks what every release has (``cache_config``, ``parallel_config``,
            ``model_runner.model``).
    """
    cache, parallel = worker.cache_config, worker.parallel_config
    runner = worker.model_runner
    local, local_source = _local_workers(parallel)
    replicas, replicas_source = _replicas(parallel)
    model_config = getattr(worker, "model_config", None)
    scheduler = getattr(worker, "scheduler_config", None)
    drafter = getattr(runner, "drafter", None)
    return budget.WorkerView(
        gpu_memory_utilization=cache.gpu_memory_utilization,
        model=runner.model,
        worker=type(worker).__name__,
        rank=getattr(worker, "rank", None),
        local_rank=getattr(worker, "local_rank", None),
        drafter=getattr(drafter, "model", None),
        kv_cache_memory_bytes=getattr(cache, "kv_cache_memory_bytes", None),
        num_gpu_blocks_override=getattr(cache, "num_gpu_blocks_override", None),
        local_workers=local,
        local_workers_source=local_source,
        replicas=replicas,
        replicas_source=replicas_source,
        max_num_seqs=int(getattr(scheduler, "max_num_seqs", 0) or 0),
        max_model_len=int(getattr(model_config, "max_model_len", 0) or 0),
        kv_layers=lambda: kv_layers(worker.get_kv_cache_spec()),
        laid_out=lambda: _laid_out(worker),
    )


def _laid_out(worker: Any) -> laid_out.LaidOut | None:
    """The KV that the worker's model has laid out; ``None`` where that, or vLLM's block, is not known."""
    try:
        size, block = kv_layers(worker.get_kv_cache_spec())
        seqs, longest = int(worker.scheduler_config.max_num_seqs), int(worker.model_config.max_model_len)
    except Exception:
        return None
    return laid_out.laid_out(worker.model_runner.model, size, block, seqs, longest)


def kv_layers(specs: dict[str, Any]) -> tuple[int, int]:
    """(block size in tokens, bytes of one block over all layers) of a worker's KV cache spec.

    Raises:
        RuntimeError: layers differ in block size or kind, so that one number of blocks does not describe the need.
    """
    kinds = {(type(spec).__name__, spec.block_size) for spec in specs.values()}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{name} with blocks of {size}" for name, size in kinds)) or "none"
        raise RuntimeError(
            f"VLLM_OMNI_PATCH_NEURON_POLICY=need is defined for layers of one kind and block size; found {found}. "
            "Use cap."
        )
    return kinds.pop()[1], sum(spec.page_size_bytes for spec in specs.values())


def _local_workers(parallel: Any) -> tuple[int, str]:
    local = getattr(parallel, "local_world_size", None)
    if local is not None:
        return int(local), "parallel_config.local_world_size"
    # vLLM before 0.11.1 has no such attribute and runs one node per engine.
    return int(parallel.world_size), "parallel_config.world_size"


def _replicas(parallel: Any) -> tuple[int, str]:
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        return 1, "external_launcher: world_size includes the replicas"
    name = "data_parallel_size_local"
    # 0 on a node without engines of its own; this worker belongs to one.
    return max(int(getattr(parallel, name, 1) or 1), 1), f"parallel_config.{name}"


# What a compiled program depends on besides the KV blocks, by the names of Hugging Face configurations. Two
# models of one shape compile to one program.
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
)


def program_of(worker: Any) -> dict[str, Any]:
    """What identifies a compiled program: the model's shape and the options of vLLM."""
    model, cache, parallel = worker.model_config, worker.cache_config, worker.parallel_config
    hf_config = getattr(model, "hf_config", None)
    shape = getattr(hf_config, "text_config", None) or hf_config
    speculative = getattr(getattr(worker, "vllm_config", None), "speculative_config", None)
    return {
        "architectures": list(getattr(hf_config, "architectures", None) or []),
        **{name: getattr(shape, name, None) for name in SHAPE},
        "dtype": str(getattr(model, "dtype", None)),
        "quantization": str(getattr(model, "quantization", None) or "none"),
        "kv_cache_dtype": str(getattr(cache, "cache_dtype", None)),
        "block_size": getattr(cache, "block_size", None),
        "tensor_parallel_size": getattr(parallel, "tensor_parallel_size", None),
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", None),
        "rank": getattr(worker, "rank", None),
        "max_model_len": getattr(model, "max_model_len", None),
        "max_num_seqs": getattr(getattr(worker, "scheduler_config", None), "max_num_seqs", None),
        "speculative_tokens": getattr(speculative, "num_speculative_tokens", None),
    }


def _settle(worker: Any, made: budget.NeuronBudget) -> int:
    """Compare with the other side, log and report ``made``; returns its bytes.

    Raises:
        SidesDifferError: the other side was there and planned other KV blocks.
    """
    try:
        _compare(worker, made)
    except record.SidesDifferError:
        raise
    except Exception as error:
        made.report.notes.append(
            f"The KV blocks of compile host and device were not compared ({type(error).__name__}: {error})."
        )
    return _emit(worker, made.report)


def _compare(worker: Any, made: budget.NeuronBudget) -> None:
    if not made.side:
        return
    blocks, block = _blocks(worker, made.report.kv_bytes)
    numbers = {item.name: item.value for item in made.report.inputs}
    names = ("platform", "gpu_memory_utilization", "cap_fraction", "weights", "needed_blocks", *EXPLICIT)
    made_of = {name: numbers[name] for name in names if name in numbers}
    total = None if any(name in numbers for name in EXPLICIT) else numbers.get("device_total")
    plan = record.Plan(
        made.side,
        made.report.kv_bytes,
        blocks,
        total if isinstance(total, int) else None,
        {"policy": made.report.policy, **made_of, "block": block},
    )
    where = record.place(str(getattr(worker.model_config, "model", "")))
    done = record.exchange(plan, made.at_total, program_of(worker), where)
    made.report.notes += done.warnings
    for line in done.notes:
        logger.info("%s", line)


def _report_original(worker: Any, stock: Any) -> None:
    try:
        formula = "the worker's own number (contiguous KV or pooling)"
        made = BudgetReport("neuron", type(worker).__name__, "stock", int(stock), formula, linear_in_requested=False)
        made.rank, made.local_rank = getattr(worker, "rank", None), getattr(worker, "local_rank", None)
        _emit(worker, made)
    except Exception as error:
        output.warn_failed(error)


def _blocks(worker: Any, kv_bytes: int) -> tuple[int | None, int | None]:
    """(blocks, bytes of one over all layers) as vLLM divides ``kv_bytes``; ``None`` where unknown."""
    override = getattr(worker.cache_config, "num_gpu_blocks_override", None)
    by_hand = None if override is None else int(override)
    try:
        _, block_bytes = kv_layers(worker.get_kv_cache_spec())
    except Exception:
        return by_hand, None
    return (kv_bytes // block_bytes if by_hand is None else by_hand), block_bytes


def _emit(worker: Any, made: BudgetReport) -> int:
    """Log and report ``made``; returns its bytes, also when reporting fails."""
    try:
        for line in made.notes:
            logger.warning("%s", line)
        made.dp_rank = metrics.dp_rank(getattr(worker, "parallel_config", None))
        made.blocks, made.block_bytes = _blocks(worker, made.kv_bytes)
        output.emit(made)
    except Exception as error:
        output.warn_failed(error)
    return made.kv_bytes
