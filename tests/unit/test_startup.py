# SPDX-License-Identifier: Apache-2.0
"""Stage 1: armed where the flag is on, absent where it is off, in every kind of process and interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_house import PLACE, ROOT, STATES, House

LOAD = "vllm.worker:Worker.load"
LINE = (ROOT / "startup_files" / "vllm_omni_patch.pth").read_text()
OURS = "[m for m in sys.modules if m.partition('.')[0] in ('vllm_omni_patch', 'wrapt', 'packaging')]"


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    return house


def line(house: House, code: str, flag: str | None, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the startup file's line as ``site`` does, then ``code``. ``folder`` stands for the package's folder."""
    path = str(house.folder) if folder is None else str(folder)
    # -S: the environment that runs the tests may have a startup file of its own.
    head = f"import sys; sys.path.insert(0, {path!r}); exec({LINE!r}, {{}}); exec({LINE!r}, {{}})\n"
    env = {**house.environment(flag), "PYTHONPATH": "" if folder else str(PLACE)}
    return subprocess.run(
        [sys.executable, "-S", "-c", head + code], env=env, cwd="/", capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", " OFF "])
def test_with_the_flag_off_no_module_of_ours_is_imported(house: House, value: str | None) -> None:
    done = line(
        house, f"import vllm, vllm.worker, sys; print({OURS}, [f for f in sys.meta_path if 'vllm' in repr(f)])", value
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n", "")


@pytest.mark.parametrize("value", ["1", "true", "YES", "all", "probe", "2"])
def test_with_the_flag_on_only_stage_one_is_there_until_vllm_is(house: House, value: str) -> None:
    done = line(house, f"import sys, json; print({OURS}, 'importlib.metadata' in sys.modules)", value)
    expected = "['vllm_omni_patch'] False\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_file_is_one_line() -> None:
    assert LINE.count("\n") == 1
    assert LINE.startswith("import ")


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "an empty package", "another version", "another file"])
def test_a_line_that_is_left_over_is_silent(house: House, tmp_path: Path, left: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    if left != "nothing":
        (site / "vllm_omni_patch").mkdir()
    if left in ("an empty package", "another version"):
        (site / "vllm_omni_patch" / "__init__.py").write_text("" if left == "an empty package" else "FLAG = 1\n")
    if left == "another file":
        (site / "vllm_omni_patch" / "notes.txt").write_text("")
    for flag in ("1", "0", None):
        done = line(house, "print('fine')", flag, site)
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), flag


@pytest.mark.parametrize("module", ["startup.py", "loading/loader.py"])
def test_a_broken_package_is_one_line_and_python_goes_on(house: House, module: str) -> None:
    shutil.copytree(PLACE / "vllm_omni_patch", house.folder / "vllm_omni_patch")
    (house.folder / "vllm_omni_patch" / module).write_text("raise RuntimeError('half an upgrade')\n")
    done = house.run("import vllm.worker; show(vllm.worker.Worker().load('a'))")
    assert done.value == ["a", 1]
    assert len(done.err.splitlines()) == 1
    assert "vllm-omni-patch: not active" in done.err
    assert "half an upgrade" in done.err


# -- when the flag is set


def test_the_flag_is_read_again_at_the_first_import_of_vllm(house: House) -> None:
    done = house.run("""
        import os
        os.environ["VLLM_OMNI_PATCH"] = "0"
        import vllm.worker
        show([vllm.worker.Worker().load("a"), "vllm_omni_patch.loading.loader" in sys.modules])
    """)
    assert done.value == [["a", 1], False]


def test_a_flag_that_is_set_late_is_caught_by_the_plugin(house: House) -> None:
    done = house.run(
        """
        import vllm.worker, vllm.plugins
        arm()
        vllm.plugins.load_general_plugins()
        from vllm_omni_patch import ledger
        show([vllm.worker.Worker().load("a"), ledger.process()["activation_path"]])
    """,
        activate=False,
    )
    assert done.value == [["ours", ["a", 1]], "plugin"]
    assert "was not set yet when vLLM was imported" in done.err


