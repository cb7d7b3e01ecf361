# SPDX-License-Identifier: Apache-2.0
"""Numbers of several processes on one page."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_house import House
from vllm_omni_patch import metrics
from vllm_omni_patch.commands import processes
from vllm_omni_patch.telemetry import exposition, numbers, shared_folder

prometheus = pytest.importorskip("prometheus_client")

SERVER = """
import os, subprocess, sys
import vllm.v1.metrics.prometheus as served
from prometheus_client import generate_latest
from vllm_omni_patch import metrics
CHILD = '''
import vllm
from vllm_omni_patch import metrics
metrics.add("steps_total", "Steps.", 2, kind="a")
metrics.add("steps_total", "Steps.", 3, kind="a")
metrics.set_gauge("size_bytes", "Size.", 10, rank=0)
metrics.flush()
'''
def page():
    text = generate_latest(served.get_prometheus_registry()).decode()
    return [line for line in text.splitlines() if line.startswith("vllm_omni_patch_") and "info" not in line]
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.patch("probe", 'T("vllm.worker", "Worker.load")', ["vllm.worker:Worker.load"])
    return house


def sample(pid: int, **more: Any) -> dict[str, Any]:
    """A snapshot of a living process on another host."""
    return {
        "pid": pid, "host": "elsewhere", "families": {}, "values": [], "states": [], "vllm_version": "7.0.0", **more
    }  # fmt: skip


def lines(*snapshots: dict[str, Any]) -> list[str]:
    registry = prometheus.CollectorRegistry()

    class Fixed:
        def collect(self) -> Any:
            return exposition.families(list(snapshots))

    registry.register(Fixed())
    text = prometheus.generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


APPLIED = 'patch="probe",state="applied",target="vllm.worker:Worker.load",vllm_version="7.0.0"'
COUNTER = {"steps_total": ["counter", "Steps."]}
GAUGE = {"size_bytes": ["gauge", "Size."]}


def test_counters_are_summed_and_keep_what_ended_processes_counted() -> None:
    one = sample(1, families=COUNTER, values=[["steps_total", [["kind", "a"]], 2.0]])
    other = sample(2, families=COUNTER, values=[["steps_total", [["kind", "a"]], 3.0], ["steps_total", [], 1.0]])
    ended = sample(2**22 + 7, host=platform.node(), families=COUNTER, values=[["steps_total", [], 5.0]])
    assert lines(one, other, ended) == [
        "vllm_omni_patch_steps_total 6.0",
        'vllm_omni_patch_steps_total{kind="a"} 5.0',
    ]


def test_a_gauge_is_shown_as_it_is_where_one_process_set_it() -> None:
    one = sample(
        1, families=GAUGE, values=[["size_bytes", [["rank", "0"]], 10.0], ["size_bytes", [["rank", "1"]], 7.0]]
    )
    other = sample(2, families=GAUGE, values=[["size_bytes", [["rank", "2"]], 10.0]])
    assert lines(one, other) == [
        'vllm_omni_patch_size_bytes{rank="0"} 10.0',
        'vllm_omni_patch_size_bytes{rank="1"} 7.0',
        'vllm_omni_patch_size_bytes{rank="2"} 10.0',
    ]


@pytest.mark.parametrize("second", [10.0, 11.0])
def test_one_gauge_of_two_processes_is_told_apart_by_process(second: float) -> None:
    """Also where they agree: the ranks 0 of two data-parallel engines hold as much each, and a sum counts both."""
    one = sample(1, families=GAUGE, values=[["size_bytes", [["rank", "0"]], 10.0]])
    other = sample(2, families=GAUGE, values=[["size_bytes", [["rank", "0"]], second]])
    assert lines(one, other) == [
        'vllm_omni_patch_size_bytes{pid="1",rank="0"} 10.0',
        f'vllm_omni_patch_size_bytes{{pid="2",rank="0"}} {second}',
    ]
    assert lines(one, {**other, "pid": 1, "host": "third"}) == [
        'vllm_omni_patch_size_bytes{host="elsewhere",pid="1",rank="0"} 10.0',
        f'vllm_omni_patch_size_bytes{{host="third",pid="1",rank="0"}} {second}',
    ]


