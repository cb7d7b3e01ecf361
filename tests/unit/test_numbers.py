# SPDX-License-Identifier: Apache-2.0
"""The numbers of a process in its file, whatever happens to the file."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_house import House
from vllm_omni_patch.telemetry import number_file, run_folder
from vllm_omni_patch.telemetry.number_file import Key, Number, NumberFile

A: Key = ("a_total", (("kind", "x"),))
B: Key = ("b_bytes", ())


def counter(value: float) -> Number:
    return Number("counter", "A.", value)


def gauge(value: float) -> Number:
    return Number("gauge", "B.", value)


def values(path: str | Path) -> dict[Key, float]:
    return {key: number.value for key, number in number_file.read(str(path)).items()}


class Written:
    """A file of numbers, and what was written to it."""

    def __init__(self, folder: Path) -> None:
        self.file = NumberFile(str(folder))
        self.path = Path(self.file.path)
        self.numbers: dict[Key, Number] = {}

    def write(self, **values: float) -> None:
        changed = {}
        for name, value in values.items():
            changed |= {A: counter(value)} if name == "a" else {B: gauge(value)}
        self.numbers |= changed
        self.file.write(changed, lambda: self.numbers)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.patch("probe", 'T("vllm.worker", "Worker.load")', ["vllm.worker:Worker.load"])
    return house


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, as the run folder is by itself."""
    if not os.path.isdir(run_folder.MEMORY):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(prefix="vllm-omni-patch-test-", dir=run_folder.MEMORY) as folder:
        yield Path(folder)


# -- the file


def test_a_number_changes_in_its_place(written: Written) -> None:
    written.write(a=1.5, b=math.nan)
    size = written.path.stat().st_size
    written.write(a=7.25)
    found = number_file.read(str(written.path))
    assert found[A] == Number("counter", "A.", 7.25) and math.isnan(found[B].value)
    written.write(a=-2.2250738585072014e-308, b=1e300)
    assert values(written.path) == {A: -2.2250738585072014e-308, B: 1e300}
    about = written.path.stat()
    assert (about.st_size, about.st_mode & 0o777) == (size, 0o600)
    assert number_file.written_by(written.path.name)[1] == os.getpid()


@pytest.mark.parametrize("offset", [10, 22, 26, 40], ids=["blanks", "value", "checksum", "description"])
@pytest.mark.parametrize("damage", [b"\0" * 8, b"7", b"\n"], ids=["zeros", "digit", "line end"])
def test_a_damaged_line_hides_only_its_number(written: Written, offset: int, damage: bytes) -> None:
    written.write(a=3.0, b=4.0)
    with open(written.path, "r+b") as file:
        file.seek(offset)
        file.write(damage)
    assert values(written.path) == {B: 4.0}
    written.write(a=5.0)
    assert values(written.path) in ({A: 5.0, B: 4.0}, {B: 4.0})


def test_a_file_that_somebody_truncates_is_written_anew(written: Written) -> None:
    written.write(a=1.0, b=2.0)
    for size in (0, 20, 90, 500):
        os.truncate(written.path, size)
        assert values(written.path).items() <= {A: 1.0, B: 2.0}.items()
        written.write(a=1.0)
        assert values(written.path) == {A: 1.0, B: 2.0}


def test_a_file_that_is_removed_or_replaced_is_not_written(written: Written, tmp_path: Path) -> None:
    written.write(a=1.0)
    other = tmp_path / "precious"
    other.write_bytes(b"x" * 100)
    for replace in (
        lambda: None,
        lambda: written.path.symlink_to(other),
        lambda: os.mkfifo(written.path),
        lambda: written.path.hardlink_to(other),
    ):
        written.path.unlink(missing_ok=True)
        replace()
        with pytest.raises(OSError):
            written.write(a=2.0)
    assert other.read_bytes() == b"x" * 100


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(OSError):
            number_file.read(str(tmp_path / name))


def test_a_reader_never_sees_a_number_that_was_not_written(written: Written) -> None:
    """A process writes 1000000, 1000001, ... as fast as it can; each look finds at least what the one before did."""
    written.write(a=1e6)
    pid = os.fork()
    if pid == 0:
        count = 1e6
        while True:
            count += 1
            written.write(a=count)
    try:
        looks, before = 0, 1e6
        end, give_up = time.monotonic() + 1.5, time.monotonic() + 60
        while time.monotonic() < end or (looks <= 100 and time.monotonic() < give_up):
            value = values(written.path)[A]
            assert value >= before
            looks, before = looks + (value > before), value
        assert looks > 100
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# -- a process

PROCESS = """
import os, sys, threading, time
import vllm
from vllm_omni_patch import metrics
from vllm_omni_patch.telemetry import number_file, numbers, run_folder
def count(amount=1):
    metrics.add("steps_total", "Steps.", amount)
def shown(part="steps_total"):
    folder = run_folder.path()
    files = [number_file.read(os.path.join(folder, name)) for name in os.listdir(folder) if name != "alive"]
    return sorted(one.value for file in files for (name, _), one in file.items() if part in name)
def wait_for(true):
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()
"""


