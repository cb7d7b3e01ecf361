# SPDX-License-Identifier: Apache-2.0
"""A folder of entries: limit over processes, leftovers, damage, strangers' files."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.ec_connector.storage.entry import Entry
from vllm_omni_patch.patches.ec_connector.storage.files import BadEntry, FileStore
from vllm_omni_patch.patches.ec_connector.storage.folder_listing import Published
from vllm_omni_patch.patches.ec_connector.storage.folder_lock import Busy
from vllm_omni_patch.patches.ec_connector.storage.key import Key, encode_id, stable_u64

MIB = 1 << 20
NAMESPACE = b"b" * 32


def key(mm_hash: str, namespace_digest: bytes = NAMESPACE) -> Key:
    return Key(encode_id(mm_hash), stable_u64(mm_hash), "bfloat16", namespace_digest)


def content(mm_hash: str, size: int) -> memoryview:
    return memoryview(bytearray((mm_hash.encode() * (size // len(mm_hash) + 1))[:size]))


def write(store: FileStore, mm_hash: str, size: int = 2048, rows: int = 4, **options: bool) -> str:
    data = content(mm_hash, size)
    entry = Entry.describe(key(mm_hash), rows, size // rows // 2, "bfloat16", data, {})
    return store.write(key(mm_hash), entry, data, **options)


def read(store: FileStore, mm_hash: str, rows: int | None = None) -> bytes | None:
    box: list[bytearray] = []

    def allocate(entry: Entry) -> memoryview:
        box.append(bytearray(entry.payload))
        return memoryview(box[0])

    return None if store.read(key(mm_hash), rows, allocate) is None else bytes(box[0])


def opened(path: Path, limit: int | None = 64 * MIB, **options: float) -> FileStore:
    """A store whose folder is in order, with nothing going on in the background."""
    store = FileStore(str(path), limit, **options)
    store.folder.make()
    if limit is not None:
        store.folder.usage()
    store.folder.upkeep._next = math.inf
    return store


def published(store: FileStore) -> list[Published]:
    shards, old = store.folder.listing.folders()
    return [file for name in shards + old for file in store.folder.listing.published(name)]


def on_disk(store: FileStore) -> int:
    """Bytes of all entries, each in whole pages."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in Path(store.folder.root).rglob("*.ec"))


def age(store: FileStore, mm_hash: str, seconds: float) -> None:
    path = os.path.join(store.folder.root, key(mm_hash).path)
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_is_written_is_read_by_another_store(tmp_path: Path) -> None:
    assert write(opened(tmp_path), "a") == "stored"
    other = opened(tmp_path)
    assert read(other, "a") == bytes(content("a", 2048))
    assert read(other, "a", 4) is not None and read(other, "a", 5) is None and read(other, "b") is None
    assert other.find(key("a"), 4) and not other.find(key("a"), 5)
    assert not other.find(key("a", b"c" * 32)), "another model"


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = opened(tmp_path / "deep" / "er")
        write(store, "a")
    finally:
        os.umask(old)
    for path in Path(store.folder.root).rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(os.stat(store.folder.root).st_mode) == 0o700


@pytest.mark.parametrize("mm_hash", ["../../escaped", "/etc/x", "a\0b", "ü" * 10_000, "\ud800"])
def test_no_id_leaves_the_folder(mm_hash: str, tmp_path: Path) -> None:
    store = opened(tmp_path / "in")
    data = content("z", 64)
    entry = Entry.describe(key(mm_hash), 4, 8, "bfloat16", data, {})
    assert store.write(key(mm_hash), entry, data) == "stored"
    assert store.find(key(mm_hash))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_equal_entry_is_not_written_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a")
    path = os.path.join(store.folder.root, key("a").path)
    before = os.stat(path)
    assert write(opened(tmp_path), "a") == "present"
    assert os.stat(path).st_ino == before.st_ino and os.stat(path).st_mtime_ns == before.st_mtime_ns
    assert write(store, "a", force=True) == "stored"
    assert os.stat(path).st_ino != before.st_ino


def test_same_id_with_another_length_replaces_the_entry(tmp_path: Path) -> None:
    """Scenario: 138 x 64 stored, 638 x 64 expected under the same id."""
    store = opened(tmp_path)
    write(store, "img-1", size=138 * 128, rows=138)
    assert read(store, "img-1", 638) is None
    assert write(store, "img-1", size=638 * 128, rows=638) == "stored"
    assert len(read(store, "img-1", 638) or b"") == 638 * 128
    assert store.folder.counted() == on_disk(store)


