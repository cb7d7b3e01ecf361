# SPDX-License-Identifier: Apache-2.0
"""The one holder in vLLM itself: DeepSeek-OCR2's image encoder, against the caches that it really makes."""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM is not installed")
MODULE = "vllm.model_executor.models.deepencoder2"
if importlib.util.find_spec(MODULE) is None:
    pytest.skip("this vLLM has no DeepSeek-OCR2", allow_module_level=True)

from support.omni_caches import MiB, cache_tensors, declared, entry, installed, storage_bytes

PROCESSOR = "vllm.transformers_utils.processors.deepseek_ocr"


def max_crops() -> int:
    """The processor's constant, from its text: importing the processor needs torchvision."""
    spec = importlib.util.find_spec(PROCESSOR)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MAX_CROPS":
            return int(ast.literal_eval(node.value))
    raise AssertionError(f"{PROCESSOR} has no MAX_CROPS")


def test_image_views_hold_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicCache

    deepencoder2 = importlib.import_module(MODULE)
    crops = max_crops()
    encoder = deepencoder2.build_qwen2_decoder_as_encoder(intermediate_size=32).to(torch.bfloat16)
    peak = [0]

    def look(*_: Any) -> None:
        alive = [o for o in gc.get_objects() if type(o) is DynamicCache]
        peak[0] = max(peak[0], storage_bytes(cache_tensors(alive)))

    encoder.model.model.norm.register_forward_hook(look)
    with installed(MODULE), torch.no_grad():
        monkeypatch.delitem(sys.modules, PROCESSOR, raising=False)
        assert entry(declared(encoder), "image_crops").rows == 1
        monkeypatch.setitem(sys.modules, PROCESSOR, SimpleNamespace(MAX_CROPS=crops))
        found = declared(encoder, max_num_seqs=64)
        encoder(torch.zeros(1, 896, 16, 16, dtype=torch.bfloat16))
        assert peak[0] == entry(found, "image_view").declared_peak == 6 * MiB
        peak[0] = 0
        encoder(torch.zeros(crops, 896, 12, 12, dtype=torch.bfloat16))
        assert peak[0] == entry(found, "image_crops").declared_peak == 20.25 * MiB
    assert {e.residency for e in found.entries} == {"profiled"}
    assert {e.storage_peak for e in found.entries} == {e.declared_peak for e in found.entries}
