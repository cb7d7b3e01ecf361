# SPDX-License-Identifier: Apache-2.0
"""The matrix and the record of runs that are shipped: complete, as the checker writes them, without contradictions."""

from __future__ import annotations

import pytest

from support import live_release
from vllm_omni_patch.loading import discover
from vllm_omni_patch.matrix import evidence, files, table
from vllm_omni_patch.matrix.table import Table
from vllm_omni_patch.patch import Patch


@pytest.fixture(scope="module")
def shipped() -> Table:
    return files.read(files.MATRIX)


def ours() -> list[Patch]:
    return [one.patch for one in discover.find() if one.patch and one.distribution == discover.OWN_DISTRIBUTION]


def test_the_matrix_covers_every_target_on_every_release(shipped):
    assert len(shipped.releases["vllm"]) == 36
    assert shipped.releases["vllm"][0] == "0.10.2"
    assert shipped.releases["vllm"][-1] == "0.33.0"
    assert shipped.releases["vllm-omni"][0] == "0.14.0"
    wanted = {
        (p.name, t.name, release)
        for p in ours()
        for t in (*p.targets, *p.uses)
        for release in (
            shipped.releases[t.distribution] if t.evidence == "static" else [d.release for d in t.documented]
        )
    }
    held = {(r.patch, r.target, r.release) for r in shipped.rows()}
    assert held - wanted == set(), "rows of targets that nobody declares: run vllm-omni-patch matrix --update"
    assert wanted - held == set(), "targets without rows: run vllm-omni-patch matrix --update"


def test_no_two_of_our_patches_name_one_attribute():
    """The loader gives it to the first; the other would be off, and its whole group with it."""
    names = [(t.module, t.qualname) for p in ours() for t in p.targets]
    assert {name for name in names if names.count(name) > 1} == set()


def test_every_row_gives_its_reason_and_its_code(shipped):
    for r in shipped.rows():
        assert r.reason or r.verdict == "applies", r
        if r.evidence == "static" and r.verdict == "applies":
            assert len(r.fingerprint) == 16, r


def test_the_file_is_as_the_checker_writes_it(shipped):
    assert files.dump(shipped) == files.MATRIX.read_text("utf-8")


def test_runs_and_table_never_contradict_each_other(shipped):
    for run in evidence.live_rows():
        rows = {target: shipped.row(run.patch, target, run.release) for _, target in shipped.targets()}
        verdicts = {target: row.verdict for target, row in rows.items() if row is not None}
        assert {verdicts.get(target) for target in run.applied} <= {"applies"}, run
        assert run.passed or "applies" not in verdicts.values(), run


def test_what_only_a_gpu_worker_calls_is_not_live_on_a_cpu():
    """A CPU engine imports these and its own classes override them, or nobody asks for what they do."""
    runs = [run for run in evidence.live_rows() if run.device == "cpu"]
    never = {
        "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.prepare_mm_inputs",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "vllm.v1.worker.gpu_worker:Worker.reload_weights",
        "vllm.v1.worker.gpu_worker:Worker.update_weights",
    }
    assert {t for run in runs for t in run.applied} >= never
    assert {t for run in runs for t in run.applied if run.evidence(t) == "live"} & never == set()


def test_the_live_checks_name_targets_that_exist():
    declared = {p.name: {t.qualname for t in p.targets} for p in ours()}
    assert {name for name in live_release.CHECKED if not set(live_release.CHECKED[name]) <= declared[name]} == set()


@pytest.mark.parametrize(
    ("name", "release", "verdict"),
    [
        # From the sources of these releases: the encoder-cache factory came with 0.11.1, model runner V2 with 0.12.0.
        ("vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory", "0.11.0", "absent"),
        ("vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory", "0.11.1", "applies"),
        ("vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory", "0.33.0", "applies"),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model", "0.11.2", "absent"),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model", "0.12.0", "applies"),
        ("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", "0.10.2", "applies"),
        # XPUWorker has had a method of its own up to 0.15.1 and inherits its parent's since.
        ("vllm.v1.worker.xpu_worker:XPUWorker.determine_available_memory", "0.15.1", "applies"),
        ("vllm.v1.worker.xpu_worker:XPUWorker.determine_available_memory", "0.16.0", "absent"),
    ],
)
def test_known_facts(shipped, name, release, verdict):
    rows = [r for r in shipped.rows() if r.target == name and r.release == release]
    assert [r.verdict for r in rows] == [verdict]


def test_code_that_is_known_to_be_the_same_has_one_fingerprint(shipped):
    factory = shipped.target_rows(
        "ec_connector", "vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory"
    )
    assert len({r.fingerprint for r in factory if r.verdict == "applies"}) == 1
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model"
    spans = table.spans(shipped.target_rows("model_local_kv", runner))
    assert ["0.11.1", "0.11.2"] in [[r.release for r in span] for span in spans]
    assert ["0.32.0", "0.33.0"] in [[r.release for r in span] for span in spans]
