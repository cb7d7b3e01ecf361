# SPDX-License-Identifier: Apache-2.0
"""The Neuron budget against vLLM's own configs and its own planning of KV blocks. No engine is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support import (
    neuron_plugin,
    tiny_model,
)
from vllm_omni_patch.loading import apply
from vllm_omni_patch.patches.available_memory import PATCH
from vllm_omni_patch.patches.available_memory.flags import NEURON_FLAGS
from vllm_omni_patch.patches.available_memory.neuron import hooks
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB

OLD = next(target for target in PATCH.targets if target.distribution == "vllm-neuron")
LAYERS, BLOCK = 32, 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.make(str(tmp_path_factory.mktemp("model")), dummy=True)


@pytest.fixture
def worker_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hooked worker of plugin 0.5, on a device of 24 GiB with 11 in use."""
    for flag in NEURON_FLAGS:
        monkeypatch.delenv(flag.name, raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # the CPU platform turns it into explicit bytes
    module_name = neuron_plugin.lay(tmp_path, neuron_plugin.TWO_BRANCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(module_name)
    module = sys.modules[module_name]
    monkeypatch.setattr(torch.classes, "neuron", neuron_plugin.runtime_of((11 * GIB, 13 * GIB)), raising=False)
    apply.install(PATCH, OLD, module, lambda: None)
    yield module.NeuronWorker
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_neuron"]:
        del sys.modules[name]


def specs() -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return {
        f"model.layers.{number}.attn": FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=8, head_size=64, dtype=torch.bfloat16
        )
        for number in range(LAYERS)
    }


def make(worker_class: Any, checkpoint: str, **arguments: Any) -> tuple[Any, Any]:
    """(worker, vLLM config): a worker that holds the parts of a real config, as vLLM's WorkerBase does."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=checkpoint,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        block_size=BLOCK,
        gpu_memory_utilization=0.9,
        **arguments,
    ).create_engine_config()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(10 * GIB, dtype=torch.uint8, device="meta"), requires_grad=False)
    worker = worker_class(
        vllm_config=config,
        cache_config=config.cache_config,
        model_config=config.model_config,
        parallel_config=config.parallel_config,
        scheduler_config=config.scheduler_config,
        model_runner=SimpleNamespace(model=model),
        specs=specs(),
        pooling=False,
        block_kv=True,
        rank=0,
        local_rank=0,
    )
    return worker, config


def planned_blocks(config: Any, worker: Any, available: int) -> int:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    if hasattr(config.cache_config, "kv_cache_layout"):
        # Newer engine cores ask their workers first; the order of the dimensions does not change the count.
        config.cache_config.kv_cache_layout = "LBNHC"
    (planned,) = get_kv_cache_configs(config, [worker.get_kv_cache_spec()], [available])
    return int(planned.num_blocks)


def test_what_is_read_from_a_real_config(worker_class: Any, checkpoint: str) -> None:
    worker, _ = make(worker_class, checkpoint)
    view = hooks.view_of(worker)
    program = hooks.program_of(worker)
    assert program["architectures"] == ["Blip2ForConditionalGeneration"]
    assert (program["quantization"], program["tensor_parallel_size"], program["dtype"]) == ("none", 1, "torch.bfloat16")
    assert (program["max_model_len"], program["max_num_seqs"], program["block_size"]) == (64, 4, BLOCK)
    assert program["num_hidden_layers"] is not None and program["hidden_size"] is not None
    assert (view.max_num_seqs, view.max_model_len, view.gpu_memory_utilization) == (4, 64, 0.9)
    assert (view.local_workers, view.replicas) == (1, 1)
    assert view.kv_cache_memory_bytes is None and view.num_gpu_blocks_override is None
    size, block = view.kv_layers() if view.kv_layers else (0, 0)
    assert (size, block) == (BLOCK, LAYERS * BLOCK * 2 * 8 * 64 * 2)


def test_vllm_divides_the_budget_as_the_report_says(worker_class: Any, checkpoint: str) -> None:
    worker, config = make(worker_class, checkpoint)
    available = worker.determine_available_memory()
    assert available == 6_957_847_019
    _, block = hooks.kv_layers(worker.get_kv_cache_spec())
    assert planned_blocks(config, worker, available) == available // block == 3317


def test_the_need_becomes_exactly_that_many_blocks(
    worker_class: Any, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_NEURON_POLICY", "need")
    worker, config = make(worker_class, checkpoint)
    assert planned_blocks(config, worker, worker.determine_available_memory()) == 4 * 2 + 1


def test_compile_host_and_device_plan_the_same_blocks(
    worker_class: Any, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, config = make(worker_class, checkpoint)
    monkeypatch.setattr(torch.classes.neuron, "Runtime", neuron_plugin.runtime_of((11 * GIB, 13 * GIB - 3)).Runtime)
    device = planned_blocks(config, worker, worker.determine_available_memory())
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert planned_blocks(config, worker, worker.determine_available_memory()) == device == 3317


@pytest.mark.parametrize("blocks", [2, 8, 256])
def test_vllm_plans_the_blocks_that_the_library_laid_out(worker_class: Any, checkpoint: str, blocks: int) -> None:
    """One request of 64 tokens takes two blocks and vLLM keeps one: its own check passes, however few were laid out."""
    worker, config = make(worker_class, checkpoint)
    worker.model_runner.model = torch.nn.Module()
    worker.model_runner.model.neuron_config = SimpleNamespace(
        is_block_kv_layout=True, pa_num_blocks=blocks, pa_block_size=BLOCK
    )
    assert planned_blocks(config, worker, worker.determine_available_memory()) == max(blocks, 3)


def test_the_other_side_stops_before_vllm_plans(
    worker_class: Any, checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path / "programs"))
    worker, config = make(worker_class, checkpoint)
    with monkeypatch.context() as host:
        host.setenv("VLLM_NEURON_CPU_COMPILE", "1")
        host.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        assert planned_blocks(config, worker, worker.determine_available_memory()) == 3317
    assert planned_blocks(config, worker, worker.determine_available_memory()) == 3317
    used = 11 * GIB
    runtime = neuron_plugin.runtime_of((used, int(23.7 * GIB) - used)).Runtime
    monkeypatch.setattr(torch.classes.neuron, "Runtime", runtime)
    with pytest.raises(RuntimeError, match=r"3276 blocks.*3317 blocks"):
        worker.determine_available_memory()


def test_explicit_blocks_pass_vllms_check(worker_class: Any, checkpoint: str) -> None:
    worker, config = make(worker_class, checkpoint, num_gpu_blocks_override=256)
    assert planned_blocks(config, worker, worker.determine_available_memory()) == 256


def test_explicit_bytes_are_planned(worker_class: Any, checkpoint: str) -> None:
    worker, config = make(worker_class, checkpoint, kv_cache_memory_bytes=1 << 30)
    assert worker.determine_available_memory() == 1 << 30
    assert planned_blocks(config, worker, 1 << 30) == 512
