# SPDX-License-Identifier: Apache-2.0
"""The protocol: what an object that holds attention KV outside the paged manager says about it.

An owner defines ``model_local_kv_specs(self) -> Sequence[ModelLocalKVSpec]``, one spec per distinct allocation, and
returns an empty list when its path is inert. The field names are those of the model-local KV design and of vLLM-Omni
0.30, so one collector reads native declarations and ours; the fields from ``layer_positions`` on are extra and
optional, and a declaration without them is read as "not stated".

Nothing here allocates, and nothing here imports vLLM, transformers or torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

METHOD = "model_local_kv_specs"
"""The method that makes an object a declarer."""

CORRECTED = "vllm_omni_patch_model_local_kv_specs"
"""A method of the same shape that the collector prefers to :data:`METHOD`.

It is for owners whose release declares natively and wrongly: the release's own report keeps printing what it printed,
ours has the right number.
"""

OWNERS = "model_local_kv_owners"
"""Class attribute of a module: names of its attributes that hold owners which are not submodules (the one hop)."""


class ModelLocalKVScope(str, Enum):
    """When an allocation appears and goes. It says nothing about how wide it is: that is ``rows``."""

    INVOCATION = "invocation"  # gone when the call returns
    REQUEST = "request"  # kept over the steps of one request
    SESSION = "session"  # outlives a request: a duplex or streaming session
    MODEL = "model"  # as long as the model: captured graphs, preallocated buffers


class RowDriver(str, Enum):
    """What decides how many rows are live at peak.

    There is no ``SESSIONS``. The one cache that is widened by sessions is MiniCPM-o's, and its declarer can read the
    number itself (``model_config.duplex_max_sessions``, see :func:`engine_config`), which makes it a ``FIXED`` count
    whose ``rows_reason`` names the setting. A third driver would be needed only for a number that the declarer cannot
    see and the engine can; it would also be a value that vLLM-Omni's own collector does not know.
    """

    FIXED = "fixed"  # a count the declarer knows: ``rows_fixed``, explained by ``rows_reason``
    MAX_NUM_SEQS = "max_num_seqs"  # one per sequence in flight; the engine knows the value


class Residency(str, Enum):
    """Where the bytes are when the engine sizes its KV cache; decides whether the budget has charged them already."""

    AT_LOAD = "at_load"  # live tensors before profiling, held by a Python reference
    GRAPH_POOL = "graph_pool"  # blocks of a CUDA graph pool whose tensors are gone: reserved, not allocated
    PROFILED = "profiled"  # transient, and the profiling run executes the path, so its peak contains them
    LATER = "later"  # allocated after profiling
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ModelLocalKVSpec:
    """One allocation of attention KV: ``rows`` rows of ``layers`` pairs of ``(kv_heads, positions, head_dim)``.

    Attributes:
        name: short name, unique within its owner.
        layers: layers that hold KV, >= 1.
        kv_heads: heads of K (and of V), >= 1.
        head_dim: elements per head, >= 1.
        dtype: the ``torch.dtype`` in which the cache is held.
        physical_capacity_positions: positions that a tensor can hold, not the logical position in the stream. Where
            layers differ: the largest of ``layer_positions``.
        capacity_source: where the bound comes from. Text for readers; never branch on it.
        scope: lifetime, for readers.
        rows: what sets the number of rows at peak. One allocation of N rows and N allocations of one row count alike.
        rows_fixed: the count for ``RowDriver.FIXED``, >= 1.
        rows_reason: why it is that count; required for ``RowDriver.FIXED``.
        allocation_note: layout and caveats. Text for readers.
        layer_positions: positions per layer where layers differ (sliding and full ones mixed); ``None`` when all
            hold ``physical_capacity_positions``.
        storage_positions: positions that the storage behind one layer's tensor can hold, as one number or per layer.
            A sliding layer keeps a view of the last ``window - 1`` positions, and the view pins everything that was
            concatenated for it. ``None``: not known.
        storage_reason: what the update is that makes the storage that long.
        residency: where the bytes are when the KV budget is computed; ``UNKNOWN`` when the owner cannot tell.

    Raises:
        ValueError: a number is not a positive whole number, a fixed count has no reason, or the per-layer tuples do
            not match ``layers``.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    physical_capacity_positions: int
    capacity_source: str
    scope: ModelLocalKVScope
    rows: RowDriver
    rows_fixed: int = 1
    rows_reason: str = ""
    allocation_note: str | None = None
    layer_positions: tuple[int, ...] | None = None
    storage_positions: int | tuple[int, ...] | None = None
    storage_reason: str = ""
    residency: Residency = Residency.UNKNOWN

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "physical_capacity_positions", "rows_fixed"):
            _positive(getattr(self, field), f"{self.name}: {field}")
        if self.rows is RowDriver.FIXED and not self.rows_reason.strip():
            raise ValueError(f"{self.name}: rows_fixed={self.rows_fixed} needs a rows_reason that a reader can check")
        if self.layer_positions is not None:
            self._check_layers(self.layer_positions, "layer_positions")
            if max(self.layer_positions) != self.physical_capacity_positions:
                raise ValueError(
                    f"{self.name}: physical_capacity_positions={self.physical_capacity_positions} must be the largest "
                    f"of layer_positions ({max(self.layer_positions)})"
                )
        if isinstance(self.storage_positions, tuple):
            self._check_layers(self.storage_positions, "storage_positions")
        elif self.storage_positions is not None:
            _positive(self.storage_positions, f"{self.name}: storage_positions")

    def _check_layers(self, positions: tuple[int, ...], field: str) -> None:
        if len(positions) != self.layers:
            raise ValueError(f"{self.name}: {field} has {len(positions)} entries for {self.layers} layers")
        for value in positions:
            _positive(value, f"{self.name}: {field}")

    @property
    def bytes_per_position(self) -> int:
        """Bytes of K and V of one position of one layer of one row."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row with every position filled: what the tensors show."""
        positions = self.layer_positions or (self.physical_capacity_positions,) * self.layers
        return self.bytes_per_position * sum(positions)

    @property
    def storage_bytes_per_row(self) -> int | None:
        """Bytes that the storages behind one row can hold; never below ``bytes_per_row``; ``None``: not known."""
        if self.storage_positions is None:
            return None
        storage = self.storage_positions
        per_layer = storage if isinstance(storage, tuple) else (storage,) * self.layers
        return max(self.bytes_per_row, self.bytes_per_position * sum(per_layer))

    def row_count(self, max_num_seqs: int = 1) -> int:
        """Rows live at peak when the engine runs ``max_num_seqs`` sequences."""
        return self.rows_fixed if self.rows is RowDriver.FIXED else max(1, max_num_seqs)

    def peak_bytes(self, max_num_seqs: int = 1) -> int:
        """Declared peak in bytes: rows times bytes per row."""
        return self.bytes_per_row * self.row_count(max_num_seqs)

    def storage_peak_bytes(self, max_num_seqs: int = 1) -> int | None:
        """Worst case of the storages in bytes; ``None`` when the storage per row is not known."""
        per_row = self.storage_bytes_per_row
        return None if per_row is None else per_row * self.row_count(max_num_seqs)


