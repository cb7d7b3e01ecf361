# SPDX-License-Identifier: Apache-2.0
"""The loader on the vLLM that is installed: one engine in strict mode, and what can be seen without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import engine_process, tiny_model

pytest.importorskip("vllm")

STATUS = [sys.executable, "-m", "vllm_omni_patch.commands.main", "status", "--json"]


def python(code: str, flag: str | None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=engine_process.environment(flag, env), capture_output=True, text=True, timeout=300, cwd="/",
    )  # fmt: skip


@dataclass
class Seen:
    """What an engine left: its log, its metrics page, the account of its processes, its run folder."""

    log: str
    page: str
    status: dict[str, Any]
    run_folders: set[str]
    left: dict[int, str]

    def roles(self) -> dict[str, dict[str, Any]]:
        return {process["role"]: process for process in self.status["processes"]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A server with every patch on, strict, checking its environment, and in Prometheus' multiprocess mode."""
    folder = tmp_path_factory.mktemp("engine")
    reports, pages = folder / "reports", folder / "prometheus"
    pages.mkdir()
    env = {
        "VLLM_OMNI_PATCH_STRICT": "1",
        "VLLM_OMNI_PATCH_REPORT_DIR": str(reports),
        "PROMETHEUS_MULTIPROC_DIR": str(pages),
    }
    model = tiny_model.make(str(folder / "model"))
    server = engine_process.Server(
        model, str(folder), flag="1", env=env, dummy=True, arguments=["--fail-on-environ-validation"]
    )
    try:
        page = server.get("/metrics")
        run_folders = server.group.shared_folders()
        done = subprocess.run([*STATUS, "--report-dir", str(reports)], capture_output=True, text=True, timeout=120)
        status = json.loads(done.stdout)
        log = server.log()
    finally:
        left = server.stop()
    yield Seen(log, page, status, run_folders, left)


def test_every_process_says_what_it_applied(engine: Seen) -> None:
    roles = engine.roles()
    assert {"api server", "engine core", "worker"} <= set(roles)
    applied = {
        role: {entry["patch"] for entry in process["entries"] if entry["state"] == "applied"}
        for role, process in roles.items()
    }
    assert applied["worker"] == {"loader", "available_memory", "ec_connector", "model_local_kv"}
    assert "ec_connector" in applied["engine core"]
    served = {e["target"]: e["state"] for e in roles["api server"]["entries"] if e["patch"] == "loader"}
    assert set(served.values()) <= {"applied", "skipped"}, served  # no configure_logging up to 0.30
    assert [state for name, state in served.items() if "configure_logging" not in name] == ["applied"] * 4
    assert engine.status["mismatches"] == []
    assert engine.status["problems"] == []
    for process in roles.values():
        assert process["process"]["activation_path"] == "startup file"
        assert process["process"]["vllm_version"] == engine.status["installed"]["vllm"]["release"]


def test_the_account_tells_what_was_called(engine: Seen) -> None:
    entries = [entry for process in engine.status["processes"] for entry in process["entries"]]
    told = {entry["target"] for entry in entries if entry["called"]}
    assert "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory" in told
    assert "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model" in told
    assert "vllm.engine.arg_utils:EngineArgs.create_engine_config" in told
    # Hooked, and overridden by the CPU's own worker and runner.
    applied = {entry["target"] for entry in entries if entry["state"] == "applied"}
    others = {
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    }
    assert others <= applied and not others & told


def test_each_process_has_one_line_in_vllms_format(engine: Seen) -> None:
    lines = [line for line in engine.log.splitlines() if re.search(r"vllm-omni-patch \d+\.\d+\.\d+: pid ", line)]
    pids = [re.search(r": pid (\d+),", line).group(1) for line in lines]  # type: ignore[union-attr]
    told = {str(p["pid"]) for p in engine.status["processes"] if p["role"] in ("api server", "engine core", "worker")}
    assert told <= set(pids)
    assert len(pids) == len(set(pids))
    for line in lines:
        assert " INFO " in line
        assert re.search(r"vLLM \S+: \d+ applied", line)


