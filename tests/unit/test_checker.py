# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch matrix``: exit status, output, updates and upgrade help, on small releases that pip serves.

A patch from another package (``demo``) brings its own matrix file. What is installed is a folder on ``sys.path``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder

import pytest
import typer.testing

from support import package_index
from vllm_omni_patch import flags
from vllm_omni_patch.code import releases
from vllm_omni_patch.code.releases import read_path
from vllm_omni_patch.code.text import ModuleText
from vllm_omni_patch.commands import matrix
from vllm_omni_patch.loading import discover
from vllm_omni_patch.matrix import build, files, table, table_text
from vllm_omni_patch.matrix.forecast import forecast, without_effect
from vllm_omni_patch.patch import Contract, Documented, Parameter, Patch, Target

WORKER = """
class Base:
    def start(self): ...
class Worker(Base):
    def load(self, name, size=1):
        return size
"""
RELEASES = {
    "9.0.0": {"vllm/worker.py": "class Base: ...\n"},
    "9.1.0": {"vllm/worker.py": WORKER},
    "9.1.1": {"vllm/worker.py": WORKER + "# a comment\n"},
    "9.2.0": {"vllm/worker.py": WORKER.replace("size=1", "size=2, *, model=None")},
    "9.3.0": {"vllm/worker.py": WORKER.replace("name, size=1", "config").replace("start", "begin")},
    "9.4.0": {"vllm/runner.py": ""},
    "9.5.0": {"vllm/worker.py": WORKER + "LOADS_BY_ITSELF = True\n"},
}
FOR_THE_LOADER = {
    "vllm/envs.py": "environment_variables = {}\n",
    "vllm/plugins.py": "def load_general_plugins(): ...\n",
    "vllm/v1/metrics/prometheus.py": "from prometheus_client import REGISTRY\ndef get_prometheus_registry(): ...\n",
}
LISTED = ("9.0.0", "9.1.0", "9.1.1", "9.2.0", "9.3.0", "9.4.0", "9.5.0")

DEMO = """
from pathlib import Path
from vllm_omni_patch.patch import Contract, Documented, Native, Parameter, Patch, Target
CONTRACT = Contract(parameters=(Parameter("name"),), base_methods=("start",))
PATCH = Patch(
    "demo", "s", "w", "s", "f", "r", "adds",
    (
        Target("vllm.worker", "Worker.load", "demo.hooks:install", contract=CONTRACT,
               native=Native(module_attributes=("LOADS_BY_ITSELF",))),
        Target("vllm.runner", "Runner.load", "demo.hooks:install", optional=True),
        Target("vllm_neuron.worker", "Worker.load", "demo.hooks:install", distribution="vllm-neuron", optional=True,
               evidence="documented", documented=(Documented("0.5.0", reason="read on its page"),)),
    ),
    matrix=str(Path(__file__).with_name("matrix.json")),
)
"""


def vllm(release: str) -> dict[str, str]:
    return {
        "vllm/__init__.py": package_index.TRAP,
        "vllm/_version.py": f"__version__ = {release!r}\n",
        **RELEASES[release],
    }


class OnlyIn:
    """The path finder, to which vLLM and its relatives exist in one folder only, whatever else is installed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        hidden = name in releases.IMPORT_NAMES.values()
        return PathFinder.find_spec(name, [self.folder] if hidden else path, target)

    def __getattr__(self, name):
        return getattr(PathFinder, name)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An index with every release, and a cache that fills as they are asked for."""
    pytest.importorskip("pip")
    index = tmp_path_factory.mktemp("index")
    for release in RELEASES:
        package_index.wheel(index, "vllm", release, vllm(release))
    return index, tmp_path_factory.mktemp("cache")


@pytest.fixture
def house(tmp_path, monkeypatch, served):
    """A site-packages folder with the patch ``demo``, and nothing else installed."""
    index, cache = served
    site = tmp_path / "site"
    package_index.use_only(monkeypatch, index)
    package_index.tree(
        site,
        {
            "demo/__init__.py": DEMO,
            "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
            "demo-1.0.dist-info/entry_points.txt": f"[{discover.GROUP}]\ndemo = demo:PATCH\n",
        },
    )
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    finders = [OnlyIn(str(site)) if finder is PathFinder else finder for finder in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "demo")]:
        monkeypatch.delitem(sys.modules, name)
    for flag in (flags.SWITCH, flags.UNLISTED):
        monkeypatch.delenv(flag.name, raising=False)
    monkeypatch.setattr(releases, "cache_folder", lambda chosen=None: chosen or cache)
    files.load.cache_clear()
    yield site
    discover.find.cache_clear()