def test_the_plugin_imports_nothing_with_the_flag_off(house: House) -> None:
    done = house.run(
        """
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        show(sorted(m for m in sys.modules if m.startswith("vllm_omni_patch")))
    """,
        flag=None,
        activate=False,
    )
    assert done.value == ["vllm_omni_patch", "vllm_omni_patch.startup"]
    assert done.err == ""


@pytest.mark.parametrize(
    ("value", "known", "unknown"),
    [
        ("probe", ["probe"], []),
        (" probe , ", ["probe"], []),
        ("probe,nope", ["probe"], ["nope"]),
        ("2", [], ["2"]),
        ("1,probe", ["probe"], ["1"]),
        ("PROBE", [], ["PROBE"]),
    ],
)
def test_names_are_never_guessed(house: House, value: str, known: list[str], unknown: list[str]) -> None:
    done = house.run(
        """
        import vllm.worker
        from vllm_omni_patch import ledger
        show([[e.patch, e.state, e.reason] for e in ledger.entries() if e.patch != "loader"])
    """,
        flag=value,
    )
    assert [row[0] for row in done.value if row[1] == "applied"] == known
    told = [row for row in done.value if row[1] == "failed"]
    assert [row[0] for row in told] == unknown
    for _, _, reason in told:
        assert "known: available_memory, ec_connector, model_local_kv, probe" in reason
        assert reason in done.err


# -- other tools in the import system

GREEDY = """
from importlib.machinery import PathFinder
class Greedy:
    # Answers for vllm by itself, as some tracers do.
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name.partition(".")[0] == "vllm" else None
"""


def test_a_tool_in_front_that_answers_itself_is_caught_up_with(house: House) -> None:
    done = house.run(
        GREEDY,
        """
        sys.meta_path.insert(0, Greedy())
        import vllm.worker
        first = vllm.worker.Worker().load("a")
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        from vllm_omni_patch.loading import wrappers
        show([first, vllm.worker.Worker().load("a"), wrappers.depth(vars(vllm.worker.Worker)["load"], "probe")])
    """,
    )
    assert done.value == [["a", 1], ["ours", ["a", 1]], 1]


def test_after_a_greedy_tool_was_seen_we_stand_first(house: House) -> None:
    house.patch("late", 'T("vllm.runner", "Runner.execute")', ["vllm.runner:Runner.execute"])
    done = house.run(
        GREEDY,
        """
        import vllm
        sys.meta_path.insert(0, Greedy())
        import vllm.worker, vllm.plugins
        from vllm_omni_patch import startup
        startup.plugin()
        import vllm.runner
        show([vllm.worker.Worker().load("a"), vllm.runner.Runner().execute(1)])
    """,
        flag="probe,late",
    )
    assert done.value == [["ours", ["a", 1]], ["ours", [1]]]


def test_wrapts_own_hooks_and_ours_both_run(house: House) -> None:
    done = house.run("""
        import wrapt
        seen = []
        wrapt.register_post_import_hook(lambda module: seen.append(module.__name__), "vllm.worker")
        import vllm.worker
        show([seen, vllm.worker.Worker().load("a")])
    """)
    assert done.value == [["vllm.worker"], ["ours", ["a", 1]]]


