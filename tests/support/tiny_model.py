# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny BLIP-2 checkpoint folder without network: configuration, tokenizer, image processor, weights.

``python tests/support/tiny_model.py OUT_DIR [--dummy] [--seed N] [--vision-seed N]`` prints the folder it wrote.

Without ``--dummy`` the folder holds random weights that are wide enough for two images to give different logprobs
(vLLM's ``load_format="dummy"`` draws them within 1e-3, which answers every image alike). ``--dummy`` writes no
weights at all: start vLLM with ``--load-format dummy`` then. ``--vision-seed`` changes the vision side only, for a
second checkpoint whose language model is the same.

One image becomes ``QUERY_TOKENS`` rows of width ``TEXT_WIDTH`` in the encoder cache.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
from typing import Any

QUERY_TOKENS = 32
TEXT_WIDTH = 64
VISION_WIDTH = 64
IMAGE_SIZE = 56
PATCH_SIZE = 14
HEAD_WIDTH = 32  # the smallest that vLLM's CPU attention takes
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def make(
    folder: str,
    *,
    dummy: bool = False,
    seed: int = 0,
    vision_seed: int | None = None,
    vision_layers: int = 4,
    vision_width: int = VISION_WIDTH,
    image_size: int = IMAGE_SIZE,
    query_tokens: int = QUERY_TOKENS,
    text_width: int = TEXT_WIDTH,
) -> str:
    """Write the checkpoint into ``folder`` (made if missing) and return its path.

    Writing again into the same folder with another seed replaces the weights, as an in-place model update does.
    """
    os.makedirs(folder, exist_ok=True)
    tokenizer_size = write_tokenizer(folder)
    config = _config(tokenizer_size, vision_layers, vision_width, image_size, query_tokens, text_width)
    config.save_pretrained(folder)
    _write_json(
        os.path.join(folder, "preprocessor_config.json"),
        {
            "image_processor_type": "BlipImageProcessor",
            "processor_class": "Blip2Processor",
            "do_resize": True,
            "size": {"height": image_size, "width": image_size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
            "do_convert_rgb": True,
        },
    )
    _write_json(
        os.path.join(folder, "processor_config.json"),
        {"processor_class": "Blip2Processor", "num_query_tokens": query_tokens},
    )
    weights = os.path.join(folder, "model.safetensors")
    if dummy:
        if os.path.exists(weights):
            os.unlink(weights)
    else:
        _write_weights(weights, config, seed, seed if vision_seed is None else vision_seed)
    return folder


def _config(
    vocabulary: int, vision_layers: int, vision_width: int, image_size: int, query_tokens: int, text_width: int
) -> Any:
    from transformers import Blip2Config, Blip2QFormerConfig, Blip2VisionConfig, OPTConfig

    vision = Blip2VisionConfig(
        hidden_size=vision_width,
        intermediate_size=2 * vision_width,
        num_hidden_layers=vision_layers,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=PATCH_SIZE,
    )
    qformer = Blip2QFormerConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        encoder_hidden_size=vision_width,
        cross_attention_frequency=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    text = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=text_width,
        word_embed_proj_dim=text_width,
        ffn_dim=2 * text_width,
        num_hidden_layers=2,
        num_attention_heads=text_width // HEAD_WIDTH,
        max_position_embeddings=512,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
        architectures=["OPTForCausalLM"],  # what old releases of vLLM build the language model from
    )
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=qformer.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=query_tokens,
        image_token_index=3,
    )
    config.architectures = ["Blip2ForConditionalGeneration"]
    config.dtype = "float32"
    return config


def write_tokenizer(folder: str, more: tuple[str, ...] = ("<image>",), template: str = CHAT_TEMPLATE) -> int:
    """A byte-level tokenizer of 256 bytes and special tokens, ``more`` from 3 on; returns the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<pad>", "</s>", *more]
    vocabulary = {token: index for index, token in enumerate(specials)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    while len(vocabulary) % 16:
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="</s>",
        eos_token="</s>",
        additional_special_tokens=list(more),
        model_max_length=512,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as file:
        saved = json.load(file)
    saved["tokenizer_class"] = "PreTrainedTokenizerFast"
    saved["chat_template"] = template
    saved.pop("processor_class", None)
    _write_json(path, saved)
    return len(vocabulary)


def _write_weights(path: str, config: Any, seed: int, vision_seed: int) -> None:
    """Random weights, wide enough for the image to be seen in the logprobs. One generator per side of the model."""
    import torch
    from safetensors.torch import save_file
    from transformers import Blip2ForConditionalGeneration

    with torch.device("meta"):
        model = Blip2ForConditionalGeneration(config)
    text = torch.Generator().manual_seed(seed)
    vision = torch.Generator().manual_seed(vision_seed + 1_000_000)
    state: dict[str, Any] = {}
    for name, parameter in sorted(model.state_dict().items()):
        name = name.removeprefix("model.")
        name = f"language_model.{name}" if name.startswith("lm_head") else name
        if name == "language_model.lm_head.weight" or name.endswith("position_ids"):
            continue
        generator = text if name.startswith("language_model.") else vision
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.lower():
            state[name] = 1 + 0.1 * values if name.endswith("weight") else 0.1 * values
        elif name.endswith("bias"):
            state[name] = 0.1 * values
        elif name.startswith("language_model.") and "embed" in name:
            state[name] = 0.3 * values
        elif "embed" in name or name.endswith("query_tokens"):
            state[name] = values
        else:
            state[name] = values * (1.5 / parameter.shape[-1] ** 0.5)
    for name in list(state):
        if name.startswith("language_model.decoder."):
            state["language_model.model." + name.removeprefix("language_model.")] = state.pop(name)
    save_file({k: v.contiguous() for k, v in state.items()}, path, metadata={"format": "pt"})


def image_url(seed: int, size: int = IMAGE_SIZE) -> str:
    """A PNG of random pixels as a data URL; the same seed gives the same bytes."""
    file = io.BytesIO()
    image(seed, size).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(seed: int, size: int = IMAGE_SIZE) -> Any:
    """The same picture as a PIL image: a block pattern, so that it survives resizing."""
    from PIL import Image

    draw = random.Random(seed)
    small = Image.new("RGB", (8, 8))
    small.putdata([(draw.randrange(256), draw.randrange(256), draw.randrange(256)) for _ in range(64)])
    return small.resize((size, size), Image.Resampling.NEAREST)


def _write_json(path: str, value: Any) -> None:
    with open(path, "w") as file:
        json.dump(value, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny BLIP-2 checkpoint folder.")
    parser.add_argument("folder")
    parser.add_argument("--dummy", action="store_true", help="write no weights; start vLLM with --load-format dummy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vision-seed", type=int, default=None, help="seed of the vision side (default: --seed)")
    parser.add_argument("--vision-layers", type=int, default=4)
    parser.add_argument("--vision-width", type=int, default=VISION_WIDTH)
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    arguments = parser.parse_args()
    print(
        make(
            arguments.folder,
            dummy=arguments.dummy,
            seed=arguments.seed,
            vision_seed=arguments.vision_seed,
            vision_layers=arguments.vision_layers,
            vision_width=arguments.vision_width,
            image_size=arguments.image_size,
        )
    )


if __name__ == "__main__":
    main()