def test_a_gauge_of_a_process_that_ended_is_gone() -> None:
    ended = sample(2**22 + 7, host=platform.node(), families=GAUGE, values=[["size_bytes", [], 10.0]])
    assert lines(ended) == []


def test_states_are_shown_once_and_waiting_only_where_nobody_settled() -> None:
    one = sample(1, states=[["p", "m:f", "pending"], ["p", "m:g", "pending"], ["p", "m:h", "applied"]])
    other = sample(2, states=[["p", "m:f", "applied"], ["p", "m:h", "failed"]])
    assert lines(one, other) == [
        'vllm_omni_patch_info{patch="p",state="applied",target="m:f",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="pending",target="m:g",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="applied",target="m:h",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="failed",target="m:h",vllm_version="7.0.0"} 1.0',
    ]


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_childs_numbers_are_on_its_parents_page(house: House, tmp_path: Path, multiprocess: bool) -> None:
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if multiprocess else {}
    house.write("sitecustomize.py", "import vllm_omni_patch; vllm_omni_patch.activate()\n")
    done = house.run(
        SERVER,
        """
        folder = os.environ["VLLM_OMNI_PATCH_RUN_DIR"]
        metrics.add("steps_total", "Steps.", 1, kind="a")
        for _ in range(2):
            subprocess.run([sys.executable, "-c", CHILD], check=True)
        subprocess.run([sys.executable, "-c", CHILD + "import os; os._exit(9)"])
        show([page(), page(), folder, os.path.isdir(folder)])
    """,
        **env,
    )
    first, second, folder, there = done.value
    assert (
        first == second == ['vllm_omni_patch_steps_total{kind="a"} 16.0']
    )  # children ended: their gauges went with them
    assert there
    gone(folder)


def test_a_registry_that_is_made_for_each_scrape_has_ours_too(house: House, tmp_path: Path) -> None:
    """In multiprocess mode the metrics route makes its own registry and leaves vLLM's aside."""
    done = house.run(
        SERVER,
        """
        from prometheus_client import CollectorRegistry, multiprocess
        metrics.add("steps_total", "Steps.", 1)
        def scrape():
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
            lines = generate_latest(registry).decode().splitlines()
            return [line for line in lines if line.startswith("vllm_omni_patch_steps_total ")]
        show([scrape(), scrape()])
    """,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    )
    assert done.value == [["vllm_omni_patch_steps_total 1.0"]] * 2


def test_a_scrape_is_a_use_of_our_place_on_vllms_registry(house: House, tmp_path: Path) -> None:
    code = """
from vllm_omni_patch import ledger
def called():
    name = "vllm.v1.metrics.prometheus:get_prometheus_registry"
    return next(e["called"] for e in ledger.snapshot()["entries"] if e["target"] == name)
before = called()
page()
show([before, called()])
"""
    done = house.run(SERVER, code, TMPDIR=str(tmp_path))
    assert done.value == [False, True]


def test_the_info_row_and_a_living_childs_gauge_are_there(house: House) -> None:
    house.write("sitecustomize.py", "import vllm_omni_patch; vllm_omni_patch.activate()\n")
    done = house.run(
        SERVER,
        """
        import vllm.worker
        child = subprocess.Popen([sys.executable, "-c", CHILD + "print('ready', flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        rows = page()
        text = generate_latest(served.get_prometheus_registry()).decode()
        child.communicate("\\n")
        info = [line for line in text.splitlines() if line.startswith("vllm_omni_patch_info")]
        show([rows, [line for line in info if 'patch="loader"' not in line]])
    """,
    )
    assert done.value == [
        ['vllm_omni_patch_size_bytes{rank="0"} 10.0', 'vllm_omni_patch_steps_total{kind="a"} 5.0'],
        [f"vllm_omni_patch_info{{{APPLIED}}} 1.0"],
    ]


def test_a_forked_child_counts_from_zero(house: House) -> None:
    done = house.run(
        SERVER,
        """
        metrics.add("steps_total", "Steps.", 1)
        pid = os.fork()
        if pid == 0:
            metrics.add("steps_total", "Steps.", 10)
            metrics.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        show(page())
    """,
    )
    assert done.value == ["vllm_omni_patch_steps_total 11.0"]


