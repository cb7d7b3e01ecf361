# SPDX-License-Identifier: Apache-2.0
"""Tensors on modules that look like attention KV: ring buffers, plain ``k_cache`` tensors, per-request state.

A heuristic, and reported as one. Looked at are the attributes of every module, and what plain objects, lists and dicts
below them hold. A tensor is suspected for its name (``_k_cache``, ``estimator_att_cache``, ``past_key_values``), for
the name of the class that holds it (``RingKVCache``), or for its shape ``(2, slots, heads, positions, head_dim)``.

Not looked at: parameters, transformers caches (they are followed by themselves) and layers whose KV the engine pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .measure import Held, StorageKey, is_tensor

NAME = re.compile(
    r"(^|_)(k|v|kv|key|keys|value|values|key_values|att|attn|attention)_?(cache|caches|buffer|pool|ring)s?($|_)"
    r"|past_(key|kv)|(^|_)kv($|_)"
)
CLASS = re.compile(r"kv|(attention|attn|codec|decoder).*cache", re.IGNORECASE)
INNER = frozenset({"k", "v", "kv", "key", "keys", "value", "values", "cache", "buffer", "data"})

_DEPTH = 3
_ITEMS = 4096
_PLAIN = (str, bytes, int, float, bool, type(None), type)


@dataclass(frozen=True)
class Suspect:
    """Tensors of one attribute of one module. ``shape`` and ``dtype`` are those of the largest; sizes in bytes."""

    owner: str
    owner_class: str
    attribute: str
    why: str
    shape: tuple[int, ...]
    dtype: str
    tensors: int
    view_bytes: int
    storages: tuple[tuple[StorageKey, int], ...]

    @property
    def storage_bytes(self) -> int:
        """Bytes of the distinct storages."""
        return sum(size for _, size in self.storages)

    def heads_and_size(self) -> tuple[int, int]:
        """``(heads, head_dim)`` of a tensor that ends in ``(heads, positions, head_dim)``; zeros when it does not."""
        return (self.shape[-3], self.shape[-1]) if len(self.shape) >= 3 else (0, 0)

    def rows(self) -> int:
        """Rows of ``([2 or layers,] rows, heads, positions, head_dim)``; 0 for another number of dimensions."""
        if len(self.shape) == 5:
            return self.shape[1]
        return self.shape[0] if len(self.shape) == 4 else 0


def merge(suspects: Iterable[Suspect]) -> Held:
    """What suspects that belong to one declaration hold together. ``rows`` is 0 where one of them does not say."""
    total = Held()
    rows: set[int] = set()
    for suspect in suspects:
        total.view_bytes += suspect.view_bytes
        total.storages.update(suspect.storages)
        total.kv_heads, total.head_dim = suspect.heads_and_size()
        total.dtype = suspect.dtype
        rows.add(suspect.rows())
    total.rows = 0 if 0 in rows else max(rows, default=0)
    return total


def find(modules: Iterable[tuple[str, Any]]) -> list[Suspect]:
    """Suspected tensors of ``modules`` (pairs of path and module), the largest first; each storage counts once."""
    seen: set[int] = set()
    found: list[Suspect] = []
    for path, module in modules:
        # AttentionLayerBase: this layer's KV is the engine's.
        if hasattr(type(module), "get_kv_cache_spec"):
            continue
        groups: dict[str, list[tuple[Any, str]]] = {}
        parameters = getattr(module, "_parameters", {})
        for name, value in [*list(vars(module).items()), *list(getattr(module, "_buffers", {}).items())]:
            if name in ("_parameters", "_buffers", "_modules") or name in parameters:
                continue
            for tensor, why in _tensors(value, name, type(module).__name__, _DEPTH, seen):
                groups.setdefault(name, []).append((tensor, why))
        for name, pairs in groups.items():
            suspect = _suspect(path, type(module).__name__, name, pairs)
            if suspect is not None:
                found.append(suspect)
    return sorted(found, key=lambda suspect: -suspect.storage_bytes)


def _tensors(value: Any, name: str, holder: str, depth: int, seen: set[int]) -> Iterator[tuple[Any, str]]:
    if isinstance(value, _PLAIN) or callable(getattr(value, "named_modules", None)):
        return
    if is_tensor(value):
        why = _why(value, name, holder)
        if why and id(value) not in seen:
            seen.add(id(value))
            yield value, why
        return
    if depth == 0 or id(value) in seen or _is_transformers_cache(value):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner: Iterable[tuple[str, Any]] = ((f"{name}.{key}", item) for key, item in list(value.items())[:_ITEMS])
    elif isinstance(value, (list, tuple)):
        inner = ((name, item) for item in list(value)[:_ITEMS])
    else:
        state = getattr(value, "__dict__", None)
        if not isinstance(state, dict) or getattr(type(value), "__module__", "").startswith(("torch.", "vllm.config")):
            return
        holder = type(value).__name__
        inner = ((f"{name}.{key}", item) for key, item in list(state.items())[:_ITEMS])
    for label, item in inner:
        yield from _tensors(item, label, holder, depth - 1, seen)


def _why(tensor: Any, name: str, holder: str) -> str:
    if type(tensor).__name__ == "Parameter" or tensor.dim() < 3 or not tensor.is_floating_point():
        return ""
    if not tensor.untyped_storage().nbytes():
        return ""
    if tensor.dim() == 5 and tensor.shape[0] == 2:
        return "shape (2, slots, heads, positions, head_dim)"
    parts = name.split(".")
    if any(NAME.search(part) for part in parts):
        return f"name {next(part for part in parts if NAME.search(part))}"
    if CLASS.search(holder) and parts[-1] in INNER:
        return f"held by a {holder}"
    return ""


def _suspect(path: str, kind: str, attribute: str, pairs: list[tuple[Any, str]]) -> Suspect | None:
    storages: dict[StorageKey, int] = {}
    view = 0
    for tensor, _ in pairs:
        storage = tensor.untyped_storage()
        storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
        view += tensor.nbytes
    largest, why = max(pairs, key=lambda pair: pair[0].nbytes)
    return Suspect(
        owner=path or kind,
        owner_class=kind,
        attribute=attribute,
        why=why,
        shape=tuple(largest.shape),
        dtype=str(largest.dtype).removeprefix("torch."),
        tensors=len(pairs),
        view_bytes=view,
        storages=tuple(storages.items()),
    )


def _is_transformers_cache(value: Any) -> bool:
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(value).__mro__)
