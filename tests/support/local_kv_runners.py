# SPDX-License-Identifier: Apache-2.0
"""Runner classes of every known shape around small models that declare, and a process of its own for each test.

A pytest plugin: ``pytest_plugins = ["support.local_kv_runners"]`` in a test module brings the fixtures.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_omni_patch.loading import apply
from vllm_omni_patch.patch import Target
from vllm_omni_patch.patches.model_local_kv import PATCH, hooks, watch
from vllm_omni_patch.patches.model_local_kv.flags import OBSERVE
from vllm_omni_patch.patches.model_local_kv.observe.observer import Observer
from vllm_omni_patch.patches.model_local_kv.specs import ModelLocalKVScope, ModelLocalKVSpec, RowDriver

MIB = 1 << 20
LOAD_MODEL = "vllm_omni_patch.patches.model_local_kv.hooks:install_load_model"


def spec(name: str = "request") -> ModelLocalKVSpec:
    return ModelLocalKVSpec(
        name=name,
        layers=1,
        kv_heads=1,
        head_dim=1024,
        dtype=torch.float16,
        physical_capacity_positions=256,
        capacity_source="test",
        scope=ModelLocalKVScope.REQUEST,
        rows=RowDriver.MAX_NUM_SEQS,
    )


class Decoder(torch.nn.Module):
    def __init__(self, name: str = "request") -> None:
        super().__init__()
        self.name = name

    def model_local_kv_specs(self) -> list[Any]:
        if self.name == "raises":
            raise ValueError("broken declaration")
        return [spec(self.name)] if self.name else []


def model(name: str = "request") -> Any:
    return torch.nn.ModuleDict({"decoder": Decoder(name)})


class Base:
    """As a V1 runner: load_model makes ``self.model``."""

    def __init__(self, name: str = "request", max_num_seqs: int = 4) -> None:
        self.name = name
        self.scheduler_config = types.SimpleNamespace(max_num_seqs=max_num_seqs)
        self.model_config = types.SimpleNamespace(stage_id=1)
        self.parallel_config = types.SimpleNamespace(rank=0)
        self.cache_config = types.SimpleNamespace(kv_cache_memory_bytes=None)
        self.vllm_config = object()
        self.device = torch.device("cpu")
        self.calls: list[tuple[Any, ...]] = []

    def load_model(self, load_dummy_weights: bool = False, *, model: Any = None) -> str:
        self.calls.append((load_dummy_weights, model))
        if self.name == "fails to load":
            raise MemoryError("no room for the weights")
        self.model = model or globals()["model"](self.name)
        return "loaded"


def module(**classes: type) -> types.ModuleType:
    made = types.ModuleType("runners_for_a_test")
    for name, one in classes.items():
        setattr(made, name, one)
    return made


def fresh(base: type = Base, **body: Any) -> type:
    """A runner class of our own, so that wrapping it leaves the others alone."""
    own = {"load_model": base.__dict__["load_model"]} if "load_model" in base.__dict__ else {}
    return type("Runner", (base,), {**own, **body})


@pytest.fixture
def install() -> Iterator[Callable[..., Any]]:
    done: list[apply.Installed] = []

    def one(where: types.ModuleType, qualname: str, installer: str = LOAD_MODEL) -> apply.Installed:
        target = Target(where.__name__, qualname, installer)
        done.append(apply.install(PATCH, target, where, lambda: None))
        return done[-1]

    yield one
    for installed in reversed(done):
        apply.remove(installed)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("vllm", "vllm.omni_patch"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="vllm.omni_patch")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[watch.Watch]:
    """This process as the patch sees it, without earlier loads."""
    one = watch.Watch()
    monkeypatch.setattr(hooks, "WATCH", one)
    monkeypatch.setattr(watch, "WATCH", one)
    monkeypatch.delenv(OBSERVE.name, raising=False)
    yield one
    one.stop()


@pytest.fixture
def observer() -> Iterator[Observer]:
    """An observer of the transformers caches made in the test, which measures when it is asked to."""
    from transformers.cache_utils import Cache

    one = Observer(interval=0)
    undo = one.install(Cache)
    yield one
    undo()
