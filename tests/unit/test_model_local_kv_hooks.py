# SPDX-License-Identifier: Apache-2.0
"""The wrappers around load_model: installed by the loader's own installer on runner classes of every known shape."""

from __future__ import annotations

import functools
import gc
import json
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.local_kv_runners import LOAD_MODEL, MIB, Base, Decoder, fresh, model, module
from vllm_omni_patch import flags, ledger
from vllm_omni_patch.code import contract
from vllm_omni_patch.loading import apply
from vllm_omni_patch.patch import Target
from vllm_omni_patch.patches.model_local_kv import PATCH, RUNNERS, hooks, report

pytest_plugins = ["support.local_kv_runners"]
pytestmark = pytest.mark.usefixtures("process")

NATIVE = "vllm_omni_patch.patches.model_local_kv.hooks:install_native_report"


def headlines(text: list[str]) -> list[str]:
    return [line for line in text if line.startswith(report.HEADLINE)]


# -- apply, refuse, twice, off


def test_a_load_is_reported_and_its_result_and_arguments_are_untouched(install: Any, lines: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    runner = cls(max_num_seqs=256)
    assert runner.load_model(True) == "loaded"
    assert runner.calls == [(True, None)]
    assert headlines(lines()) == [
        f"{report.HEADLINE}: 256.00 MiB across 1 declaration(s) at max_num_seqs=256 (stage 1, cpu, rank 0)"
    ]
    assert ledger.published(report.FACT)["declared_bytes"] == 256 * MIB


def test_undone_it_is_the_original_again(lines: Any) -> None:
    cls = fresh()
    before = cls.__dict__["load_model"]
    where = module(Runner=cls)
    installed = apply.install(PATCH, Target(where.__name__, "Runner.load_model", LOAD_MODEL), where, lambda: None)
    assert cls.__dict__["load_model"] is not before
    assert apply.remove(installed) == ""
    assert cls.__dict__["load_model"] is before
    cls().load_model()
    assert headlines(lines()) == []


def test_a_drifted_target_breaks_the_contract() -> None:
    own = next(target for target in RUNNERS if target.contract.class_attributes).contract
    drifted = contract.check_source(
        own, "class Runner:\n    def load_model(self, weights):\n        self.model = weights\n", "Runner.load_model"
    )
    assert "required parameter weights" in drifted[0]
    moved = contract.check_source(
        own, "class Runner:\n    def load_model(self):\n        self.network = 1\n", "Runner.load_model"
    )
    assert moved == ["Runner does not set model"]
    gone = contract.check_source(
        own, "class Runner:\n    def load(self):\n        self.model = 1\n", "Runner.load_model"
    )
    assert gone


@pytest.mark.parametrize(
    "signature",
    [
        "self, eep_scale_up=False",
        "self, load_dummy_weights=False",
        "self, load_dummy_weights=False, *, model=None",
        "self, *args, **kwargs",
        "self, load_dummy_weights=False, *args, model=None, **kwargs",
    ],
)
def test_every_known_signature_fits(signature: str) -> None:
    text = f"class Runner:\n    def load_model({signature}):\n        self.model = 1\n"
    own = next(target for target in RUNNERS if target.contract.class_attributes).contract
    assert contract.check_source(own, text, "Runner.load_model") == []


# -- once per load, whatever the class chain


def test_a_chain_of_wrapped_classes_reports_once_and_after_the_outermost(install: Any, lines: Any) -> None:
    core = fresh()

    def omni_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = core.load_model(self, *args, **kwargs)
        assert headlines(lines()) == [], "the outer class has not finished"
        self.model["late"] = Decoder("late")
        return result

    omni = fresh(core, load_model=omni_load)
    install(module(Runner=core), "Runner.load_model")
    install(module(Runner=omni), "Runner.load_model")
    assert omni().load_model() == "loaded"
    assert len(headlines(lines())) == 1
    assert "2 declaration(s)" in headlines(lines())[0]


def test_a_class_that_goes_past_the_wrapped_one_is_reported_by_its_own(install: Any, lines: Any) -> None:
    core, npu_base = fresh(), fresh()

    def npu_load(self: Any, *args: Any) -> Any:
        return npu_base.load_model(self, *args)

    npu = type("Runner", (core, npu_base), {"load_model": npu_load, "__init__": Base.__init__})
    install(module(Runner=core), "Runner.load_model")
    install(module(Runner=npu), "Runner.load_model")
    npu().load_model()
    assert len(headlines(lines())) == 1


def test_two_runners_of_one_process_each_report(install: Any, lines: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    runners = [cls("first"), cls("second")]
    for runner in runners:
        runner.load_model()
    assert len(headlines(lines())) == 2
    assert ledger.published(report.FACT)["declared_bytes"] == 8 * MIB


def test_a_runner_that_loads_inside_anothers_load_reports_too(install: Any, lines: Any) -> None:
    cls = fresh()
    inner = cls("inner")

    def load_both(self: Any) -> Any:
        inner.load_model()
        return Base.load_model(self)

    outer_class = fresh(load_model=load_both)
    install(module(Runner=cls), "Runner.load_model")
    install(module(Runner=outer_class), "Runner.load_model")
    outer_class("outer").load_model()
    assert len(headlines(lines())) == 2


def test_a_dummy_weight_call_on_a_loaded_runner_is_not_reported_again(install: Any, lines: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    runner = cls()
    runner.load_model()
    runner.load_model(True)
    runner.load_model(load_dummy_weights=True)
    assert len(headlines(lines())) == 1
    assert ledger.published(report.FACT)["declared_bytes"] == 4 * MIB
    runner.load_model(model=model("another"))
    assert len(headlines(lines())) == 2, "another model is another report"


def test_a_runner_that_is_gone_no_longer_counts(install: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    cls("first").load_model()
    gc.collect()
    kept = cls("second")
    kept.load_model()
    assert ledger.published(report.FACT)["declared_bytes"] == 4 * MIB


# -- drafters, wrappers


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_the_draft_model_is_walked_and_what_it_shares_counts_once(install: Any, lines: Any, name: str) -> None:
    def load_both(self: Any) -> Any:
        result = Base.load_model(self)
        draft = model("draft")
        draft["shared"] = self.model["decoder"]
        setattr(self, name, types.SimpleNamespace(model=draft))
        return result

    cls = fresh(load_model=load_both)
    install(module(Runner=cls), "Runner.load_model")
    cls().load_model()
    text = "\n".join(lines())
    assert "2 declaration(s)" in text
    assert f"  {name}.decoder.draft: " in text


def test_a_drafter_without_a_model_is_fine(install: Any, lines: Any) -> None:
    cls = fresh(drafter=object())
    install(module(Runner=cls), "Runner.load_model")
    cls().load_model()
    assert len(headlines(lines())) == 1


# -- upstream's own report


def native_runner(calls: bool) -> type:
    def load(self: Any) -> Any:
        result = Base.load_model(self)
        if calls:
            self._report_model_local_kv()
        return result

    return fresh(load_model=load, _report_model_local_kv=lambda self: self.calls.append("native"))


@pytest.mark.parametrize("calls", [True, False])
def test_upstreams_lines_stand_and_are_not_repeated(
    install: Any, lines: Any, calls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flags.REPORT_DIR.name, str(tmp_path))
    cls = native_runner(calls)
    where = module(Runner=cls)
    install(where, "Runner._report_model_local_kv", NATIVE)
    install(where, "Runner.load_model")
    runner = cls()
    runner.load_model()
    assert runner.calls.count("native") == int(calls)
    assert len(headlines(lines())) == int(not calls), "a runner that has the method and never calls it gets our block"
    (file,) = tmp_path.glob("model-local-kv-*.json")
    (load,) = json.loads(file.read_text())["loads"]
    assert load["native_report"] is calls
    assert load["entries"][0]["declared_peak"] == 4 * MIB


# -- what goes wrong


def test_a_load_that_fails_raises_its_own_error_and_leaves_nothing_behind(install: Any, lines: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    runner = cls("fails to load")
    with pytest.raises(MemoryError, match="no room for the weights"):
        runner.load_model()
    assert headlines(lines()) == []
    runner.name = "request"
    assert runner.load_model() == "loaded"
    assert len(headlines(lines())) == 1


@pytest.mark.parametrize("where", ["collect", "engine_of", "models_of"])
def test_an_error_of_ours_never_reaches_the_load(
    install: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(hooks, where, broken)
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    assert cls().load_model() == "loaded"
    assert any("ours" in line or "The load is not affected" in line for line in lines())


def test_a_runner_that_lacks_what_we_read_loads_all_the_same(install: Any) -> None:
    class Bare:
        def load_model(self) -> str:
            return "loaded"

    install(module(Runner=Bare), "Runner.load_model")
    assert Bare().load_model() == "loaded"


@pytest.mark.parametrize("name", ["", "no declarer"])
def test_nothing_declared_is_one_line(install: Any, lines: Any, name: str) -> None:
    def load(self: Any) -> Any:
        self.model = model("") if name == "" else torch.nn.Linear(1, 1)

    cls = fresh(load_model=load)
    install(module(Runner=cls), "Runner.load_model")
    cls().load_model()
    (line,) = headlines(lines())
    assert ("hold nothing" in line) == (name == "")


def test_release_numbers_are_read_with_their_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for text, release in (
        ("0.32.0", (0, 32)),
        ("0.28.1+cu129", (0, 28)),
        ("0.29.0rc1", (0, 29)),
        ("0.28.0.post1", (0, 28)),
        ("unknown", None),
        (None, None),
    ):
        monkeypatch.setitem(sys.modules, "a_release", types.SimpleNamespace(__version__=text))  # type: ignore[arg-type]
        assert hooks._release("a_release") == release
    assert hooks._release("not imported") is None


def test_wrapped_methods_keep_their_name_and_signature(install: Any) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    assert cls.load_model.__name__ == "load_model"
    assert functools.partial(cls.load_model, cls())() == "loaded"
