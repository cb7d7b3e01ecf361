# SPDX-License-Identifier: Apache-2.0
"""Weights that a kernel has packed and emptied are counted as they were before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.loading import apply
from vllm_omni_patch.patches.available_memory import PATCH, hooks
from vllm_omni_patch.patches.available_memory.cpu import explain_cpu, weights

SIZE = 64 * 64 * 4


def emptied() -> Any:
    return torch.nn.Parameter(torch.empty(0), requires_grad=False)


def model() -> Any:
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def pack(model: Any, model_config: Any, target_device: Any) -> None:
    """What vLLM does on CPU: a copy in an object that torch does not know of, and an empty parameter in its place."""
    model[0].kernel = model[0].weight.detach().numpy().copy()
    model[0].weight = emptied()
    model[1].weight.data = torch.empty(0)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """vLLM's step, with our hook around it and the counts of this test alone."""
    module = ModuleType("loader_utils_for_test")
    module.process_weights_after_loading = pack  # type: ignore[attr-defined]
    (target,) = (one for one in PATCH.targets if one.qualname == "process_weights_after_loading")
    monkeypatch.setattr(hooks, "_before", weights.WeakKeyDictionary())
    done = apply.install(PATCH, target, module, on_first_call=lambda: None)
    yield lambda *args, **kwargs: module.process_weights_after_loading(*args, **kwargs)
    assert apply.remove(done) == "" and module.process_weights_after_loading is pack


@pytest.mark.parametrize("named", [False, True])
def test_packed_weights_count_as_before(step: Callable[..., None], named: bool) -> None:
    made, cpu = model(), torch.device("cpu")
    step(model=made, model_config=None, target_device=cpu) if named else step(made, None, cpu)
    assert weights.total([made], hooks._before) == (3 * SIZE, 2)


def test_nothing_is_counted_on_a_gpu(step: Callable[..., None]) -> None:
    step(model(), None, torch.device("cuda"))
    assert not hooks._before


def test_nobody_counted_before_is_unknown() -> None:
    made = model()
    assert weights.total([made], {}) == (3 * SIZE, 0)
    pack(made, None, None)
    assert weights.total([made], {}) is None
    row = explain_cpu._weights(SimpleNamespace(model_runner=SimpleNamespace(model=made)), None)
    assert (row.state, row.value) == ("unknown", None) and "packed parameters before" in row.source
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


def test_a_failing_count_does_not_disturb_the_load(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(weights, "note", fail)
    made = model()
    step(made, None, torch.device("cpu"))
    assert made[0].weight.numel() == 0
    assert weights.total([made], hooks._before) is None


def test_draft_models_count_too() -> None:
    draft = torch.nn.Linear(8, 8, bias=False)
    runner = SimpleNamespace(get_model=model, drafter=SimpleNamespace(model=draft), speculator=None)
    assert weights.models_of(runner)[1] is draft


@pytest.mark.parametrize("held", [None, 11])
def test_less_resident_than_the_weights_is_no_zero(held: int | None) -> None:
    assert explain_cpu._rest(10, held).state == "unknown"
