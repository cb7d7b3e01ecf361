# SPDX-License-Identifier: Apache-2.0
"""The ledger of a process, its one line, and what ``vllm-omni-patch status`` makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fake_house import RELEASE, House
from vllm_omni_patch.commands import judge
from vllm_omni_patch.telemetry import processes

LOAD = "vllm.worker:Worker.load"
EXECUTE = "vllm.runner:Runner.execute"
ENGINE = """
import vllm, vllm.plugins
import logging
logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(message)s")
vllm.plugins.load_general_plugins()
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.patch(
        "probe",
        'T("vllm.worker", "Worker.load"), T("vllm.runner", "Runner.execute"), T("vllm_omni.worker", "W.x", '
        'distribution="vllm-omni", optional=True)',
        [LOAD, EXECUTE],
    )
    return house


def status(house: House, *options: str, flag: str | None = "probe", code: int = 0, **env: str) -> dict[str, Any]:
    done = command(house, "status", "--json", *options, flag=flag, **env)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def command(house: House, *words: str, flag: str | None = "probe", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_omni_patch.commands.main", *words],
        env=house.environment(flag, **env), cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def log(done: Any) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("LOG ")]


# -- one process


def test_a_process_writes_one_line(house: House) -> None:
    done = house.run("import vllm.worker, vllm.runner", ENGINE, "import os; show(os.getpid())")
    assert log(done) == [
        f"LOG INFO vllm-omni-patch 0.1.0: pid {done.value}, activated by startup file, vLLM {RELEASE}: "
        "2 applied (probe 2)"
    ]


def test_what_is_still_waited_for_is_counted(house: House) -> None:
    done = house.run("import vllm.worker", ENGINE, "show(vllm.worker.Worker().load('a'))")
    (line,) = log(done)
    assert line.endswith("1 applied (probe 1), 1 waiting for their modules (probe 1)")


def test_a_workers_line_waits_for_its_modules(house: House) -> None:
    worker = """
import multiprocessing
multiprocessing.current_process().name = "VllmWorker-0"
"""
    done = house.run(worker, ENGINE, "import vllm.runner; show(1); import vllm.worker")
    (line,) = log(done)
    assert line.endswith(": 2 applied (probe 2)")


def test_an_engine_core_with_its_worker_inside_corrects_its_line_once(house: House) -> None:
    for path in ("vllm/v1/__init__.py", "vllm/v1/worker/__init__.py"):
        house.write(path, "")
    house.write("vllm/v1/worker/model.py", "class M:\n    def go(self): return 1\n    def stop(self): return 2\n")
    names = ["vllm.v1.worker.model:M.go", "vllm.v1.worker.model:M.stop"]
    targets = (
        'T("vllm.v1.worker.model", "M.go"), T("vllm.v1.worker.model", "M.stop"), T("vllm.runner", "Runner.execute")'
    )
    house.patch("probe", targets, [*names, EXECUTE])
    calls = "from vllm.v1.worker.model import M; M().go(); M().go(); M().stop()"
    first, second = log(house.run(ENGINE, calls))
    assert first.endswith("0 applied, 3 waiting for their modules (probe 3)")
    assert second.endswith("now 2 applied (probe 2), 1 waiting for their modules (probe 1)")


def test_the_flag_off_leaves_no_line_and_no_file(house: House) -> None:
    done = house.run("import vllm.worker", ENGINE, "show(1)", flag=None, VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    assert done.err == ""
    assert not house.reports.exists()


def test_a_ledger_holds_states_and_no_arguments(house: House) -> None:
    house.write("serve.py", "import vllm.worker, vllm.plugins\nvllm.plugins.load_general_plugins()\n")
    house.write("sitecustomize.py", "import vllm_omni_patch; vllm_omni_patch.activate()\n")
    subprocess.run(
        [sys.executable, "serve.py", "--api-key", "secret"],
        env=house.environment("probe", VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports)),
        cwd=house.folder, check=True, timeout=60,
    )  # fmt: skip
    (ledger,) = house.ledgers()
    assert {e["target"]: e["state"] for e in ledger["entries"] if e["patch"] == "probe"} == {
        LOAD: "applied", EXECUTE: "pending", "vllm_omni.worker:W.x": "pending"
    }  # fmt: skip
    assert ledger["process"]["vllm_version"] == RELEASE
    assert ledger["process"]["activation_path"] == "startup file"
    assert "secret" not in json.dumps(ledger)
    assert [p.name for p in house.reports.iterdir()] == [f"ledger-{ledger['pid']}.json"]


