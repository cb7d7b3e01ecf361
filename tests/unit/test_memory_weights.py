# SPDX-License-Identifier: Apache-2.0
"""Weights that a kernel has packed and emptied are counted as they were before it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.available_memory import explain_cpu, weights  # noqa: E402

LOADER = f"{weights.LOADERS}loader_for_test"
SIZE = 64 * 64 * 4


def emptied() -> Any:
    return torch.nn.Parameter(torch.empty(0), requires_grad=False)


def model() -> Any:
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def pack(module: Any, *args: Any) -> None:
    """What vLLM does on CPU: a copy in an object that torch does not know of, and an empty parameter in its place."""
    module[0].kernel = module[0].weight.detach().numpy().copy()
    module[0].weight = emptied()
    module[1].weight.data = torch.empty(0)


@pytest.fixture
def loader() -> Iterator[ModuleType]:
    """A loader module as vLLM's are: it has the step by name from the module that defines it."""
    module = ModuleType(LOADER)
    defined = lambda *args, **kwargs: pack(*args)  # noqa: E731
    defined.__module__ = f"{weights.LOADERS}utils"
    module.process_weights_after_loading = defined  # type: ignore[attr-defined]
    sys.modules[LOADER] = module
    yield module
    del sys.modules[LOADER]


def test_packed_weights_count_as_before(loader: ModuleType) -> None:
    made, step = model(), loader.process_weights_after_loading
    with weights.counted() as before:
        loader.process_weights_after_loading(made, None, None)
    assert loader.process_weights_after_loading is step
    assert weights.total([made], before) == (3 * SIZE, 2)


def test_nobody_counted_before_is_unknown() -> None:
    made = model()
    assert weights.total([made], {}) == (3 * SIZE, 0)
    pack(made)
    assert weights.total([made], {}) is None
    row = explain_cpu._weights(SimpleNamespace(model_runner=SimpleNamespace(model=made)), None)
    assert (row.state, row.value) == ("unknown", None) and "packed and emptied" in row.source
    assert explain_cpu._rest(10 * SIZE, row.value).state == "unknown"


def test_what_took_their_place_counts_and_not_both() -> None:
    """Quantized layers register the packed tensor under another name and delete the first."""
    made = model()
    before: weights.Before = weights.WeakKeyDictionary()
    weights.note(made, before)
    del made[0].weight
    made[0].register_buffer("packed", torch.zeros(64 * 64, dtype=torch.int8))
    made[1].weight = emptied()
    made[1].register_buffer("scale", torch.zeros(16))
    del made[2].weight
    made[2].kernel = object()
    assert weights.total([made], before) == (64 * 64 + (SIZE + 64) + SIZE, 2)


def test_what_is_shared_counts_once() -> None:
    made = model()
    made[1].weight = made[0].weight
    before: weights.Before = weights.WeakKeyDictionary()
    weights.note(made, before)
    assert weights.total([made, made[0]], before) == (2 * SIZE, 0)
    made[0].weight = emptied()  # a packed copy here, and the other still holds the tensor
    assert weights.total([made], before) == (3 * SIZE, 1)


def test_a_failing_count_does_not_disturb_the_load(loader: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(weights, "note", fail)
    made = model()
    with weights.counted() as before:
        loader.process_weights_after_loading(made, None, None)
    assert made[0].weight.numel() == 0
    assert weights.total([made], before) is None


def test_an_error_of_the_loader_passes_and_nothing_stays_swapped(loader: ModuleType) -> None:
    step = loader.process_weights_after_loading
    with pytest.raises(KeyError), weights.counted():
        raise KeyError("no such weight")
    assert loader.process_weights_after_loading is step


def test_draft_models_count_too() -> None:
    draft = torch.nn.Linear(8, 8, bias=False)
    runner = SimpleNamespace(get_model=model, drafter=SimpleNamespace(model=draft), speculator=None)
    assert weights.models_of(runner)[1] is draft


@pytest.mark.parametrize("held", [None, 11])
def test_less_resident_than_the_weights_is_no_zero(held: int | None) -> None:
    assert explain_cpu._rest(10, held).state == "unknown"
