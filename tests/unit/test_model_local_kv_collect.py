# SPDX-License-Identifier: Apache-2.0
"""The walk over real module trees: who is asked, how often, and what a bad declarer costs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.model_local_kv import specs
from vllm_omni_patch.patches.model_local_kv.collect import collect, modules, unwrap
from vllm_omni_patch.patches.model_local_kv.specs import ModelLocalKVScope, ModelLocalKVSpec, RowDriver


def spec(name: str = "cache", **changes: Any) -> ModelLocalKVSpec:
    fields: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 4,
        "head_dim": 8,
        "dtype": torch.float32,
        "physical_capacity_positions": 16,
        "capacity_source": "test",
        "scope": ModelLocalKVScope.REQUEST,
        "rows": RowDriver.MAX_NUM_SEQS,
    }
    return ModelLocalKVSpec(name=name, **{**fields, **changes})


class Owner(torch.nn.Module):
    """Declares what it is given and counts how often it is asked."""

    def __init__(self, *declared: Any) -> None:
        super().__init__()
        self.declared = declared
        self.asked = 0

    def model_local_kv_specs(self) -> list[Any]:
        self.asked += 1
        return list(self.declared)


class Raising(torch.nn.Module):
    def model_local_kv_specs(self) -> list[Any]:
        raise KeyError("sliding_window")


class GraphWrapper:
    """As vLLM's ``CUDAGraphWrapper``: no module, forwards reads, knows its runnable."""

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def unwrap(self) -> Any:
        return self.runnable


class Generator:
    """An owner that is no module."""

    def model_local_kv_specs(self) -> list[Any]:
        return [spec("talker")]


class Holder(torch.nn.Module):
    model_local_kv_owners = ("audio_generator", "more")

    def __init__(self) -> None:
        super().__init__()
        self.audio_generator = Generator()
        self.more: Any = None


def names(found: Any) -> list[tuple[str, str]]:
    return [(entry.owner, entry.name) for entry in found.entries]


def test_a_declarer_inside_the_tree_is_found_by_its_path() -> None:
    root = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(Owner(spec("a"), spec("b"))))
    found = collect([("", root)], max_num_seqs=3)
    assert names(found) == [("1.0", "a"), ("1.0", "b")]
    entry = found.entries[0]
    assert (entry.owner_class, entry.rows, entry.row_driver, entry.dtype) == ("Owner", 3, "max_num_seqs", "float32")
    assert entry.bytes_per_row == 2 * 2 * 4 * 8 * 16 * 4
    assert entry.declared_peak == 3 * entry.bytes_per_row
    assert not entry.native
    assert found.modules == 4


def test_the_order_is_that_of_named_modules_and_a_shared_module_counts_once() -> None:
    shared = Owner(spec())
    root = torch.nn.ModuleDict({"x": torch.nn.Sequential(shared, torch.nn.ReLU()), "y": shared, "z": torch.nn.ReLU()})
    walked = [".".join(part for part in (parent, name) if part) for parent, name, _ in modules(root, set())]
    assert walked == [path for path, _ in root.named_modules()]
    assert names(collect([("", root)], max_num_seqs=1)) == [("x.0", "cache")]
    assert shared.asked == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_root_declarer_behind_wrappers_is_asked_once(depth: int) -> None:
    root = Owner(spec())
    wrapped: Any = root
    for _ in range(depth):
        wrapped = GraphWrapper(wrapped)
    assert unwrap(wrapped) is root
    found = collect([("", wrapped), ("again", root)], max_num_seqs=1)
    assert names(found) == [("Owner", "cache")]
    assert root.asked == 1


