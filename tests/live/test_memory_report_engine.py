# SPDX-License-Identifier: Apache-2.0
"""The memory report of a real CPU engine: it appears through the flag alone and the number stays vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from typer.testing import CliRunner

from support import engine_process, tiny_model
from support.engine_process import Server
from vllm_omni_patch.patches.available_memory.cli import app

GIB = 1 << 30
FLAG = "available_memory"
TEXT_WIDTH = 2048  # 256 MiB of linear weights, which vLLM packs on CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.make(str(tmp_path_factory.mktemp("model")), dummy=True, text_width=TEXT_WIDTH)


def boot(model: str, folder: Path, flag: str | None, **env: str) -> tuple[str, str, str]:
    """(log, /metrics, /health text) of one server that answered and was ended."""
    arguments = ["--gpu-memory-utilization", "0.15"]
    with Server(model, str(folder), flag=flag, env=env, arguments=arguments, dummy=True) as server:
        answer = server.chat(text="hello")
        assert answer.ok, answer.error
        metrics = server.get("/metrics")
        log = server.log()
    return log, metrics, answer.text


def capacity(log: str) -> tuple[str, ...]:
    """What vLLM itself says about the size of its KV cache."""
    found = re.findall(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens|# (?:GPU|CPU) blocks: (\d+)", log)
    assert found, log[-3000:]
    return tuple(part for pair in found for part in pair if part)


def only_report(folder: Path) -> dict[str, Any]:
    files = list(folder.glob("memory-*.json"))
    assert len(files) == 1, files
    return json.loads(files[0].read_text())


def inputs(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in data["inputs"]}


@pytest.fixture(scope="module")
def explicit(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The same engine with the flag off and on, KV size given (1 GiB)."""
    folder = tmp_path_factory.mktemp("explicit")
    off = boot(model, folder / "off", None, VLLM_OMNI_PATCH_REPORT_DIR=str(folder / "off-reports"))
    on = boot(model, folder / "on", FLAG, VLLM_OMNI_PATCH_REPORT_DIR=str(folder / "reports"))
    yield {"off": off, "on": on, "folder": folder}


def test_off_writes_nothing(explicit: dict[str, Any]) -> None:
    assert not (explicit["folder"] / "off-reports").exists()
    assert "KV cache budget of" not in explicit["off"][0]


def test_the_number_is_stocks(explicit: dict[str, Any]) -> None:
    assert capacity(explicit["on"][0]) == capacity(explicit["off"][0])
    assert only_report(explicit["folder"] / "reports")["kv_bytes"] == GIB


def checkpoint_bytes(model: str) -> int:
    """Bytes of the model's parameters, tied ones once, as transformers lays it out in float32."""
    import torch
    from transformers import AutoConfig, Blip2ForConditionalGeneration

    with torch.device("meta"):
        laid_out = Blip2ForConditionalGeneration(AutoConfig.from_pretrained(model))
    count = sum(each.numel() * 4 for each in laid_out.parameters())
    assert count > 256 << 20
    return count


def test_the_report_of_the_worker(explicit: dict[str, Any], model: str) -> None:
    data = only_report(explicit["folder"] / "reports")
    found = inputs(data)
    assert data["worker"] == "CPUWorker" and data["platform"] == "cpu" and data["device"] == "cpu"
    assert data["policy"] == "explicit kv_cache_memory_bytes"
    assert found["kv_cache_memory_bytes"]["value"] == GIB
    assert found["weights"]["state"] == "measured"
    assert found["weights"]["value"] == pytest.approx(checkpoint_bytes(model), rel=0.03)
    assert "before vLLM packed them" in found["weights"]["source"]
    assert found["non_torch"]["value"] == found["own_process"]["value"] - found["weights"]["value"]
    assert found["device_total"]["value"] > found["own_process"]["value"] > found["weights"]["value"]
    assert found["activation_peak"]["state"] == "unknown"
    assert data["blocks"] * data["block_bytes"] <= GIB < (data["blocks"] + 1) * data["block_bytes"]
    log = explicit["on"][0]
    assert log.count("KV cache budget of CPUWorker") == 1
    assert f"KV cache laid out: {data['blocks']} blocks of {data['block_bytes']} bytes" in log


def test_the_gauges_are_on_metrics(explicit: dict[str, Any], model: str) -> None:
    samples = dict(re.findall(r"^(vllm_omni_patch_memory_\w+)(?:\{[^}]*\})? ([\d.e+]+)$", explicit["on"][1], re.M))
    assert float(samples["vllm_omni_patch_memory_kv_cache_bytes"]) == GIB
    assert float(samples["vllm_omni_patch_memory_weights_bytes"]) == pytest.approx(checkpoint_bytes(model), rel=0.03)
    assert "vllm_omni_patch_memory_activation_peak_bytes" not in samples
    assert "vllm_omni_patch" not in explicit["off"][1]


def test_memory_shows_and_draws_it(explicit: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "budget.png"
    result = CliRunner().invoke(app, [str(explicit["folder"] / "reports"), "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert "KV cache budget of CPUWorker" in result.output
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and png.stat().st_size > 5000


def test_automatic_size(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an explicit size vLLM takes its share of the memory node less the process, and the report says so."""
    reports = tmp_path / "reports"
    usual = engine_process.environment

    def without_a_size(flag: str | None, extra: Any = None) -> dict[str, str]:
        return {name: value for name, value in usual(flag, extra).items() if name != "VLLM_CPU_KVCACHE_SPACE"}

    monkeypatch.setattr(engine_process, "environment", without_a_size)
    log, _, _ = boot(model, tmp_path, FLAG, VLLM_OMNI_PATCH_REPORT_DIR=str(reports))
    data = only_report(reports)
    found = inputs(data)
    assert data["policy"] == "stock"
    assert data["kv_bytes"] == found["requested"]["value"] - found["own_process"]["value"]
    said = re.search(
        r"Auto set \(([\d.]+)/[\d.]+\) GiB for KV cache .* with ([\d.]+) GiB requested.* ([\d.]+) GiB memory was",
        log,
    )
    assert said is not None, log[-3000:]
    kv, requested, own = (float(part) for part in said.groups())
    assert kv == pytest.approx(data["kv_bytes"] / GIB, abs=0.005)
    assert requested == pytest.approx(found["requested"]["value"] / GIB, abs=0.005)
    assert own == pytest.approx(found["own_process"]["value"] / GIB, abs=0.005)


def test_a_wrong_setting_stops_the_real_worker(model: str, tmp_path: Path) -> None:
    """A setting that is not accepted stops the engine with the name of the variable; it is never guessed."""
    with pytest.raises(RuntimeError) as stopped:
        boot(model, tmp_path, FLAG, VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV="maybe")
    assert "VLLM_OMNI_PATCH_RESERVE_MODEL_LOCAL_KV='maybe' is not accepted" in str(stopped.value)