def test_a_late_number_is_left_behind_too(house: House) -> None:
    done = house.run("""
        import vllm, os, json, time
        from vllm_omni_patch import metrics
        for _ in range(50):
            metrics.add("steps_total", "Steps.")
        deadline = time.monotonic() + 20
        path = os.path.join(metrics.folder(), metrics._name())
        while time.monotonic() < deadline:
            values = json.load(open(path))["values"] if os.path.exists(path) else []
            if values == [["steps_total", [], 50.0]]:
                break
            time.sleep(0.05)
        show(values)
    """)
    assert done.value == [["steps_total", [], 50.0]]


def test_a_run_folder_of_another_host_is_left_alone(house: House, tmp_path: Path) -> None:
    elsewhere = tmp_path / "vllm-omni-patch-run-otherhost-abc"
    done = house.run(
        SERVER,
        """
        metrics.add("steps_total", "Steps.", 1)
        show(page())
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(elsewhere),
    )
    assert done.value == ["vllm_omni_patch_steps_total 1.0"]
    assert done.err == ""
    assert not elsewhere.exists()


def test_a_folder_that_the_user_named_is_made_and_kept(house: House, tmp_path: Path) -> None:
    named = tmp_path / "shared" / "run"
    done = house.run(SERVER, 'metrics.add("steps_total", "Steps."); show(page())', VLLM_OMNI_PATCH_RUN_DIR=str(named))
    assert done.value == ["vllm_omni_patch_steps_total 1.0"]
    (left,) = named.glob("metrics-*.json")
    assert json.loads(left.read_text())["values"] == [["steps_total", [], 1.0]]


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
        monkeypatch.setattr(metrics, "MEMORY", str(tmp_path))
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
    metrics._sweep(str(tmp_path))
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
    parents = [str(temporary)] + ([metrics.MEMORY] if os.path.isdir(metrics.MEMORY) else [])
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
    done = house.run(SERVER, LATE, f"os.kill(child.pid, 19); {server}")
    folder, child = done.shown[-1]
    try:
        assert os.path.isdir(folder) or "child.pid" in server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
    gone(folder)


def gone(folder: str) -> None:
    deadline = time.monotonic() + 60
    while os.path.exists(folder):
        assert time.monotonic() < deadline, f"{folder} is left"
        time.sleep(0.02)


def test_the_last_of_a_run_removes_its_folder(house: House) -> None:
    """A child may live longer than the server that made the folder."""
    done = house.run(
        SERVER,
        """
        import vllm
        late = CHILD + "print('up', flush=True); sys.stdin.read(); time.sleep(2); metrics.flush()"
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
        SERVER, 'metrics.add("steps_total", "Steps."); show(page())', VLLM_OMNI_PATCH_RUN_DIR="/proc/nowhere"
    )
    assert done.value == ["vllm_omni_patch_steps_total 1.0"]


def test_the_flag_off_leaves_no_folder(house: House, tmp_path: Path) -> None:
    env = {**house.environment(None), "TMPDIR": str(tmp_path)}
    before = set(tmp_path.iterdir())
    code = "import vllm.worker, vllm.plugins; vllm.plugins.load_general_plugins()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set(tmp_path.iterdir()) == before


def test_numbers_change_in_place(tmp_path: Path) -> None:
    path = str(tmp_path / "numbers")
    mine = numbers.Numbers(path)
    mine.put_all([1.5, float("nan"), -2.0])
    mine.put(2, 7.25)
    first, second, third, fourth = numbers.read(path, 4)
    assert (first, third, fourth) == (1.5, 7.25, None)
    assert second is not None and math.isnan(second)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        numbers.Numbers(path)


@pytest.mark.parametrize("damage", [b"\1", b"\0" * 16, b"noise" * 3], ids=["a write seen halfway", "zeros", "noise"])
def test_a_damaged_number_is_none(tmp_path: Path, damage: bytes) -> None:
    mine = numbers.Numbers(str(tmp_path / "numbers"))
    mine.put_all([3.0, 4.0])
    with open(mine.path, "r+b") as file:
        file.write(damage)
    assert numbers.read(mine.path, 2) == [None, 4.0]


