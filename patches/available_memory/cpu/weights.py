# SPDX-License-Identifier: Apache-2.0
"""Bytes of a CPU worker's weights, counted before vLLM packs them.

vLLM's CPU kernels take a packed copy of a linear layer's weight and leave an empty parameter behind
(``dispatch_cpu_unquantized_gemm`` in vllm/model_executor/layers/utils.py; quantized layers do the like). The copy lies
in an object that torch knows nothing of, so that what is left in the model afterwards is a few per cent of it. The
count is therefore made just before that step, ``process_weights_after_loading``, which every loader calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

Before = WeakKeyDictionary[Any, dict[str, int]]
"""Of every module: bytes of each parameter and buffer of its own. What several modules share counts in the first."""


def note(model: Any, before: Before) -> None:
    """Add the sizes of ``model``'s parameters and buffers to ``before``."""
    seen: set[int] = set()
    for module in model.modules():
        sizes = {}
        for name, tensor in _own(module):
            sizes[name] = 0 if id(tensor) in seen else _bytes(tensor)
            seen.add(id(tensor))
        before[module] = sizes


def total(models: Iterable[Any], before: Mapping[Any, dict[str, int]]) -> tuple[int, int] | None:
    """(bytes of all weights, how many of them were packed) of ``models`` as they are now.

    A parameter that is empty now counts with its bytes of before. One that is gone does too, unless its module has got
    another in its place. ``None``: a parameter is empty and was not counted before.
    """
    count, packed = 0, 0
    seen: set[int] = set()
    done: set[int] = set()
    for module in (module for model in models for module in model.modules()):
        if id(module) in done:
            continue
        done.add(id(module))
        was = before.get(module)
        now = dict(_own(module))
        fresh = False
        for name, tensor in now.items():
            if not tensor.numel() and was is None:
                return None
            if tensor.numel() and id(tensor) not in seen:
                seen.add(id(tensor))
                count += _bytes(tensor)
                fresh = fresh or (was is not None and name not in was)
        for name, size in (was or {}).items():
            if (name in now and not now[name].numel()) or (name not in now and not fresh):
                count += size
                packed += size > 0
    return count, packed


def models_of(runner: Any) -> list[Any]:
    """The runner's model, and its draft model: ``drafter`` of the V1 runner, ``speculator`` of the V2 runner."""
    found = [runner.get_model() if hasattr(runner, "get_model") else runner.model]
    for name in ("drafter", "speculator"):
        draft = getattr(getattr(runner, name, None), "model", None)
        if hasattr(draft, "modules"):
            found.append(draft)
    return found


def _own(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
