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

    @property
    def source(self) -> str:
        """How it was counted, in words."""
        return "model parameters and buffers, sum over tensors" + (", drafter included" if self.drafter else "")


def model_bytes(model: Any, drafter: Any = None) -> ModelBytes:
    """Bytes held by ``model`` and ``drafter`` (``torch.nn.Module`` or ``None``).

    The sum of ``nbytes`` over ``parameters()`` and ``buffers()`` of each of the two, as vllm-neuron 0.21 and later
    count (determine_available_memory design, section 4): two parameters over one storage count twice, and a drafter
    that shares the embedding counts it again.

    Raises:
        RuntimeError: a parameter or buffer is uninitialized, so that its size is not known yet.
        TypeError: ``model`` has no parameters to ask for.
    """
    parameters, buffers = _bytes_of(model, "parameters"), _bytes_of(model, "buffers")
    extra = 0 if drafter is None else _bytes_of(drafter, "parameters") + _bytes_of(drafter, "buffers")
    return ModelBytes(parameters + buffers + extra, parameters, extra)


def _bytes_of(model: Any, kind: str) -> int:
    return sum(tensor_bytes(name, tensor) for name, tensor in _named(model, kind))


def tensor_bytes(name: str, tensor: Any) -> int:
    """Bytes of one tensor: elements times element size, or the parts of a sparse one.

    Raises:
        RuntimeError: the tensor is uninitialized.
    """
    _check_initialized(name, tensor)
    return sum(int(part.nbytes) for part in _parts(tensor))


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
        raise RuntimeError(f"{name!r} is uninitialized, so the size of the model is unknown. Load the model first.")
