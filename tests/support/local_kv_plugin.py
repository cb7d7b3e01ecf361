# SPDX-License-Identifier: Apache-2.0
"""A model that keeps KV of its own, and the vLLM plugin that registers it.

:func:`write` lays a plugin (this module and an entry point) and a model folder into a temporary directory. The model is
a small Qwen2 with three more modules: ``codec`` declares the transformers cache that it fills, ``extra`` fills one that
nobody declares, ``ring`` has a plain tensor; with ``LOCAL_KV_RAISE=1`` there is a ``broken`` one whose declaration
raises.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ARCHITECTURE = "LocalKVForCausalLM"
LAYERS, HEADS, SIZE, CAPACITY = 2, 4, 16, 8
ROW = 2 * LAYERS * HEADS * SIZE * CAPACITY * 4
"""Bytes of one full row of either cache."""


def register() -> None:
    """Entry point in ``vllm.general_plugins``."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "local_kv_plugin_model:LocalKVForCausalLM")


def write(folder: str) -> tuple[str, str]:
    """(folder for ``PYTHONPATH``, model folder) below ``folder``."""
    plugin, model = os.path.join(folder, "plugin"), os.path.join(folder, "model")
    about = os.path.join(plugin, "local_kv_plugin-1.0.dist-info")
    os.makedirs(about)
    os.makedirs(model)
    for name in ("local_kv_plugin.py", "local_kv_plugin_model.py"):
        shutil.copy(os.path.join(HERE, name), plugin)
    _write(os.path.join(about, "METADATA"), "Metadata-Version: 2.1\nName: local-kv-plugin\nVersion: 1.0\n")
    entry = "[vllm.general_plugins]\nlocal_kv_plugin = local_kv_plugin:register\n"
    _write(os.path.join(about, "entry_points.txt"), entry)
    from support import tiny_model  # not in the copy that is the plugin

    vocabulary = tiny_model.write_tokenizer(model)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": max(64, vocabulary),
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    _write(os.path.join(model, "config.json"), json.dumps(config))
    return plugin, model


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
