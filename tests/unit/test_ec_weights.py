# SPDX-License-Identifier: Apache-2.0
"""Which changes of a model's weights are seen, and which changes in a model are none, on real torch modules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from vllm_omni_patch.patches.ec_connector.vllm.weights import WeightsSample


class Tower(nn.Module):
    """An encoder with what real ones have: convolution, fused linear, norm with running numbers, a rotary cache."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.BatchNorm1d(32)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("amax", torch.zeros(16))
        self.register_buffer("cos", torch.ones(4, 8), persistent=False)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.experts = nn.Parameter(torch.randn(8, 32, 32))


class Model(nn.Module):
    """The usual shape in vLLM: tower, projector and language model side by side, and an alias for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Tower()
        self.projector = nn.Linear(32, 32)
        self.query = nn.Parameter(torch.randn(1, 4, 32))
        self.language_model = Language()
        self.alias = self.language_model.embed
        self.lm_head = nn.Linear(32, 64)

    def get_language_model(self) -> Any:
        return self.language_model


class Enclosing(nn.Module):
    """QwenVL and old GLM-4V: what is called the language model holds the tower; the mapping tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Language()
        self.transformer.visual = Tower()

    def get_language_model(self) -> Any:
        return self.transformer

    def get_mm_mapping(self) -> Any:
        return SimpleNamespace(
            language_model=["transformer."], connector=[], tower_model=["transformer.visual.", "transformer.gone"]
        )


class Marked(Enclosing):
    """From 0.15 a model names the towers that it was built with."""

    _tower_model_names = ("transformer.visual",)

    def get_mm_mapping(self) -> Any:
        raise NotImplementedError


class Unnamed(Enclosing):
    """Chameleon before 0.15: the language model holds the tower, and nothing says so; beside it there is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(32, 64)

    def get_mm_mapping(self) -> Any:
        raise NotImplementedError


class Wrapped(Model):
    """The Transformers backend: the language model is a wrapper made for the call, and is no part of the model."""

    def get_language_model(self) -> Any:
        made = nn.Module()
        made.__dict__.update(self.__dict__)
        return made


def sample(model: nn.Module) -> WeightsSample:
    return WeightsSample(lambda: model)


@torch.no_grad()
def write(parameter: Any) -> None:
    """As a loader writes: past the version counter."""
    parameter.data.copy_(parameter.data * 1.5 + 1)


def test_equal_weights_are_unchanged() -> None:
    watch = sample(Model())
    assert not watch.changed() and not watch.changed()


@pytest.mark.parametrize("name", [name for name, _ in Model().named_parameters()])
def test_what_counts_is_what_encodes(name: str) -> None:
    """Expert shuffles and training of the language model alone leave the encoder's outputs right."""
    model = Model()
    watch = sample(model)
    write(model.get_parameter(name))
    encodes = not name.startswith(("language_model.", "alias.", "lm_head."))
    assert watch.changed() is encodes
    assert not watch.changed(), "said once"


@pytest.mark.parametrize("kind", [Enclosing, Marked, Unnamed, Wrapped])
def test_the_tower_is_found_in_every_kind_of_model(kind: type[nn.Module]) -> None:
    model = kind()
    watch = sample(model)
    assert not watch.changed()
    tower = next(module for module in model.modules() if isinstance(module, Tower))
    for parameter in tower.parameters():
        write(parameter)
        assert watch.changed()
    write(next(module for module in model.modules() if isinstance(module, Language)).experts)
    # Where the two sides cannot be told apart, a change of either counts.
    assert watch.changed() is (kind in (Unnamed, Wrapped))


def swap_object(model: Model) -> None:
    model.projector.weight = nn.Parameter(torch.zeros_like(model.projector.weight))


def swap_memory(model: Model) -> None:
    model.projector.weight.data = model.projector.weight.data + 1


def swap_module(model: Model) -> None:
    model.visual = Tower()


def swap_half(model: Model) -> None:
    """One of three matrices that were fused."""
    model.visual.qkv.weight.data[64:].add_(1)


def add_one(model: Model) -> None:
    model.projector.extra = nn.Parameter(torch.ones(3))


def to_other_dtype(model: Model) -> None:
    model.projector.weight.data = model.projector.weight.data.to(torch.bfloat16)


@pytest.mark.parametrize("way", [swap_object, swap_memory, swap_module, swap_half, add_one, to_other_dtype])
def test_every_way_to_replace_is_seen(way: Callable[[Model], None]) -> None:
    model = Model()
    watch = sample(model)
    with torch.no_grad():
        way(model)
    assert watch.changed() and not watch.changed()


def test_another_model_in_the_runner_is_seen() -> None:
    models = [Model()]
    watch = WeightsSample(lambda: models[-1])
    models.append(Model())
    assert watch.changed() and not watch.changed()


