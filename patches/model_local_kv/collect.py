# SPDX-License-Identifier: Apache-2.0
"""The walk: find every declarer of a loaded model, ask each once, read what it says.

A declaration is read by its attributes, so the specs of vLLM-Omni 0.30 and those of :mod:`.specs` are the same thing
here. A declarer that raises or returns something unreadable becomes a ``failed`` row; it never ends a load.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import specs


@dataclass(frozen=True)
class Entry:
    """One declaration, resolved for this engine. Sizes are in bytes.

    ``bytes_per_row``: every position of one row filled. ``declared_peak``: that times ``rows``. ``storage_per_row``
    and ``storage_peak``: what the storages behind the tensors can hold; ``None`` when the declaration does not say.
    ``positions``: per layer, the largest. ``native``: the release declares it, not this package. ``corrected``: it
    replaces a native declaration. ``owner_id``: ``id()`` of the owner, for as long as the model lives.
    """

    owner: str
    owner_class: str
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    positions: int
    capacity_source: str
    scope: str
    rows: int
    row_driver: str
    rows_reason: str
    note: str
    bytes_per_row: int
    declared_peak: int
    storage_per_row: int | None
    storage_peak: int | None
    storage_reason: str
    residency: str
    native: bool
    corrected: bool
    owner_id: int = 0


@dataclass(frozen=True)
class Inert:
    """A path that could hold KV and holds none here, and why."""

    owner: str
    owner_class: str
    name: str
    reason: str


@dataclass(frozen=True)
class Failed:
    """A declarer that raised, or a declaration that cannot be read. Its bytes are unknown, not zero."""

    owner: str
    owner_class: str
    reason: str
    traceback: str


@dataclass
class Collection:
    """What one walk found. ``declarers`` counts the owners that were asked, ``modules`` the modules walked.

    ``native``: declared peak by owner and name, in bytes, where a corrected declaration stands before the release's
    own; ``root``: name by which the first root goes; ``paths``: see ``keep_paths`` of :func:`collect`.
    """

    entries: list[Entry] = field(default_factory=list)
    inert: list[Inert] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    declarers: int = 0
    modules: int = 0
    root: str = ""
    native: dict[tuple[str, str], int] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Owner:
    path: str
    instance: Any
    method: str


def unwrap(model: Any) -> Any:
    """The module tree below the runner's wrappers (``CUDAGraphWrapper``, ``UBatchWrapper``), which are not modules.

    The wrappers forward attribute reads, so a walk through the wrapper and one through its runnable both work; done
    both ways a declarer at the root would be counted twice.
    """
    seen: set[int] = set()
    current = model
    while id(current) not in seen:
        seen.add(id(current))
        if _is_module(current):
            return current
        accessor = getattr(current, "unwrap", None)
        inner = accessor() if callable(accessor) else None
        if inner is None:
            return current
        current = inner
    return current


def collect(
    roots: Iterable[tuple[str, Any]],
    *,
    max_num_seqs: int,
    vllm_config: Any = None,
    keep_paths: bool = False,
) -> Collection:
    """Ask every declarer below ``roots`` (pairs of path prefix and model) once, however many ways lead to it.

    Args:
        max_num_seqs: the engine's sequences in flight, for ``RowDriver.MAX_NUM_SEQS``.
        vllm_config: shown to declarers through :func:`specs.engine_config`.
        keep_paths: fill ``Collection.paths`` with ``id(module) -> path`` for every module walked.
    """
    found = Collection()
    owners = list(_owners(roots, found, keep_paths))
    found.declarers = len(owners)
    for owner in owners:
        inert: list[tuple[str, str]] = []
        kind = type(owner.instance).__name__
        try:
            with specs.collecting(vllm_config, inert):
                declared = list(getattr(owner.instance, owner.method)())
                corrected = owner.method == specs.CORRECTED
                if corrected:
                    found.native.update(_native(owner, max_num_seqs))
            found.entries += [_read(spec, owner, max_num_seqs, corrected) for spec in declared]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            found.failed.append(Failed(owner.path, kind, reason, traceback.format_exc()))
        found.inert += [Inert(owner.path, kind, name, reason) for name, reason in inert]
    return found


def modules(root: Any, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """``(parent's path, name, module)`` below ``root`` in the order of ``named_modules()``, skipping ids in ``seen``.

    It reads ``_modules`` itself and leaves joining the path to the caller, who needs it for a few modules only: the
    nested generators of ``named_modules()`` cost a call per level, and a string per module, on a tree of 100,000.
    """
    if not _is_module(root):
        named = getattr(root, "named_modules", None)
        for path, module in named() if callable(named) else [("", root)]:
            if id(module) not in seen:
                seen.add(id(module))
                yield "", path, module
        return
    stack: list[tuple[str, Iterator[tuple[str, Any]]]] = [("", iter([("", root)]))]
    while stack:
        parent, children = stack[-1]
        for name, module in children:
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            yield parent, name, module
            below = module._modules
            if below:
                stack.append((f"{parent}.{name}" if parent else name, iter(below.items())))
                break
        else:
            stack.pop()


def _owners(roots: Iterable[tuple[str, Any]], found: Collection, keep_paths: bool) -> Iterator[_Owner]:
    seen: set[int] = set()
    asked: set[int] = set()
    # What a class offers: (method to ask or None, names of attributes that hold owners).
    offers: dict[type, tuple[str | None, Sequence[str]]] = {}
    for prefix, model in roots:
        root = unwrap(model)
        top = prefix or type(root).__name__
        found.root = found.root or top
        for parent, name, module in modules(root, seen):
            found.modules += 1
            kind = type(module)
            offer = offers.get(kind)
            if offer is None:
                offer = offers[kind] = (_method(module), getattr(kind, specs.OWNERS, ()))
            if keep_paths:
                found.paths[id(module)] = _join(prefix, _join(parent, name)) or top
            method, names = offer
            if method is None and not names:
                continue
            path = _join(prefix, _join(parent, name))
            if method is not None and id(module) not in asked:
                asked.add(id(module))
                yield _Owner(path or top, module, method)
            for attribute in names:
                for label, held in _held(getattr(module, attribute, None), attribute):
                    method = _method(held)
                    if method is not None and id(held) not in asked:
                        asked.add(id(held))
                        yield _Owner(_join(path, label), held, method)


def _method(instance: Any) -> str | None:
    """The declaring method of ``instance``'s class. The instance is not asked: wrappers forward attribute reads."""
    for method in (specs.CORRECTED, specs.METHOD):
        if callable(getattr(type(instance), method, None)):
            return method
    return None


def _held(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}.{key}", held) for key, held in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}.{index}", held) for index, held in enumerate(value))
    elif value is not None:
        yield name, value


