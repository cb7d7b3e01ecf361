# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch ec``: what it counts, finds and removes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.cli import app
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry
from vllm_omni_patch.patches.ec_connector.storage.files import FileStore
from vllm_omni_patch.patches.ec_connector.storage.folder_listing import Listing
from vllm_omni_patch.patches.ec_connector.storage.key import Key, stable_u64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three entries of model ``a`` and two of model ``b``."""
    (tmp_path / "shm").mkdir()
    for model, count in (("a", 3), ("b", 2)):
        config = ECConfig(shm_path=str(tmp_path / "shm"), disk_path=str(tmp_path / "disk"))
        engine = ECCacheEngine(config, ModelIdentity(model, engine_id=model), role="worker", dtype=torch.bfloat16)
        for index in range(count):
            assert engine.put(f"{model}{index}", torch.ones(600, 512, dtype=torch.bfloat16))
        assert engine.flush(10)
        engine.close()
    return tmp_path / "disk"


def call(*args: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.ec"))


def test_stats(folder: Path) -> None:
    assert json.loads(call("stats", folder / "ec-v1", "--json")[1])["entries"] == 5, "the inner folder will do too"
    code, text = call("stats", folder, "--json")
    found = json.loads(text)
    assert code == 0 and found["entries"] == 5 and found["bytes"] == sum(p.stat().st_size for p in entries(folder))
    assert found["models"]["a"]["entries"] == 3 and found["models"]["b"]["entries"] == 2
    code, text = call("stats", folder)
    assert code == 0 and "5 entries" in text and "a: 3 entries" in text


def test_verify_finds_every_damaged_entry(folder: Path) -> None:
    assert call("verify", folder) == (0, f"{folder}/ec-v1: 5 entries are sound, 0 are not\n")
    first, second, third, *_ = entries(folder)
    data = bytearray(first.read_bytes())
    data[-8] ^= 0x80
    first.write_bytes(data)
    os.truncate(second, 100)
    third.write_bytes(b"nothing")
    code, text = call("verify", folder, "--json")
    found = json.loads(text)
    assert code == 1 and found["good"] == 2 and set(found["bad"]) == {str(first), str(second), str(third)}
    assert call("verify", folder, "--remove")[0] == 1
    assert call("verify", folder)[0] == 0 and len(entries(folder)) == 2


def test_clear_by_model_age_and_all(folder: Path) -> None:
    assert call("clear", folder)[0] == 2, "nothing is removed unless it is said what"
    old = entries(folder)[0]
    os.utime(old, (time.time() - 7200,) * 2)
    code, text = call("clear", folder, "--older-than", "1h", "--json")
    assert code == 0 and json.loads(text)["removed"] == 1 and not old.exists()
    assert call("clear", folder, "--older-than", "soon")[0] == 2
    future = entries(folder)[0]
    os.utime(future, (time.time() + 7200,) * 2)
    assert call("clear", folder, "--older-than", "1h")[0] == 0 and not future.exists(), "its age is not known"
    code, text = call("clear", folder, "--model", "b", "--json")
    found = json.loads(text)
    assert code == 0 and found["left"] == len(entries(folder)) == 5 - 2 - found["removed"]
    assert "b" not in json.loads(call("stats", folder, "--json")[1])["models"]
    code, text = call("clear", folder, "--all")
    assert code == 0 and entries(folder) == []
    assert [p for p in (folder / "ec-v1").iterdir() if p.name not in ("lock", "tmp")] == []


def test_another_folder_is_refused(tmp_path: Path) -> None:
    for command in (("stats",), ("verify",), ("clear", "--all")):
        code, text = call(command[0], tmp_path, *command[1:])
        assert code == 2 and "no encoder cache" in text


def plant(folder: Path, model: object) -> None:
    """One more entry, with a name of somebody else's making."""
    first = entries(folder)[0]
    key = Key(b"planted", stable_u64("planted"), "bfloat16", b"p" * 32)
    payload = memoryview(bytearray(64))
    path = first.parent.parent / key.path
    path.parent.mkdir(exist_ok=True)
    header = Entry.describe(key, 4, 8, "bfloat16", payload, {"model": "m" * 100}).header
    name = json.dumps(model).encode()
    path.write_bytes(header.replace(b'"%s"' % (b"m" * 100), name.ljust(102)) + payload)


def test_a_name_that_is_no_text_is_no_name(folder: Path) -> None:
    plant(folder, [[[]]])
    code, text = call("stats", folder)
    assert code == 0 and "(no name): 1 entries" in text
    code, text = call("clear", folder, "--model", "(no name)", "--json")
    assert code == 0 and json.loads(text)["removed"] == 1


@pytest.mark.parametrize(("model", "shown"), [("\ud800", r"\ud800"), ("m\x1b[31m\n", r"m\x1b[31m\n")])
def test_names_are_printed_without_what_a_terminal_obeys(model: str, shown: str, folder: Path) -> None:
    plant(folder, model)
    code, text = call("stats", folder)
    assert code == 0 and f"  {shown}: 1 entries" in text and "\x1b" not in text
    assert call("stats", folder, "--json")[0] == 0
    code, text = call("clear", folder, "--model", shown, "--json")
    assert code == 0 and json.loads(text)["removed"] == 1, "named as stats names it"


def test_a_path_that_is_no_text_is_printed(tmp_path: Path) -> None:
    code, text = call("stats", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert code == 2 and r"\udcff holds no encoder cache" in text


def test_clear_says_why_a_folder_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    lock = folder / "ec-v1" / "lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    code, text = call("clear", folder, "--all")
    assert code == 2 and "removed 0 entries, then stopped" in text and "must be writable" in text
    assert len(entries(folder)) == 5 and not (tmp_path / "elsewhere").exists()


def test_clear_spares_what_is_behind_links(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "victim" / entries(folder)[0].name
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    (folder / "ec-v1" / ("a" * 32)).symlink_to(theirs.parent)
    assert call("clear", folder, "--all")[0] == 0
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stats"], "No numbers are shown"),
        (["verify"], " entries were sound, 0 were not, 0 were removed"),
        (["clear", "--all"], "Removed "),
    ],
)
def test_an_interrupted_command_says_how_far_it_came_and_harms_nothing(
    words: list[str], sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = Listing.published

    def published(self: Listing, name: str) -> Any:
        looked.append(name)
        if len(looked) == 3:
            raise KeyboardInterrupt
        yield from real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Listing, "published", published)
        code, text = call(words[0], folder, *words[1:])
    assert code == 130 and sentence in text and "run the command again" in text
    left = len(entries(folder))
    assert left == 5 if words[0] != "clear" else f"Removed {5 - left} entries" in text and left > 0
    assert call("verify", folder)[0] == 0
    engine = FileStore(str(folder), 1 << 30)
    counted = engine.folder.counted()
    assert counted == engine.folder.usage()[0], "what was removed was taken off the count"


def test_a_terminal_shows_progress_and_a_pipe_does_not(folder: Path) -> None:
    command = [sys.executable, "-m", "vllm_omni_patch.commands.main", "ec", "stats", str(folder)]
    ours, theirs = pty.openpty()
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 4096):
            text += piece
    os.close(ours)
    assert b"Counting" in text and b"100%" in text and b"5 entries" in shown.stdout
    piped = subprocess.run(command, capture_output=True, check=True)
    assert piped.stderr == b"" and b"5 entries" in piped.stdout