def run(*arguments: str) -> typer.testing.Result:
    discover.find.cache_clear()  # each call stands for a process
    result = typer.testing.CliRunner().invoke(matrix.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "vllm" not in sys.modules
    return result


def rows(result: typer.testing.Result) -> list[dict]:
    return json.loads(result.stdout)


def listed(house, *releases: str) -> None:
    specs = [word for release in releases for word in ("--release", f"vllm=={release}")]
    assert run("--update", "--patch", "demo", *specs).exit_code == 0


def test_update_writes_the_patchs_own_file_and_check_agrees(house):
    result = run("--update", "--patch", "demo")
    assert result.exit_code == 2
    assert "There is no matrix file" in result.stderr and "--release" in result.stderr
    listed(house, *LISTED)
    held = files.read(house / "demo" / "matrix.json")
    text = RELEASES["9.1.1"]["vllm/worker.py"].encode()
    assert held.digests["vllm", "vllm.worker", "9.1.1"] == ModuleText(text).digest
    assert {name for _, _, name in held.digests} == set(LISTED)
    verdicts = {r.release: (r.verdict, r.reason) for r in held.target_rows("demo", "vllm.worker:Worker.load")}
    assert verdicts["9.0.0"] == ("absent", "Worker is not in the module")
    assert verdicts["9.1.0"] == verdicts["9.1.1"] == verdicts["9.2.0"] == ("applies", "")
    assert verdicts["9.3.0"][0] == "drifted"
    for part in ("no parameter name", "further required parameter config", "Worker has no method start"):
        assert part in verdicts["9.3.0"][1]
    # A target that every release must have, and that went away, has drifted; it was never there before 9.1.0.
    assert verdicts["9.4.0"] == ("drifted", "last in 9.3.0; there is no module vllm.worker")
    assert verdicts["9.5.0"][0] == "native"
    optional = {r.release: r.verdict for r in held.target_rows("demo", "vllm.runner:Runner.load")}
    assert set(optional.values()) == {"absent"}
    documented = held.target_rows("demo", "vllm_neuron.worker:Worker.load")
    assert [(r.release, r.verdict, r.evidence, r.contract) for r in documented] == [
        ("0.5.0", "applies", "documented", "unknown")
    ]
    assert run("--check", "--patch", "demo").exit_code == 0
    before = (house / "demo" / "matrix.json").read_text()
    # Released code that is judged otherwise, and a release more, are both seen, and written only when asked.
    (house / "demo" / "matrix.json").write_text(before.replace('"drifted"', '"absent"', 1))
    result = run("--check", "--patch", "demo")
    assert result.exit_code == 1
    assert "drifted" in result.stdout
    assert run("--update", "--patch", "demo").exit_code == 0
    assert (house / "demo" / "matrix.json").read_text() == before
    assert run("--check", "--patch", "demo", "--release", "vllm==9.1").exit_code == 0


def test_update_warns_of_a_target_that_applies_nowhere(house):
    result = run("--update", "--patch", "demo", "--release", "vllm==9.1.0")
    assert "warning: demo: vllm.runner:Runner.load applies on none of the listed releases" in result.stderr
    assert "warning: demo: vllm.worker:Worker.load" not in result.stderr


def test_one_release_more_keeps_the_others(house):
    listed(house, "9.1.0")
    listed(house, "9.2.0")
    assert files.read(house / "demo" / "matrix.json").releases["vllm"] == ["9.1.0", "9.2.0"]


def test_the_whole_table(house):
    listed(house, *LISTED)
    result = run("--all", "--patch", "demo", "--format", "json")
    assert result.exit_code == 0
    told = rows(result)
    assert len(told) == 2 * len(LISTED) + 1
    for one in told:
        assert {"patch", "target", "distribution", "release", "verdict", "contract", "evidence", "reason"} <= set(one)
    by_release = {one["release"]: one for one in told if one["target"] == "vllm.worker:Worker.load"}
    assert by_release["9.1.0"]["contract"] == "ok"
    assert by_release["9.3.0"]["contract"] == "broken"
    assert by_release["9.5.0"]["contract"] == "unknown"
    text = run("--all", "--patch", "demo").stdout
    assert "9.1.0 to 9.2.0" in text
    page = run("--all", "--patch", "demo", "--format", "markdown").stdout
    assert "### demo\n\n| vllm | 9.0.0 | 9.1.0<br>to 9.2.0 | 9.3.0<br>to 9.4.0 | 9.5.0 |" in page
    assert "| `Worker.load` | - | applies | drifted | native |" in page


@pytest.mark.parametrize(
    ("release", "status", "verdict", "contract", "state"),
    [
        ("9.1.0", 0, "applies", "ok", "applied"),
        ("9.5.0", 0, "native", "unknown", "native"),
        ("9.3.0", 1, "drifted", "broken", "skipped"),
        ("9.0.0", 1, "absent", "unknown", "skipped"),
    ],
)
def test_this_environment(house, release, status, verdict, contract, state):
    listed(house, *LISTED)
    package_index.tree(house, vllm(release))
    result = run("--patch", "demo", "--format", "json")
    assert result.exit_code == status
    one = rows(result)[0]
    assert (one["verdict"], one["contract"], one["state"], one["release"]) == (verdict, contract, state, release)
    assert (one["listed"], one["evidence"]) == (True, "static")
    # A package that is not installed is ordinary.
    assert [(r["state"], r["release"], r["evidence"]) for r in rows(result)[2:]] == [("skipped", "", "documented")]
    text = run("--patch", "demo")
    assert text.exit_code == status
    assert f"vllm {release}" in text.stdout and state in text.stdout and "vllm-neuron (1 target)" in text.stdout


def test_the_switch_says_what_is_asked_for(house, monkeypatch):
    listed(house, *LISTED)
    package_index.tree(house, vllm("9.1.0"))
    monkeypatch.setenv(flags.SWITCH.name, "demo")
    assert "loader vllm.envs:environment_variables" in run().stdout  # always on, and this vLLM has no such module
    package_index.tree(house, FOR_THE_LOADER)
    assert run().exit_code == 0
    monkeypatch.setenv(flags.SWITCH.name, "demmo")
    result = run()
    assert result.exit_code == 2
    assert "no patch is called 'demmo'" in result.stderr
    monkeypatch.setenv(flags.SWITCH.name, "0")
    assert "is off" in run().stderr


def test_unlisted_code_is_skipped_and_known_code_is_not(house, monkeypatch):
    listed(house, "9.1.0")
    package_index.tree(house, vllm("9.1.1"))
    result = run("--patch", "demo", "--format", "json")
    assert result.exit_code == 0
    assert (rows(result)[0]["listed"], "9.1.0" in rows(result)[0]["reason"]) == (False, True)
    package_index.tree(house, vllm("9.2.0"))
    result = run("--patch", "demo", "--format", "json")
    assert result.exit_code == 1
    one = rows(result)[0]
    # The contract holds, and still nobody has judged this code.
    assert (one["verdict"], one["contract"], one["state"], one["listed"]) == ("unlisted", "ok", "skipped", False)
    monkeypatch.setenv(flags.UNLISTED.name, "apply")
    assert run("--patch", "demo").exit_code == 0


def test_a_broken_installation(house, monkeypatch):
    result = run("--patch", "demo")
    assert result.exit_code == 2
    assert "no vLLM is installed" in result.stderr
    package_index.tree(house, {**vllm("9.1.0"), "demo/__init__.py": "raise ImportError('half installed')\n"})
    monkeypatch.delitem(sys.modules, "demo")
    result = run("--patch", "demo")
    assert result.exit_code == 2
    assert "half installed" in result.stderr
    monkeypatch.setenv(flags.SWITCH.name, "demo")
    assert run().exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-such-option",),
        ("--format", "xml"),
        ("--patch", "demmo"),
        ("--release", "vllm>=9"),
        ("--release", "vllm==99.0.0"),
        ("--release", "surely-unknown==1.0"),
        ("--release", "vllm-neuron==7.7.7"),
        ("--source", "nowhere.whl"),
        ("--update", "--source", "x"),
        ("--update", "--all"),
    ],
)
def test_wrong_usage(house, arguments):
    result = run(*arguments) if "--patch" in arguments else run(*arguments, "--patch", "demo")
    assert result.exit_code == 2
    assert result.stderr.strip()
    assert result.stdout == ""