def test_a_file_of_numbers_that_was_cut_short_removed_or_replaced(tmp_path: Path) -> None:
    mine = numbers.Numbers(str(tmp_path / "numbers"))
    mine.put_all([1.0, 2.0, 3.0])
    os.truncate(mine.path, 0)
    mine.put(2, 4.0)
    assert numbers.read(mine.path, 3) == [None, None, 4.0]
    other = tmp_path / "precious"
    other.write_bytes(b"x" * 100)
    os.unlink(mine.path)
    with pytest.raises(FileNotFoundError):
        mine.put(0, 1.0)
    os.symlink(other, mine.path)
    with pytest.raises(OSError):
        mine.put(0, 1.0)
    assert other.read_bytes() == b"x" * 100
    os.unlink(mine.path)
    os.mkfifo(mine.path)
    with pytest.raises(OSError, match="not a plain file"):
        numbers.read(mine.path, 1)


def test_a_reader_never_sees_a_number_that_was_not_written(tmp_path: Path) -> None:
    """A process writes 1000000, 1000001, ... as fast as it can; each look finds at least what the one before did."""
    mine = numbers.Numbers(str(tmp_path / "numbers"))
    mine.put_all([1e6])
    pid = os.fork()
    if pid == 0:
        count = 1e6
        while True:
            count += 1
            mine.put(0, count)
    try:
        looks, before = 0, 1e6
        end, give_up = time.monotonic() + 1.5, time.monotonic() + 60
        while time.monotonic() < end or (looks <= 100 and time.monotonic() < give_up):
            (value,) = numbers.read(mine.path, 1)
            assert value is not None and value >= before
            looks, before = looks + (value > before), value
        assert looks > 100
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


PLACES = """
import json, os, time
from vllm_omni_patch import metrics
def settled(value):
    metrics.add("steps_total", "Steps.", value)
    metrics.flush()
def shown():
    rows = metrics.read_snapshots()[1:]
    return sorted(value for row in rows for _, _, value in row["values"])
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, as the run folder is by itself."""
    if not os.path.isdir(metrics.MEMORY):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(prefix="vllm-omni-patch-test-", dir=metrics.MEMORY) as folder:
        yield Path(folder)