def test_no_variable_of_ours_is_unknown_to_vllm(engine: Seen) -> None:
    assert "Unknown vLLM environment variable" not in engine.log
    assert "vllm-omni-patch: not active" not in engine.log


def test_numbers_of_the_worker_and_states_are_on_the_page(engine: Seen) -> None:
    assert re.search(r"^vllm_omni_patch_memory_kv_cache_bytes\{.*\} \S+$", engine.page, re.MULTILINE)
    rows = [line for line in engine.page.splitlines() if line.startswith("vllm_omni_patch_info{")]
    assert rows
    assert all(line.endswith(" 1.0") for line in rows)
    assert any('state="applied"' in line and "load_model" in line for line in rows)
    assert not any('state="failed"' in line for line in rows)
    assert "vllm:" in engine.page, "vLLM's own numbers are still there"


def test_nothing_is_left_when_it_ends(engine: Seen) -> None:
    """Not at once: vLLM kills its workers, and the kernel may take seconds to take one apart."""
    assert engine.left == {}
    (run_folder,) = engine.run_folders
    assert {process["process"]["run"] for process in engine.status["processes"]} == {os.path.basename(run_folder)}
    assert engine_process.left_over(engine.run_folders) == []


# -- without an engine


@pytest.mark.parametrize("flag", [None, "1"])
def test_the_compile_cache_key_does_not_know_the_flag(flag: str | None, tmp_path: Path) -> None:
    code = """
import json, vllm.envs as envs
factors = getattr(envs, "compile_factors", None) or envs.compute_hash
print("FACTORS " + json.dumps(factors(), sort_keys=True, default=str))
"""
    stock = python(code, None)
    other = python(code, flag, VLLM_OMNI_PATCH_REPORT_DIR=str(tmp_path / "elsewhere"))
    factors = [re.search(r"^FACTORS (.*)$", done.stdout, re.MULTILINE) for done in (stock, other)]
    assert factors[0] is not None, stock.stderr
    assert factors[1] is not None, other.stderr
    assert factors[0].group(1) == factors[1].group(1)
    assert "VLLM_OMNI_PATCH" not in factors[1].group(1)


def test_with_the_flag_off_vllm_is_byte_for_byte_its_own() -> None:
    code = """
import sys, vllm
from vllm.plugins import load_general_plugins
import vllm.distributed.ec_transfer.ec_connector.factory as factory
ours = [m for m in sys.modules if m.startswith("vllm_omni_patch")]
print("BEFORE", ours, type(vllm.envs.environment_variables).__name__)
load_general_plugins()
print("AFTER", [m for m in sys.modules if m.startswith("vllm_omni_patch")])
"""
    done = python(code, None)
    assert "BEFORE [] dict" in done.stdout, done.stderr
    assert "AFTER ['vllm_omni_patch', 'vllm_omni_patch.startup']" in done.stdout
    assert "omni" not in done.stderr


def test_strict_mode_ends_the_process_with_the_list() -> None:
    code = "from vllm.engine.arg_utils import EngineArgs; EngineArgs(model='x')"
    done = python(code, "ec_connector,nope", VLLM_OMNI_PATCH_STRICT="1")
    assert done.returncode != 0
    assert (
        "VLLM_OMNI_PATCH_STRICT is set, and VLLM_OMNI_PATCH asks for 1 target or patch that is not applied"
        in done.stderr
    )
    assert "no patch is called 'nope'; known: available_memory, ec_connector, model_local_kv" in done.stderr


def test_the_plugin_alone_is_enough() -> None:
    """As a Ray worker meets it: the interpreter starts without the flag, which arrives before plugins are loaded."""
    code = """
import os, vllm
import sys, vllm_omni_patch
assert vllm_omni_patch.finder not in sys.meta_path
os.environ["VLLM_OMNI_PATCH"] = "1"
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.worker.gpu_worker
from vllm_omni_patch import ledger
print("PATH", ledger.process()["activation_path"])
print("STATE", {e.state for e in ledger.entries() if e.target.startswith("vllm.v1.worker.gpu_worker:")})
"""
    done = python(code, None)
    assert "PATH plugin" in done.stdout, done.stderr
    assert "STATE {'applied'}" in done.stdout
