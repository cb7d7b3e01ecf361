# SPDX-License-Identifier: Apache-2.0
"""Whether the encoder's weights are still those that were there before: a sample of every parameter, compared bitwise.

Trainers write weights in place in ways that nobody can list (``apply_model``, ``collective_rpc``, a custom loader), so
the worker compares the weights themselves, in steps that load or store an encoder output. Nothing is looked at between
steps: while vLLM sleeps, the memory of its parameters may not be mapped.

Sampled are parameters, and not buffers: those hold what a step computes (caches of rotary embeddings, the running
scales of FP8 attention). The tensors of a LoRA adapter are neither, and an adapter is in the key of its items.

Imports torch only inside functions, and not vLLM.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Elements of each parameter. A training step moves nearly every one of 400 parameters, so a few of each are thousands
# of witnesses; more of them cost more cache misses and catch nothing that was seen.
PER_PARAMETER = 16
# Beside the language model in some classes; no encoder goes through it.
_HEAD = "lm_head"


class WeightsSample:
    """Remembers a sample of the multimodal side of a model.

    Args:
        model_of: the model as it is now; called at each look, because a runner may put another in its place.

    Raises:
        Exception: whatever stops the first look, such as a layout that has no memory to look into.
    """

    def __init__(self, model_of: Callable[[], Any]) -> None:
        self._model_of = model_of
        self._model: Callable[[], Any] = lambda: None
        self._language: Any = ()
        self._towers: list[Any] = []
        self._pointers: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        self._last: bytes | None = None
        self.changed()

    def changed(self) -> bool:
        """Whether the weights are other than at the last call; False after :meth:`forget`.

        Costs one gather and one copy of a few KiB to the host, which waits for the device's current stream, where the
        weights were written. ``scripts/bench_ec_weights.py`` measures it.

        Raises:
            Exception: a parameter cannot be looked into.
        """
        taken = self._take()
        before, self._last = self._last, taken
        return before is not None and before != taken

    def forget(self) -> None:
        """What comes next counts as known. Lets go of the parameters' memory; does not touch it."""
        self._last = None
        self._pointers, self._views = [], []

    def _take(self) -> bytes:
        import torch

        parameters = self._parameters()
        # In-place writes show through a view. `parameter.data = other` and a new parameter have other memory: the old
        # one cannot be given to somebody else while a view of it is kept.
        pointers = [parameter.data_ptr() for parameter in parameters]
        if pointers != self._pointers or not self._views:
            self._pointers, self._views = [], []
            self._views = _grouped(_spread(parameter.data) for parameter in parameters if _has_memory(parameter))
            self._pointers = pointers
        return b"".join(torch.cat(group).view(torch.uint8).cpu().numpy().tobytes() for group in self._views)

    def _parameters(self) -> list[torch.Tensor]:
        model = self._model_of()
        if model is not self._model():
            self._language, self._towers = _sides(model)
            self._model = weakref.ref(model)
        found = list(_walk([model, *self._towers], self._language)) or list(_walk([model], ()))
        if any(_is_wrapper(kind) for kind in set(map(type, found))):
            return [inner for parameter in found for inner in _inner(parameter)]
        return found


def _sides(model: Any) -> tuple[Any, list[Any]]:
    """Modules of the language model, and the roots of what encodes, as the model itself states them.

    Both empty where it does not: then every parameter is looked at. ``get_mm_mapping`` names prefixes,
    ``get_language_model`` gives the module (or one that encloses the towers, in old releases; or a wrapper of its own,
    in the Transformers backend), ``_tower_model_names`` are set from 0.15.
    """
    mapping: Any = None
    with contextlib.suppress(Exception):
        mapping = model.get_mm_mapping()
    towers = _named(model, getattr(mapping, "tower_model", ()), getattr(mapping, "connector", ()))
    towers += _named(model, getattr(model, "_tower_model_names", ()))
    roots = _named(model, getattr(mapping, "language_model", ()))
    if not roots:
        with contextlib.suppress(Exception):
            roots = [model.get_language_model()]
    within = set(model.modules()) - {model}
    language = weakref.WeakSet(module for root in roots if root in within for module in root.modules())
    for tower in towers:
        language.difference_update(tower.modules())
    return language, towers


def _named(model: Any, *prefixes: Iterable[str]) -> list[Any]:
    found = []
    for names in prefixes:
        for name in [names] if isinstance(names, str) else names:
            with contextlib.suppress(AttributeError):
                found.append(model.get_submodule(name.strip(".")))
    return found


def _walk(roots: list[Any], language: Any) -> Iterator[torch.Tensor]:
    """Parameters below ``roots``, without those of the modules in ``language``, in an order that stays."""
    seen: set[int] = set()
    stack = roots[::-1]
    while stack:
        module = stack.pop()
        if module is None or id(module) in seen or module in language:
            continue
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        if language:
            stack.extend(child for name, child in module._modules.items() if name != _HEAD)
        else:
            stack.extend(module._modules.values())


def _is_wrapper(kind: type) -> bool:
    from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

    return hasattr(kind, "__tensor_flatten__") or issubclass(kind, (UninitializedBuffer, UninitializedParameter))


def _inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which a wrapper is made: a ``DTensor``, a quantized tensor of torchao. None of one that
    was never filled."""
    if not _is_wrapper(type(tensor)):
        yield tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _inner(getattr(tensor, name))


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for meta tensors, and for those that vLLM emptied when it packed the weights for the CPU."""
    return not tensor.is_meta and tensor.numel() > 0


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """A view of up to 16 elements, [n], as integers of their size, from all over the tensor's memory.

    Over the whole extent where the elements lie side by side, whatever their order; along the diagonal of a tensor
    with gaps.
    """
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.view(bits[tensor.element_size()])
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(order).is_contiguous():
        count = min(PER_PARAMETER, tensor.numel())
        step = (tensor.numel() - 1) // max(1, count - 1)
    else:
        count = min(PER_PARAMETER, max(tensor.shape))
        step = sum(size // count * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (step,))


def _grouped(views: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views that one ``torch.cat`` takes."""
    groups: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    return list(groups.values())
