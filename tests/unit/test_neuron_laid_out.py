# SPDX-License-Identifier: Apache-2.0
"""What a loaded model tells of the KV blocks that its library has laid out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch.patches.available_memory.neuron.budget import LaidOut
from vllm_omni_patch.patches.available_memory.neuron.laid_out import laid_out

BLOCK = 16 << 20


def told(seqs: int = 4, longest: int = 4096, **config: Any) -> LaidOut | None:
    model = SimpleNamespace(neuron_config=SimpleNamespace(**config))
    return laid_out(model, block_size=32, block_bytes=BLOCK, max_num_seqs=seqs, max_model_len=longest)


def test_a_block_layout_has_the_blocks_that_it_says() -> None:
    found = told(is_block_kv_layout=True, pa_num_blocks=512, pa_block_size=32)
    assert found == LaidOut(512, BLOCK, "neuron_config.pa_num_blocks of the loaded model")


def test_one_request_always_fits_beside_the_block_that_vllm_keeps() -> None:
    """128 blocks for one request of 4096 tokens: vLLM would hand out 127, and stock starts."""
    found = told(1, is_block_kv_layout=True, pa_num_blocks=128, pa_block_size=32)
    assert found is not None and found.blocks == 129
    assert "more than 4064 tokens" in found.warning and "--num-gpu-blocks-override 128" in found.warning
    enough = told(1, is_block_kv_layout=True, pa_num_blocks=129, pa_block_size=32)
    assert enough is not None and not enough.warning


def test_a_contiguous_layout_has_one_block_for_each_sequence() -> None:
    found = told(is_block_kv_layout=False)
    assert found is not None and (found.blocks, found.warning) == (5, "")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"is_block_kv_layout": None},
        {"is_block_kv_layout": True},
        {"is_block_kv_layout": True, "pa_num_blocks": 512},
        {"is_block_kv_layout": True, "pa_num_blocks": 512, "pa_block_size": 64},  # compiled for other blocks
        *({"is_block_kv_layout": True, "pa_num_blocks": n, "pa_block_size": 32} for n in (None, 0, -1, True, 1.5, "8")),
        {"is_block_kv_layout": False, "seqs": 0},
    ],
)
def test_what_is_not_told_is_not_known(config: dict[str, Any]) -> None:
    assert told(**config) is None


def test_a_model_without_the_librarys_configuration_tells_nothing() -> None:
    for model in (None, object(), SimpleNamespace(neuron_config=None)):
        assert laid_out(model, 32, BLOCK, 4, 4096) is None
