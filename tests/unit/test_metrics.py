# SPDX-License-Identifier: Apache-2.0
"""Numbers of several processes on one page."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from support.fake_house import House, gone
from vllm_omni_patch.telemetry import exposition, number_file, numbers, processes, reading, states
from vllm_omni_patch.telemetry.number_file import Key, Number, NumberFile
from vllm_omni_patch.telemetry.reading import Process

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


def process(pid: int, *numbers: tuple[Key, Number], alive: bool = True, host: str = "here") -> Process:
    return Process(host, pid, alive, dict(numbers))


def steps(value: float, **labels: str) -> tuple[Key, Number]:
    return ("steps_total", tuple(labels.items())), Number("counter", "Steps.", value)


def size(value: float, **labels: str) -> tuple[Key, Number]:
    return ("size_bytes", tuple(labels.items())), Number("gauge", "Size.", value)


def state(target: str, state: str) -> tuple[Key, Number]:
    return (states.NAME, states.labels("p", target, state, "7.0.0")), Number("gauge", states.HELP, 1.0)


def lines(*processes: Process) -> list[str]:
    registry = prometheus.CollectorRegistry()

    class Fixed:
        def collect(self) -> Any:
            return exposition.families(list(processes))

    registry.register(Fixed())
    text = prometheus.generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


APPLIED = 'patch="probe",state="applied",target="vllm.worker:Worker.load",vllm_version="7.0.0"'


def test_counters_are_summed_and_keep_what_ended_processes_counted() -> None:
    one, other = process(1, steps(2, kind="a")), process(2, steps(3, kind="a"), steps(1))
    assert lines(one, other, process(3, steps(5), alive=False)) == [
        "vllm_omni_patch_steps_total 6.0",
        'vllm_omni_patch_steps_total{kind="a"} 5.0',
    ]


def test_a_gauge_is_shown_as_it_is_where_one_process_set_it() -> None:
    one, other = process(1, size(10, rank="0"), size(7, rank="1")), process(2, size(10, rank="2"))
    assert lines(one, other) == [
        'vllm_omni_patch_size_bytes{rank="0"} 10.0',
        'vllm_omni_patch_size_bytes{rank="1"} 7.0',
        'vllm_omni_patch_size_bytes{rank="2"} 10.0',
    ]


@pytest.mark.parametrize("second", [10.0, 11.0])
def test_one_gauge_of_two_processes_is_told_apart_by_process(second: float) -> None:
    """Also where they agree: the ranks 0 of two data-parallel engines hold as much each, and a sum counts both."""
    one = process(1, size(10, rank="0"))
    assert lines(one, process(2, size(second, rank="0"))) == [
        'vllm_omni_patch_size_bytes{pid="1",rank="0"} 10.0',
        f'vllm_omni_patch_size_bytes{{pid="2",rank="0"}} {second}',
    ]
    assert lines(one, process(1, size(second, rank="0"), host="there")) == [
        'vllm_omni_patch_size_bytes{host="here",pid="1",rank="0"} 10.0',
        f'vllm_omni_patch_size_bytes{{host="there",pid="1",rank="0"}} {second}',
    ]


def test_a_gauge_that_is_not_known_or_whose_process_ended_is_gone() -> None:
    assert lines(process(1, size(10), alive=False), process(2, size(math.nan))) == []


def test_states_are_shown_once_and_waiting_only_where_nobody_settled() -> None:
    one = process(1, state("m:f", "pending"), state("m:g", "pending"), state("m:h", "applied"))
    other = process(2, state("m:f", "applied"), state("m:h", "failed"))
    ended = process(3, state("m:i", "failed"), alive=False)
    assert lines(one, other, ended) == [
        'vllm_omni_patch_info{patch="p",state="applied",target="m:f",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="applied",target="m:h",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="failed",target="m:h",vllm_version="7.0.0"} 1.0',
        'vllm_omni_patch_info{patch="p",state="pending",target="m:g",vllm_version="7.0.0"} 1.0',
    ]


# -- the files of other processes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that this process reads."""
    monkeypatch.setattr(reading, "_seen", {})
    monkeypatch.setattr(numbers, "mine", numbers.ProcessNumbers())
    monkeypatch.setenv("VLLM_OMNI_PATCH_RUN_DIR", str(tmp_path))
    return tmp_path


def left_by(run: Path, process: str, *numbers: tuple[Key, Number]) -> Path:
    """A file as ``process`` leaves it: ``HOST-PID-START``."""
    file = NumberFile(str(run))
    file.write(dict(numbers), dict)
    return Path(file.path).rename(run / f"{number_file.START}{process}-1")


def others() -> list[list[float]]:
    return [[number.value for number in one.numbers.values()] for one in reading.all_processes()[1:]]


def test_what_cannot_be_read_is_as_it_was_and_no_counter_falls(run: Path) -> None:
    path = left_by(run, "elsewhere-1-0", steps(1000), size(5))
    older = path.read_bytes().replace(b"  1000", b"     1")
    seen = [others()]
    for damage in (b"", b"no numbers", path.read_bytes()[:60], older):
        path.write_bytes(damage)
        seen.append(others())
    path.unlink()
    os.mkfifo(path)
    assert [*seen, others()] == [[[1000.0, 5.0]]] * 6
    path.unlink()
    assert others() == []


@pytest.mark.parametrize("data", [b"", b"\n" * 9, b"[" * 100_000, b"\xff\0\n" * 50, b"{}"])
def test_a_broken_file_costs_only_itself(run: Path, data: bytes) -> None:
    left_by(run, "elsewhere-1-0", steps(2))
    (run / f"{number_file.START}elsewhere-2-0-1").write_bytes(data)
    os.mkfifo(run / f"{number_file.START}elsewhere-3-0-1")
    (run / f"{number_file.START}elsewhere-4-0-1").mkdir()
    (run / f"{number_file.START}nonsense").touch()
    assert [one for one in others() if one] == [[2.0]]


def test_another_process_with_the_id_of_one_that_ended(run: Path) -> None:
    born, host = processes.born(), platform.node()
    if not born:
        pytest.skip("no /proc here")
    left_by(run, f"{host}-{os.getpid()}-{born - 1}", size(2), steps(2))
    left_by(run, f"{host}-{os.getpid()}-{born}", size(1), steps(1))
    assert lines(*reading.all_processes()) == ["vllm_omni_patch_size_bytes 1.0", "vllm_omni_patch_steps_total 3.0"]


# -- processes of an engine


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
            os._exit(0)
        os.waitpid(pid, 0)
        show(page())
    """,
    )
    assert done.value == ["vllm_omni_patch_steps_total 11.0"]


def test_a_label_that_is_no_text_does_not_cost_the_page(house: House) -> None:
    done = house.run(
        SERVER,
        r"""
        metrics.add("steps_total", "Steps.", 1, path="a\udc80b", other='"\n\\')
        show(page())
    """,
    )
    assert done.value == ['vllm_omni_patch_steps_total{other="\\"\\n\\\\",path="a?b"} 1.0']


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