def test_a_package_in_a_zip_file_is_hooked(house: House, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", house.folder, "vllm")
    shutil.rmtree(house.folder / "vllm")
    done = house.run(
        f"""
        sys.path.insert(0, {archive!r})
        import vllm.other, vllm.worker, vllm.runner
        show([vllm.__loader__.__class__.__name__, vllm.worker.Worker().load("a")])
    """,
        VLLM_OMNI_PATCH_UNLISTED="apply",
    )
    assert done.value == ["zipimporter", ["ours", ["a", 1]]]


def test_eight_threads_import_at_once(house: House) -> None:
    house.patch("late", 'T("vllm.runner", "Runner.execute")', ["vllm.runner:Runner.execute"])
    house.write("late/hooks.py", (house.folder / "late/hooks.py").read_text() + "\nimport vllm.worker\n")
    house.write("probe/hooks.py", (house.folder / "probe/hooks.py").read_text() + "\nimport vllm.runner\n")
    code = """
        import faulthandler, importlib, threading, time
        faulthandler.dump_traceback_later(20, exit=True)
        names = ["vllm", "vllm.worker", "vllm.runner", "vllm.user", "vllm.other", "json", "vllm.plugins", "email"]
        start = threading.Barrier(len(names))
        def go(name):
            start.wait()
            importlib.import_module(name)
        threads = [threading.Thread(target=go, args=(name,)) for name in names]
        [t.start() for t in threads]
        [t.join() for t in threads]
        import vllm.worker, vllm.runner
        from vllm_omni_patch.loading import wrappers, loader
        show([wrappers.depth(vars(vllm.worker.Worker)["load"], "probe"),
              wrappers.depth(vars(vllm.runner.Runner)["execute"], "late")])
    """
    for _ in range(5):
        assert house.run(code, flag="probe,late").value == [1, 1]


# -- kinds of processes and interpreters


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_are_patched_like_their_parent(house: House, method: str) -> None:
    house.write(
        "child.py",
        """
        import os, pickle
        def child(pipe):
            import vllm.worker
            from vllm_omni_patch import ledger
            from vllm_omni_patch.loading import wrappers
            bound = pickle.loads(pickle.dumps(vllm.worker.Worker()))
            states = [e.state for e in ledger.entries() if e.patch != "loader"]
            ledger.save()
            pipe.send([bound.load("a"), wrappers.depth(vars(vllm.worker.Worker)["load"], "probe"), states, os.getpid()])
    """,
    )
    house.write(
        "main.py",
        f"""
        import json, multiprocessing, os, sys
        import child
        if __name__ == "__main__":
            import vllm_omni_patch
            vllm_omni_patch.activate()
            import vllm.worker
            context = multiprocessing.get_context({method!r})
            here, there = context.Pipe()
            process = context.Process(target=child.child, args=(there,))
            process.start()
            *answer, pid = here.recv()
            process.join()
            print(json.dumps([answer, pid == process.pid]))
    """,
    )
    # Children of spawn and forkserver are interpreters of their own: a startup file arms them, here sitecustomize.
    house.write("sitecustomize.py", LINE)
    done = subprocess.run(
        [sys.executable, str(house.folder / "main.py")],
        env=house.environment("probe", VLLM_OMNI_PATCH_REPORT_DIR=str(house.reports)),
        cwd=house.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == '[[["ours", ["a", 1]], 1, ["applied"]], true]', done.stderr
    assert len(house.ledgers()) == 2


@pytest.mark.parametrize("option", ["-I", "-E", "-O", "-s"])
def test_interpreter_options_do_not_disarm_the_line(house: House, option: str) -> None:
    head = f"import sys; sys.path[:0] = [{str(house.folder)!r}, {str(PLACE)!r}]; exec({LINE!r}, {{}})\n"
    code = head + "import vllm.worker; print(vllm.worker.Worker().load('a'))"
    done = subprocess.run(
        [sys.executable, option, "-c", code],
        env=house.environment("probe"), cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("('ours', ('a', 1))\n", "")


def test_without_site_the_plugin_activates(house: House) -> None:
    needed = {str(Path(__import__(name).__file__ or "").parent.parent) for name in ("wrapt", "packaging")}
    code = (
        "import vllm.worker, vllm.plugins; vllm.plugins.load_general_plugins(); print(vllm.worker.Worker().load('a'))"
    )
    env = house.environment("probe")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *needed])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "('ours', ('a', 1))\n", done.stderr


def test_states_are_the_same_from_any_folder(house: House) -> None:
    assert house.run("import os; os.chdir('/'); import vllm.worker", STATES).value == {LOAD: ["applied", ""]}
