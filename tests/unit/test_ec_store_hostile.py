# SPDX-License-Identifier: Apache-2.0
"""A folder in which others have put links, odd names and grown files, and devices that fail late."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_ec_store import MIB, key, on_disk, opened, published, read, write

from support.ec_engines import engine_builder  # noqa: F401
from vllm_omni_patch.patches.ec_connector.cache.tiers import FileTier
from vllm_omni_patch.patches.ec_connector.storage import files as store_module
from vllm_omni_patch.patches.ec_connector.storage import folder as folder_module
from vllm_omni_patch.patches.ec_connector.storage.files import BadEntry, FileStore


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's folder; its first file has the name of an entry."""
    path = tmp_path / "victim"
    path.mkdir()
    for name in (os.path.basename(key("a").path), "other.ec", "precious.txt"):
        (path / name).write_text("theirs")
    return path


def test_a_linked_folder_of_temporaries_is_refused_and_untouched(tmp_path: Path, victim: Path) -> None:
    store = opened(tmp_path / "in")
    os.rmdir(store.folder.listing.tmp)
    os.symlink(victim, store.folder.listing.tmp)
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        store.folder.make()
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        write(store, "a")
    store.folder.usage()
    assert len(list(victim.iterdir())) == 3


def test_a_linked_namespace_folder_is_refused_and_untouched(tmp_path: Path, victim: Path) -> None:
    store = opened(tmp_path / "in", MIB)
    os.symlink(victim, os.path.join(store.folder.root, f"{key('a').shard:02x}"))
    assert published(store) == []
    assert not store.remove(key("a"))
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        write(store, "a")
    assert store.folder.usage() == (0, 0)
    assert sorted(path.read_text() for path in victim.iterdir()) == ["theirs"] * 3


def test_names_of_other_forms_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = opened(tmp_path, 64 * 1024)
    write(store, "a")
    shard = os.fsencode(os.path.join(store.folder.root, f"{key('a').shard:02x}"))
    temporary = os.fsencode(store.folder.listing.tmp)
    foreign = [shard + b"/\xff.ec", shard + b"/notes.ec", temporary + b"/notes.txt"]
    for path in foreign:
        with open(path, "wb") as file:
            file.write(b"x" * 8192)
    again = opened(tmp_path, 64 * 1024)
    for index in range(40):
        assert write(again, f"x{index}") == "stored"
    assert again.folder.usage()[1] <= 16
    assert all(os.path.exists(path) for path in foreign)


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_temporary_name_with_an_impossible_size_costs_nothing(kind: str, tmp_path: Path) -> None:
    store = opened(tmp_path, MIB)
    write(store, "a")
    odd = Path(store.folder.listing.tmp, f"{'b' * 32}.{'9' * 23}.1.ab.tmp")
    if kind == "folder":
        odd.mkdir()
    elif kind == "link":
        odd.symlink_to(tmp_path)
    else:
        odd.write_text("")
    again = opened(tmp_path, MIB)
    assert write(again, "b") == write(again, "c") == "stored"
    assert read(again, "a") is not None
    assert again.folder.usage()[0] == again.folder.counted() == on_disk(again)


def test_a_count_beyond_the_record_is_clamped(tmp_path: Path) -> None:
    store = opened(tmp_path, MIB)
    with store.folder.lock.held() as counts:
        counts.add(7, 1 << 70)
    assert write(store, "a") == "stored"
    assert store.folder.counted() == on_disk(store)


@pytest.mark.parametrize("grown", [1 << 40, 2 * MIB])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_grown_entry_does_not_lift_the_limit(how: str, grown: int, tmp_path: Path) -> None:
    store = opened(tmp_path, 4 * MIB)
    for index in range(30):
        write(store, f"a{index}", 128 * 1024)
    last = "a29"
    os.truncate(os.path.join(store.folder.root, key(last).path), grown)
    if how == "removed":
        with pytest.raises(BadEntry) as error:
            store.find(key(last))
        assert store.remove(key(last), error.value.seen)
    else:
        assert write(store, last, 64 * 1024, force=True) == "stored"
    assert store.folder.counted() >= on_disk(store)
    for index in range(40):
        write(store, f"b{index}", 128 * 1024)
        assert on_disk(store) <= 4 * MIB


def test_a_count_below_zero_is_taken_anew(tmp_path: Path) -> None:
    store = opened(tmp_path, MIB)
    for name in ("a", "b", "c"):
        write(store, name, 256 * 1024)
    with store.folder.lock.held() as counts:
        counts.add(key("a").shard, -200 * 1024)
    store.remove(key("a"))
    with store.folder.lock.held() as counts:
        assert counts.counted_at[key("a").shard] == 0 and counts.total == 2 * (256 + 4) * 1024
    store.folder.upkeep._next = 0.0
    assert write(store, "d", 4096) == "stored" and store.folder.upkeep.wait(20)
    assert store.folder.counted() == on_disk(store)
    with store.folder.lock.held() as counts:
        assert all(counts.counted_at)


def test_small_entries_count_in_whole_pages(tmp_path: Path) -> None:
    store = opened(tmp_path, 10 * 4096)
    for index in range(30):
        assert write(store, f"a{index}", 64) == "stored"
    assert store.folder.usage() == (10 * 4096, 10)


