# SPDX-License-Identifier: Apache-2.0
"""A real vLLM serves a model that keeps KV of its own: what is reported, and that nothing else changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support import engine_process, local_kv_plugin

ROW = local_kv_plugin.ROW
REFRESH = "vllm_omni_patch.patches.model_local_kv.watch:refresh"
HEADLINE = "Model-local KV (outside the paged manager)"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return local_kv_plugin.write(str(tmp_path_factory.mktemp("local_kv")))


class Run:
    """One engine's answers, budget, log and report."""

    def __init__(self, plugin: tuple[str, str], folder: Path, flag: str | None, **env: str) -> None:
        reports = folder / "reports"
        settings = {
            "PYTHONPATH": plugin[0],
            "VLLM_OMNI_PATCH_REPORT_DIR": str(reports),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for a function as collective_rpc's argument
            **env,
        }
        with engine_process.Offline(
            plugin[1], str(folder), flag=flag, env=settings, load_format="dummy", enable_prefix_caching=False
        ) as engine:
            self.error = engine.ready.get("error", "")
            self.tokens = [answer.tokens for answer in engine.images([None], max_tokens=12, text="What is it?")]
            observing = "VLLM_OMNI_PATCH_OBSERVE_KV" in env
            self.report = self._wait(reports) if observing else self._read(reports)
            self.refreshed = engine.call("rpc", function=REFRESH) if observing else {}
            self.log = engine.log()
        self.left = self._read(reports)
        self.cache_size = re.findall(r"KV cache size: ([\d,]+) tokens", self.log)

    def _wait(self, reports: Path) -> dict[str, Any] | None:
        """The report once a full row of both caches is in it: the measuring thread writes it when it gets there."""
        deadline = time.monotonic() + 60
        while True:
            found = self._read(reports)
            rows = (found or {}).get("observed") or []
            if len(rows) == 2 and all(row["observed_row"] == ROW for row in rows):
                return found
            if time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    @staticmethod
    def _read(reports: Path) -> dict[str, Any] | None:
        files = list(reports.glob("model-local-kv-*.json"))
        if not files:
            return None
        assert len(files) == 1, "one process loads the model"
        data: dict[str, Any] = json.loads(files[0].read_text())
        return data


@pytest.fixture(scope="module")
def run(plugin: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    done: dict[tuple[Any, ...], Run] = {}

    def one(flag: str | None, **env: str) -> Run:
        key = (flag, *sorted(env.items()))
        if key not in done:
            done[key] = Run(plugin, tmp_path_factory.mktemp("engine"), flag, **env)
        return done[key]

    return one


def test_off_there_is_no_report(run: Callable[..., Run]) -> None:
    off = run(None)
    assert off.error == ""
    assert off.report is None
    assert HEADLINE not in off.log


def test_on_the_declared_cache_is_reported_and_tokens_and_budget_are_the_same(run: Callable[..., Run]) -> None:
    off, on = run(None), run("model_local_kv")
    assert on.error == ""
    assert on.tokens == off.tokens
    assert on.tokens[0]
    assert on.cache_size == off.cache_size
    assert on.cache_size
    assert on.log.count(HEADLINE) == 1
    assert "codec.codec_cache: 0.01 MiB (1 rows from fixed(1; one cache for the whole model)" in on.log
    assert on.report is not None
    (load,) = on.report["loads"]
    assert (load["status"], load["runner"]) == ("declared", "vllm.v1.worker.cpu_model_runner.CPUModelRunner")
    (entry,) = load["entries"]
    assert (entry["owner"], entry["name"], entry["declared_peak"]) == ("codec", "codec_cache", ROW)
    assert load["budget_path"] == "fixed", "VLLM_CPU_KVCACHE_SPACE is set"
    assert entry["charge"] == "pending"
    assert on.report["observed"] is None


def test_observed_declared_and_undeclared_both_show_up(run: Callable[..., Run]) -> None:
    off = run(None)
    seen = run("model_local_kv", VLLM_OMNI_PATCH_OBSERVE_KV="1")
    assert seen.tokens == off.tokens
    assert seen.cache_size == off.cache_size
    assert seen.report is not None
    rows = {row["owner"]: row for row in seen.report["observed"]}
    assert set(rows) == {"codec", "extra"}
    assert (rows["codec"]["status"], rows["codec"]["observed_row"]) == ("matched", ROW)
    assert (rows["extra"]["status"], rows["extra"]["observed_row"]) == ("undeclared", ROW)
    assert "local_kv_plugin_model.py" in rows["extra"]["sites"][0]
    assert [(one["owner"], one["attribute"]) for one in seen.report["suspects"]] == [("ring", "_k_cache")]
    assert "Model-local KV undeclared: extra" in seen.log
    assert "Model-local KV suspected: ring._k_cache" in seen.log
    (refreshed,) = seen.refreshed["values"]
    assert {row["owner"]: row["status"] for row in refreshed["observed"]} == {"codec": "matched", "extra": "undeclared"}
    assert seen.left is not None
    assert {row["owner"]: row["status"] for row in seen.left["observed"]} == {"codec": "matched", "extra": "undeclared"}


def test_a_declarer_that_raises_changes_nothing_but_its_row(run: Callable[..., Run]) -> None:
    off, bad = run(None), run("model_local_kv", LOCAL_KV_RAISE="1")
    assert bad.error == ""
    assert bad.tokens == off.tokens
    assert bad.cache_size == off.cache_size
    assert bad.report is not None
    (load,) = bad.report["loads"]
    assert [(one["owner"], one["reason"]) for one in load["failed"]] == [
        ("broken", "RuntimeError: this declaration is broken")
    ]
    assert [entry["name"] for entry in load["entries"]] == ["codec_cache"]
    assert "broken: model_local_kv_specs() of Broken failed" in bad.log
    assert os.path.basename(local_kv_plugin.__file__) == "local_kv_plugin.py"


def test_a_family_is_imported_with_its_models_module_and_not_before() -> None:
    """A process that imports vLLM and its runners holds no family; importing a model brings that model's alone."""
    code = """
        import sys
        import vllm.v1.worker.gpu_model_runner
        from vllm_omni_patch import ledger
        def families():
            here = "vllm_omni_patch.patches.model_local_kv.families."
            return [n.removeprefix(here) for n in sys.modules if n.startswith(here) and n != here + "targets"]
        print(families())
        import vllm.model_executor.models.deepencoder2 as model
        print(sorted(families()), [e.state for e in ledger.entries() if e.target.startswith(model.__name__)])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=engine_process.environment("model_local_kv"), capture_output=True, text=True, timeout=300, cwd="/",
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["[]", "['attach', 'deepseek_ocr2'] ['applied']"], done.stderr
