# SPDX-License-Identifier: Apache-2.0
"""Load Qwen3-TTS's stage 1 with vLLM-Omni's own model runner, on CPU, as far as a CPU goes.

``python tests/support/omni_runner.py FOLDER v1|v2 eager|graphs``. A runner's constructor needs CUDA, so its attributes
are set here; its ``load_model`` and the one that it inherits from vLLM are the real ones. Below them three things are
replaced: the model loader (returns the real stage, loaded from FOLDER by its own ``load_weights``), the device memory
profiler, and the state that a V2 runner builds from the model. The patch comes in by its flag, as in a deployment.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CORE = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
OMNI = {"v1": "vllm_omni.worker.gpu_model_runner", "v2": "vllm_omni.worker_v2.omni_model_runner"}


def main(folder: Path, which: str, mode: str) -> None:
    """Load the stage and check that the runner holds it."""
    core, omni = importlib.import_module(CORE[which]), importlib.import_module(OMNI[which])
    from vllm.config import CompilationConfig, CUDAGraphMode

    sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is run by its path
    from support import omni_caches

    vllm_config = omni_caches.qwen3_config(folder, decode_batch_max_size=4)
    vllm_config.model_config.multimodal_config = None
    vllm_config.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    vllm_config.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    stage = omni_caches.qwen3_stage(vllm_config)
    if mode == "graphs":
        segmented = omni_caches.module("qwen3_tts.segmented_graph_wrapper")
        stage.decoder._cudagraph_wrapper = segmented.CUDAGraphDecoderWrapper(stage.decoder)

    loader = SimpleNamespace(load_model=lambda **_: stage)
    replace(core, "get_model_loader", lambda _config: loader)
    replace(core, "DeviceMemoryProfiler", lambda: contextlib.nullcontext(SimpleNamespace(consumed_memory=0)))
    if which == "v2":
        replace(omni, "init_omni_model_state", lambda *_, **__: SimpleNamespace(num_new_sampled_tokens_per_step=1))

    runner = omni.OmniGPUModelRunner.__new__(omni.OmniGPUModelRunner)
    eplb = {"prepare_load": lambda: None, "maybe_register_model": lambda *_: False, "maybe_start_async_loop": print}
    for name, value in {
        "vllm_config": vllm_config,
        "model_config": vllm_config.model_config,
        "scheduler_config": vllm_config.scheduler_config,
        "cache_config": vllm_config.cache_config,
        "compilation_config": vllm_config.compilation_config,
        "load_config": vllm_config.load_config,
        "parallel_config": SimpleNamespace(
            enable_batch_sharded_sampling=False, enable_eplb=False, use_ubatching=False, rank=0
        ),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "eplb": SimpleNamespace(**eplb),
        "jit_warmup_registry": SimpleNamespace(activate=contextlib.nullcontext),
        "lora_config": None,
        "use_aux_hidden_state_outputs": False,
        "speculator": None,
        "num_speculative_steps": 0,
        "encoder_cache": None,
        "is_first_pp_rank": True,
        "is_last_pp_rank": False,
        "is_pooling_model": False,
        "supports_mm_inputs": False,
    }.items():
        setattr(runner, name, value)
    runner.load_model()
    if runner.model is not stage:
        raise SystemExit(f"the runner holds {type(runner.model).__name__}")
    print(f"LOADED reports by itself: {hasattr(runner, '_report_model_local_kv')}")


def replace(module: Any, name: str, value: Any) -> None:
    """Set a name that the module must have."""
    if not hasattr(module, name):
        raise SystemExit(f"{module.__name__} has no {name}")
    setattr(module, name, value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
