# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own runner classes around a real model: where its report is missing ours appears, and never twice.

What core vLLM does inside ``load_model`` needs a GPU engine and is replaced by "here is the model"; everything that
vLLM-Omni adds to it, its own report included, is the release's code. Run by ``scripts/check_families.py``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm_omni", reason="vLLM-Omni is not installed; scripts/check_families.py makes environments for it"
)
torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.model_local_kv import PATCH, RUNNERS, hooks, report, watch  # noqa: E402

from tests.live import omni_caches as omni  # noqa: E402
from vllm_omni_patch import apply, ledger  # noqa: E402

RELEASE = omni.omni_release()
V1, V2 = "vllm_omni.worker.gpu_model_runner", "vllm_omni.worker_v2.omni_model_runner"
CORE = {V1: "vllm.v1.worker.gpu_model_runner", V2: "vllm.v1.worker.gpu.model_runner"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The real Qwen3-TTS stage, eager and in async-chunk mode, and its config."""
    config = omni.qwen3_config(tmp_path_factory.mktemp("qwen3"))
    return omni.qwen3_stage(config), config


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("vllm", "vllm.omni_patch", "vllm_omni"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "WATCH", watch.Watch())


def install(*modules: str) -> list[apply.Installed]:
    """Every runner target and every family target in ``modules`` that this release has."""
    done = []
    for target in PATCH.targets:
        if target.module not in modules:
            continue
        module = importlib.import_module(target.module)
        try:
            apply.locate(module, target.qualname)
        except LookupError:
            continue
        done.append(apply.install(PATCH, target, module, lambda: None))
    return done


@pytest.fixture
def load(stage: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``load(module)``: the runner class of a module, hooked, loads the stage."""
    done: list[apply.Installed] = []

    def one(name: str, model: Any = None) -> Any:
        core = importlib.import_module(CORE[name]).GPUModelRunner
        cls = importlib.import_module(name).OmniGPUModelRunner

        def load_core(self: Any, *args: Any, **kwargs: Any) -> None:
            self.model = stage[0] if model is None else model

        monkeypatch.setattr(core, "load_model", load_core)
        done.extend(install(CORE[name], name, omni.MODELS + omni.QWEN3))
        runner = object.__new__(cls)
        runner.scheduler_config = SimpleNamespace(max_num_seqs=64)
        runner.vllm_config = stage[1]
        runner.model_config = stage[1].model_config
        runner.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
        runner.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[], cudagraph_mode=None)
        runner.parallel_config = SimpleNamespace(rank=0)
        runner.device = torch.device("cpu")
        runner.supports_mm_inputs = False
        runner.load_model()
        return runner

    yield one
    for installed in reversed(done):
        apply.remove(installed)


def headlines(text: list[str]) -> list[str]:
    return [line for line in text if line.startswith(report.HEADLINE)]


def request_peak() -> int:
    """Declared bytes of the decoder's per-request cache."""
    (row,) = [row for row in ledger.published(report.FACT)["entries"] if row["name"].endswith("_request")]
    return int(row["declared_peak"])


def test_every_runner_target_of_this_release_is_there() -> None:
    here = {target.module for target in RUNNERS if target.distribution == "vllm-omni" and "npu" not in target.module}
    expected = {V1} if RELEASE < (0, 30) else {V1, V2}
    found = set()
    for name in here:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        found.add(name)
    assert expected <= found


@pytest.mark.skipif(RELEASE < (0, 28), reason="the decoder keeps nothing before 0.28")
def test_the_v1_runner_reports_once(load: Any, lines: Any) -> None:
    """Also in 0.30, whose own declaration is empty under ``enforce_eager`` and whose report then prints nothing."""
    load(V1)
    assert len(headlines(lines())) == 1
    item = 4 if RELEASE < (0, 30) else 2
    assert request_peak() == 64 * 8 * 16 * 64 * 71 * 2 * item


@pytest.mark.skipif(RELEASE < (0, 30), reason="this runner came with 0.30")
def test_the_v2_runner_reports_where_upstream_prints_nothing(load: Any, lines: Any) -> None:
    runner = load(V2)
    assert not hasattr(runner, "_report_model_local_kv")
    (headline,) = headlines(lines())
    assert "at max_num_seqs=64" in headline
    assert any("codec_decoder_request: 142.00 MiB (64 rows from max_num_seqs" in line for line in lines())
    assert request_peak() == 142 << 20


@pytest.mark.skipif(RELEASE < (0, 30), reason="upstream's report came with 0.30")
def test_upstreams_own_lines_stand_and_ours_follow_only_where_they_differ(load: Any, lines: Any) -> None:
    from vllm_omni.model_executor.models import model_local_kv as native

    class Owner(torch.nn.Module):
        def model_local_kv_specs(self) -> list[Any]:
            return [
                native.ModelLocalKVSpec(
                    name="native",
                    layers=1,
                    kv_heads=1,
                    head_dim=1024,
                    dtype=torch.float16,
                    physical_capacity_positions=256,
                    capacity_source="test",
                    scope=native.ModelLocalKVScope.REQUEST,
                    rows=native.RowDriver.MAX_NUM_SEQS,
                )
            ]

    load(V1, torch.nn.ModuleDict({"owner": Owner()}))
    text = lines()
    assert len(headlines(text)) == 1
    assert sum("owner.native" in line for line in text) == 1, "upstream's line, and not ours"
    (row,) = ledger.published(report.FACT)["entries"]
    assert (row["native"], row["declared_peak"], row["charge"]) == (True, 64 << 20, "pending")
