# SPDX-License-Identifier: Apache-2.0
"""The example of a third party's patch: installed as a package, its own tests, and applied to a real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "vllm-omni-patch-schedule-timer"
CHILD = """
import json
import vllm.v1.core.sched.scheduler as scheduler
from vllm_omni_patch import ledger
states = {e.target: e.state for e in ledger.entries() if e.patch == "schedule_timer"}
print("RESULT", json.dumps({"states": states, "wrapped": hasattr(scheduler.Scheduler.schedule, "__wrapped__")}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that has the example as an installed package."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*pip, str(folder / "source")], check=True, capture_output=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_OMNI_PATCH")}
    return {**env, "PYTHONPATH": str(folder / "site"), "CUDA_VISIBLE_DEVICES": ""}


def test_its_own_tests_pass(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(EXAMPLE / "tests")],
        env=installed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(("flag", "state"), [("schedule_timer", "applied"), ("ec_connector", None)])
def test_it_is_applied_where_it_is_asked_for(installed: dict[str, str], flag: str, state: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env={**installed, "VLLM_OMNI_PATCH": flag}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["states"] == ({} if state is None else {"vllm.v1.core.sched.scheduler:Scheduler.schedule": state})
    assert result["wrapped"] is (state is not None)
