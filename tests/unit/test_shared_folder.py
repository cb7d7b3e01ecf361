# SPDX-License-Identifier: Apache-2.0
"""A folder that goes with the last process that takes part in it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_patch import shared_folder
from vllm_omni_patch.shared_folder import Member

JOIN = (
    "import sys; from vllm_omni_patch.shared_folder import Member; m = Member(sys.argv[1]); print('in', flush=True); "
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "folder")


def test_the_last_to_leave_removes_it(path: str) -> None:
    one, other = Member(path), Member(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    one.leave()
    assert other.is_there() and not shared_folder.remove_if_left(path)
    other.leave()
    assert not os.path.exists(path)
    other.leave()


def test_what_a_killed_process_left_is_removed(path: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"{JOIN}sys.stdin.read()", path], stdin=-1, stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    assert not shared_folder.remove_if_left(path)
    process.kill()
    process.communicate()
    assert os.path.isdir(path)
    assert shared_folder.remove_if_left(path) and not os.path.exists(path)


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


def test_a_handle_closed_behind_our_back_is_not_taken_for_ours(path: str, tmp_path: Path) -> None:
    mine = Member(path)
    os.close(mine._handle)
    stranger = os.open(tmp_path / "stranger", os.O_RDWR | os.O_CREAT)
    assert stranger == mine._handle
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
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        Member(str(tmp_path / "link"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Member(str(tmp_path / "file"))