def test_a_first_call_is_in_the_report_of_a_process_that_is_killed_later(house: House) -> None:
    calls = """
import os, signal
from vllm.worker import Worker
import vllm.runner
folder = os.environ["VLLM_OMNI_PATCH_REPORT_DIR"]
Worker().load("a")
written = os.stat(f"{folder}/ledger-{os.getpid()}.json")
Worker().load("b")
show(os.stat(f"{folder}/ledger-{os.getpid()}.json").st_ino == written.st_ino)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = house.run("import vllm.worker", ENGINE, calls, VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    assert done.status == -9 and done.shown == [True], "one report for the first call, none for the second"
    (ledger,) = house.ledgers()
    probe = [e for e in ledger["entries"] if e["patch"] == "probe"]
    assert {e["target"]: (e["state"], e["called"]) for e in probe} == {
        LOAD: ("applied", True), EXECUTE: ("applied", False), "vllm_omni.worker:W.x": ("pending", False)
    }  # fmt: skip
    text = command(house, "status", "--verbose", "--report-dir", str(house.reports), flag=None).stdout
    assert "applied, called" in text


def test_the_calls_of_a_parent_are_not_those_of_its_forked_child(house: House) -> None:
    calls = """
import os
from vllm.worker import Worker
from vllm.runner import Runner
Worker().load("a")
if os.fork() == 0:
    Runner().execute(1)
    os._exit(0)