def test_releases_that_are_not_installed(house):
    listed(house, "9.1.0", "9.2.0")
    result = run("--patch", "demo", "--release", "vllm==9.1.0", "--release", "vllm==9.3.0", "--format", "json")
    assert result.exit_code == 1
    told = {one["release"]: one for one in rows(result) if one["target"] == "vllm.worker:Worker.load"}
    assert told["9.1.0"]["state"] == "applied"
    assert told["9.3.0"]["state"] == "skipped"
    assert run("--patch", "demo", "--release", "vllm==9.1.0").exit_code == 0
    assert run("--patch", "demo", "--release", "vllm-neuron==0.5.0").exit_code == 0


def test_a_path(house, tmp_path):
    listed(house, "9.1.0")
    for path in (
        package_index.wheel(tmp_path, "vllm", "9.1.0", vllm("9.1.0")),
        package_index.sdist(tmp_path, "vllm", "9.1.0", vllm("9.1.0")),
        package_index.tree(tmp_path / "checkout", vllm("9.1.0")),
    ):
        result = run("--patch", "demo", "--source", str(path), "--format", "json")
        assert result.exit_code == 0
        assert rows(result)[0]["verdict"] == "applies"


def test_a_matrix_that_cannot_be_read(house):
    package_index.tree(house, {**vllm("9.1.0"), "demo/matrix.json": "{"})
    result = run("--patch", "demo", "--format", "json")
    assert result.exit_code == 1
    assert "cannot be looked up" in rows(result)[0]["reason"]
    result = run("--all", "--patch", "demo")
    assert result.exit_code == 2
    assert "matrix.json cannot be read" in result.stderr