def test_in_memory_a_number_is_there_at_once(house: House, memory: Path) -> None:
    done = house.run(
        PROCESS,
        """
        seen = []
        for _ in range(3):
            count()
            seen += shown()
        if os.fork() == 0:
            count(10)
            count(5)
            os.kill(os.getpid(), 9)
        os.wait()
        names = {thread.name for thread in threading.enumerate()}
        show([seen, shown(), "vllm-omni-patch-metrics" in names])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [[1.0, 2.0, 3.0], [3.0, 15.0], False], "a killed child's last number counts too"


def test_on_a_disk_another_thread_writes(house: House, tmp_path: Path) -> None:
    """Nothing that the counting thread does waits for the disk, and no count is lost at the end."""
    run = tmp_path / "run"
    done = house.run(
        PROCESS,
        """
        writers = set()
        real = os.pwrite
        def pwrite(*args):
            writers.add(threading.current_thread().name)
            return real(*args)
        os.pwrite = pwrite
        for _ in range(50):
            count()
        there = wait_for(lambda: shown() == [50.0])
        time.sleep(0.6)
        writers_before = sorted(writers)
        count()
        begun = time.monotonic()
        wait_for(lambda: shown() == [51.0])
        seconds = time.monotonic() - begun
        show([there, writers_before, seconds])
        count(100)
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(run),
    )
    there, writers, seconds = done.value
    assert there and writers == ["vllm-omni-patch-metrics"]
    assert seconds < 5, "half a second, on a machine that is not busy"
    (left,) = run.iterdir()
    assert values(left) == {("steps_total", ()): 151.0}


def test_an_ended_process_leaves_its_counts_and_no_gauge(house: House, memory: Path) -> None:
    code = 'import vllm.worker; metrics.set_gauge("size_bytes", "Size.", 2); show(1)'
    house.run(PROCESS, code, VLLM_OMNI_PATCH_RUN_DIR=str(memory))
    assert list(memory.iterdir()) == []
    house.run(PROCESS, "count()", code, VLLM_OMNI_PATCH_RUN_DIR=str(memory))
    (left,) = memory.iterdir()
    found = values(left)
    assert found.pop(("steps_total", ())) == 1.0
    assert found and all(math.isnan(value) for value in found.values())


def test_numbers_go_on_where_their_file_is_removed(house: House, memory: Path) -> None:
    done = house.run(
        PROCESS,
        """
        count()
        for name in os.listdir(run_folder.path()):
            os.unlink(os.path.join(run_folder.path(), name))
        gone = shown()
        for _ in range(200):
            count()
        show([gone, shown()])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [[], [201.0]]


def test_a_write_that_failed_is_tried_again(house: House, memory: Path) -> None:
    """A gauge that is set once, while the memory is full, is on the page when there is room again."""
    done = house.run(
        PROCESS,
        """
        import resource
        numbers.RETRY_S = 0.5
        count()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        metrics.set_gauge("size_bytes", "Size." * 20, 3)
        count()
        time.sleep(1.5)
        full = shown()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        wait_for(lambda: len(shown("_")) == 2)
        show([full, shown("_")])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [[2.0], [2.0, 3.0]], "what there is room for is written"
    assert done.err.count("cannot write its numbers for /metrics") == 1


def test_a_worker_that_learns_of_the_run_folder_late(house: House, memory: Path) -> None:
    """Ray starts a worker, and vLLM then gives it the environment of its driver."""
    late = memory / "late"
    late.mkdir()
    done = house.run(
        PROCESS,
        f"""
        count()
        first = run_folder.path()
        os.environ["VLLM_OMNI_PATCH_RUN_DIR"] = {str(late)!r}
        count(5)
        count(10)
        show([shown(), wait_for(lambda: not os.path.exists(first))])
    """,
    )
    assert done.value == [[16.0], True]


def test_numbers_of_a_process_without_a_free_descriptor(house: House, memory: Path) -> None:
    done = house.run(
        PROCESS,
        """
        import resource
        numbers.RETRY_S = 0.2
        count(1000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for _ in range(10):
            count()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_for(lambda: shown() == [1010.0])
        count()
        wait_for(lambda: shown() == [1011.0])
        show([shown(), len(os.listdir(run_folder.path()))])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [[1011.0], 1]


def test_a_handler_that_counts_in_the_middle_of_a_write(house: House, memory: Path) -> None:
    """Python runs signal handlers, and the finalizers of objects, between any two steps of a thread."""
    done = house.run(
        PROCESS,
        """
        import signal
        signal.signal(signal.SIGALRM, lambda *_: count())
        count()
        real = os.pwrite
        def pwrite(*args):
            os.pwrite = real
            signal.raise_signal(signal.SIGALRM)
            return real(*args)
        os.pwrite = pwrite
        count()
        show(shown())
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory),
    )
    assert done.value == [3.0]


def test_a_log_handler_that_counts(house: House, memory: Path) -> None:
    """And that is slow: with debug lines on, and nothing that can be written."""
    done = house.run(
        PROCESS,
        """
        import logging
        from vllm_omni_patch import ledger
        from vllm_omni_patch.telemetry import states
        class Counting(logging.Handler):
            def emit(self, record):
                time.sleep(0.3)
                metrics.add("lines_total", "Lines.")
                states.update()
        ledger.logger("").addHandler(Counting())
        ledger.logger("").setLevel(logging.DEBUG)
        count()
        os.rename(run_folder.path(), run_folder.path() + ".away")
        open(run_folder.path(), "w").close()
        threads = [threading.Thread(target=count, daemon=True) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join(15) for thread in threads]
        stuck = sum(thread.is_alive() for thread in threads)
        wait_for(lambda: ("lines_total", ()) in metrics.values())
        os.unlink(run_folder.path())
        os.rename(run_folder.path() + ".away", run_folder.path())
        show([stuck, metrics.values()[("steps_total", ())], metrics.values()[("lines_total", ())] < 4])
    """,
        VLLM_OMNI_PATCH_RUN_DIR=str(memory / "run"),
    )
    assert done.value == [0, 5.0, True]