@runtime_checkable
class HasModelLocalKV(Protocol):
    """The object that owns the cache, which need not be the registered model."""

    def model_local_kv_specs(self) -> Sequence[ModelLocalKVSpec]:
        """One spec per distinct allocation; empty when nothing is held."""


_engine: ContextVar[tuple[Any, list[tuple[str, str]]] | None] = ContextVar("model_local_kv_engine", default=None)


@contextlib.contextmanager
def collecting(vllm_config: Any, inert: list[tuple[str, str]]) -> Iterator[None]:
    """Make ``vllm_config`` and the list of inert paths known to declarers while they are asked."""
    token = _engine.set((vllm_config, inert))
    try:
        yield
    finally:
        _engine.reset(token)


def engine_config() -> Any | None:
    """The ``VllmConfig`` of the runner whose model is being collected; ``None`` when unknown.

    For owners that keep no config of their own. ``None`` is never "off": a declarer that needs the setting says in
    ``allocation_note`` that it could not see it.
    """
    current = _engine.get()
    return None if current is None else current[0]


def inert(name: str, reason: str) -> None:
    """Called by a declarer that holds nothing for ``name`` here and why: the report lists it as inert."""
    current = _engine.get()
    if current is not None:
        current[1].append((name, reason))


def spec_from_hf_config(
    config: object,
    *,
    name: str,
    physical_capacity_positions: int,
    capacity_source: str,
    scope: ModelLocalKVScope,
    dtype: torch.dtype,
    rows: RowDriver,
    rows_fixed: int = 1,
    rows_reason: str = "",
    allocation_note: str | None = None,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    cache: Literal["dynamic", "static", "plain"] = "dynamic",
    longest_update: int | None = None,
    residency: Residency = Residency.UNKNOWN,
) -> ModelLocalKVSpec:
    """A spec from the config that the transformers cache is built from.

    ``layers``, ``kv_heads`` and ``head_dim`` override the config, for a module that knows better. Layer types follow
    ``transformers.cache_utils``: ``config.layer_types``, else all sliding when ``sliding_window`` is set, all chunked
    when ``attention_chunk_size`` is, all full otherwise; the last ``num_kv_shared_layers`` layers hold nothing.

    Args:
        physical_capacity_positions: positions a full layer can hold; a sliding layer holds at most its window's.
        cache: ``dynamic``: a sliding layer keeps ``window - 1`` positions (``DynamicSlidingWindowLayer``);
            ``static``: it keeps ``window`` of them, allocated whole; ``plain``: the cache is built without the config
            (``DynamicCache()``), so every layer is a full one.
        longest_update: most positions that one call can add (prefix or chunk). Bounds the storage of a dynamic sliding
            layer: ``window - 1 + longest_update``. Without it such a storage is not known.

    Raises:
        ValueError: the config lacks an attribute, contradicts itself or names a layer type whose cache is not a
            pair of ``(kv_heads, positions, head_dim)`` tensors. The text says what to pass explicitly.
    """
    _check_one_side(config, layers, kv_heads)
    source = _text_config(config)
    total = (
        _resolve(source, ("num_hidden_layers", "encoder_layers", "num_layers"), "layers") if layers is None else layers
    )
    if kv_heads is None:
        kv_heads = _resolve(
            source, ("num_key_value_heads", "num_attention_heads", "encoder_attention_heads"), "kv_heads"
        )
    if head_dim is None:
        head_dim = _head_dim(source)
    _positive(physical_capacity_positions, f"{name}: physical_capacity_positions")

    windows = (None,) * total if cache == "plain" else _windows(source, total)
    positions, storage = [], []
    for window in windows:
        kept = physical_capacity_positions
        pinned: int | None = kept
        if window is not None:
            kept = min(kept, window if cache == "static" else window - 1)
            pinned = kept
            if cache == "dynamic":
                pinned = None if longest_update is None else kept + longest_update
        if kept > 0:  # a window of 1 keeps nothing between calls
            positions.append(kept)
            storage.append(pinned)
    if not positions:
        raise ValueError(f"{name}: no layer of {type(config).__name__} holds a position; declare nothing instead")
    mixed = len(set(positions)) > 1
    known = [value for value in storage if value is not None]
    return ModelLocalKVSpec(
        name=name,
        layers=len(positions),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        physical_capacity_positions=max(positions),
        capacity_source=capacity_source,
        scope=scope,
        rows=rows,
        rows_fixed=rows_fixed,
        rows_reason=rows_reason,
        allocation_note=allocation_note,
        layer_positions=tuple(positions) if mixed else None,
        storage_positions=tuple(known) if len(known) == len(storage) else None,
        storage_reason="" if longest_update is None else f"one update brings up to {longest_update} positions",
        residency=residency,
    )


