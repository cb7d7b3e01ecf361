# SPDX-License-Identifier: Apache-2.0
"""One multimodal item of a request, as the encoder cache sees it: key, row count, and whether it may be cached.

Reads vLLM's ``Request`` and ``MultiModalFeatureSpec`` by attribute name, in any release; imports neither vLLM nor
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..storage.key import is_request_scoped
from .adapters import AdapterFiles, LoadedAdapters

# vLLM's modality for tensors that a client computed in the language model's own embedding space.
_PROMPT_EMBEDS = "prompt_embeds"
# A processed item with a key of this ending (``image_embeds``, ``audio_embeds``) was computed by the client.
_PRECOMPUTED_ENDING = "_embeds"


# Fields of the served model's items, by modality, that only say how many rows an item has: an item may come with these
# alone. Set by a consumer's connector where vLLM tells them (0.30 and later).
placeholder_fields: Callable[[str], Collection[str] | None] = dict[str, Collection[str]]().get


@dataclass(frozen=True)
class Load:
    """One item that the worker is to load in this step.

    ``mm_hash`` is vLLM's id of the item (``feature.identifier``), under which ``encoder_cache`` holds the output.
    ``key`` is the id in the store: the same, unless an adapter changes the encoder; empty where there is none.
    ``rows`` and ``width``: the tensor's shape where known. ``index`` counts the request's items. ``adapter``: vLLM's id
    of the adapter whose files the key names.
    """

    request_id: str
    index: int
    mm_hash: str
    key: str
    rows: int | None = None
    width: int | None = None
    adapter: int | None = None


def expected_rows(request: Any, index: int) -> int:
    """Rows of the encoder output that vLLM will put in ``encoder_cache`` for item ``index`` of ``request``.

    Up to 0.13 an output is stored scattered over the whole placeholder; from 0.14 only its embeddings are.
    """
    count = getattr(request, "get_num_encoder_embeds", None) or request.get_num_encoder_tokens
    return int(count(index))


def end_of(feature: Any) -> int:
    """Position in the prompt after the item's last placeholder."""
    position = feature.mm_position
    return int(position.offset + position.length)


def is_precomputed(feature: Any) -> bool:
    """Whether a client sent this item as embeddings. Such a tensor is the user's own and is never persisted."""
    if feature.modality == _PROMPT_EMBEDS:
        return True
    return feature.data is not None and any(str(key).endswith(_PRECOMPUTED_ENDING) for key in feature.data)


def is_metadata_only(feature: Any) -> bool:
    """Whether the item came without anything to encode: its embedding can only come from a cache.

    It has no data at all, or nothing but what says how many rows it has (Qwen-VL: ``image_grid_thw``).
    """
    if feature.data is None:
        return True
    fields = placeholder_fields(feature.modality)
    return all(key in fields for key in feature.data) if fields else False


class ItemKeys:
    """Keys of items in the store, and which items have none.

    With ``tower_lora`` (vLLM's ``enable_tower_connector_lora``) an adapter changes encoder outputs. vLLM then puts
    the adapter's *name* before the ``mm_hash``; the key adds a digest of the adapter's files, so that an adapter loaded
    again from elsewhere under its old name is another one. A worker knows which files it loaded (``loaded``); a
    scheduler reads those that are there now, and the worker loads nothing whose key names others.
    """

    def __init__(self, tower_lora: bool = False, loaded: LoadedAdapters | None = None) -> None:
        self._tower_lora = tower_lora
        self._loaded = loaded
        self._files = AdapterFiles()

    def key(self, mm_hash: str, request_id: str | None, lora_request: Any = None) -> str | None:
        """Key of the item, or ``None`` when it must be neither stored nor looked up."""
        if is_request_scoped(mm_hash, request_id):
            return None
        if not self._tower_lora or lora_request is None:
            return mm_hash
        if self._loaded is None:
            adapter = self._files.digest(lora_request)
        else:
            adapter = self._loaded.digest(lora_request.lora_int_id)
        return f"{mm_hash}\x1f{adapter}" if adapter else None

    def adapter_of(self, lora_request: Any) -> int | None:
        """vLLM's id of the adapter, where it has a part in the key."""
        return None if not self._tower_lora or lora_request is None else int(lora_request.lora_int_id)

    def holds(self, load: Load) -> bool:
        """Whether this worker has the adapter loaded from the files that the key names."""
        if load.adapter is None or self._loaded is None:
            return True
        adapter = self._loaded.digest(load.adapter)
        return bool(adapter) and load.key.endswith(f"\x1f{adapter}")


def indices_in(scheduled: dict[str, list[int]]) -> Iterable[tuple[str, int]]:
    """``(request id, item index)`` pairs of vLLM's ``scheduled_encoder_inputs``."""
    for request_id, indices in scheduled.items():
        for index in indices:
            yield request_id, index