os.wait()
"""
    house.run(ENGINE, calls, "show(os.getpid())", VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    ledgers = sorted(house.ledgers(), key=lambda one: one["started"])
    called = [{e["target"] for e in one["entries"] if e["called"]} for one in ledgers]
    assert called == [{"vllm.plugins:load_general_plugins", LOAD}, {EXECUTE}]


def test_an_unwritable_report_folder_is_one_warning(house: House) -> None:
    done = house.run(
        "import vllm.worker", ENGINE, "show(vllm.worker.Worker().load('a'))", VLLM_OMNI_PATCH_REPORT_DIR="/proc/no"
    )
    assert done.value == ["ours", ["a", 1]]
    assert len([line for line in log(done) if "could not write the ledger report" in line]) == 1


# -- this environment


def test_status_says_what_would_happen(house: House) -> None:
    found = status(house)
    rows = {row["target"]: row for row in found["targets"] if row["patch"] == "probe"}
    assert {target: row["would_be"] for target, row in rows.items()} == {
        LOAD: "applied", EXECUTE: "applied", "vllm_omni.worker:W.x": "skipped"
    }  # fmt: skip
    assert rows["vllm_omni.worker:W.x"]["reason"] == "vllm-omni is not installed"
    assert all(row["asked"] for row in rows.values())
    assert (rows[LOAD]["evidence"], rows[LOAD]["devices"]) == ("static", [])
    assert found["flag"] == {
        "name": "VLLM_OMNI_PATCH",
        "value": "probe",
        "on": True,
        "patches": ["loader", "probe"],
        "unknown": [],
    }
    vllm = found["installed"]["vllm"]
    assert (vllm["release"], vllm["distribution"].split(", ")[-1]) == (RELEASE, "vllm-fake")
    assert found["problems"] == []


def test_status_knows_that_an_attribute_has_one_owner(house: House) -> None:
    house.patch("second", 'T("vllm.worker", "Worker.load")', [LOAD])
    rows = {(row["patch"], row["target"]): row for row in status(house, flag="second,probe")["targets"]}
    assert rows["probe", LOAD]["would_be"] == "applied"
    assert rows["second", LOAD]["would_be"] == "skipped"
    assert "patch 'probe' claims this attribute first" in rows["second", LOAD]["reason"]


def test_a_group_without_an_attribute_that_another_patch_has_is_off(house: House) -> None:
    house.patch(
        "second",
        'T("vllm.worker", "Worker.load", group="g"), T("vllm.other", "Base.run", group="g")',
        [LOAD, "vllm.other:Base.run"],
    )
    rows = {(row["patch"], row["target"]): row for row in status(house, flag="second,probe")["targets"]}
    other = rows["second", "vllm.other:Base.run"]
    assert other["would_be"] == "skipped" and "group 'g'" in other["reason"]


def test_status_imports_neither_vllm_nor_stage_two(house: House) -> None:
    house.write("vllm/__init__.py", "raise RuntimeError('imported')\n")
    house.write("torch/__init__.py", "raise RuntimeError('imported')\n")
    found = status(house, VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    assert found["installed"]["vllm"]["release"] == RELEASE
    assert not house.reports.exists()


def test_status_with_the_flag_off_is_no_problem(house: House) -> None:
    found = status(house, flag=None)
    assert found["flag"]["on"] is False
    assert not any(row["asked"] for row in found["targets"])


def test_a_group_is_shown_as_a_group(house: House) -> None:
    contract = 'contract=Contract(parameters=(Parameter("missing"),))'
    house.patch(
        "probe",
        f'T("vllm.worker", "Worker.load", group="g"), T("vllm.runner", "Runner.execute", group="g", {contract})',
        [LOAD, EXECUTE],
    )
    rows = {row["target"]: row for row in status(house)["targets"] if row["patch"] == "probe"}
    assert rows[LOAD]["would_be"] == "skipped"
    assert "group 'g'" in rows[LOAD]["reason"]


def test_a_filtered_plugin_and_a_missing_startup_file_are_a_problem(house: House) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "vllm_omni_patch.commands.main", "status", "--json"],
        env={**house.environment("probe", VLLM_PLUGINS="other"), "PYTHONPATH": _without_site(house)},
        cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["activation_paths"]["filtered"] is True
    if not found["activation_paths"]["startup"]:
        assert done.returncode == 1
        assert any("No activation path is open" in line and "VLLM_PLUGINS" in line for line in found["problems"])


def _without_site(house: House) -> str:
    return os.pathsep.join(
        [house.environment(None)["PYTHONPATH"], *(p for p in sys.path if p.endswith("site-packages"))]
    )


def test_an_unknown_name_is_a_problem(house: House) -> None:
    found = status(house, flag="probe,nope", code=1)
    assert found["flag"]["unknown"] == ["nope"]
    assert "no patch is called 'nope'" in found["problems"][0]


def test_a_name_that_is_nearly_right_is_guessed(house: House) -> None:
    assert "no patch is called 'prob' (did you mean probe?)" in " ".join(status(house, flag="prob", code=1)["problems"])


def test_a_folder_that_hides_a_patch_is_named(house: House) -> None:
    house.distribution("ghost-dist", "1.0", {"vllm_omni_patch.patches": {"ghost": "ghost:PATCH"}})
    house.write("ghost/notes.txt", "")
    told = " ".join(status(house, flag="ghost", code=1)["problems"])
    assert "AttributeError" in told and f"(found at {house.folder / 'ghost'})" in told


def test_a_wrong_folder_is_a_wrong_call(house: House) -> None:
    done = command(house, "status", "--report-dir", "/nowhere")
    assert done.returncode == 2
    assert "/nowhere is not a folder" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["status", "--help"], ["flags"], ["flags", "--format", "markdown"]])
def test_help_and_flags_run(house: House, words: list[str]) -> None:
    done = command(house, *words, flag=None)
    assert done.returncode == 0
    assert ("VLLM_OMNI_PATCH_STRICT" in done.stdout) == (words[0] == "flags")
    if "markdown" in words:
        assert "| `VLLM_OMNI_PATCH_PROBE_SIZE` | int | 1 |" in done.stdout


def test_an_old_copy_on_the_path_is_a_problem(house: House) -> None:
    house.distribution("vllm-omni-patch", "0.0.1", {})
    found = status(house, code=1)
    assert any("Several copies are installed (0.0.1 in " in line for line in found["problems"])


# -- the processes of an engine


def test_status_shows_each_process_and_what_it_did(house: House) -> None:
    done = house.run("import vllm.worker", ENGINE, "show(1)", VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    assert done.value == 1
    found = status(house, "--report-dir", str(house.reports), flag=None)
    (process,) = found["processes"]
    assert process["alive"] is False
    assert [e["state"] for e in process["entries"] if e["patch"] == "probe"] == ["applied", "pending", "pending"]
    assert found["mismatches"] == []


def test_a_process_that_ended_is_not_alive_again_when_its_id_is(house: House) -> None:
    """The file of a process whose id another one has now, of one that nobody has waited for, and of one that runs."""
    if not processes.born():
        pytest.skip("no /proc here")
    code = (
        "import json, os; from vllm_omni_patch import ledger; print(json.dumps(ledger.snapshot()), flush=True); input()"
    )
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = subprocess.Popen([sys.executable, "-c", code], **pipes)
    try:
        assert child.stdout is not None
        written = json.loads(child.stdout.readline())
        house.reports.mkdir()
        earlier = {**written, "born": written["born"] - 1}
        elsewhere = {**written, "host": "elsewhere"}
        for number, one in enumerate((written, earlier, {**written, "born": 0}, elsewhere)):
            (house.reports / f"ledger-{number}.json").write_text(json.dumps({**one, "started": number}))
        found = status(house, "--report-dir", str(house.reports), flag=None)
        assert [one["alive"] for one in found["processes"]] == [True, False, True, None]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        found = status(house, "--report-dir", str(house.reports), flag=None)
        assert [one["alive"] for one in found["processes"]] == [False, False, False, None]
    finally:
        child.kill()
        child.communicate()


def process(pid: int, state: str, **facts: Any) -> dict[str, Any]:
    about = {"run": "r", "package": "1", "vllm_version": "7", "flag": "1", "patches": ["p"], **facts}
    entry = {"patch": "p", "target": "m:f", "state": state}
    return {"pid": pid, "role": "worker" if pid > 1 else "api server", "process": about, "entries": [entry]}


def test_a_worker_that_differs_is_called_out() -> None:
    assert judge.mismatches([process(1, "applied"), process(2, "skipped")]) == [
        "p: m:f is applied in api server 1, and skipped in worker 2"
    ]
    assert judge.mismatches([process(1, "applied"), process(2, "applied", vllm_version="8", flag="p")]) == [
        "the version of vLLM differs: '7' in api server 1; '8' in worker 2",
        "the value of VLLM_OMNI_PATCH differs: '1' in api server 1; 'p' in worker 2",
    ]


def test_what_a_process_never_imported_and_another_run_are_no_difference() -> None:
    assert judge.mismatches([process(1, "pending"), process(2, "applied")]) == []
    assert judge.mismatches([process(1, "applied"), process(2, "skipped", run="other")]) == []


def ray(pid: int, role: str = "ray worker", **facts: Any) -> dict[str, Any]:
    return {**process(pid, "applied", **{"run_reachable": True, "ray": True, **facts}), "role": role}


def test_ray_workers_whose_numbers_are_lost_are_called_out() -> None:
    engine, workers = ray(1, "engine core"), [ray(2, rank=0, world_size=2), ray(3, rank=1, world_size=2)]
    assert judge.mismatches([engine, *workers]) == []
    alone, lost = judge.mismatches([engine, ray(2, run="named"), ray(3, run="named")])
    assert "engine core 1: no Ray worker of this engine has written a ledger here" in alone
    assert lost.startswith("ray worker 2, ray worker 3: no engine shares the run folder")
    assert judge.mismatches([ray(2, run="run-host-2-x"), ray(3, run="run-host-2-x")]) == [], "a driver inside a worker"
    (far,) = judge.mismatches([engine, ray(2, run_reachable=False)])
    assert "numbers of ray worker 2 are not on /metrics" in far and "VLLM_OMNI_PATCH_RUN_DIR" in far
    (missing,) = judge.mismatches([engine, workers[0]])
    assert missing.startswith("rank 1 of 2 has written no ledger here")


def test_a_ledger_says_whether_the_run_folder_can_be_reached(house: House) -> None:
    """On another host than its driver's, a worker has only the folder's name."""
    reports = {"VLLM_OMNI_PATCH_REPORT_DIR": str(house.reports)}
    house.run("import vllm.worker", ENGINE, "show(1)", **reports)
    house.run(ENGINE, "show(1)", VLLM_OMNI_PATCH_RUN_DIR="/dev/shm/vllm-omni-patch-run-otherhost-1-x", **reports)
    assert sorted(ledger["process"]["run_reachable"] for ledger in house.ledgers()) == [False, True]


# -- for people


def test_a_line_for_each_patch_and_process(house: House) -> None:
    house.run("import vllm.worker", ENGINE, "show(1)", VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports))
    done = command(house, "status", "--report-dir", str(house.reports))
    (row,) = (line for line in done.stdout.splitlines() if line.strip().startswith("probe"))
    assert row.split("probe")[1].strip() == "1 applied, 2 not imported here"
    assert "Worker.load" not in done.stdout
    verbose = command(house, "status", "--verbose", "--report-dir", str(house.reports)).stdout
    assert f"probe: {LOAD}\n      applied" in verbose
    assert "  6 not imported here" in verbose  # 2 of the probe, 4 of the loader itself


def test_what_was_asked_for_and_would_not_be_applied_is_named_with_its_reason(house: House) -> None:
    contract = 'contract=Contract(parameters=(Parameter("missing"),))'
    house.patch(
        "probe", f'T("vllm.worker", "Worker.load"), T("vllm.runner", "Runner.execute", {contract})', [LOAD, EXECUTE]
    )
    text = command(house, "status").stdout
    (row,) = (line for line in text.splitlines() if line.startswith("probe"))
    assert row.split() == ["probe", "yes", "1", "applied,", "1", "skipped"]
    assert f"  - probe: {EXECUTE}: " in text.partition("not applied")[2]
    assert LOAD not in text
    assert LOAD in command(house, "status", "--verbose").stdout


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal_but_for_a_name(house: House, columns: int) -> None:
    for words in (["status"], ["status", "-v"]):
        lines = command(house, *words, COLUMNS=str(columns)).stdout.splitlines()
        assert [line for line in lines if len(line) > columns and " " in line.strip()] == []
