# SPDX-License-Identifier: Apache-2.0
"""Gating: what is done with a target on listed, unlisted, development and changed builds, and on a broken matrix."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_patch import flags
from vllm_omni_patch.code import text as module_text
from vllm_omni_patch.code.fingerprint import fingerprint
from vllm_omni_patch.matrix import evidence, files, forecast, judge, table, table_text
from vllm_omni_patch.matrix.evidence import LiveRow
from vllm_omni_patch.matrix.table import Row, Table
from vllm_omni_patch.patch import Contract, Native, Parameter, Patch, Target

CODE = "class Worker:\n    def load(self, name, size=1):\n        self.loaded = name\n        return size\n"
OTHER = CODE.replace("return size", "return size + 1")
BROKEN = CODE.replace("name, size=1", "name, size")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(flags.UNLISTED.name, raising=False)


def module(folder: Path, text: str = CODE):
    name = f"worker_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def target(**changes) -> Target:
    contract = Contract(parameters=(Parameter("name"),), class_attributes=("loaded",))
    return dataclasses.replace(Target("vllm.worker", "Worker.load", "x.y:install", contract=contract), **changes)


def row(release: str, verdict: str = "applies", code: str = CODE, reason: str = "") -> Row:
    digest = fingerprint(code, "Worker.load") if verdict != "absent" else ""
    return Row("demo", "vllm.worker:Worker.load", "vllm", release, verdict, reason, digest)


ROWS = [
    row("0.10.0", "absent", reason="there is no module vllm.worker"),
    row("0.11.0", code=OTHER.replace("+ 1", "+ 2")),
    row("0.12.0"),
    row("0.13.0", "drifted", reason="Worker.load has no parameter name"),
    row("0.14.0", "native", reason="upstream has it"),
]


def patch(folder: Path, rows=ROWS, text: str | None = None, **changes) -> Patch:
    path = folder / f"matrix-{next(_numbers)}.json"
    if text is None:
        releases = {"vllm": [r.release for r in rows]}
        text = files.dump(Table(rows, releases))
    path.write_text(text)
    return Patch("demo", "", "", "", "", "", "adds", (target(**changes),), matrix=str(path))


def decide(folder, release, text=CODE, **changes):
    declared = patch(folder, **changes)
    return judge.decide(declared, declared.targets[0], release, module(folder, text))


@pytest.mark.parametrize("release", ["0.12.0", "0.12", "0.12.0+cpu", "0.12.0+cu129", "0.12.0+empty"])
def test_a_listed_release_is_looked_up_without_its_local_part(tmp_path, release):
    # The code is another than the one that was judged: on a listed release the contract alone decides.
    decision = decide(tmp_path, release, OTHER)
    assert (decision.verdict, decision.apply, decision.like) == ("applies", True, None)


@pytest.mark.parametrize(
    "release",
    [
        "0.15.0",
        "0.12.1.dev3+gabc",
        "0.12.0.dev3",
        "0.12.0rc1",
        "0.12.0.post1",
        "0.9.0",
        "dev",
        "",
        None,
        "not a version",
    ],
)
def test_an_unlisted_release_with_the_code_of_a_listed_one_is_judged_as_that(tmp_path, release):
    decision = decide(tmp_path, release)
    assert (decision.verdict, decision.apply, decision.like, decision.level) == ("applies", True, "0.12.0", "info")
    assert "0.12.0" in decision.reason


@pytest.mark.parametrize("release", ["0.15.0", "0.12.1.dev3+gabc", "0.12.0.dev1", "dev", None])
def test_an_unlisted_release_with_other_code_is_skipped_with_a_way_out(tmp_path, release):
    decision = decide(tmp_path, release, OTHER)
    assert (decision.verdict, decision.apply, decision.level) == ("unlisted", False, "warning")
    assert f"vllm {release or 'of unknown version'} is not listed" in decision.reason
    assert "the last listed release is 0.14.0" in decision.reason
    assert "VLLM_OMNI_PATCH_UNLISTED=apply" in decision.reason


def test_the_override(tmp_path, monkeypatch):
    monkeypatch.setenv(flags.UNLISTED.name, "apply")
    decision = decide(tmp_path, "0.15.0", OTHER)
    assert (decision.verdict, decision.apply, decision.level) == ("unlisted", True, "warning")
    monkeypatch.setenv(flags.UNLISTED.name, "skip")
    decision = decide(tmp_path, "0.15.0", OTHER)
    assert (decision.verdict, decision.apply, decision.level) == ("unlisted", False, "info")
    # Code that is known is no guess, so there is nothing to override.
    assert decide(tmp_path, "0.15.0").apply
    monkeypatch.setenv(flags.UNLISTED.name, "perhaps")
    with pytest.raises(flags.FlagError, match=r"perhaps.*use apply, skip"):
        decide(tmp_path, "0.15.0")


@pytest.mark.parametrize("release", ["0.12.0", "0.15.0", "dev"])
@pytest.mark.parametrize("override", ["", "apply"])
def test_a_broken_contract_is_never_hooked(tmp_path, monkeypatch, release, override):
    monkeypatch.setenv(flags.UNLISTED.name, override)
    decision = decide(tmp_path, release, BROKEN)
    assert (decision.verdict, decision.apply, decision.level) == ("drifted", False, "warning")
    assert "further required parameter size" in decision.reason


def test_listed_as_absent_drifted_or_native(tmp_path):
    assert decide(tmp_path, "0.10.0").verdict == "absent"
    assert decide(tmp_path, "0.10.0").level == "warning"
    assert decide(tmp_path, "0.10.0", optional=True).level == "info"
    drifted = decide(tmp_path, "0.13.0")
    assert (drifted.verdict, drifted.apply) == ("drifted", False)
    assert "no parameter name" in drifted.reason
    # Listed as native, and this build shows no sign of it: neither hooked nor called native.
    native = decide(tmp_path, "0.14.0")
    assert (native.verdict, native.apply, native.level) == ("drifted", False, "warning")
    assert "no sign of it" in native.reason


@pytest.mark.parametrize("release", ["0.12.0", "0.12.0+vendor", "0.15.0", "dev", "0.14.0"])
def test_a_backport_is_seen_in_the_code(tmp_path, monkeypatch, release):
    monkeypatch.setenv(flags.UNLISTED.name, "apply")
    signs = Native(base_methods=("load_cached",), strings=("CachedWorker",), reason="vendor backport")
    by_method = CODE + "    def load_cached(self): ...\n"
    by_string = CODE + "REGISTRY = {'CachedWorker': 1}\n"
    for text in (by_method, by_string):
        decision = decide(tmp_path, release, text, native=signs)
        assert (decision.verdict, decision.apply, decision.level) == ("native", False, "info")
        assert "vendor backport" in decision.reason
    assert decide(tmp_path, "0.12.0", native=signs).verdict == "applies"


@pytest.mark.parametrize(
    ("text", "unlisted"),
    [
        ("class Other: ...\n", "absent"),
        ("class Worker: ...\n", "absent"),
        ("from queue import Queue as Worker\n", "drifted"),  # it has moved: there is something to hook, and not here
    ],
)
def test_the_target_is_gone(tmp_path, text, unlisted):
    listed = decide(tmp_path, "0.12.0", text)
    assert (listed.verdict, listed.apply, listed.level) == ("drifted", False, "warning")
    other = decide(tmp_path, "0.15.0", text, optional=True)
    assert (other.verdict, other.apply, other.level) == (unlisted, False, "info" if unlisted == "absent" else "warning")


def test_a_module_without_text_is_judged_by_the_matrix_and_its_objects(tmp_path):
    made = module(tmp_path)
    Path(made.__file__).unlink()
    declared = patch(tmp_path)
    assert judge.decide(declared, declared.targets[0], "0.15.0", made).verdict == "unlisted"
    assert judge.decide(declared, declared.targets[0], "0.12.0", made).apply
    made.Worker.load = lambda self, other: None
    assert judge.decide(declared, declared.targets[0], "0.12.0", made).verdict == "drifted"


# -- the digest of the source file


@pytest.fixture
def unread(monkeypatch):
    """Reading a code view is an error."""

    def refuse(self, source):
        raise AssertionError("the text was parsed")

    monkeypatch.setattr(module_text.CodeView, "__init__", refuse)


def known(folder: Path, release: str, digest: str, **changes) -> Patch:
    """The patch, with a matrix that knows the file of ``release``."""
    declared = patch(folder, **changes)
    digests = {("vllm", "vllm.worker", release): digest}
    held = files.read(declared.matrix)
    Path(declared.matrix).write_text(files.dump(Table(held.rows(), held.releases, digests=digests)))
    return declared


DIGEST = module_text.ModuleText(CODE.encode()).digest


@pytest.mark.parametrize(
    ("of", "here", "verdict", "like"),
    [
        ("0.12.0", "0.12.0+cpu", "applies", None),
        ("0.12.0", "0.15.0.dev1", "applies", "0.12.0"),
        ("0.10.0", "0.10.0", "absent", None),
        ("0.13.0", "0.13.0", "drifted", None),
        ("0.14.0", "0.14.0", "native", None),
        ("0.14.0", "0.15.0", "native", None),
    ],
)
def test_a_file_that_the_matrix_knows_is_not_read(tmp_path, unread, of, here, verdict, like):
    declared = known(tmp_path, of, DIGEST)
    made = module(tmp_path)
    decision = judge.decide(declared, declared.targets[0], here, made)
    assert (decision.verdict, decision.like) == (verdict, like)
    assert decision.apply == (verdict == "applies")


@pytest.mark.parametrize(
    ("of", "here", "text"),
    [
        ("0.12.0", "0.12.0", CODE + "\n"),  # a rebuilt wheel
        ("0.11.0", "0.12.0", CODE),  # known, and as another release's file
        ("0.13.0", "0.15.0", CODE),  # a verdict against it is read again elsewhere
    ],
)
def test_any_other_file_is_read(tmp_path, unread, of, here, text):
    declared = known(tmp_path, of, DIGEST)
    with pytest.raises(AssertionError, match="parsed"):
        judge.decide(declared, declared.targets[0], here, module(tmp_path, text))


def test_the_object_is_checked_though_the_file_is_known(tmp_path):
    """Another package may have replaced the function before it is judged; such a one is not hooked."""
    declared = known(tmp_path, "0.12.0", DIGEST)
    made = module(tmp_path)
    made.Worker.load = lambda self, config: None
    decision = judge.decide(declared, declared.targets[0], "0.12.0", made)
    assert (decision.verdict, decision.apply, decision.level) == ("drifted", False, "warning")
    assert "further required parameter config" in decision.reason
    signs = Native(base_methods=("load_cached",), reason="brought by another plugin")
    declared = known(tmp_path, "0.12.0", DIGEST, native=signs)
    made = module(tmp_path)
    made.Worker.load_cached = lambda self: None
    decision = judge.decide(declared, declared.targets[0], "0.12.0", made)
    assert (decision.verdict, decision.apply) == ("native", False)
    assert "brought by another plugin" in decision.reason


def test_only_code_on_which_the_target_applied_is_trusted(tmp_path):
    rows = [row("0.12.0", "drifted", reason="it is odd"), row("0.13.0", "native", reason="has it")]
    assert decide(tmp_path, "0.15.0", rows=rows).verdict == "unlisted"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99, "releases": {}, "patches": {}}', "null", "\x00\x01",
     '{"format": 1, "releases": {"vllm": ["0.12.0"]}, "patches": {"demo": {"a:b": {"distribution": "vllm", '
     '"ranges": [{"from": "0.99.0", "verdict": "applies"}]}}}}',
     '{"format": 1, "releases": {"vllm": ["0.12.0"]}, "patches": {"demo": {"a:b": {"distribution": "vllm", '
     '"ranges": [{"from": "0.12.0", "verdict": "perhaps"}]}}}}',
     '{"format": 1, "releases": {"vllm": ["twelve"]}, "patches": {}}'],
)  # fmt: skip
def test_an_unreadable_matrix_lists_nothing_and_says_so(tmp_path, text, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    declared = patch(tmp_path, text=text)
    made = module(tmp_path)
    for _ in range(3):
        decision = judge.decide(declared, declared.targets[0], "0.12.0", made)
    assert (decision.verdict, decision.apply) == ("unlisted", False)
    assert declared.matrix in decision.reason
    assert "matrix --update" in decision.reason
    assert len([r for r in caplog.records if declared.matrix in r.getMessage()]) == 1
    monkeypatch.setenv(flags.UNLISTED.name, "apply")
    assert judge.decide(declared, declared.targets[0], "0.12.0", made).apply


def test_a_missing_matrix_is_the_same(tmp_path):
    declared = dataclasses.replace(patch(tmp_path), matrix=str(tmp_path / "nowhere.json"))
    decision = judge.decide(declared, declared.targets[0], "0.12.0", module(tmp_path))
    assert (decision.verdict, decision.apply) == ("unlisted", False)
    assert "There is no matrix file" in decision.reason and "nowhere.json yet" in decision.reason


def test_a_target_without_rows_is_told_apart_from_a_new_release(tmp_path):
    declared = patch(tmp_path, rows=[])
    decision = judge.decide(declared, declared.targets[0], "0.12.0", module(tmp_path))
    assert (decision.verdict, decision.apply) == ("unlisted", False)
    assert "no row for this target" in decision.reason


# -- the file

VERSIONS = ["0.9.0", "0.10.0", "0.10.1", "0.11.0rc1", "0.11.0"]
ANY_ROWS = st.lists(
    st.builds(
        Row,
        st.sampled_from(["p", "q"]),
        st.sampled_from(["m:a", "m:B.c"]),
        st.just("vllm"),
        st.sampled_from(VERSIONS),
        st.sampled_from(table.VERDICTS),
        st.sampled_from(["", "because"]),
        st.sampled_from(["", "00ff00ff00ff00ff"]),
    ),
    unique_by=lambda r: (r.patch, r.target, r.release),
)
ANY_DIGESTS = st.dictionaries(
    st.tuples(st.just("vllm"), st.just("m"), st.sampled_from(VERSIONS)), st.sampled_from(["00ff", "ff00"])
)


@settings(max_examples=100, deadline=None)
@given(ANY_ROWS, ANY_DIGESTS)
def test_a_table_survives_its_file(tmp_path_factory, rows, digests):
    path = tmp_path_factory.mktemp("table") / "matrix.json"
    made = Table(rows, {"vllm": VERSIONS}, digests=digests)
    path.write_text(files.dump(made))
    again = files.read(path)
    assert again.rows() == made.rows()
    assert again.digests == (digests if rows else {})
    assert again.releases == (made.releases if rows else {})
    assert files.dump(again) == files.dump(made)


LOAD = "vllm.worker:Worker.load"
SEEN = {"targets": [LOAD], "called": [LOAD], "checked": [LOAD]}


def proved(folder: Path, *runs: dict) -> list[Row]:
    path = folder / "live.json"
    path.write_text(json.dumps([{"release": "0.12.0+cpu", **run} for run in runs]))
    rows = evidence.live_rows(path)
    held = evidence.with_live(Table(ROWS), rows)
    assert {r.evidence for r in held.rows() if r.release != "0.12.0"} == {"static"}
    return [r for r in held.rows() if r.release == "0.12.0"]


@pytest.mark.parametrize(
    ("result", "word"),
    [
        ({"result": "pass", **SEEN}, "live"),
        ({"result": "pass", **SEEN, "called": []}, "hooked"),
        ({"result": "pass", **SEEN, "checked": []}, "hooked"),
        ({"result": "fail", **SEEN}, "hooked"),
        ({"result": "pass", **SEEN, "targets": []}, "static"),
        # From before calls were recorded.
        ({"result": "pass", "targets": [LOAD]}, "hooked"),
        ({"result": "fail"}, "static"),
    ],
    ids=["live", "never called", "effect not checked", "check failed", "not applied", "no record of calls", "stopped"],
)
def test_a_target_is_live_when_it_was_called_and_its_effect_checked(tmp_path, result, word):
    (held,) = proved(tmp_path, {"patches": {"demo": result, "other": {"result": "fail"}}})
    assert (held.evidence, held.devices) == (word, () if word == "static" else ("cpu",))
    assert held.as_json()["evidence"] == word
    assert held.proof == ("static" if word == "static" else f"{word} (cpu)")


def test_evidence_names_the_devices(tmp_path):
    called, hooked = {"demo": {"result": "pass", **SEEN}}, {"demo": {"result": "pass", "targets": [LOAD]}}
    cuda = {"device": "cuda", "patches": called}
    (held,) = proved(tmp_path, cuda, {"patches": called})
    assert (held.evidence, held.devices, held.as_json()["devices"]) == ("live", ("cpu", "cuda"), ["cpu", "cuda"])
    (held,) = proved(tmp_path, cuda, {"patches": hooked})
    assert held.proof == "live (cuda)"


def test_a_run_of_vllm_proves_nothing_of_another_distribution_with_that_number():
    other = dataclasses.replace(ROWS[2], distribution="vllm-omni")
    run = LiveRow("vllm", "0.12.0", "demo", True, (LOAD,), (LOAD,), (LOAD,))
    assert [row.proof for row in evidence.with_live(Table([other]), [run]).rows()] == ["static"]
    assert [row.proof for row in evidence.with_live(Table([ROWS[2]]), [run]).rows()] == ["live (cpu)"]


def test_evidence_holds_for_the_code_that_was_run(tmp_path, monkeypatch):
    """A fork or a rebuilt wheel carries the number of a release too; nobody has run its code."""
    runs = tmp_path / "live.json"
    runs.write_text(json.dumps([{"release": "0.12.0", "patches": {"demo": {"result": "pass", **SEEN}}}]))
    monkeypatch.setattr(evidence, "LIVE", runs)
    demo = patch(tmp_path)
    for name, text in {"same": CODE, "other": OTHER}.items():
        (tmp_path / f"{name}.py").write_text(text)
    proofs = {}
    for release, name in (("0.12.0", "same"), ("0.12.0", "other"), ("0.99.0", "same")):
        text = module_text.ModuleText((tmp_path / f"{name}.py").read_bytes())
        source = SimpleNamespace(release=release, text=lambda module, text=text: text)
        (told,) = forecast.forecast(demo, lambda target, source=source: source, {})
        proofs[release, name] = told.row.proof
    assert list(proofs.values()) == ["live (cpu)", "static", "static"]


def test_a_file_of_runs_that_is_no_list_is_named(tmp_path):
    runs = tmp_path / "live.json"
    runs.write_text('{"release": 1}')
    with pytest.raises(table.MatrixError, match=r"live_matrix\.py"):
        evidence.live_rows(runs)
    assert evidence.live_rows(tmp_path / "none.json") == []


def test_the_page(tmp_path):
    proof = [
        LiveRow("vllm", "0.11.0", "demo", True, (LOAD,)),
        LiveRow("vllm", "0.12.0", "demo", True, (LOAD,), (LOAD,), (LOAD,), "cuda"),
    ]
    text = table_text.markdown_table(evidence.with_live(Table(ROWS), proof))
    assert text.splitlines() == [
        "### demo",
        "",
        "| vllm | 0.10.0 | 0.11.0<br>to 0.12.0 | 0.13.0 | 0.14.0 |",
        "|---|:-:|:-:|:-:|:-:|",
        "| `Worker.load` | - | live (cuda) | drifted | native |",
    ]
    page = f"before\n{table_text.BEGIN}\nold\n{table_text.END}\nafter\n"
    once = table_text.with_table(page, Table(ROWS))
    assert "old" not in once and once.startswith("before\n") and once.endswith("\nafter\n")
    assert table_text.with_table(once, Table(ROWS)) == once
    with pytest.raises(ValueError, match="matrix: end"):
        table_text.with_table("no markers", Table(ROWS))


def test_targets_with_one_name_are_told_apart_by_the_end_of_their_modules():
    modules = ("vllm.v1.gpu", "vllm.v2.gpu", "vllm.cpu")
    rows = [dataclasses.replace(ROWS[2], target=f"{module}:Worker.load") for module in modules]
    text = table_text.markdown_table(Table([*rows, dataclasses.replace(ROWS[1], target="vllm.v1.gpu:Other")]))
    assert re.findall("`(.+?)`", text) == ["v1.gpu:Worker.load", "v2.gpu:Worker.load", "cpu:Worker.load", "Other"]