# -- upgrade help


def test_what_an_upgrade_changes(house):
    listed(house, "9.1.0", "9.2.0")
    package_index.tree(house, vllm("9.1.0"))
    result = run("--patch", "demo", "--release", "vllm==9.3.0", "--format", "json")
    told = rows(result)[0]["upgrade"]
    assert (told["from"], told["verdict_before"], told["matters"], told["same_code"]) == (
        "9.1.0",
        "applies",
        "yes",
        False,
    )
    assert told["differences"] == [
        "- Worker.load(name, size=...)",
        "+ Worker.load(config)",
        "- Worker.start()",
    ]
    text = run("--patch", "demo", "--release", "vllm==9.3.0").stdout
    assert "Upgrade of vllm from 9.1.0 to 9.3.0" in text
    assert "MATTERS: drifted" in text
    assert "    + Worker.load(config)" in text


@pytest.mark.parametrize(
    ("installed", "new", "listing", "matters", "why"),
    [
        ("9.1.0", "9.1.1", ("9.1.0",), "no", "the code is the same"),
        ("9.1.0", "9.2.0", ("9.1.0", "9.2.0"), "no", "the contract holds"),
        ("9.1.0", "9.2.0", ("9.1.0",), "yes", "until the matrix lists the release"),
        ("9.1.0", "9.4.0", ("9.1.0",), "yes", "absent"),
        ("9.1.0", "9.5.0", ("9.1.0",), "no", "upstream takes over"),
        ("9.0.0", "9.1.0", ("9.1.0",), "better", "applies now"),
        ("9.3.0", "9.4.0", ("9.1.0",), "no", "absent as before"),
    ],
)
def test_whether_it_matters(house, installed, new, listing, matters, why):
    listed(house, *listing)
    package_index.tree(house, vllm(installed))
    told = rows(run("--patch", "demo", "--release", f"vllm=={new}", "--format", "json"))[0]["upgrade"]
    assert told["matters"] == matters
    assert why in told["why"]


def test_what_it_is_compared_with(house):
    listed(house, "9.1.0", "9.2.0")
    told = rows(run("--patch", "demo", "--release", "vllm==9.3.0", "--format", "json"))[0]["upgrade"]
    assert told["from"] == "9.2.0"
    against = ("--against", "vllm==9.1.0")
    told = rows(run("--patch", "demo", "--release", "vllm==9.3.0", *against, "--format", "json"))[0]["upgrade"]
    assert told["from"] == "9.1.0"
    page = run("--patch", "demo", "--release", "vllm==9.3.0", *against, "--format", "markdown").stdout
    assert page.startswith("| patch | target |")
    assert "### Upgrade of vllm from 9.1.0 to 9.3.0" in page


# -- parts