def test_two_ids_with_one_64_bit_value_are_never_confused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = Key(b"a", 7, "bfloat16", NAMESPACE)
    second = Key(b"b", 7, "bfloat16", NAMESPACE)
    data = content("a", 64)
    store.write(first, Entry.describe(first, 4, 8, "bfloat16", data, {}), data)
    assert first.path == second.path
    assert store.find(first) and not store.find(second)
    other = content("b", 64)
    assert store.write(second, Entry.describe(second, 4, 8, "bfloat16", other, {}), other) == "stored"
    assert store.find(second) and not store.find(first)


def test_the_limit_holds_over_what_was_there_and_oldest_go_first(tmp_path: Path) -> None:
    """Scenario: limit 10 MiB with 9 MiB there; 2 MiB ten times; remove; store; a file deleted by hand."""
    earlier = opened(tmp_path, 10 * MIB)
    for index in range(9):
        assert write(earlier, f"old{index}", MIB - 4096) == "stored"
        age(earlier, f"old{index}", 1000 - index)
    store = opened(tmp_path, 10 * MIB)
    for index in range(10):
        assert write(store, f"new{index}", 2 * MIB - 4096) == "stored"
        assert on_disk(store) <= 10 * MIB
        assert store.folder.counted() == on_disk(store)
        age(store, f"new{index}", 100 - index)
    assert read(store, "old8") is None and read(store, "new0") is None
    assert read(store, "new9") is not None and read(store, "new7") is not None
    store.remove(key("new9"))
    assert store.folder.counted() == on_disk(store)
    os.unlink(os.path.join(store.folder.root, key("new8").path))
    assert read(store, "new8") is None
    assert write(store, "last", 2 * MIB - 4096) == "stored"
    assert read(store, "last") is not None
    assert store.folder.usage()[0] == on_disk(store) == store.folder.counted()


def test_store_and_remove_leak_no_bytes(tmp_path: Path) -> None:
    store = opened(tmp_path, 10 * MIB)
    for index in range(50):
        assert write(store, f"x{index}", 2 * MIB) == "stored"
        assert store.remove(key(f"x{index}"))
        assert store.folder.counted() == on_disk(store) == 0
    assert write(store, "last", 2 * MIB) == "stored"
    assert read(store, "last") == bytes(content("last", 2 * MIB))


def test_a_hit_saves_an_entry_from_eviction(tmp_path: Path) -> None:
    store = opened(tmp_path, 4 * MIB, touch_seconds=0.0)
    for index, name in enumerate(("a", "b", "c")):
        write(store, name, MIB)
        age(store, name, 100 - index)
    assert read(store, "a") is not None
    write(store, "d", MIB)
    write(store, "e", MIB)
    assert read(store, "a") is not None and read(store, "b") is None


def test_too_large_for_the_folder_is_said(tmp_path: Path) -> None:
    store = opened(tmp_path, MIB)
    assert write(store, "a", 1024) == "stored"
    assert write(store, "b", 2 * MIB) == "too large"
    assert read(store, "a") is not None, "nothing was evicted for it"


