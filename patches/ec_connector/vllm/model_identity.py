# SPDX-License-Identifier: Apache-2.0
"""Reads the identity of the model from a ``VllmConfig``: all that decides the value of an encoder output.

Attributes are read by name; one that a release lacks only makes the identity shorter. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from ..cache.model import THIS_RUN, ModelIdentity, vllm_version
from .weight_files import content_of

_VISION_SIDE = re.compile(
    r"vision|visual|image|audio|video|speech|sound|mm_|multi_?modal|projector|qformer|perceiver|resampler|patch|"
    r"spatial|encoder|deepstack|select_layer|select_feature|num_query",
    re.IGNORECASE,
)
_VOLATILE = ("torch_dtype", "dtype", "transformers_version", "name_or_path", "attn_implementation")
_MM_SETTINGS = ("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate")


def model_identity(vllm_config: Any) -> ModelIdentity:
    """Read a ``VllmConfig`` (any release; attributes by name) into a :class:`ModelIdentity`.

    A configuration names where weights are asked for and not which ones were found, so the weights are those of this
    run until the loader has opened them (``opened.py``); dummies follow from configuration and seed. Tensor-parallel
    size is left out on purpose: a producer and a consumer of different sizes share entries, equal up to rounding.
    """
    model = getattr(vllm_config, "model_config", None)
    name = str(getattr(model, "model", "") or "")
    revision = str(getattr(model, "revision", "") or "")
    load = getattr(vllm_config, "load_config", None)
    multimodal = getattr(model, "multimodal_config", None)
    dummy = _text(getattr(load, "load_format", "")) == "dummy"
    processor = getattr(multimodal, "mm_processor_kwargs", None) or getattr(model, "mm_processor_kwargs", None)
    facts = {
        "encoder": encoder_settings(getattr(model, "hf_config", None)),
        "quantization": _text(getattr(model, "quantization", None)),
        "load_format": _text(getattr(load, "load_format", None)),
        "seed": _text(getattr(model, "seed", None)) if dummy else "",
        "multimodal": {key: _setting(getattr(multimodal, key)) for key in _MM_SETTINGS if hasattr(multimodal, key)},
        "processor": _digest(processor) if processor else "",
        "vllm": vllm_version(),
    }
    engine_id = str(getattr(getattr(vllm_config, "ec_transfer_config", None), "engine_id", "") or "")
    weights = "" if dummy else _this_run(engine_id, str(getattr(vllm_config, "instance_id", "") or ""))
    return ModelIdentity(name=name, revision=revision, weights=weights, facts=facts, engine_id=engine_id)


def _this_run(engine_id: str, instance_id: str) -> str:
    """What the processes of an engine agree on and the next run does not have.

    An operator may have fixed the engine's id; vLLM then still draws the instance's.
    """
    return THIS_RUN + "/".join(part for part in (engine_id, instance_id) if part)


def encoder_settings(hf_config: Any) -> dict[str, Any]:
    """The part of a Hugging Face configuration that shapes encoder outputs, without fields that vary by themselves."""
    try:
        values = hf_config.to_dict()
    except Exception:
        values = dict(hf_config) if isinstance(hf_config, Mapping) else {}
    chosen = {key: value for key, value in values.items() if _VISION_SIDE.search(str(key))}
    for key in ("model_type", "architectures", "hidden_size"):
        if key in values:
            chosen[key] = values[key]
    cleaned: dict[str, Any] = _clean(chosen)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _clean(inner)
            for key, inner in sorted(value.items(), key=lambda item: str(item[0]))
            if not str(key).startswith("_") and str(key) not in _VOLATILE
        }
    if isinstance(value, (list, tuple)):
        return [_clean(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    to_dict = getattr(value, "to_dict", None)
    return _clean(to_dict()) if callable(to_dict) else _text(value)


def _digest(value: Any) -> str:
    """Stands for settings that may hold what must not be logged; the same in every process."""
    return hashlib.sha256(_spelled(value).encode("utf-8", "surrogatepass")).hexdigest()


def _spelled(value: Any) -> str:
    """``value`` in full; maps and sets in one order, and no addresses, which differ by process."""
    if isinstance(value, Mapping):
        pairs = sorted(f"{_spelled(key)}:{_spelled(inner)}" for key, inner in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_spelled(inner) for inner in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "<" + ",".join(sorted(_spelled(inner) for inner in value)) + ">"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _setting(value: Any) -> str:
    """:func:`_text`; a file (the scales of an encoder in FP8) by what it holds."""
    text = _text(value)
    try:
        return content_of(text).hex() if os.path.isfile(text) else text
    except OSError:
        return text


def _text(value: Any) -> str:
    """A value in words that are the same in every process: enum members by value, classes by name, no addresses."""
    if value is None:
        return ""
    value = getattr(value, "value", value)
    if isinstance(value, (str, int, float, bool)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
