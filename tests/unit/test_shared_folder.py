# SPDX-License-Identifier: Apache-2.0
"""A folder that goes with the last process that takes part in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_patch.telemetry import shared_folder
from vllm_omni_patch.telemetry.shared_folder import Member

JOIN = """
import os, sys
from vllm_omni_patch.telemetry import shared_folder
from vllm_omni_patch.telemetry.shared_folder import Member
if "no keeper" in sys.argv:
    shared_folder._start_keeper = lambda path: None
mine = Member(sys.argv[1])
if "killed half-way" in sys.argv:
    os.unlink = lambda *_, **__: os.kill(os.getpid(), 9)
print("in", flush=True)
sys.stdin.read()
mine.leave()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "folder")


@pytest.fixture
def join(path: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process that takes part until its input ends, in a session of its own where asked."""
    with contextlib.ExitStack() as ended:

        def start(*options: str, **more: Any) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", JOIN, path, *options]
            process = subprocess.Popen(command, stdin=-1, stdout=-1, **more)
            ended.callback(process.communicate)
            ended.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"in\n"
            return process

        yield start


def keepers(path: str) -> list[int]:
    """Processes that hold the folder's file open and are no member: they wait for its lock."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            files = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}
            if b"once every process" in command and os.path.join(path, shared_folder.ALIVE) in files:
                found.append(int(pid))
    return found


def wait_for(true: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def gone(path: str) -> None:
    wait_for(lambda: not os.path.exists(path))
    wait_for(lambda: not keepers(path))


def test_the_last_to_leave_removes_it(path: str) -> None:
    one, other = Member(path), Member(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    one.leave()
    assert other.is_there() and not shared_folder.remove_if_left(path)
    other.leave()
    gone(path)
    other.leave()


def test_killed_at_once(path: str, join: Any) -> None:
    """Stopped first, so that none of them notices that the others are gone."""
    processes = [join() for _ in range(3)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            process.send_signal(number)
    gone(path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_until_all_others_have_gone(path: str, join: Any, end: signal.Signals) -> None:
    """As slow as a teardown can be: the process still holds its lock when the one that made the folder leaves."""
    first, slow = join(), join()
    os.kill(slow.pid, signal.SIGSTOP)
    first.communicate()
    time.sleep(0.2)
    assert os.path.isdir(path) and first.returncode == 0
    os.kill(slow.pid, end)
    if end != signal.SIGKILL:
        assert os.path.isdir(path)
        os.kill(slow.pid, signal.SIGCONT)
    gone(path)


def test_the_keeper_is_nobodys_child_and_holds_nothing(path: str, join: Any) -> None:
    """A group that is told to end does not take it along, and whoever reads the maker's output sees its end."""
    maker = join(start_new_session=True)
    wait_for(lambda: len(keepers(path)) == 1)
    other = join()
    (keeper,) = keepers(path)
    fields = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != maker.pid and int(fields[3]) != maker.pid
    files = {os.readlink(one) for one in Path(f"/proc/{keeper}/fd").iterdir()}
    assert files == {"/dev/null", os.path.join(path, shared_folder.ALIVE)}
    assert os.readlink(f"/proc/{keeper}/cwd") == "/"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(keeper, number)
    maker.kill()
    maker.communicate()
    assert keepers(path) == [keeper] and os.path.isdir(path)
    other.kill()
    gone(path)


def test_the_keeper_leaves_a_folder_that_others_made_anew(path: str, tmp_path: Path, join: Any) -> None:
    maker = join()
    wait_for(lambda: keepers(path))
    (keeper,) = keepers(path)
    os.rename(path, tmp_path / "away")
    theirs = join()
    maker.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{keeper}"))
    assert os.path.isdir(path) and os.path.isdir(tmp_path / "away")
    theirs.kill()
    gone(path)


@pytest.mark.parametrize("where", ["", "/nowhere/python"])
def test_no_keeper_can_be_started(path: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(sys, "executable", where)
    mine = Member(path)
    assert mine.is_there() and not keepers(path)
    mine.leave()
    assert not os.path.exists(path)


def test_the_next_start_clears_what_was_left_without_a_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_start_keeper", lambda path: None)
    paths = [str(tmp_path / f"{shared_folder.PREFIX}{name}") for name in ("killed", "alive", "not ours")]
    members = [Member(one) for one in paths]
    for left in (members[0], members[2]):
        left.forget()
    (tmp_path / f"{shared_folder.PREFIX}never joined").mkdir()
    (tmp_path / f"{shared_folder.PREFIX}link").symlink_to(paths[2])
    shared_folder.sweep(str(tmp_path), lambda name: "not ours" not in name)
    left_over = {one.name.removeprefix(shared_folder.PREFIX) for one in tmp_path.iterdir()}
    assert left_over == {"alive", "not ours", "never joined", "link"}
    members[1].leave()


def test_what_a_killed_process_left_is_removed(path: str, join: Any) -> None:
    process = join("no keeper")
    assert not shared_folder.remove_if_left(path)
    process.kill()
    process.communicate()
    assert os.path.isdir(path)
    assert shared_folder.remove_if_left(path) and not os.path.exists(path)


def filled(path: str) -> None:
    for folder in ("ec-v1/00", "ec-v1/01"):
        os.makedirs(os.path.join(path, folder))
        for name in range(50):
            Path(path, folder, str(name)).touch()


@pytest.mark.parametrize("how", ["end", "start"])
def test_neither_end_nor_start_waits_for_many_files(
    path: str, join: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a keeper's work once the time is up, also where the first keeper was killed."""
    monkeypatch.setattr(shared_folder, "_CLEAR_S", 0.0)
    removed: list[str] = []
    real = os.unlink
    monkeypatch.setattr(os, "unlink", lambda *args, **more: (removed.append(args[0]), real(*args, **more)))
    if how == "end":
        mine = Member(path)
        for keeper in keepers(path):
            os.kill(keeper, signal.SIGKILL)
        filled(path)
        mine.leave()
    else:
        process = join("no keeper")
        filled(path)
        process.kill()
        process.communicate()
        assert shared_folder.remove_if_left(path)
    assert removed == []
    deadline = time.monotonic() + 20
    while os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_in_which_nobody_took_part_is_not_judged(path: str) -> None:
    assert not shared_folder.remove_if_left(path)
    os.mkdir(path)
    assert not shared_folder.remove_if_left(path) and os.path.isdir(path)


def test_a_forked_child_that_forgets_does_not_end_its_parents_part(path: str) -> None:
    mine = Member(path)
    pid = os.fork()
    if pid == 0:
        mine.forget()
        os._exit(0)
    os.waitpid(pid, 0)
    assert not shared_folder.remove_if_left(path)
    mine.leave()


def test_a_folder_made_anew_belongs_to_others(path: str, tmp_path: Path) -> None:
    mine = Member(path)
    os.rename(path, tmp_path / "away")
    theirs = Member(path)
    assert not mine.is_there()
    mine.leave()
    assert theirs.is_there()
    theirs.leave()


@pytest.mark.parametrize("reused", [False, True])
def test_a_handle_closed_behind_our_back_is_not_taken_for_ours(path: str, tmp_path: Path, reused: bool) -> None:
    """``reused``: the folder went with its lock, and the new file has got the inode of the old one."""
    mine = Member(path)
    opened = os.open(tmp_path / "stranger", os.O_RDWR | os.O_CREAT)
    stranger = os.dup2(opened, mine._handle)  # closes it, and gives its number to another file
    os.close(opened)
    if reused:
        mine._file = os.fstat(stranger)
        os.utime(stranger, ns=(0, mine._file.st_mtime_ns + 1))
    fcntl.flock(stranger, fcntl.LOCK_SH)
    assert not mine.is_there()
    mine.leave()
    os.fstat(stranger)
    other = os.open(tmp_path / "stranger", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(stranger)


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Member(str(tmp_path / "missing" / "folder"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        Member(str(tmp_path / "link"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Member(str(tmp_path / "file"))
    (tmp_path / "open").mkdir(0o755)
    with pytest.raises(PermissionError, match="is not a private folder of user"):
        Member(str(tmp_path / "open"))
    assert not os.listdir(tmp_path / "open")


@pytest.mark.parametrize("kept", [True, False])
def test_whoever_is_killed_while_removing_leaves_the_rest_to_others(path: str, join: Any, kept: bool) -> None:
    """The file with the lock goes last: a folder without it would belong to nobody forever."""
    process = join("killed half-way", *([] if kept else ["no keeper"]))
    os.makedirs(os.path.join(path, "inner", "deep"))
    for name in ("inner/entry", "a", "zz"):
        Path(path, name).touch()
    os.symlink("/", os.path.join(path, "link"))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    if not kept:
        assert os.path.exists(os.path.join(path, shared_folder.ALIVE))
        assert shared_folder.remove_if_left(path) and not os.path.exists(path)
    gone(path)
    assert os.path.isdir("/usr"), "links are not followed"
