# SPDX-License-Identifier: Apache-2.0
"""The memory report: table, file, gauges, advice, pictures, and that it cannot disturb anything."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.patches.available_memory.cli import app
from vllm_omni_patch.patches.available_memory.report import output, picture, report
from vllm_omni_patch.patches.available_memory.report.output import complete, emit
from vllm_omni_patch.patches.available_memory.report.report import BudgetReport, Input
from vllm_omni_patch.patches.available_memory.report.text import as_text
from vllm_omni_patch.telemetry import numbers

GIB = 1 << 30


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(numbers, "mine", numbers.ProcessNumbers())
    ledger.publish(report.MODEL_LOCAL_KV, None)
    yield
    ledger.publish(report.MODEL_LOCAL_KV, None)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path))
    return tmp_path


def made(kv: int = 17 * GIB, total: int = 48 * GIB, requested: int = 30 * GIB, **more: Any) -> BudgetReport:
    inputs = [
        Input.measured(report.DEVICE_TOTAL, total, "torch"),
        Input(report.UTILIZATION, requested / total, "gpu_memory_utilization", "configured", "ratio"),
        Input(report.REQUESTED, requested, "device total x gpu_memory_utilization", "configured"),
        Input.measured(report.WEIGHTS, 10 * GIB, "model_runner.model_memory_usage"),
        Input.measured(report.ACTIVATION_PEAK, 2 * GIB, "torch"),
        Input.measured(report.GRAPH_ESTIMATE, 0, "model_runner.profile_cudagraph_memory"),
    ]
    return BudgetReport("gpu", "Worker", "stock", kv, device="cuda:0", rank=0, inputs=inputs, **more)


def publish(pending: int | None, resident: int = 0, uncharged: int = 0) -> None:
    declared = resident + (pending or 0)
    ledger.publish(
        report.MODEL_LOCAL_KV,
        {
            "declared_bytes": declared,
            "resident_bytes": resident,
            "uncharged_bytes": uncharged,
            "pending_bytes": pending,
            "entries": [],
        },
    )


@pytest.mark.parametrize(
    ("value", "state"),
    [(None, "unknown"), (float("nan"), "unknown"), (0, "zero"), (0.0, "zero"), (5, "measured"), (-5, "measured")],
)
def test_input_states(value: Any, state: str) -> None:
    item = Input.measured("weights", value, "torch")
    assert item.state == state
    assert (item.value is None) == (state == "unknown")


def test_the_file_has_every_standard_input_and_unknown_is_null(folder: Path) -> None:
    path = emit(made())
    assert path == str(folder / f"memory-{os.getpid()}.json")
    data = json.loads(Path(path).read_text())
    assert data["schema"] == 1 and data["kv_bytes"] == 17 * GIB and data["pid"] == os.getpid()
    found = {item["name"]: item for item in data["inputs"]}
    assert {name for name, _ in report.STANDARD} <= set(found)
    assert (found["other_processes"]["state"], found["other_processes"]["value"]) == ("unknown", None)
    assert (found["graph_estimate"]["state"], found["graph_estimate"]["value"]) == ("zero", 0)
    assert data["blocks"] is None


def test_the_table(folder: Path) -> None:
    publish(2 * GIB, resident=GIB)
    budget = made()
    budget.notes.append("a note")
    emit(budget)
    text = as_text(budget)
    for line in (
        "KV cache budget of Worker (cuda:0, rank 0, pid",
        "48.00 GiB  measured: torch",
        "0.625  configured: gpu_memory_utilization",
        "unknown  unknown: not measured by this worker",
        "model_local_kv pending",
        "17.00 GiB  18253611008 bytes, policy stock",
        "note: a note",
    ):
        assert line in text
    assert len({len(line) - len(line.lstrip()) for line in text.splitlines()[1:]}) == 1


def test_one_log_record_and_a_brief_one_later(caplog: pytest.LogCaptureFixture) -> None:
    budget = made()
    with caplog.at_level(logging.INFO, logger="vllm.omni_patch.memory"):
        logging.getLogger("vllm").propagate = True
        emit(budget)
        budget.blocks, budget.block_bytes = 1088, 16 << 20
        emit(budget, brief=True)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert texts[1] == "KV cache laid out: 1088 blocks of 16777216 bytes"


def test_gauges_are_known_bytes_only() -> None:
    publish(2 * GIB)
    emit(made())
    values = {name: value for (name, _), value in metrics.values().items()}
    assert values["memory_kv_cache_bytes"] == 17 * GIB
    assert values["memory_device_total_bytes"] == 48 * GIB
    assert values["memory_graph_estimate_bytes"] == 0
    assert values["memory_model_local_kv_pending_bytes"] == 2 * GIB
    assert "memory_other_processes_bytes" not in values
    assert not [name for name in values if "utilization" in name]
    assert all(name.endswith("_bytes") for name in values)


# Attributes as vLLM 0.32.0 leaves them: alone, mixture of experts, dense (each engine as if alone), and before 0.13.
@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"data_parallel_size": 1, "data_parallel_index": 0, "data_parallel_master_port": 0}, None),
        ({"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_index": 1}, 1),
        ({"data_parallel_size": 1, "data_parallel_index": 0, "data_parallel_master_port": 4711}, 0),
        ({"data_parallel_size": 1, "data_parallel_index": 1, "data_parallel_master_port": 4711}, 1),
        ({"data_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_master_port": 29500}, None),
        ({}, None),
    ],
)
def test_data_parallel_engines_are_told_apart(config: dict[str, int], rank: int | None) -> None:
    assert metrics.dp_rank(SimpleNamespace(**config)) == rank
    emit(made(dp_rank=rank))
    labels = (("rank", "0"),) if rank is None else (("dp_rank", str(rank)), ("rank", "0"))
    assert ("memory_weights_bytes", labels) in metrics.values()
    assert ("DP rank" in as_text(made(dp_rank=rank))) == (rank is not None)


@pytest.mark.parametrize("broken", ["as_text", "complete", "_set_gauges"])
def test_emit_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("broken on purpose")

    monkeypatch.setattr(output, broken, fail)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        assert emit(made()) is None
    assert "The budget is not affected" in caplog.text


def test_emit_survives_a_broken_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def info(self, *args: Any) -> None:
            raise OSError("no space left")

        warning = info

    monkeypatch.setattr(output, "logger", Broken())
    assert emit(made()) is None


def test_an_unwritable_folder_is_a_log_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path / "file"))
    assert emit(made()) is None


# Text, JSON and pictures


@pytest.fixture
def reports(folder: Path) -> Path:
    for pid, rank in ((11, 0), (12, 1)):
        publish(2 * GIB, resident=GIB)
        budget = made()
        budget.rank, budget.pid = rank, pid
        budget.inputs.append(Input.measured(report.OWN_PROCESS, 13 * GIB, "NVML"))
        budget.inputs.append(Input.measured(report.OTHER_PROCESSES, 5 * GIB, "NVML"))
        complete(budget)
        (folder / f"memory-{pid}.json").write_text(json.dumps(budget.to_json()))
    (folder / "model-local-kv-11.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "pid": 11,
                "loads": [
                    {
                        "runner": "GPUModelRunner",
                        "model": "<Codec>",
                        "status": "declared",
                        "entries": [
                            {
                                "owner": "decoder",
                                "name": "codec_request",
                                "declared_peak": 2 * GIB,
                                "charge": "pending",
                                "charge_reason": "allocated per request",
                            }
                        ],
                        "failed": [],
                    }
                ],
                "figures": {"declared_bytes": 3 * GIB, "resident_bytes": GIB, "pending_bytes": 2 * GIB},
            }
        )
    )
    (folder / "memory-13.json").write_text("{ not json")
    return folder


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_memory_prints_every_worker(reports: Path) -> None:
    result = run(str(reports))
    assert result.exit_code == 0
    assert result.output.count("KV cache budget of Worker") == 2
    assert "rank 0, pid 11" in result.output and "rank 1, pid 12" in result.output
    assert "decoder.codec_request: 2.00 GiB, pending: allocated per request" in result.output
    assert "--kv-cache-memory-bytes 16106127360" in result.output


def test_memory_json(reports: Path) -> None:
    data = json.loads(run(str(reports), "--json").stdout)
    assert [each["pid"] for each in data["memory"]] == [11, 12]
    assert data["model_local_kv"][0]["figures"]["pending_bytes"] == 2 * GIB
    assert json.loads(run("--json", str(reports)).stdout) == data


def test_memory_png(reports: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(str(reports), "--png", str(tmp_path / "budget.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "budget.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_without_matplotlib_names_the_extra(reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(str(reports), "--png", str(tmp_path / "budget.png"))
    assert result.exit_code == 1
    assert "vllm-omni-patch[plots]" in result.output


def test_memory_of_nothing(tmp_path: Path) -> None:
    empty = run(str(tmp_path))
    assert empty.exit_code == 1 and "has no memory-<pid>.json" in empty.output
    missing = run(str(tmp_path / "none"))
    assert missing.exit_code == 2 and "is not a folder" in missing.output


def test_memory_without_a_folder_prints_its_help() -> None:
    result = run()
    assert "REPORT_DIR" in result.output and "--json" in result.output


def test_what_is_written_is_read_back_whole(folder: Path) -> None:
    publish(2 * GIB, resident=GIB)
    budget = made()
    path = emit(budget)
    assert path is not None
    assert BudgetReport.from_json(json.loads(Path(path).read_text())) == budget


def test_the_bar_adds_up() -> None:
    publish(2 * GIB, resident=GIB)
    budget = made()
    budget.inputs.append(Input.measured(report.OWN_PROCESS, 13 * GIB, "NVML"))
    budget.inputs.append(Input.measured(report.OTHER_PROCESSES, 5 * GIB, "NVML"))
    complete(budget)
    each = picture.bar(budget)
    parts = dict(each.parts)
    assert parts == {
        "other processes": 5 * GIB,
        "weights": 10 * GIB,
        "model-local KV, resident": GIB,
        "other memory of this process": 2 * GIB,
        "activation peak": 2 * GIB,
        "KV cache": 17 * GIB,
        "model-local KV, pending": 2 * GIB,
        "not claimed": 9 * GIB,
    }
    assert each.height == each.total


def test_a_plan_beyond_the_device_is_drawn_beyond_it() -> None:
    budget = made(kv=40 * GIB)
    complete(budget)
    each = picture.bar(budget)
    assert each.total is not None and each.height > each.total


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 9}, "schema 9"),
        ({"schema": None}, "schema None"),
        ({"inputs": [{"name": "weights"}]}, "not a memory report"),
        ({"kv_bytes": "much"}, "not a memory report (kv_bytes is 'much')"),
    ],
)
def test_a_file_that_is_no_report_is_named_and_the_others_are_shown(
    reports: Path, change: dict[str, Any], reason: str
) -> None:
    data = json.loads((reports / "memory-11.json").read_text())
    (reports / "memory-7.json").write_text(json.dumps({**data, **change}))
    result = run(str(reports))
    assert result.exit_code == 0
    assert f"memory-7.json is left out: {reason}" in result.output
    assert result.output.count("KV cache budget of Worker") == 2


def test_only_foreign_files_are_no_report(tmp_path: Path) -> None:
    (tmp_path / "memory-8.json").write_text("[]")
    assert run(str(tmp_path)).exit_code == 1