def full_until(monkeypatch: pytest.MonkeyPatch, store: FileStore, entries: int, code: int = errno.ENOSPC) -> None:
    """The device has no room while more than ``entries`` are published."""
    real = store_module._write_all

    def write_all(handle: int, parts: list[memoryview]) -> None:
        if len(published(store)) > entries:
            raise OSError(code, "full")
        real(handle, parts)

    monkeypatch.setattr(store_module, "_write_all", write_all)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_costs_the_oldest_entry(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    for index, name in enumerate(("a", "b", "c")):
        write(store, name)
        os.utime(os.path.join(store.folder.root, key(name).path), (index, index))
    full_until(monkeypatch, store, 2, code)
    assert write(store, "d") == "stored"
    assert read(store, "a") is None and all(read(store, name) is not None for name in ("b", "c", "d"))
    assert store.folder.counted() == on_disk(store) and os.listdir(store.folder.listing.tmp) == []
    full_until(monkeypatch, store, 0)
    with pytest.raises(OSError, match="full"):
        write(store, "e")
    assert store.folder.usage()[1] == 2, "one eviction for each store, however full the device is"


def test_spare_room_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(str(tmp_path), 100 * 4096, spare=4 * 4096)
    store.folder.make()
    total = 10 * 4096

    class Device:
        f_frsize = 4096

        @property
        def f_bavail(self) -> int:
            return (total - on_disk(store)) // 4096

    monkeypatch.setattr(folder_module.os, "statvfs", lambda path: Device())
    for index in range(20):
        assert write(store, f"a{index}", 64) == "stored"
        assert on_disk(store) <= 6 * 4096
    assert on_disk(store) == 6 * 4096
    store.folder.upkeep.stop()


def test_a_private_tier_does_not_make_its_engine_s_folder_again(tmp_path: Path) -> None:
    base = tmp_path / "engine"
    base.mkdir()
    tier = FileTier("memory", FileStore(str(base), MIB), private=True)
    tier.recover()
    assert write(tier.store, "a") == "stored"
    shutil.rmtree(base)
    with pytest.raises(FileNotFoundError, match="was removed while the engine runs"):
        tier.recover()
    assert not base.exists()
    tier.store.folder.upkeep.stop()


def test_the_cpu_tier_is_private_and_leaves_room(build: Any) -> None:
    tier = build()._tiers.local[-1]
    assert tier.private and tier.store.folder._spare == tier.store.limit // 4 > 0


@pytest.mark.parametrize("fails", ["close", "publish"])
def test_a_descriptor_is_closed_once(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    handles: list[int] = []
    closed: list[int] = []
    reserve, close = store.folder.reserve, os.close

    def reserved(*args: Any) -> Any:
        found = reserve(*args)
        assert found is not None
        handles.append(found[0])
        return found

    def closing(handle: int) -> None:
        if handle not in handles or closed.count(handle):
            # Whatever has the number now is somebody else's.
            closed.extend([handle] if handle in handles else [])
            return close(handle)
        close(handle)
        # The number stays taken, as by a thread that opens a file at this moment.
        os.dup2(taken, handle)
        closed.append(handle)
        if fails == "close":
            raise OSError(errno.EIO, "late")

    def publish(*args: Any) -> None:
        raise OSError(errno.EIO, "late")

    taken = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(store.folder, "reserve", reserved)
    if fails == "publish":
        monkeypatch.setattr(store.folder, "publish", publish)
    monkeypatch.setattr(os, "close", closing)
    with pytest.raises(OSError, match="late"):
        write(store, "a")
    monkeypatch.undo()
    assert closed == handles and len(handles) == 1
    os.fstat(handles[0])
    os.close(handles[0])
    os.close(taken)
    assert read(store, "a") is None and os.listdir(store.folder.listing.tmp) == []
    assert store.folder.counted() == 0


def test_a_sparse_file_does_not_decide_what_is_allocated(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, "a")
    path = os.path.join(store.folder.root, key("a").path)
    fields = json.loads(Path(path).read_bytes()[8:].partition(b"}}")[0] + b"}}")
    fields["output"].update(shape=[1 << 33, 64], data_offsets=[0, 1 << 40])
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 64) * 64 - 8
    Path(path).write_bytes(length.to_bytes(8, "little") + text.ljust(length))
    os.truncate(path, 8 + length + (1 << 40))
    with pytest.raises(BadEntry, match="impossible payload"):
        store.find(key("a"))


def test_entries_of_the_layout_before_get_their_place_and_are_counted(tmp_path: Path) -> None:
    store = opened(tmp_path, MIB)
    write(store, "a", 64 * 1024)
    write(store, "b", 64 * 1024)
    before = Path(store.folder.root, key("a").namespace)
    before.mkdir()
    os.rename(os.path.join(store.folder.root, key("a").path), before / key("a").name)
    (before / key("b").name).write_bytes(b"of old")
    (before / "notes.txt").write_text("theirs")
    killed = Path(store.folder.listing.tmp, f"{'b' * 32}.4096.1.ab.tmp")
    killed.write_bytes(bytes(4096))
    assert read(store, "a") is None
    store.folder.upkeep._next = 0.0
    assert write(store, "c") == "stored" and store.folder.upkeep.wait(20)
    assert read(store, "a") is not None and read(store, "b") is not None and not killed.exists()
    assert [path.name for path in before.iterdir()] == ["notes.txt"]
    assert store.folder.counted() == on_disk(store)
