# SPDX-License-Identifier: Apache-2.0
"""The model of ``local_kv_plugin``; imported by vLLM, and by nothing else, because it needs vLLM to be defined."""

from __future__ import annotations

import os
from typing import Any

import torch
from local_kv_plugin import CAPACITY, HEADS, LAYERS, SIZE
from transformers.cache_utils import DynamicCache
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM


class Side(torch.nn.Module):
    """Keeps one row in a transformers cache: a position per step until it is full, and full from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.past: Any = None

    def step(self) -> None:
        """Add a position."""
        if self.past is None:
            self.past = DynamicCache()
        if self.past.get_seq_length() >= CAPACITY:
            return
        new = torch.zeros(1, HEADS, 1, SIZE)
        for layer in range(LAYERS):
            self.past.update(new, new, layer)


class Codec(Side):
    """A side path that declares."""

    def model_local_kv_specs(self) -> list[Any]:
        """One row, whatever the engine runs."""
        from vllm_omni_patch.patches.model_local_kv.specs import ModelLocalKVScope, ModelLocalKVSpec, RowDriver

        return [
            ModelLocalKVSpec(
                name="codec_cache",
                layers=LAYERS,
                kv_heads=HEADS,
                head_dim=SIZE,
                dtype=torch.float32,
                physical_capacity_positions=CAPACITY,
                capacity_source="constant of this test",
                scope=ModelLocalKVScope.REQUEST,
                rows=RowDriver.FIXED,
                rows_reason="one cache for the whole model",
            )
        ]


class Broken(torch.nn.Module):
    """A declarer that raises."""

    def model_local_kv_specs(self) -> list[Any]:
        """Raise."""
        raise RuntimeError("this declaration is broken")


class Ring(torch.nn.Module):
    """A plain KV tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._k_cache = torch.zeros(3, HEADS, CAPACITY, SIZE)


class LocalKVForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with side paths that run in every forward."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.codec = Codec()
        self.extra = Side()
        self.ring = Ring()
        if os.environ.get("LOCAL_KV_RAISE"):
            self.broken = Broken()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The text model's, after a step of each side path."""
        self.codec.step()
        self.extra.step()
        return super().forward(*args, **kwargs)