def test_several_processes_give_the_same_table(served):
    index, cache = served
    contract = Contract(parameters=(Parameter("name"),), base_methods=("start",))
    declared = Patch(
        "demo", "", "", "", "", "", "adds", (Target("vllm.worker", "Worker.load", "x:y", contract=contract),)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        package_index.use_only(monkeypatch, index)
        told: list[str] = []
        one = build.rebuild([declared], {"vllm": LISTED}, cache, told.append, jobs=1)
        two = build.rebuild([declared], {"vllm": LISTED}, cache, jobs=2)
    assert files.dump(one) == files.dump(two)
    assert len(one.rows()) == len(told) == len(LISTED)


def test_groups_stand_and_fall_together(house, tmp_path):
    good = Target("vllm.worker", "Worker.load", "x:y", group="both")
    bad = Target("vllm.worker", "Worker.start", "x:y", group="both", contract=Contract(parameters=(Parameter("a"),)))
    there_or_not = Target("vllm.nowhere", "X.y", "x:y", group="both", optional=True)
    declared = Patch("demo", "", "", "", "", "", "adds", (good, bad, there_or_not), matrix=str(tmp_path / "m.json"))
    release = read_path(package_index.tree(tmp_path / "tree", vllm("9.1.0")))[0]
    questions = build.questions([declared])
    held = table.Table([build.row_of(q, release) for q in questions], {"vllm": ["9.1.0"]})
    (tmp_path / "m.json").write_text(files.dump(held))
    found = forecast(declared, lambda target: release, {})
    assert [(one.state, one.row.verdict) for one in found] == [
        ("skipped", "applies"),
        ("skipped", "drifted"),
        ("skipped", "absent"),
    ]
    assert "all targets of group 'both' or none" in found[0].reason
    assert [one.faulty for one in found] == [True, True, False]
    found = forecast(dataclasses.replace(declared, targets=(good, there_or_not)), lambda target: release, {})
    assert [one.state for one in found] == ["applied", "skipped"]


def test_an_attribute_belongs_to_the_first_patch_that_names_it(house, tmp_path):
    listed(house, "9.1.0")
    release = read_path(package_index.tree(tmp_path, vllm("9.1.0")))[0]
    import demo

    first = dataclasses.replace(demo.PATCH, targets=demo.PATCH.targets[:1])
    second, claimed = dataclasses.replace(first, name="second"), {}
    found = [forecast(patch, lambda target: release, claimed)[0] for patch in (first, second)]
    assert [one.state for one in found] == ["applied", "skipped"]


def test_documented_rows_have_a_reason():
    target = Target(
        "m", "q", "x:y", evidence="documented", documented=(Documented("1.0"), Documented("2.0", "native", "r"))
    )
    made = build.documented(build.Question("p", target))
    assert [(r.release, r.verdict, r.reason) for r in made] == [
        ("1.0", "applies", build.DOCUMENTED_REASON),
        ("2.0", "native", "r"),
    ]


def test_a_process_of_its_own_imports_no_vllm(tmp_path):
    package_index.tree(tmp_path, vllm("9.1.0"))
    code = """
        import sys
        from vllm_omni_patch.commands.matrix import main
        try:
            main()
        finally:
            print(sorted(n for n in sys.modules if n.split('.')[0] in ('vllm', 'torch')), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "--format", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), flags.SWITCH.name: ""},
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert {one["release"] for one in json.loads(done.stdout) if one["distribution"] == "vllm"} == {"9.1.0"}
    # Ours have nothing to hook in this small package.
    assert done.returncode == 1


def test_what_a_patch_uses_is_judged_and_not_hooked(house, tmp_path):
    wanted = Contract(base_methods=("start",))
    good = Target("vllm.worker", "Base", "", contract=wanted)
    bad = Target("vllm.worker", "Base", "", contract=Contract(base_methods=("stop",)))
    gone = Target("vllm.nowhere", "Base", "", optional=True)
    absent = Target("other.worker", "Base", "", distribution="other", contract=wanted)
    hooked = Target("vllm.worker", "Worker.load", "x:y")
    matrix = str(tmp_path / "m.json")
    declared = Patch("demo", "", "", "", "", "", "adds", (hooked,), matrix=matrix, uses=(good, bad, gone))
    release = read_path(package_index.tree(tmp_path / "tree", vllm("9.1.0")))[0]
    held = table.Table([build.row_of(q, release) for q in build.questions([declared])], {"vllm": ["9.1.0"]})
    (tmp_path / "m.json").write_text(files.dump(held))
    assert [r.used for r in files.read(tmp_path / "m.json").rows()] == [False, True, True]
    assert "| `worker:Base` (used) |" in table_text.markdown_table(held)
    declared = dataclasses.replace(declared, uses=(good, bad, gone, absent))
    found = forecast(declared, lambda target: release if target.distribution == "vllm" else None, {})
    assert [(one.state, one.row.verdict, one.installed) for one in found] == [
        ("applied", "applies", True),
        (None, "applies", True),
        (None, "drifted", True),
        (None, "absent", True),
        (None, "absent", False),
    ]
    assert [one.faulty for one in found] == [False, False, True, False, False]
    assert [one.as_json()["role"] for one in found] == ["hooked", *["used"] * 4]
    assert without_effect(found) == []