def _windows(config: object, layers: int) -> tuple[int | None, ...]:
    """Window per layer that holds KV (``None``: a full layer), as ``transformers.cache_utils`` picks layer classes."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        kind = (
            "sliding_attention"
            if window is not None
            else "chunked_attention"
            if chunk is not None
            else "full_attention"
        )
        types = (kind,) * layers
    if len(types) < layers:
        raise ValueError(f"{type(config).__name__}.layer_types has {len(types)} entries for {layers} layers")
    # A longer list belongs to a larger model whose config was copied: the cache is indexed by the first layers.
    types = tuple(types[:layers])
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared:
        types = types[:-shared]
    known = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(
            f"layer types {', '.join(unknown)} of {type(config).__name__} do not hold plain K and V; declare the "
            "attention layers with explicit layers= and cache='plain'"
        )
    for kind, what in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        if kind in types:
            _positive(known[kind], f"{type(config).__name__}.{what}")
    return tuple(known[kind] for kind in types)


def _head_dim(config: object) -> int:
    explicit = getattr(config, "head_dim", None)
    values = getattr(config, "v_head_dim", None)
    if values is not None and values != explicit:
        raise ValueError(
            f"{type(config).__name__} gives K and V different head sizes (v_head_dim={values}); build two specs with "
            "explicit head_dim="
        )
    if explicit is not None:
        return _positive(explicit, f"{type(config).__name__}.head_dim")
    hidden = _resolve(config, ("hidden_size", "d_model"), "head_dim")
    heads = _resolve(config, ("num_attention_heads", "encoder_attention_heads"), "head_dim")
    if hidden % heads:
        raise ValueError(
            f"{type(config).__name__}: {hidden} hidden elements do not divide into {heads} heads; pass head_dim="
        )
    return hidden // heads


def _check_one_side(config: object, layers: int | None, kv_heads: int | None) -> None:
    """An encoder-decoder config whose sides differ does not say which side the cache belongs to."""
    for given, what, field in ((layers, "layers", "layers="), (kv_heads, "attention_heads", "kv_heads=")):
        sides = [getattr(config, f"{side}_{what}", None) for side in ("encoder", "decoder")]
        if given is None and None not in sides and sides[0] != sides[1]:
            raise ValueError(
                f"{type(config).__name__} has encoder_{what}={sides[0]} and decoder_{what}={sides[1]}; pass {field}"
            )


def _text_config(config: object) -> object:
    """The part of a composite config that transformers builds its cache from."""
    getter = getattr(config, "get_text_config", None)
    if not callable(getter) or getattr(config, "is_encoder_decoder", False):
        return config
    return getter(decoder=True)


def _resolve(config: object, names: Sequence[str], what: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return _positive(value, f"{type(config).__name__}.{name}")
    raise ValueError(f"{type(config).__name__} has none of {', '.join(names)}; pass {what}= to spec_from_hf_config()")


def _positive(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number >= 1, got {value!r}")
    return value