def test_a_wrapper_held_by_a_module_is_not_a_second_declarer() -> None:
    class Model(torch.nn.Module):
        model_local_kv_owners = ("graph",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = Owner(spec())
            self.graph = GraphWrapper(self.inner)

    assert names(collect([("", Model())], max_num_seqs=1)) == [("inner", "cache")]


def test_owners_that_are_no_modules_are_reached_by_the_named_hop() -> None:
    holder = Holder()
    holder.more = {"a": Generator(), "b": [Generator()]}
    root = torch.nn.ModuleDict({"talker": holder})
    found = collect([("", root)], max_num_seqs=1)
    assert names(found) == [("talker.audio_generator", "talker"), ("talker.more.a", "talker")]
    again = Holder()
    again.more = again.audio_generator
    assert len(collect([("", again)], max_num_seqs=1).entries) == 1


def test_an_owner_that_is_both_submodule_and_named_counts_once() -> None:
    class Model(torch.nn.Module):
        model_local_kv_owners = ("inner",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = Owner(spec())

    model = Model()
    assert len(collect([("", model)], max_num_seqs=1).entries) == 1
    assert model.inner.asked == 1


def test_a_declarer_that_raises_is_a_failed_row_and_the_others_are_read() -> None:
    root = torch.nn.Sequential(Owner(spec("a")), Raising(), Owner(spec("b")))
    found = collect([("", root)], max_num_seqs=1)
    assert names(found) == [("0", "a"), ("2", "b")]
    assert [(bad.owner, bad.owner_class, bad.reason) for bad in found.failed] == [
        ("1", "Raising", "KeyError: 'sliding_window'")
    ]
    assert "sliding_window" in found.failed[0].traceback


@pytest.mark.parametrize("bad", [None, object(), "cache"])
def test_a_declaration_that_cannot_be_read_fails_its_owner_only(bad: Any) -> None:
    found = collect([("", torch.nn.Sequential(Owner(bad), Owner(spec())))], max_num_seqs=1)
    assert len(found.entries) == 1
    assert len(found.failed) == 1


class NativeScope(str, Enum):
    REQUEST = "request"


class NativeDriver(str, Enum):
    FIXED = "fixed"


class NativeSpec:
    """The fields and methods of vLLM-Omni 0.30's, without ours."""

    name, layers, kv_heads, head_dim, dtype = "native", 2, 4, 8, torch.float16
    physical_capacity_positions, capacity_source = 16, "native"
    scope, rows, rows_fixed, rows_reason, allocation_note = NativeScope.REQUEST, NativeDriver.FIXED, 5, "five", None
    bytes_per_row = 2 * 2 * 4 * 8 * 16 * 2

    def __init__(self, size: Any = None) -> None:
        if size is not None:
            self.bytes_per_row = size

    def row_count(self, max_num_seqs: int = 1) -> int:
        return self.rows_fixed

    def peak_bytes(self, max_num_seqs: int = 1) -> int:
        return self.bytes_per_row * self.rows_fixed


def test_native_declarations_are_read_by_their_fields() -> None:
    found = collect([("", Owner(NativeSpec()))], max_num_seqs=9)
    entry = found.entries[0]
    assert (entry.native, entry.rows, entry.row_driver, entry.scope, entry.dtype) == (
        True,
        5,
        "fixed",
        "request",
        "float16",
    )
    assert entry.declared_peak == 5 * 4096
    assert entry.storage_per_row is None
    assert entry.storage_peak is None
    assert entry.residency == "unknown"


@pytest.mark.parametrize("size", [-1, 1.5, "12", True])
def test_a_size_that_is_no_number_of_bytes_is_a_failure_and_not_a_zero(size: Any) -> None:
    found = collect([("", Owner(NativeSpec(size)))], max_num_seqs=1)
    assert found.entries == []
    assert "bytes_per_row" in found.failed[0].reason


def test_a_corrected_declaration_goes_before_the_native_one_and_keeps_its_figure() -> None:
    class Corrected(Owner):
        def vllm_omni_patch_model_local_kv_specs(self) -> list[Any]:
            return [spec("ours")]

    owner = Corrected(NativeSpec())
    found = collect([("", owner)], max_num_seqs=1)
    assert names(found) == [("Corrected", "ours")]
    assert found.entries[0].corrected
    assert found.native == {("Corrected", "native"): 5 * 4096}


def test_declarers_see_the_engine_and_may_say_why_they_hold_nothing() -> None:
    class Gated(torch.nn.Module):
        def model_local_kv_specs(self) -> list[Any]:
            if specs.engine_config() == "turn":
                specs.inert("encoder", "session_mode is turn")
                return []
            return [spec("encoder")]

    found = collect([("", Gated())], max_num_seqs=1, vllm_config="turn")
    assert found.entries == []
    assert found.declarers == 1
    assert [(one.owner, one.name, one.reason) for one in found.inert] == [("Gated", "encoder", "session_mode is turn")]
    assert specs.engine_config() is None
    assert names(collect([("", Gated())], max_num_seqs=1, vllm_config="duplex")) == [("Gated", "encoder")]


def test_several_roots_are_one_walk() -> None:
    main, shared = torch.nn.Sequential(Owner(spec("main"))), Owner(spec("shared"))
    main.append(shared)
    draft = torch.nn.Sequential(shared, Owner(spec("draft")))
    found = collect([("", main), ("drafter", draft)], max_num_seqs=1, keep_paths=True)
    assert names(found) == [("0", "main"), ("1", "shared"), ("drafter.1", "draft")]
    assert found.root == "Sequential"
    assert found.paths[id(draft)] == "drafter"
    assert found.paths[id(draft[1])] == "drafter.1"


def test_a_model_that_is_no_module_is_walked_as_far_as_it_goes() -> None:
    class Facade:
        def named_modules(self) -> list[tuple[str, Any]]:
            return [("", self), ("inner", Owner(spec()))]

    assert names(collect([("", Facade())], max_num_seqs=1)) == [("inner", "cache")]
    assert collect([("", object())], max_num_seqs=1).entries == []
    assert collect([("", None)], max_num_seqs=1).entries == []
