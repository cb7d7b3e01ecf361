# SPDX-License-Identifier: Apache-2.0
"""Bytes behind a cache object: tensors, and the storages that they pin. Metadata only: nothing is read from a device.

Known layouts: ``layers[i].keys/.values`` (transformers from 4.54), lists ``key_cache``/``value_cache`` (before), and
``EncoderDecoderCache``, which holds two caches and no tensors. Anything else is *not measurable*, which is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

StorageKey = tuple[str, int]
"""Device and address of a storage; unique among the storages alive at one moment."""


@dataclass
class Held:
    """What a cache holds. Sizes in bytes.

    ``view_bytes``: sum of the tensors' own bytes. ``storages``: bytes of each distinct storage behind them.
    ``rows``: largest batch dimension. ``kv_heads`` and ``head_dim``: of the first filled ``(rows, kv_heads, positions,
    head_dim)`` tensor, 0 while empty.
    """

    view_bytes: int = 0
    storages: dict[StorageKey, int] = field(default_factory=dict)
    rows: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""

    @property
    def storage_bytes(self) -> int:
        """Bytes of the distinct storages."""
        return sum(self.storages.values())


def measure(cache: Any) -> Held | None:
    """What ``cache`` holds now; ``None`` when its layout is not a known one. Never allocates."""
    tensors = _tensors(cache)
    return None if tensors is None else held(tensors)


def held(tensors: Iterable[Any]) -> Held:
    """Sum up ``tensors``; several views of one storage pin it once."""
    result = Held()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not size:
            continue
        result.view_bytes += tensor.nbytes
        result.storages[(str(tensor.device), storage.data_ptr())] = size
        shape = tensor.shape
        if len(shape) == 4 and tensor.numel():
            result.rows = max(result.rows, shape[0])
            if not result.kv_heads:
                result.kv_heads, result.head_dim = shape[1], shape[3]
                result.dtype = str(tensor.dtype).removeprefix("torch.")
    return result


def _tensors(cache: Any) -> list[Any] | None:
    state = getattr(cache, "__dict__", None)
    if state is None:
        return None
    if not state:  # between __new__ and __init__
        return []
    layers = state.get("layers")
    if isinstance(layers, (list, tuple)):
        return [tensor for layer in layers for tensor in _layer_tensors(layer)]
    keys, values = state.get("key_cache"), state.get("value_cache")
    if isinstance(keys, (list, tuple)) and isinstance(values, (list, tuple)):
        return [tensor for tensor in (*keys, *values) if is_tensor(tensor)]
    if is_pair(cache):
        halves = [_tensors(state[name]) for name in ("self_attention_cache", "cross_attention_cache")]
        known = [half for half in halves if half is not None]
        return [tensor for half in known for tensor in half] if len(known) == 2 else None
    return None


def is_pair(cache: Any) -> bool:
    """An encoder-decoder cache: two caches and no tensors of its own."""
    state = getattr(cache, "__dict__", {})
    return "layers" not in state and "self_attention_cache" in state and "cross_attention_cache" in state


def _layer_tensors(layer: Any) -> Iterator[Any]:
    """Tensors of a layer, with those in its lists and dicts (the states of linear attention); counters left out."""
    for value in list(getattr(layer, "__dict__", {}).values()):
        if is_tensor(value):
            if value.dim() >= 2:
                yield value
        elif isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            yield from [item for item in items if is_tensor(item) and item.dim() >= 2]


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    return hasattr(value, "untyped_storage") and not isinstance(value, type)
