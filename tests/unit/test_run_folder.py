# SPDX-License-Identifier: Apache-2.0
"""The run folder: made by the first process of an engine, and gone with the last."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.fake_house import House, gone
from vllm_omni_patch.telemetry import number_file, run_folder, shared_folder

pytest.importorskip("prometheus_client")

PAGE = """
import os, subprocess, sys
import vllm.v1.metrics.prometheus as served
from prometheus_client import generate_latest
from vllm_omni_patch import metrics
from vllm_omni_patch.telemetry import run_folder
CHILD = '''
import vllm
from vllm_omni_patch import metrics
metrics.add("steps_total", "Steps.")
'''
def steps():
    text = generate_latest(served.get_prometheus_registry()).decode()
    return [line.split()[1] for line in text.splitlines() if line.startswith("vllm_omni_patch_steps_total")]
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.patch("probe", 'T("vllm.worker", "Worker.load")', ["vllm.worker:Worker.load"])
    return house


def test_a_run_folder_of_another_host_is_left_alone(house: House, tmp_path: Path) -> None:
    elsewhere = tmp_path / "vllm-omni-patch-run-otherhost-abc"
    done = house.run(
        PAGE,
        """
        metrics.add("steps_total", "Steps.", 1)
        show(steps())
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(elsewhere),
    )
    assert done.value == ["1.0"]
    assert done.err == ""
    assert not elsewhere.exists()


def test_a_folder_that_the_user_named_is_made_and_kept(house: House, tmp_path: Path) -> None:
    named = tmp_path / "shared" / "run"
    done = house.run(PAGE, 'metrics.add("steps_total", "Steps."); show(steps())', VLLM_OMNI_PATCH_RUN_DIR=str(named))
    assert done.value == ["1.0"]
    (left,) = named.iterdir()
    assert number_file.read(str(left))[("steps_total", ())].value == 1.0


def test_a_child_that_made_the_folder_removes_it(house: House, tmp_path: Path) -> None:
    house.write(
        "child.py",
        """
        import os
        def child(pipe):
            import vllm_omni_patch
            vllm_omni_patch.activate()
            import vllm
            pipe.send(os.environ["VLLM_OMNI_PATCH_RUN_DIR"])
    """,
    )
    done = house.run(
        """
        import multiprocessing, os, child
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=child.child, args=(there,))
        process.start()
        folder = here.recv()
        process.join()
        show(folder)
    """,
        activate=True,
        TMPDIR=str(tmp_path),
    )
    assert "vllm-omni-patch-run-" in done.value
    gone(done.value)


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_killed_engine_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    """In memory also what another container left; elsewhere another host may be at work."""
    monkeypatch.setattr(shared_folder, "_start_keeper", lambda path: None)
    if in_memory:
        monkeypatch.setattr(run_folder, "MEMORY", str(tmp_path))
    here, there = f"run-{platform.node()}-", "run-otherhost-"
    names = {f"{here}{name}" for name in ("killed", "alive", "quiet", "never joined", "just made")}
    names |= {f"{there}killed", f"{there}quiet", "ec-0-killed"}
    paths = {name: tmp_path / f"{shared_folder.PREFIX}{name}" for name in names}
    for path in paths.values():
        path.mkdir(mode=0o700)
    for name in (f"{here}killed", f"{there}killed", "ec-0-killed"):
        shared_folder.Member(str(paths[name])).forget()
    members = [shared_folder.Member(str(paths[f"{here}{name}"])) for name in ("alive", "quiet")]
    for name in (f"{here}quiet", f"{here}never joined", f"{there}quiet"):
        os.utime(paths[name], (1, 1))
    (tmp_path / f"{shared_folder.PREFIX}{here}linked").symlink_to(paths[f"{here}quiet"])
    run_folder._sweep(str(tmp_path))
    left = {path.name.removeprefix(shared_folder.PREFIX) for path in tmp_path.iterdir()}
    expected = {f"{here}{name}" for name in ("alive", "quiet", "just made", "linked")} | {f"{there}quiet"}
    assert left == (expected if in_memory else expected | {f"{there}killed"})
    for member in members:
        member.leave()


def test_a_start_sweeps_memory_and_temporary_files(house: House, tmp_path: Path) -> None:
    """Also when another patch, or none, is asked for than in the run that was killed."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = """
        import sys
        from vllm_omni_patch.telemetry import shared_folder
        shared_folder._start_keeper = lambda path: None
        for path in sys.argv[1:]:
            shared_folder.Member(path)
        os.kill(os.getpid(), 9)
    """
    parents = [str(temporary)] + ([run_folder.MEMORY] if os.path.isdir(run_folder.MEMORY) else [])
    left = [os.path.join(parent, f"vllm-omni-patch-ec-test-{os.getpid()}") for parent in parents]
    subprocess.run([sys.executable, "-c", "import os" + textwrap.dedent(code), *left])
    assert [os.path.isdir(path) for path in left] == [True] * len(left)
    house.run("import vllm; show(1)", TMPDIR=str(temporary))
    assert [os.path.isdir(path) for path in left] == [False] * len(left)


LATE = """
import vllm
child = subprocess.Popen([sys.executable, "-c", CHILD + "print('up', flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdout.readline()
show([os.environ["VLLM_OMNI_PATCH_RUN_DIR"], child.pid])
sys.stdout.flush()
"""


@pytest.mark.parametrize("server", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit()", "os.kill(child.pid, 9)"])
def test_a_run_folder_goes_with_the_last_however_it_ends(house: House, server: str) -> None:
    """The child is stopped until after the server has gone, and then killed: the slowest teardown there can be."""
    done = house.run(PAGE, LATE, f"os.kill(child.pid, 19); {server}")
    folder, child = done.shown[-1]
    try:
        assert os.path.isdir(folder) or "child.pid" in server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
    gone(folder)


def test_the_last_of_a_run_removes_its_folder(house: House) -> None:
    """A child may live longer than the server that made the folder."""
    done = house.run(
        PAGE,
        """
        import vllm
        late = CHILD + "print('up', flush=True); sys.stdin.read(); time.sleep(2); metrics.add('a_total', 'A.')"
        child = subprocess.Popen([sys.executable, "-c", "import sys, time" + late],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        child.stdout.readline()
        show(os.environ["VLLM_OMNI_PATCH_RUN_DIR"])
    """,
    )
    assert os.path.exists(done.value)
    gone(done.value)


def test_an_unwritable_folder_costs_nothing_but_the_page(house: House) -> None:
    done = house.run(
        PAGE, 'metrics.add("steps_total", "Steps."); show(steps())', VLLM_OMNI_PATCH_RUN_DIR="/proc/nowhere"
    )
    assert done.value == ["1.0"]


def test_the_flag_off_leaves_no_folder(house: House, tmp_path: Path) -> None:
    env = {**house.environment(None), "TMPDIR": str(tmp_path)}
    before = set(tmp_path.iterdir())
    code = "import vllm.worker, vllm.plugins; vllm.plugins.load_general_plugins()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set(tmp_path.iterdir()) == before


def test_two_servers_that_one_program_starts_count_for_themselves(house: House) -> None:
    house.write("sitecustomize.py", "import vllm_omni_patch; vllm_omni_patch.activate()\n")
    house.write(
        "vllm/api_server.py",
        """
        import os, sys
        import vllm.v1.metrics.prometheus as served
        from prometheus_client import generate_latest
        from vllm_omni_patch import metrics
        metrics.add("steps_total", "Steps.", int(sys.argv[1]))
        print("up", flush=True)
        sys.stdin.readline()
        text = generate_latest(served.get_prometheus_registry()).decode()
        print([line.split()[1] for line in text.splitlines() if line.startswith("vllm_omni_patch_steps_total")])
    """,
    )
    done = house.run(
        """
        import subprocess, sys, vllm
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [sys.executable, "-m", "vllm.api_server"]
        servers = [subprocess.Popen([*command, count], **pipes) for count in ("3", "100")]
        for server in servers:
            server.stdout.readline()
        show([server.communicate("\\n")[0].strip() for server in servers])
    """
    )
    assert done.value == ["['3.0']", "['100.0']"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_processes_of_one_server_share_a_folder(house: House, method: str) -> None:
    """vLLM starts its API servers by ``spawn``; what they are to run imports vLLM before they know their parent."""
    house.write("sitecustomize.py", "import vllm_omni_patch; vllm_omni_patch.activate()\n")
    house.write(
        "child.py",
        """
        import vllm
        from vllm_omni_patch import metrics
        metrics.add("steps_total", "Steps.", 0)
        def child():
            metrics.add("steps_total", "Steps.", 5)
    """,
    )
    house.write(
        "vllm/api_server.py",
        f"""
        import multiprocessing
        import vllm.v1.metrics.prometheus as served
        from prometheus_client import generate_latest
        if __name__ == "__main__":
            import child
            for name in ("ApiServer_0", "EngineCore", None):
                process = multiprocessing.get_context("{method}").Process(target=child.child, name=name)
                process.start()
                process.join()
            text = generate_latest(served.get_prometheus_registry()).decode()
            print([line.split()[1] for line in text.splitlines() if line.startswith("vllm_omni_patch_steps_total")])
    """,
    )
    done = house.run("""
        import subprocess, sys, vllm
        show(subprocess.run([sys.executable, "-m", "vllm.api_server"], stdout=-1, text=True).stdout.strip())
    """)
    assert done.value == "['15.0']"


def test_a_run_folder_comes_back_after_its_owner_closed_all_descriptors(house: House) -> None:
    """The lock that held the folder is closed with them, so the keeper removes it; the next count makes it anew."""
    done = house.run(
        PAGE,
        """
        import time, vllm
        metrics.add("steps_total", "Steps.")
        folder, deadline = run_folder.path(), time.monotonic() + 60
        os.closerange(3, 64)
        while os.path.exists(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        metrics.add("steps_total", "Steps.")
        code = "from vllm_omni_patch.telemetry import lifetime; lifetime.start()"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "VLLM_OMNI_PATCH_RUN_DIR": ""})
        show([folder, sorted(name.partition("-")[0] for name in os.listdir(folder))])
    """,
    )
    folder, names = done.value
    assert names == ["alive", "numbers"]
    gone(folder)


RAY_WORKER = "import sys; sys.orig_argv = ['python', 'ray/_private/workers/default_worker.py']"


def test_a_ray_worker_takes_the_folder_of_its_driver(house: House, tmp_path: Path) -> None:
    """Ray unpickles the worker, which imports vLLM; only then does vLLM set what its driver has and the node lacks."""
    driver = tmp_path / "driver"
    done = house.run(
        RAY_WORKER,
        f"""
        import os, vllm.worker, vllm.plugins
        from vllm_omni_patch import metrics
        metrics.add("steps_total", "Steps.", 3)
        first = os.environ.setdefault("VLLM_OMNI_PATCH_RUN_DIR", {str(driver)!r})
        vllm.plugins.load_general_plugins()
        metrics.add("steps_total", "Steps.", 4)
        show([first, os.environ["VLLM_OMNI_PATCH_RUN_DIR"]])
    """,
    )
    assert done.value == [str(driver)] * 2
    (left,) = driver.iterdir()
    assert number_file.read(str(left))[("steps_total", ())].value == 7.0


def test_a_driver_inside_a_ray_worker_makes_the_folder(house: House) -> None:
    """As Ray Serve runs it."""
    done = house.run(
        RAY_WORKER,
        """
        import os, vllm.worker, vllm.plugins
        before = os.environ.get("VLLM_OMNI_PATCH_RUN_DIR")
        vllm.plugins.load_general_plugins()
        show([before, os.environ["VLLM_OMNI_PATCH_RUN_DIR"]])
    """,
    )
    before, after = done.value
    assert before is None and f"vllm-omni-patch-run-{platform.node()}-" in after
    gone(after)
