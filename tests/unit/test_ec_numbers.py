# SPDX-License-Identifier: Apache-2.0
"""What the counters and the log lines of the encoder cache say is what happened."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_ec_cli import call
from test_ec_remote import Server, key, made_entry, tier_on, until

from support.ec_engines import engine_builder, entry_files, output, same  # noqa: F401
from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.cache.staging import Staging
from vllm_omni_patch.patches.ec_connector.cache.writer import Job, Writer
from vllm_omni_patch.patches.ec_connector.stats import ALIKE, HELP, WHO, ECStats
from vllm_omni_patch.patches.ec_connector.storage.remote import RemoteTier

NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """As a user that may not read everything, where the tests run as root."""
    if os.getuid():
        yield
        return
    import encodings.ascii  # noqa: F401 - what is imported late may lie where only root can read

    call("stats", "/nowhere")
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user reaches; those of pytest are closed to others."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "vllm.omni_patch.ec")
    return lambda level="WARNING": [one.getMessage() for one in caplog.records if one.levelname == level]


def engine_in(folder: Path) -> ECCacheEngine:
    config = ECConfig(shm_path=str(folder / f"shm-{os.getuid()}"), disk_path=str(folder / "disk"))
    return ECCacheEngine(config, ModelIdentity("m", engine_id="engine"), role="both", dtype=torch.bfloat16)


def counts(engine: ECCacheEngine) -> dict[str, int]:
    """The counters that are not 0."""
    return {name: int(value) for name, value in engine.stats.values().items() if value and name != "load_seconds"}


def test_switched_off_it_counts_nothing_and_logs_it(build: Any, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_EC_DISABLE", "1")
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) is False
    assert not engine.contains("id") and engine.get("id", "cpu") is None
    engine.discard("id")
    assert counts(engine) == {} and engine.stats.reasons() == {}
    assert any("is disabled (VLLM_OMNI_PATCH_EC_DISABLE)" in text for text in lines("INFO"))
    assert not any("at most" in text for text in lines("INFO")), "it is not on any disk"


def test_an_entry_that_cannot_be_removed_is_one_finding_and_not_called_removed(
    build: Any, tmp_path: Path, lines: Any
) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    (path,) = entry_files(tmp_path)
    path.unlink()
    path.mkdir()
    for _ in range(5):
        assert not engine.contains("id") and engine.get("id", "cpu") is None
    assert counts(engine)["bad_entries"] == 1
    (text,) = lines()
    assert "not a regular file" in text and "no longer offers it" in text and "removed" not in text
    assert path.is_dir()
    line = engine.stats.line(engine.stats.snapshot())
    assert "1 bad entries found" in line and "removed" not in line


def test_an_entry_that_was_removed_is_called_removed(build: Any, tmp_path: Path, lines: Any) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    (path,) = entry_files(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert not engine.contains("id") and not engine.contains("id")
    assert counts(engine)["bad_entries"] == 1 and not path.exists()
    (text,) = lines()
    assert text.endswith("It was removed.")


@pytest.mark.parametrize("closed", ["entry", "folder"])
def test_what_may_not_be_read_is_counted_and_logged_once(closed: str, public: Path, lines: Any) -> None:
    with as_nobody():
        engine = engine_in(public)
        assert engine.put("id", output(4, 4)) and engine.flush(5)
        (file,) = entry_files(public / "disk")
        shut = file if closed == "entry" else file.parent
        shut.chmod(0)
        for _ in range(5):
            assert not engine.contains("id") and engine.get("id", "cpu") is None
        (text,) = lines()
        assert "cannot read from disk" in text and "Permission denied" in text and "ec_read_failures_total" in text
        expected = {"lookups": 5, "misses": 5, "read_failures": 10, "stored": 1, "bytes_stored": 32}
        assert counts(engine) == expected
        assert "10 times storage could not be read" in engine.stats.line(engine.stats.snapshot())
        shut.chmod(0o700)
        assert engine.contains("id") and same(engine.get("id", "cpu"), output(4, 4)), "found once it may be read"
        engine.close()


def test_a_file_where_the_folder_of_entries_belongs_is_no_silent_miss(build: Any, tmp_path: Path, lines: Any) -> None:
    engine = build(disk=True)
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    (file,) = entry_files(tmp_path)
    shutil.rmtree(file.parent)
    file.parent.write_text("")
    assert not engine.contains("id") and engine.get("id", "cpu") is None
    assert (counts(engine)["read_failures"], len(lines())) == (2, 1)
    assert "Not a directory" in lines()[0]


def test_an_entry_that_is_not_there_is_an_ordinary_miss(build: Any, lines: Any) -> None:
    engine = build(disk=True)
    assert not engine.contains("id") and engine.get("id", "cpu") is None
    assert counts(engine) == {"lookups": 1, "misses": 1} and lines() == []


def test_an_error_of_our_own_is_counted_and_logged_once_with_its_place(
    build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build()
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    device: Any = object()
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        for _ in range(3):
            assert engine.get("id", device) is None
    (record,) = caplog.records
    assert "a load ended in TypeError" in record.getMessage() and record.exc_info
    assert counts(engine)["errors"] == counts(engine)["misses"] == 3
    assert "3 unexpected errors" in engine.stats.line(engine.stats.snapshot())


def test_every_operation_counts_an_error_of_its_own(build: Any, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    engine = build()

    def broken(mm_hash: str) -> Any:
        raise TypeError("ours")

    monkeypatch.setattr(engine, "_key", broken)
    for _ in range(2):
        assert not engine.contains("id") and engine.get("id", "cpu") is None
        assert engine.put("id", output(4, 4)) is False
        engine.discard("id")
    assert counts(engine) == {"lookups": 2, "misses": 2, "dropped": 2, "errors": 8}
    assert [text.partition(" ended in ")[0].partition(": ")[2] for text in lines()] == [
        "a lookup",
        "a load",
        "a store",
        "forgetting an entry",
    ]


def test_every_counter_has_a_field_a_help_text_and_somebody_who_counts_it() -> None:
    assert set(HELP) == set(WHO) == set(ECStats("both").snapshot().__dict__) and set(ALIKE) < set(HELP)


# -- the writer


class Place:
    """A tier whose answers are given."""

    name = "a place"

    def __init__(self, *answers: str | OSError) -> None:
        self.answers = list(answers)

    def write(self, *args: Any, **options: Any) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def recover(self) -> None:
        pass


def write_all(place: Place, stats: ECStats, jobs: int, local_only: bool = False) -> None:
    staging = Staging(1 << 20)
    writer = Writer(staging, [place], [], {}, stats, queue_entries=9, retry_seconds=0, stored=lambda key: None)
    for index in range(jobs):
        slot = staging.take(64)
        assert slot is not None and writer.submit(Job(key(str(index)), slot, 4, 8, "bfloat16", local_only=local_only))
        assert writer.flush(10)
    writer.close(5)


def test_writes_resume_when_one_was_stored(lines: Any) -> None:
    stats = ECStats("worker")
    write_all(Place(OSError("read-only"), "present", OSError("read-only")), stats, 3)
    assert len(lines()) == 1 and lines("INFO") == [], "that an entry was there already proves nothing about writes"
    assert (stats.snapshot().dropped, stats.snapshot().duplicates) == (2, 1)
    write_all(Place(OSError("read-only"), "stored"), stats, 2)
    assert any("resumed" in text for text in lines("INFO"))


def test_a_copy_of_what_a_remote_keeps_is_not_called_dropped() -> None:
    stats = ECStats("worker")
    write_all(Place(OSError("full"), "too large"), stats, 2, local_only=True)
    assert stats.snapshot().dropped == 0 and stats.reasons() == {}


def test_an_error_in_the_writer_is_counted_and_logged_once(lines: Any) -> None:
    stats = ECStats("worker")
    write_all(Place(), stats, 3)
    assert (stats.snapshot().errors, stats.reasons()) == (3, {"error": 3})
    assert len(lines()) == 1 and "writing an output ended in IndexError" in lines()[0]


# -- a remote


def shared(folder: Path) -> tuple[RemoteTier, ECStats]:
    from vllm_omni_patch.patches.ec_connector.storage.shared_folder import SharedFolder

    stats = ECStats("worker")
    tier = RemoteTier("fs://", SharedFolder(str(folder), 0.0), ECConfig(lookup_deadline=5.0), stats)
    assert tier.wait_ready(30)
    return tier, stats


def test_an_entry_that_is_replaced_while_it_is_loaded_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    tier, stats = shared(tmp_path)
    assert tier.write(key(), *made_entry()) == "stored"
    real = tier._remote.find

    def then_replaced(*args: Any) -> Any:
        found = real(*args)
        tier._remote.write(key(), *made_entry(rows=7), 1.0)
        return found

    monkeypatch.setattr(tier._remote, "find", then_replaced)
    assert tier.load(key(), 4) is None
    monkeypatch.undo()
    assert stats.snapshot().bad_entries == 0 and lines() == []
    assert tier.contains(key(), 7), "the new entry stays"
    tier.close(1)


def test_a_damaged_header_found_by_a_lookup_is_counted_and_removed(tmp_path: Path, lines: Any) -> None:
    tier, stats = shared(tmp_path)
    assert tier.write(key(), *made_entry()) == "stored"
    (path,) = entry_files(tmp_path)
    path.write_bytes(b"nothing")
    assert not tier.contains(key(), 4) and not tier.contains(key(), 4)
    assert stats.snapshot().bad_entries == 1 and not path.exists()
    assert len(lines()) == 1 and lines()[0].endswith("It was removed.")
    tier.close(1)


def test_a_connection_alone_does_not_say_that_lookups_work(lines: Any) -> None:
    server = Server()
    real, server.find = server.find, broken_header  # type: ignore[method-assign]
    tier = tier_on(server, retry_seconds=0.01)
    assert tier.wait_ready(5)
    until(lambda: not tier.contains(key(), None) and server.connects >= 4)
    assert len(lines()) == 1 and lines("INFO") == []
    server.find = real  # type: ignore[method-assign]
    until(lambda: not tier.contains(key(), None) and bool(lines("INFO")))
    assert "resumed" in lines("INFO")[0]
    tier.close(1)


def broken_header(*args: Any) -> Any:
    raise OSError("Input/output error")


# -- the command line


def stored_by_nobody(folder: Path) -> Path:
    engine = engine_in(folder)
    assert engine.put("id", output(4, 4)) and engine.flush(5)
    engine.close()
    (file,) = entry_files(folder / "disk")
    return file


def test_verify_says_what_it_could_not_remove(public: Path) -> None:
    with as_nobody():
        file = stored_by_nobody(public)
        file.write_bytes(b"nothing")
        file.parent.chmod(0o500)
        code, text = call("verify", public / "disk", "--remove")
        assert code == 1 and f"  not removed: {file}: " in text and file.exists()
        assert json.loads(call("verify", public / "disk", "--remove", "--json")[1])["removed"] == 0
        file.parent.chmod(0o700)
        assert json.loads(call("verify", public / "disk", "--remove", "--json")[1])["removed"] == 1
        assert not file.exists()


@pytest.mark.parametrize("level", ["namespace", "root"])
def test_a_folder_that_may_not_be_listed_is_not_called_empty(level: str, public: Path) -> None:
    with as_nobody():
        file = stored_by_nobody(public)
        shut = file.parent if level == "namespace" else file.parents[1]
        shut.chmod(0o300)
        answers = [call(*words) for words in (("stats", public / "disk"), ("verify", public / "disk"))]
        shut.chmod(0o700)
        assert all("Permission denied" in text for _, text in answers)
        assert [code for code, _ in answers] == ([0, 1] if level == "namespace" else [2, 2])
