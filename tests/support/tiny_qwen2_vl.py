# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny Qwen2-VL checkpoint folder without network. It needs torchvision at run time, for its video processor.

vLLM's example proxy sends a consumer a picture's grid instead of the picture where the model's parser declares which
fields that takes, and Qwen2-VL's does; BLIP-2's does not.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .tiny_model import HEAD_WIDTH, write_tokenizer

WIDTH = 64
# From 3 on, as in the tokenizer.
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if 'image' in part['type'] %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def make(folder: str, seed: int = 0) -> str:
    """Write the checkpoint into ``folder`` and return its path. A picture of 112 x 112 becomes 16 rows of ``WIDTH``."""
    from transformers import Qwen2VLConfig

    os.makedirs(folder, exist_ok=True)
    vocabulary = write_tokenizer(folder, TOKENS, TEMPLATE)
    heads = WIDTH // HEAD_WIDTH
    text = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    vision = {"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **sizes}
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            **patches,
        },
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor", **patches},
        "processor_config.json": {"processor_class": "Qwen2VLProcessor"},
    }
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file)
    _write_weights(os.path.join(folder, "model.safetensors"), config, seed)
    return folder


def _write_weights(path: str, config: Any, seed: int) -> None:
    """Random weights under the names of published checkpoints, wide enough for a picture to be seen in the answer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in sorted(model.state_dict().items()):
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values *= 0.1
        elif "norm" in name or "ln_q" in name:
            values = 1 + 0.1 * values
        elif "embed_tokens" in name:
            values *= 0.3
        else:
            values *= 1.5 / parameter[0].numel() ** 0.5
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        state[name] = values.contiguous()
    save_file(state, path, metadata={"format": "pt"})
