# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own runners report Qwen3-TTS's caches once, whoever of them and of us reports. One process per case.

Needs vLLM-Omni beside its vLLM: ``scripts/check_families.py`` makes the environments and runs this file in each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip(
        "vLLM-Omni is not installed; scripts/check_families.py makes an environment for it", allow_module_level=True
    )
pytest.importorskip("torch")

from support.omni_caches import MiB, omni_release

RELEASE = omni_release()
HEADER = "Model-local KV (outside the paged manager): "
pytestmark = pytest.mark.skipif(RELEASE < (0, 28), reason=f"vLLM-Omni {RELEASE} is inert for Qwen3-TTS")
NAMES = ["codec_decoder_batch_copy", "codec_decoder_request", "codec_decoder_working_copy"]


def load(folder: Path, *arguments: str, patch: str = "model_local_kv") -> tuple[str, dict[str, Any] | None]:
    """Output of one load, and its report if one was written."""
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_OMNI_PATCH": patch,
        "VLLM_OMNI_PATCH_UNLISTED": "apply",
        "VLLM_OMNI_PATCH_REPORT_DIR": str(folder / "reports"),
    }
    command = [sys.executable, str(root / "tests" / "support" / "omni_runner.py"), str(folder), *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "LOADED" in output
    reports = list((folder / "reports").glob("model-local-kv-*.json"))
    return output, json.loads(reports[0].read_text())["loads"][0] if reports else None


def peaks(report: dict[str, Any] | None) -> dict[str, int]:
    assert report is not None and report["status"] == "declared" and not report["failed"]
    return {e["name"]: e["declared_peak"] for e in report["entries"]}


def row() -> int:
    """Bytes of one row: float32 in 0.28, bfloat16 in 0.30."""
    return int((4.4375 if RELEASE == (0, 28) else 2.21875) * MiB)


@pytest.mark.skipif(RELEASE < (0, 30), reason="model runner V2 of vLLM-Omni exists from 0.30 on")
def test_v2_runner_reports_where_upstream_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    off, nothing = load(tmp_path / "off", "v2", "eager", patch="0")
    assert HEADER not in off and nothing is None
    (tmp_path / "on").mkdir()
    on, report = load(tmp_path / "on", "v2", "eager")
    assert on.count(HEADER) == 1
    assert peaks(report) == {NAMES[0]: 4 * row(), NAMES[1]: 64 * row(), NAMES[2]: 4 * row()}
    assert report["runner"] == "vllm_omni.worker_v2.omni_model_runner.OmniGPUModelRunner"
    assert not report["native_report"]


@pytest.mark.skipif(RELEASE >= (0, 30), reason="vLLM-Omni 0.30 reports by itself")
def test_v1_runner_reports_in_a_release_that_does_not(tmp_path: Path) -> None:
    output, report = load(tmp_path, "v1", "eager")
    assert output.count(HEADER) == 1
    assert peaks(report) == {NAMES[0]: 4 * row(), NAMES[1]: 64 * row(), NAMES[2]: 4 * row()}


@pytest.mark.skipif(RELEASE < (0, 30), reason="vLLM-Omni reports by itself from 0.30 on")
def test_v1_runner_keeps_upstreams_lines_and_adds_what_differs(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    off, _ = load(tmp_path / "off", "v1", "graphs", patch="0")
    (tmp_path / "on").mkdir()
    on, report = load(tmp_path / "on", "v1", "graphs")
    # Upstream's block is the same with and without us, and is the only one.
    upstream = [
        line.split("] ", 1)[1] for line in off.splitlines() if "Model-local KV" in line or ": 142.00 MiB" in line
    ]
    assert len(upstream) == 3 and on.count(HEADER) == 1
    for line in upstream:
        assert line in on
    assert on.count("decoder.codec_decoder_request") == 1
    assert report["native_report"]
    assert peaks(report) == {NAMES[1]: 64 * row(), NAMES[2]: row()}


@pytest.mark.skipif(RELEASE < (0, 30), reason="vLLM-Omni reports by itself from 0.30 on")
def test_v1_runner_adds_what_upstream_leaves_out_under_enforce_eager(tmp_path: Path) -> None:
    off, _ = load(tmp_path, "v1", "eager", patch="0")
    assert "codec_decoder" not in off
    on, report = load(tmp_path, "v1", "eager")
    assert peaks(report) == {NAMES[0]: 4 * row(), NAMES[1]: 64 * row(), NAMES[2]: 4 * row()}
    assert "decoder.codec_decoder_request: 142.00 MiB" in on