def test_a_number_is_seen_at_once_and_no_snapshot_is_written_for_it(house: House, memory: Path) -> None:
    done = house.run(
        PLACES,
        """
        import vllm
        settled(1)
        pid = os.fork()
        if pid == 0:
            settled(10)
            time.sleep(0.6)  # the snapshot that the new number itself asked for
            path = os.path.join(metrics.folder(), metrics._name())
            before = os.stat(path).st_mtime_ns
            metrics.add("steps_total", "Steps.", 5)
            time.sleep(0.6)
            os._exit(0 if os.stat(path).st_mtime_ns == before else 3)
        first = os.waitpid(pid, 0)[1]
        show([first, shown()])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [0, [15.0]], "a killed child's last number counts too"


def test_the_last_snapshot_holds_the_numbers_itself(house: House, memory: Path) -> None:
    house.run(
        PLACES,
        'import vllm; settled(1); metrics.add("steps_total", "Steps.", 2); show(1)',
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    (left,) = memory.iterdir()
    one = json.loads(left.read_text())
    assert "numbers" not in one and one["values"] == [["steps_total", [], 3.0]]


def test_numbers_go_on_where_their_file_is_removed_or_may_not_be_mapped(house: House, memory: Path) -> None:
    code = """
        import vllm
        settled(1)
        kept = [name for name in os.listdir(metrics.folder()) if name.startswith("numbers-")]
        for name in kept:
            os.unlink(os.path.join(metrics.folder(), name))
        for _ in range(200):
            metrics.add("steps_total", "Steps.")
        metrics.flush()
        one = metrics._read(metrics.folder(), metrics._name())
        show([len(kept), one["values"], "numbers" in one])
    """
    done = house.run(PLACES, code, VLLM_OMNI_PATCH_RUN_DIR=str(memory))
    assert done.value == [1, [["steps_total", [], 201.0]], True]
    memory.chmod(0o777)
    done = house.run(PLACES, code, VLLM_OMNI_PATCH_RUN_DIR=str(memory))
    assert done.value == [0, [["steps_total", [], 201.0]], False]


def test_a_snapshot_that_could_not_be_left_is_tried_again(house: House, memory: Path) -> None:
    """A memory that is nearly full has room for the small file of numbers, and not for the snapshot that names it."""
    done = house.run(
        PLACES,
        """
        import resource, signal, vllm
        metrics.RETRY_S = 0.5
        metrics.set_gauge("size_bytes", "Size.", 3)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
        metrics.flush()
        metrics.flush()
        named = [name for name in os.listdir(metrics.folder()) if name.startswith("metrics-")]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        deadline = time.monotonic() + 20
        path = os.path.join(metrics.folder(), metrics._name())
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        metrics.set_gauge("size_bytes", "Size.", 4)
        show([named, metrics._read(metrics.folder(), metrics._name())["values"]])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [[], [["size_bytes", [], 4.0]]]
    assert done.err.count("cannot show its numbers on /metrics") == 1


def test_a_counter_is_never_less_than_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of numbers of a living process is damaged, then lost, and its snapshot is older; then that breaks."""
    families = {**COUNTER, **GAUGE}
    values = [["steps_total", [["kind", "a"]], 1.0], ["size_bytes", [], 8.0]]
    mine = numbers.Numbers(str(tmp_path / "numbers-x"))
    mine.put_all([1000.0, 5.0])
    one = sample(1, families=families, values=values, numbers="numbers-x")
    path = tmp_path / "metrics-elsewhere-1-0.json"
    path.write_text(json.dumps(one))
    monkeypatch.setattr(metrics, "_seen", {})
    monkeypatch.setenv("VLLM_OMNI_PATCH_RUN_DIR", str(tmp_path))
    seen = []
    for damage in (lambda: os.truncate(mine.path, 0), lambda: os.unlink(mine.path), lambda: path.write_text("")):
        seen.append([value for _, _, value in metrics.read_snapshots()[1]["values"]])
        damage()
    seen.append([value for _, _, value in metrics.read_snapshots()[1]["values"]])
    assert seen == [[1000.0, 5.0]] * 4


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, "null", '{"families": {}, "values": null}', '{"values": [["x_total", [], "a"]]}'],
    ids=["empty", "list", "object", "deep", "null", "no values", "text for a number"],
)
def test_a_broken_snapshot_costs_only_itself(
    house: House, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_RUN_DIR", str(tmp_path))
    whole = sample(1, families=COUNTER, values=[["steps_total", [], 2.0]])
    (tmp_path / "metrics-elsewhere-1-0.json").write_text(json.dumps(whole))
    (tmp_path / "metrics-elsewhere-2-0.json").write_text(text)
    os.mkfifo(tmp_path / "metrics-elsewhere-3-0.json")
    (tmp_path / "metrics-elsewhere-4-0.json").mkdir()
    assert [one["values"] for one in metrics.read_snapshots()[1:]] == [[["steps_total", [], 2.0]]]


def test_a_label_that_is_no_text_does_not_cost_the_page(house: House) -> None:
    done = house.run(
        SERVER,
        r"""
        metrics.add("steps_total", "Steps.", 1, path="a\udc80b", other='"\n\\')
        show(page())
    """,
    )
    assert done.value == ['vllm_omni_patch_steps_total{other="\\"\\n\\\\",path="a?b"} 1.0']


def test_another_process_with_the_id_of_one_that_ended(tmp_path: Path) -> None:
    born = processes.born()
    if not born:
        pytest.skip("no /proc here")
    now = sample(os.getpid(), host=platform.node(), born=born, families=GAUGE, values=[["size_bytes", [], 1.0]])
    before = {**now, "born": born - 1, "values": [["size_bytes", [], 2.0]]}
    assert lines(before, now) == ["vllm_omni_patch_size_bytes 1.0"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_last_numbers_of_children_of_multiprocessing(house: House, method: str) -> None:
    house.write(
        "child.py",
        """
        def child():
            import vllm_omni_patch
            vllm_omni_patch.activate()
            from vllm_omni_patch import metrics
            metrics.add("steps_total", "Steps.", 5)
            if __import__("os").environ.get("AND_SO_ON"):
                import multiprocessing
                grandchild = multiprocessing.get_context("fork").Process(target=grand)
                grandchild.start()
                grandchild.join()
        def grand():
            from vllm_omni_patch import metrics
            metrics.add("steps_total", "Steps.", 100)
    """,
    )
    done = house.run(
        SERVER,
        f"""
        import multiprocessing, child
        if __name__ == "__main__":
            metrics.add("steps_total", "Steps.", 1)
            for _ in range(2):
                process = multiprocessing.get_context("{method}").Process(target=child.child)
                process.start()
                process.join()
            show(page())
    """,
        AND_SO_ON="1",
    )
    assert done.value == ["vllm_omni_patch_steps_total 211.0"]


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
        metrics.flush()
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
        metrics.changed()
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


def test_a_worker_that_learns_of_the_run_folder_late(house: House, memory: Path) -> None:
    """Ray starts a worker, and vLLM then gives it the environment of its driver."""
    late = memory / "late"
    late.mkdir()
    done = house.run(
        PLACES,
        f"""
        import vllm
        settled(1)
        first = metrics.folder()
        os.environ["VLLM_OMNI_PATCH_RUN_DIR"] = {str(late)!r}
        metrics.add("steps_total", "Steps.", 5)
        deadline = time.monotonic() + 20
        path = os.path.join({str(late)!r}, metrics._name())
        while (not os.path.exists(path) or os.path.exists(first)) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        metrics.add("steps_total", "Steps.", 10)
        show([metrics._read({str(late)!r}, metrics._name())["values"], os.path.exists(first)])
    """,
    )
    assert done.value == [[["steps_total", [], 16.0]], False]


def test_numbers_of_a_process_without_a_free_descriptor(house: House, memory: Path) -> None:
    done = house.run(
        PLACES,
        """
        import resource, vllm
        settled(1000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        name = metrics._name()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for _ in range(10):
            metrics.add("steps_total", "Steps.")
        metrics.flush()
        same = metrics._name() == name
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        metrics.flush()
        metrics.add("steps_total", "Steps.")
        files = sorted(one.partition("-")[0] for one in os.listdir(metrics.folder()))
        show([same, files, metrics._read(metrics.folder(), name)["values"]])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [True, ["metrics", "numbers"], [["steps_total", [], 1011.0]]]


def test_a_run_folder_outlives_its_owners_closed_descriptors(house: House) -> None:
    done = house.run(
        PLACES,
        """
        import vllm
        settled(1)
        os.closerange(3, 64)
        settled(1)
        other = subprocess.run([sys.executable, "-c", "from vllm_omni_patch import metrics; metrics.start()"],
                               env={**os.environ, "VLLM_OMNI_PATCH_RUN_DIR": ""})
        show([metrics.folder(), os.path.exists(metrics.folder())])
    """.replace("import vllm\n", "import subprocess, sys, vllm\n"),
    )
    folder, there = done.value
    assert there
    gone(folder)


def test_a_log_handler_that_counts(house: House, memory: Path) -> None:
    """And that is slow: with debug lines on, and nothing that can be written."""
    done = house.run(
        PLACES,
        """
        import logging, threading, vllm
        from vllm_omni_patch import ledger
        class Counting(logging.Handler):
            def emit(self, record):
                time.sleep(0.3)
                metrics.add("lines_total", "Lines.")
                metrics.changed()
        ledger.logger("").addHandler(Counting())
        ledger.logger("").setLevel(logging.DEBUG)
        settled(1)
        os.rename(metrics.folder(), metrics.folder() + ".away")
        open(metrics.folder(), "w").close()
        threads = [threading.Thread(target=settled, args=(1,), daemon=True) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join(15) for thread in threads]
        stuck = sum(thread.is_alive() for thread in threads)
        os.unlink(metrics.folder())
        os.rename(metrics.folder() + ".away", metrics.folder())
        show([stuck, metrics.values()[("steps_total", ())], metrics.values()[("lines_total", ())] < 4])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory / "run"),
    )
    assert done.value == [0, 5.0, True]