def test_equal_weights_in_other_memory_are_unchanged() -> None:
    """Sleep at level 2, then the same weights loaded again."""
    model = Model()
    watch = sample(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model.projector.weight = nn.Parameter(model.projector.weight.data.clone())
    assert not watch.changed()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(saved)
    assert not watch.changed()


def test_what_a_step_writes_is_no_change() -> None:
    """Running statistics, scales of FP8 attention, rotary caches that grow, the tensors of an active adapter."""
    model = Model()
    model.projector.lora_a_stacked = (torch.zeros(1, 4, 32),)
    watch = sample(model)
    model.visual.norm(torch.randn(8, 32))
    model.visual.amax.add_(1)
    model.visual.cos = torch.ones(16, 8)
    model.projector.lora_a_stacked[0].fill_(3.0)
    model.projector(torch.randn(2, 32))
    assert model.visual.norm.running_mean.abs().sum() > 0 and not watch.changed()


def test_a_small_training_step_is_seen() -> None:
    """In bfloat16 most elements do not move: about one in a hundred does here."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(100))).to(torch.bfloat16)
    watch = sample(model)
    moved = 0
    for parameter in model.parameters():
        before = parameter.data.clone()
        parameter.data.copy_((before.float() + torch.randn(before.shape) * 2e-6).to(torch.bfloat16))
        moved += int((parameter.data != before).sum())
    assert 0 < moved < 0.05 * sum(parameter.numel() for parameter in model.parameters())
    assert watch.changed()


def test_not_a_number_equals_itself() -> None:
    model = Model()
    model.projector.weight.data.fill_(float("nan"))
    watch = sample(model)
    assert not watch.changed()
    model.projector.weight.data.view(torch.int32).add_(1)  # another NaN
    assert watch.changed()


NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool", "uint8", "int8", "int16"),
    *("uint16", "int32", "uint32", "int64", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared_as_bits(dtype: torch.dtype) -> None:
    model = nn.Module()
    raw = torch.zeros(24 * 40 * dtype.itemsize, dtype=torch.uint8)
    model.weight = nn.Parameter(raw.view(dtype).view(24, 40), requires_grad=False)
    watch = sample(model)
    assert not watch.changed()
    raw.fill_(1)
    assert watch.changed()


def layouts() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.zeros(64, 48).t(),
        "channels last": torch.zeros(8, 16, 4, 4).to(memory_format=torch.channels_last),
        "with gaps": torch.zeros(64, 64)[:, 8:40],
        "part of a fused one": torch.zeros(3, 64, 64)[1],
        "expanded": torch.zeros(1, 64).expand(32, 64),
        "one element": torch.zeros(()),
        "few elements": torch.zeros(3),
        "long": torch.zeros(1_000_003),
    }


@pytest.mark.parametrize("name", layouts())
def test_every_layout_is_looked_into(name: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(layouts()[name], requires_grad=False)
    watch = sample(model)
    assert not watch.changed()
    model.weight.data.untyped_storage().fill_(1)
    assert watch.changed()
    (group,) = watch._views
    assert 1 <= group[0].numel() <= 16


@pytest.mark.parametrize("part", [slice(0, 1), slice(-15, None)])
def test_both_ends_are_looked_at(part: slice) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1600))
    watch = sample(model)
    model.weight.data[part] = 1
    assert watch.changed()


def test_parameters_without_memory_are_left_alone() -> None:
    """Packed for the CPU and emptied, on the meta device, never filled; tied ones count once or twice, no matter."""
    model = Model()
    model.projector.weight = nn.Parameter(torch.empty(0))
    model.visual.qkv.weight = nn.Parameter(torch.empty(96, 32, device="meta"))
    model.visual.lazy = nn.LazyLinear(4)
    model.tied = nn.Linear(32, 32, bias=False)
    model.tied.weight = model.visual.norm.weight
    watch = sample(model)
    assert not watch.changed()
    write(model.tied.weight)
    assert watch.changed()
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.empty(0))
    assert not sample(empty).changed() and not sample(nn.Module()).changed()


def test_the_parts_of_a_wrapper_are_looked_at() -> None:
    """Quantized weights of torchao, DTensor: a tensor that is made of others."""
    from torch.testing._internal.two_tensor import TwoTensor

    inner = torch.zeros(8, 8), torch.zeros(8, 8)
    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(*inner), requires_grad=False)
    watch = sample(model)
    assert not watch.changed()
    inner[1].fill_(1)
    assert watch.changed()


def test_a_compiled_tower_is_looked_at() -> None:
    model = Model()
    model.visual = torch.compile(model.visual, backend="eager")
    watch = sample(model)
    write(model.visual.qkv.weight)
    assert watch.changed() and not watch.changed()


def test_inside_and_outside_inference_mode() -> None:
    model = Model()
    watch = sample(model)
    with torch.inference_mode():
        assert not watch.changed()
        write(model.projector.weight)
        assert watch.changed()
        model.projector.weight = nn.Parameter(torch.zeros(32, 32))
        assert watch.changed()
    assert not watch.changed()


def test_after_forget_the_next_look_only_remembers_and_no_memory_is_kept() -> None:
    model = Model()
    watch = sample(model)
    old = weakref.ref(model.projector.weight.data.untyped_storage())
    write(model.projector.weight)
    watch.forget()
    model.projector.weight = nn.Parameter(torch.zeros(32, 32))
    gc.collect()
    assert old() is None
    assert not watch.changed()
    write(model.projector.weight)
    assert watch.changed()


def test_what_cannot_be_looked_into_is_said() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(RuntimeError):
        sample(model)
