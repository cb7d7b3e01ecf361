# SPDX-License-Identifier: Apache-2.0
"""Bytes of real torch modules: what the sum that vllm-neuron makes counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from vllm_omni_patch.patches.available_memory.neuron.model import model_bytes, tensor_bytes


class Toy(nn.Module):
    """Embedding(100, 8) and a head over it, 3200 bytes each in fp32, tied in one of several ways."""

    def __init__(self, tie: str, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8, device=device)
        self.head = nn.Linear(8, 100, bias=False, device=device)
        weight = self.embedding.weight
        if tie == "object":
            self.head.weight = weight
        elif tie == "storage":
            self.head.weight = nn.Parameter(weight.detach())
        elif tie == "view":
            self.head.weight = nn.Parameter(weight.detach()[:50])


TIES = [("untied", 6400), ("object", 3200), ("storage", 6400), ("view", 4800)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("tie", "summed"), TIES)
def test_tied_weights(tie: str, summed: int, device: str) -> None:
    model = Toy(tie, device)
    assert model_bytes(model).total == summed
    assert model_bytes(model).parameters == summed


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_drafter_that_shares_the_embedding(device: str) -> None:
    target, drafter = Toy("object", device), nn.Module()
    drafter.embedding = target.embedding
    drafter.head = nn.Linear(8, 8, bias=False, device=device)
    assert model_bytes(target, drafter).total == 6656
    assert model_bytes(target, drafter).drafter == 3456
    assert "drafter included" in model_bytes(target, drafter).source


def test_buffers_count_whether_or_not_they_are_saved() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(20))
    model.register_buffer("passing", torch.zeros(10), persistent=False)
    model.register_buffer("none", None)
    counted = model_bytes(model)
    assert (counted.total, counted.parameters, len(model.state_dict())) == (120, 0, 1)


def test_plain_attributes_do_not_count() -> None:
    model = nn.Module()
    model.operand = torch.zeros(100)
    model.listed = [torch.zeros(100)]
    assert model_bytes(model).total == 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float8_e4m3fn", 64),
        ("uint8", 64),
        ("int8", 64),
        ("bool", 64),
        ("bfloat16", 128),
        ("float32", 256),
        ("float4_e2m1fn_x2", 64),
    ],
)
def test_element_sizes(dtype: str, expected: int) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    model = nn.Module()
    model.register_buffer("weight", torch.empty(8, 8, dtype=kind))
    assert model_bytes(model).total == expected


@pytest.mark.parametrize(
    ("make", "summed"),
    [(lambda: torch.zeros(1000)[:10], 40), (lambda: torch.zeros(1).expand(1000), 4000)],
    ids=("small view", "expanded"),
)
def test_a_view_counts_as_large_as_it_looks(make: Callable[[], object], summed: int) -> None:
    model = nn.Module()
    model.register_buffer("view", make())
    assert model_bytes(model).total == summed


def test_uninitialized_is_an_error_not_zero() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(RuntimeError, match=r"'0\.weight' is uninitialized"):
        model_bytes(model)
    with pytest.raises(RuntimeError, match="uninitialized"):
        tensor_bytes("weight", nn.parameter.UninitializedBuffer())


def test_sparse_counts_values_and_indices() -> None:
    dense = torch.zeros(10, 10)
    dense[0, 1] = dense[3, 4] = 1.0
    coo, csr = nn.Module(), nn.Module()
    coo.register_buffer("weight", dense.to_sparse())
    csr.register_buffer("weight", torch.sparse_csr_tensor([0, 1, 1, 1, 2] + [2] * 6, [1, 4], [1.0, 1.0], (10, 10)))
    assert model_bytes(coo).total == 2 * 4 + 2 * 2 * 8
    assert model_bytes(csr).total == 2 * 4 + 2 * 8 + 11 * 8


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not a torch module"):
        model_bytes(object())


def test_meta_and_device_agree_for_a_whole_layer() -> None:
    def make(device: str) -> nn.Module:
        return nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, device=device)

    assert model_bytes(make("meta")) == model_bytes(make("cpu"))
    assert model_bytes(make("cpu")).total == sum(p.numel() * 4 for p in make("cpu").parameters())