def _read(spec: Any, owner: _Owner, max_num_seqs: int, corrected: bool) -> Entry:
    """Read a spec by its attributes.

    Raises:
        AttributeError, ValueError: it lacks a field of the protocol, or a size is not a whole number of bytes.
    """
    storage_peak = getattr(spec, "storage_peak_bytes", None)
    return Entry(
        owner=owner.path,
        owner_class=type(owner.instance).__name__,
        name=str(spec.name),
        layers=int(spec.layers),
        kv_heads=int(spec.kv_heads),
        head_dim=int(spec.head_dim),
        dtype=str(spec.dtype).removeprefix("torch."),
        positions=int(spec.physical_capacity_positions),
        capacity_source=str(spec.capacity_source),
        scope=_text(spec.scope),
        rows=_size(spec.row_count(max_num_seqs), "row_count"),
        row_driver=_text(spec.rows),
        rows_reason=str(spec.rows_reason),
        note=str(spec.allocation_note or ""),
        bytes_per_row=_size(spec.bytes_per_row, "bytes_per_row"),
        declared_peak=_size(spec.peak_bytes(max_num_seqs), "peak_bytes"),
        storage_per_row=_optional_size(getattr(spec, "storage_bytes_per_row", None), "storage_bytes_per_row"),
        storage_peak=None if storage_peak is None else _optional_size(storage_peak(max_num_seqs), "storage_peak_bytes"),
        storage_reason=str(getattr(spec, "storage_reason", "")),
        residency=_text(getattr(spec, "residency", specs.Residency.UNKNOWN)),
        native=not isinstance(spec, specs.ModelLocalKVSpec),
        corrected=corrected,
        owner_id=id(owner.instance),
    )


def _native(owner: _Owner, max_num_seqs: int) -> dict[tuple[str, str], int]:
    """What the release itself declares for ``owner``; nothing when it cannot say."""
    try:
        stock = getattr(owner.instance, specs.METHOD)()
        return {(owner.path, str(spec.name)): int(spec.peak_bytes(max_num_seqs)) for spec in stock}
    except Exception:
        return {}


def _size(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is {value!r}, not a whole number of bytes or rows")
    return value


def _optional_size(value: Any, what: str) -> int | None:
    return None if value is None else _size(value, what)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