@pytest.mark.parametrize("damage", ["truncate", "empty", "grow", "flip header", "flip payload", "garbage"])
@pytest.mark.parametrize("size", [2048, 2 * MIB])
def test_damage_is_found_and_never_served(damage: str, size: int, tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a", size)
    path = os.path.join(store.folder.root, key("a").path)
    length = os.path.getsize(path)
    with open(path, "r+b") as file:
        if damage == "truncate":
            file.truncate(length // 2)
        elif damage == "empty":
            file.truncate(0)
        elif damage == "grow":
            file.truncate(length + 1)
        elif damage == "flip header":
            file.seek(20)
            file.write(b"\xff")
        elif damage == "flip payload":
            file.seek(length - 9)
            file.write(b"\xff")
        else:
            file.write(os.urandom(length))
    with pytest.raises(BadEntry) as error:
        read(store, "a")
    assert store.remove(key("a"), error.value.seen)
    assert read(store, "a") is None and not store.find(key("a"))
    assert write(store, "a", size) == "stored"


def test_a_file_cut_short_while_it_is_read_is_found(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a", 4 * MIB)
    found = store.open(key("a"))
    assert found is not None
    os.truncate(os.path.join(store.folder.root, key("a").path), MIB)
    with pytest.raises(BadEntry, match="cut off"):
        found.read_into(memoryview(bytearray(found.entry.payload)))
    found.close()


def test_an_entry_replaced_while_it_is_read_stays_whole(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a", 4 * MIB)
    found = store.open(key("a"))
    assert found is not None
    write(store, "a", 2 * MIB, force=True)
    buffer = memoryview(bytearray(4 * MIB))
    found.read_into(buffer)
    found.close()
    assert bytes(buffer) == bytes(content("a", 4 * MIB))


def test_a_removal_of_what_was_seen_spares_what_came_after(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a")
    found = store.open(key("a"))
    assert found is not None
    found.close()
    write(store, "a", force=True)
    assert store.remove(key("a"), found.status)
    assert read(store, "a") is not None


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_what_is_no_regular_file_is_no_entry(kind: str, tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    write(store, "a")
    path = os.path.join(store.folder.root, key("a").path)
    copy = tmp_path / "copy"
    os.rename(path, copy)
    if kind == "symlink":
        os.symlink(copy, path)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        os.mkdir(path)
    with pytest.raises((BadEntry, OSError)):
        read(store, "a")
    assert store.folder.usage()[1] == 0


CRASH = """
import os, signal, sys
from vllm_omni_patch.patches.ec_connector.storage.folder import Folder
from vllm_omni_patch.patches.ec_connector.storage.key import Key
folder = Folder(sys.argv[1], 64 << 20)
folder.make()
handle, path = folder.reserve(Key(b"a", 1, "bfloat16", b"b" * 32), 1 << 20)
os.write(handle, b"x" * 1000)
print("written", flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def writer_process(path: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def test_leftovers_of_a_killed_writer_are_counted_then_cleaned(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert writer_process(tmp_path, "die").wait() == -signal.SIGKILL
    assert len(os.listdir(store.folder.listing.tmp)) == 1
    assert store.folder.counted() == MIB
    assert not store.find(Key(b"a", 1, "bfloat16", NAMESPACE))
    store.folder.upkeep._next = 0.0
    assert write(store, "b") == "stored" and store.folder.upkeep.wait(20)
    assert os.listdir(store.folder.listing.tmp) == []
    assert store.folder.counted() == on_disk(store)


def test_a_live_writer_s_file_is_left_alone_and_its_key_is_busy(tmp_path: Path) -> None:
    store = opened(tmp_path)
    process = writer_process(tmp_path, "wait")
    try:
        busy = Key(b"a", 1, "bfloat16", NAMESPACE)
        data = content("a", 64)
        assert store.write(busy, Entry.describe(busy, 4, 8, "bfloat16", data, {}), data) == "busy"
        assert store.folder.usage() == (MIB, 0)
        assert len(os.listdir(store.folder.listing.tmp)) == 1
    finally:
        process.kill()
        process.wait()
    assert store.write(busy, Entry.describe(busy, 4, 8, "bfloat16", data, {}), data) == "stored"
    assert store.folder.usage()[0] == on_disk(store)


def test_a_held_lock_delays_a_store_only_so_long(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a")
    store.folder.lock._seconds = 0.05
    with open(os.path.join(store.folder.root, "lock"), "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="held by another process"):
            write(store, "b")
        assert read(store, "a") is not None, "readers take no lock"
        assert store.remove(key("a")), "nor do removals wait for long"
    assert store.folder.counted() > on_disk(store), "too high, never too low: bytes are taken off under the lock only"
    assert write(store, "b") == "stored"


def test_a_removed_folder_fails_and_comes_back(tmp_path: Path) -> None:
    import shutil

    store = opened(tmp_path / "gone")
    write(store, "a")
    shutil.rmtree(tmp_path / "gone")
    assert read(store, "a") is None
    with pytest.raises(OSError):
        write(store, "b")
    store.folder.make()
    assert write(store, "b") == "stored" and store.folder.counted() == on_disk(store)


def test_a_file_system_without_locks_still_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("vllm_omni_patch.patches.ec_connector.storage.folder_lock.fcntl.flock", refuse)
    store = opened(tmp_path)
    assert write(store, "a") == "stored" and read(store, "a") is not None
    assert store.folder.usage()[0] == on_disk(store)


def test_a_folder_without_a_limit_cleans_leftovers_too(tmp_path: Path) -> None:
    store = opened(tmp_path, None)
    assert writer_process(tmp_path, "die").wait() == -signal.SIGKILL
    store.folder.upkeep._next = 0.0
    assert write(store, "a") == "stored" and store.folder.upkeep.wait(20)
    assert os.listdir(store.folder.listing.tmp) == []
