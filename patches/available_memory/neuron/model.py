# SPDX-License-Identifier: Apache-2.0
"""Bytes of a loaded model: its parameters and buffers, on any device and on ``meta``.

torch is imported when a tensor is looked at, never with this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Components of the sparse layouts, whose tensors have no byte size of their own.
_SPARSE_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model and its drafter.

    ``parameters`` is the part of the target model that its parameters make up, buffers and drafter left out: 0 means
    that the weights are not held by the host module. ``total`` includes everything.
    """

    total: int
    parameters: int
    drafter: int
    unique_storage: bool

    @property
    def source(self) -> str:
        """How it was counted, in words."""
        how = "each storage once" if self.unique_storage else "sum over tensors"
        return f"model parameters and buffers, {how}" + (", drafter included" if self.drafter else "")


def model_bytes(model: Any, drafter: Any = None, unique_storage: bool = False) -> ModelBytes:
    """Bytes held by ``model`` and ``drafter`` (``torch.nn.Module`` or ``None``).

    By default the sum of ``nbytes`` over ``parameters()`` and ``buffers()`` of each of the two, as vllm-neuron 0.21 and
    later count (determine_available_memory design, section 4): two parameters over one storage count twice, and a
    drafter that shares the embedding counts it again. ``unique_storage`` counts the storage behind each tensor once,
    over both models; a small view then counts as the storage it keeps alive.

    Raises:
        RuntimeError: a parameter or buffer is uninitialized, so that its size is not known yet.
        TypeError: ``model`` has no parameters to ask for.
    """
    seen: set[object] = set()

    def size(name: str, tensor: Any) -> int:
        return _unique_bytes(name, tensor, seen) if unique_storage else tensor_bytes(name, tensor)

    parameters = sum(size(name, tensor) for name, tensor in _named(model, "parameters"))
    buffers = sum(size(name, tensor) for name, tensor in _named(model, "buffers"))
    extra = 0
    if drafter is not None:
        extra = sum(size(name, tensor) for kind in ("parameters", "buffers") for name, tensor in _named(drafter, kind))
    return ModelBytes(parameters + buffers + extra, parameters, extra, unique_storage)


def tensor_bytes(name: str, tensor: Any) -> int:
    """Bytes of one tensor: elements times element size, or the parts of a sparse one.

    Raises:
        RuntimeError: the tensor is uninitialized.
    """
    _check_initialized(name, tensor)
    return sum(int(part.nbytes) for part in _parts(tensor))


def _unique_bytes(name: str, tensor: Any, seen: set[object]) -> int:
    _check_initialized(name, tensor)
    total = 0
    for part in _parts(tensor):
        try:
            storage = part.untyped_storage()
            # data_ptr() is 0 for every tensor on meta; the address of the storage object itself is not. The model keeps
            # its storages, so no address is used twice while they are compared.
            key, size = ("storage", storage._cdata), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):  # wrapper subclasses have no storage of their own
            key, size = ("tensor", id(part)), int(part.nbytes)
        if key not in seen:
            seen.add(key)
            total += size
    return total


def _parts(tensor: Any) -> list[Any]:
    names = _SPARSE_PARTS.get(str(tensor.layout))
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def _named(model: Any, kind: str) -> Iterator[tuple[str, Any]]:
    if not callable(getattr(model, f"named_{kind}", None)):
        raise TypeError(f"{type(model).__name__} is not a torch module; its {kind} cannot be counted")
    yield from getattr(model, f"named_{kind}")()


def _check_initialized(name: str, tensor: Any) -> None:
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        raise RuntimeError(f"{name!r} is uninitialized, so the bytes of the model are not known; load it first.")
