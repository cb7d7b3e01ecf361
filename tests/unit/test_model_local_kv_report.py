# SPDX-License-Identifier: Apache-2.0
"""The log block, the JSON file, the gauges and the figures for the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.patches.model_local_kv import report
from vllm_omni_patch.patches.model_local_kv.charge import Engine
from vllm_omni_patch.patches.model_local_kv.collect import collect
from vllm_omni_patch.patches.model_local_kv.observe.observer import Peak
from vllm_omni_patch.patches.model_local_kv.observe.reconcile import Assignment, Group, reconcile
from vllm_omni_patch.patches.model_local_kv.report import Load
from vllm_omni_patch.patches.model_local_kv.specs import (
    ModelLocalKVScope,
    ModelLocalKVSpec,
    Residency,
    RowDriver,
    inert,
)

pytest_plugins = ["support.local_kv_runners"]

MIB = 1 << 20
CUDA_026 = Engine((0, 26), device="cuda")


def spec(name: str, row: float = 1, **changes: Any) -> ModelLocalKVSpec:
    """A spec of ``row`` MiB per row."""
    fields: dict[str, Any] = {
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 1024,
        "dtype": torch.float16,
        "physical_capacity_positions": int(row * 256),
        "capacity_source": "test",
        "scope": ModelLocalKVScope.REQUEST,
        "rows": RowDriver.MAX_NUM_SEQS,
    }
    return ModelLocalKVSpec(name=name, **{**fields, **changes})


class Decoder(torch.nn.Module):
    def __init__(self, *declared: Any, error: str = "", inert_reason: str = "") -> None:
        super().__init__()
        self.declared, self.error, self.inert_reason = declared, error, inert_reason

    def model_local_kv_specs(self) -> list[Any]:
        if self.error:
            raise ValueError(self.error)
        if self.inert_reason:
            inert("request", self.inert_reason)
        return list(self.declared)


def load(*declared: Any, max_num_seqs: int = 4, engine: Engine = CUDA_026, **changes: Any) -> Load:
    owner = Decoder(*declared, error=changes.pop("error", ""), inert_reason=changes.pop("inert_reason", ""))
    found = collect([("", torch.nn.ModuleDict({"decoder": owner}))], max_num_seqs=max_num_seqs)
    return Load("Runner", found.root, "stage 1, cuda:0, rank 0", max_num_seqs, engine, found, **changes)


def pool(rows: int = 689) -> ModelLocalKVSpec:
    return spec(
        "graph_pool",
        704 / 1024,
        scope=ModelLocalKVScope.MODEL,
        rows=RowDriver.FIXED,
        rows_fixed=rows,
        rows_reason="sum of the captured buckets",
        residency=Residency.AT_LOAD,
    )


def test_the_block_has_the_shape_of_upstreams(lines: Any) -> None:
    report.log(load(spec("codec_decoder_request", 4.4375), max_num_seqs=256))
    text = lines()
    assert text[0] == (
        "Model-local KV (outside the paged manager): 1136.00 MiB across 1 declaration(s) at max_num_seqs=256 "
        "(stage 1, cuda:0, rank 0)"
    )
    assert text[1].startswith(
        "  decoder.codec_decoder_request: 1136.00 MiB (256 rows from max_num_seqs x 4.44 MiB/row, scope=request, "
        "1136 positions from test; pending: "
    )
    assert text[2] == "  pending, allocated while serving: 1136.00 MiB"


def test_charged_and_not_charged_are_separate_lines(lines: Any) -> None:
    one = load(pool(), spec("request", 704 / 1024), max_num_seqs=64)
    report.log(one)
    assert "  already charged to the KV budget: 473.69 MiB" in lines()
    assert "  pending, allocated while serving: 44.00 MiB" in lines()
    assert any("fixed(689; sum of the captured buckets)" in text for text in lines())
    figures = report.figures([one])
    assert figures["resident_bytes"] == 689 * 704 * 1024
    assert figures["pending_bytes"] == 44 * MIB
    assert figures["declared_bytes"] == figures["resident_bytes"] + figures["pending_bytes"]


def test_the_three_other_outcomes_read_differently(lines: Any) -> None:
    none = collect([("", torch.nn.Linear(1, 1))], max_num_seqs=1)
    report.log(Load("Runner", none.root, "cpu", 1, CUDA_026, none))
    report.log(load())
    report.log(Load("Runner", "Model", "cpu", 1, CUDA_026, error="RuntimeError: broken"))
    first, second, third = lines()
    assert "none of the 1 modules of Linear declares any" in first
    assert "1 declarer(s) in ModuleDict hold nothing" in second
    assert "the collection failed (RuntimeError: broken)" in third
    assert all(text.startswith(report.HEADLINE) for text in (first, second, third))


def test_an_inert_path_says_why_and_a_failed_declarer_is_unknown(lines: Any) -> None:
    report.log(load(inert_reason="stateless decoding"))
    assert "  decoder.request: nothing held: stateless decoding" in lines()
    broken = load(error="no such attribute")
    report.log(broken)
    assert any("failed (ValueError: no such attribute), so its bytes are unknown" in text for text in lines())
    figures = report.figures([broken])
    assert figures["failed"] == 1
    assert figures["pending_bytes"] is None
    assert figures["declared_bytes"] is None and figures["resident_bytes"] is None
    assert figures["uncharged_bytes"] is None and figures["unknown_bytes"] == 0


def test_an_unknown_charge_makes_the_sum_unknown_and_not_smaller() -> None:
    one = load(spec("request"), spec("copy", scope=ModelLocalKVScope.INVOCATION))
    figures = report.figures([one])
    assert figures["unknown_bytes"] == 4 * MIB
    assert figures["pending_bytes"] is None and figures["resident_bytes"] is None
    assert figures["declared_bytes"] == 8 * MIB, "what is declared is known"
    assert {row["charge"] for row in figures["entries"]} == {"pending", "unknown"}


def test_two_stages_in_one_process_are_summed_and_stay_apart() -> None:
    first = load(spec("request", 4.4375), max_num_seqs=256)
    second = load(spec("encoder", 180, rows=RowDriver.FIXED, rows_reason="one session"))
    assert report.figures([first])["declared_bytes"] == 1_191_182_336
    assert report.figures([second])["declared_bytes"] == 188_743_680
    assert report.figures([first, second])["declared_bytes"] == 1_379_926_016
    assert [one["figures"]["declared_bytes"] for one in (report.document([first]), report.document([second]))] == [
        1_191_182_336,
        188_743_680,
    ]


def test_small_share_against_large_declaration_is_readable(lines: Any) -> None:
    report.log(load(spec("side_path", 96), max_num_seqs=32))
    assert "  pending, allocated while serving: 3072.00 MiB" in lines()
    assert "32 rows from max_num_seqs x 96.00 MiB/row" in lines()[1]


def test_declared_but_not_yet_allocated(lines: Any) -> None:
    talker = spec(
        "static",
        24,
        rows=RowDriver.FIXED,
        rows_reason="calls are serialized",
        residency=Residency.LATER,
    )
    one = load(talker)
    assert one.rows()[0]["declared_peak"] == 25_165_824
    assert one.rows()[0]["charge"] == "pending"


def test_storage_is_shown_where_it_is_more_than_the_view(lines: Any) -> None:
    report.log(load(spec("request", 1, storage_positions=512)))
    assert any("storage up to 8.00 MiB" in text for text in lines())
    assert report.figures([load(spec("request", 1, storage_positions=512))])["pending_storage_bytes"] == 8 * MIB


class Native:
    """A declaration of the release itself, of one MiB per row."""

    layers, kv_heads, head_dim, dtype = 1, 1, 1024, torch.float16
    physical_capacity_positions, capacity_source = 256, "native"
    scope, rows, rows_fixed, rows_reason, allocation_note = "request", "max_num_seqs", 1, "", None
    bytes_per_row = MIB

    def __init__(self, name: str) -> None:
        self.name = name

    def row_count(self, max_num_seqs: int = 1) -> int:
        return max_num_seqs

    def peak_bytes(self, max_num_seqs: int = 1) -> int:
        return MIB * max_num_seqs


def test_where_upstream_has_reported_only_the_differences_are_said(lines: Any) -> None:
    class Corrected(torch.nn.Module):
        def model_local_kv_specs(self) -> list[Any]:
            return [Native("same"), Native("wrong"), Native("gone")]

        def vllm_omni_patch_model_local_kv_specs(self) -> list[Any]:
            return [spec("same"), spec("wrong", 2), spec("new")]

    found = collect([("", torch.nn.ModuleDict({"decoder": Corrected()}))], max_num_seqs=4)
    one = Load("Runner", found.root, "cuda:0", 4, CUDA_026, found, native_report=True)
    report.log(one)
    text = lines()
    assert not any(report.HEADLINE in each for each in text)
    assert not any("decoder.same" in each for each in text)
    assert any("decoder.wrong: 8.00 MiB" in each and each.endswith("4.00 MiB above") for each in text)
    assert any("decoder.new: 4.00 MiB" in each and each.endswith("not in the lines above") for each in text)
    assert "  decoder.gone: 4.00 MiB above, and nothing is held on this path" in text
    assert len(report.document([one])["loads"][0]["entries"]) == 3


def test_where_upstream_has_reported_the_same_nothing_is_repeated(lines: Any) -> None:
    found = collect([("", Decoder(Native("request")))], max_num_seqs=4)
    one = Load("Runner", found.root, "cuda:0", 4, CUDA_026, found, native_report=True)
    report.log(one)
    assert [text for text in lines() if "request" in text] == []
    assert report.figures([one])["declared_bytes"] == 4 * MIB


def test_where_upstreams_report_was_silent_ours_is_whole(lines: Any) -> None:
    class Corrected(torch.nn.Module):
        def model_local_kv_specs(self) -> list[Any]:
            return []

        def vllm_omni_patch_model_local_kv_specs(self) -> list[Any]:
            return [spec("request")]

    found = collect([("", Corrected())], max_num_seqs=4)
    report.log(Load("Runner", found.root, "cuda:0", 4, CUDA_026, found, native_report=True))
    assert lines()[0].startswith(f"{report.HEADLINE}: 4.00 MiB across 1 declaration(s)")
    assert not any("above" in text for text in lines())


def test_the_json_file_and_the_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path))
    one = load(spec("json_request", 2, storage_positions=1024), spec("json_plain"))
    report.gauges([one])
    path = ledger.write_report("model-local-kv", report.document([one]))
    assert path is not None
    data = json.loads(Path(path).read_text())
    assert Path(path).name == f"model-local-kv-{data['pid']}.json"
    (written,) = data["loads"]
    assert (written["status"], written["budget_path"], written["max_num_seqs"]) == ("declared", "legacy", 4)
    entry = written["entries"][0]
    assert (entry["owner"], entry["name"]) == ("decoder", "json_request")
    assert (entry["bytes_per_row"], entry["declared_peak"], entry["storage_peak"]) == (2 * MIB, 8 * MIB, 16 * MIB)
    assert data["observed"] is None, "nothing was looked at"

    def gauge(name: str, kind: str) -> float | None:
        labels = tuple(sorted({"owner": "decoder", "name": name, "kind": kind}.items()))
        return metrics.values().get(("model_local_kv_bytes", labels))

    assert gauge("json_request", "per_row") == 2 * MIB
    assert gauge("json_request", "declared_peak") == 8 * MIB
    assert gauge("json_request", "storage_peak") == 16 * MIB
    assert gauge("json_plain", "declared_peak") == 4 * MIB
    assert gauge("json_plain", "storage_peak") is None, "not known is no sample"
    assert gauge("json_plain", "observed_peak") is None


def test_a_collection_that_failed_counted_nothing() -> None:
    (written,) = report.document([Load("Runner", "Model", "cpu", 1, CUDA_026, error="RuntimeError: broken")])["loads"]
    assert (written["modules"], written["declarers"]) == (None, None)


def test_what_is_not_known_any_more_has_no_sample_on_the_page() -> None:
    from vllm_omni_patch.telemetry import exposition, reading

    one = load(spec("page"))
    group = Group("decoder", ("page",))

    def shown() -> list[float]:
        reconciled = reconcile(Assignment(one.collection.entries, {}), {group: peak})
        report.gauges([one], reconciled)
        (family,) = [f for f in exposition.families(reading.all_processes()) if f.name.endswith("model_local_kv_bytes")]
        wanted = {"owner": "decoder", "name": "page", "kind": "observed_peak"}
        return [sample.value for sample in family.samples if sample.labels == wanted]

    peak = Peak(created=1, unmeasured=1, kinds={"OddCache"})
    assert shown() == []
    peak = Peak(created=1, storage_bytes=MIB, row_bytes=MIB, rows=1)
    assert shown() == [MIB]
    peak = Peak(created=2, storage_bytes=MIB, row_bytes=MIB, rows=1, unmeasured=1)
    assert shown() == [], "a floor is no peak"
