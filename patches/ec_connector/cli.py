# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch ec stats|verify|clear PATH``: look at, check and empty a folder of encoder outputs.

Safe while engines use the folder. ``PATH`` is the folder that ``ec_local_disk`` or an ``fs://`` URL names.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .storage.entry import Entry
from .storage.files import BadEntry, open_path
from .storage.folder import ROOT_NAME, Folder
from .storage.folder_listing import Published

app = typer.Typer(no_args_is_help=True, help="Encoder outputs stored in a folder: count, verify, clear.")
T = TypeVar("T")
_THREADS = 8
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_Path = Annotated[Path, typer.Argument(help="Folder given as ec_local_disk, or the path of an fs:// URL.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass
class _Group:
    """Entries of one model."""

    entries: int = 0
    bytes: int = 0
    oldest: float = math.inf
    newest: float = -math.inf

    def add(self, entries: int, size: int, oldest: float, newest: float) -> None:
        """Add so many more."""
        self.entries += entries
        self.bytes += size
        self.oldest, self.newest = min(self.oldest, oldest), max(self.newest, newest)


@app.command()
def stats(path: _Path, as_json: _Json = False) -> None:
    """Count entries, bytes and ages, by model. Reads headers only."""
    folder = _folder(path)
    now = time.time()
    groups: dict[str, _Group] = {}
    unreadable: list[str] = []

    def read(files: Iterator[Published]) -> dict[str, _Group]:
        found: dict[str, _Group] = {}
        for file in files:
            entry, error = _header(file.path)
            if entry is None:
                unreadable.append(f"{file.path}: {error}")
            found.setdefault(_model(entry), _Group()).add(1, file.size, file.used, file.used)
        return found

    with _interruptible(lambda: "No numbers are shown, because they would be incomplete"):
        for found in _by_folder(folder, "Counting", read):
            for name, group in found.items():
                groups.setdefault(name, _Group()).add(group.entries, group.bytes, group.oldest, group.newest)
    unreadable += [f"{closed}: {reason}" for closed, reason in folder.listing.closed()]
    writing = sum(1 for _ in folder.listing.temporaries())
    total = sum(group.bytes for group in groups.values())
    count = sum(group.entries for group in groups.values())
    if as_json:
        models = {
            name: {
                "entries": group.entries,
                "bytes": group.bytes,
                "oldest_use_seconds": round(now - group.oldest, 1),
                "newest_use_seconds": round(now - group.newest, 1),
            }
            for name, group in groups.items()
        }
        _print_json(
            path=folder.root, entries=count, bytes=total, being_written=writing, unreadable=unreadable,
            models=models,
        )  # fmt: skip
        return
    _echo(f"{folder.root}: {count} entries, {_size(total)}, {writing} being written or left over")
    for name, group in sorted(groups.items()):
        _echo(
            f"  {name}: {group.entries} entries, {_size(group.bytes)}, last used between {_age(now - group.oldest)} "
            f"and {_age(now - group.newest)} ago"
        )
    for line in unreadable:
        _echo(f"  unreadable: {line}")


@app.command()
def verify(
    path: _Path,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the entries that fail.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every entry and compare its checksum. Exit status 1 when one fails or cannot be read."""
    folder = _folder(path)
    good: list[int] = []
    bad: dict[str, str] = {}
    removed: set[str] = set()

    def check(files: Iterator[Published]) -> None:
        for file in files:
            reason = _verify(file.path)
            if not reason:
                good.append(1)
                continue
            bad[file.path] = reason
            if remove and folder.drop([file]):
                removed.add(file.path)

    with _interruptible(lambda: f"{len(good)} entries were sound, {len(bad)} were not, {len(removed)} were removed"):
        for _ in _by_folder(folder, "Verifying", check):
            pass
    closed = dict(folder.listing.closed())
    if as_json:
        _print_json(path=folder.root, good=len(good), bad=bad, removed=len(removed), unreadable=closed)
    else:
        _echo(f"{folder.root}: {len(good)} entries are sound, {len(bad)} are not")
        for name, reason in bad.items():
            outcome = "removed" if name in removed else "not removed" if remove else "bad"
            _echo(f"  {outcome}: {name}: {reason}")
        _echo_closed(closed)
    raise typer.Exit(1 if bad or closed else 0)


@app.command()
def clear(
    path: _Path,
    model: Annotated[str, typer.Option(help="Only entries of this model, as stats names it.")] = "",
    older_than: Annotated[str, typer.Option(help="Only entries not used for so long: 90s, 30m, 12h, 7d.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove entries by model, by age, or all of them; also what killed writers left over."""
    if not (model or older_than or everything):
        _echo("Choose what to clear: --model NAME, --older-than AGE, or --all.", err=True)
        raise typer.Exit(2)
    limit = _seconds(older_than)
    folder = _folder(path)
    now = time.time()
    removed: list[int] = []

    def chosen(file: Published) -> bool:
        if limit is not None and file.age(now) < limit:
            return False
        if not model:
            return True
        entry, _ = _header(file.path)
        return model in (_model(entry), _printable(_model(entry)))

    try:
        folder.make(parents=False)  # a folder without a limit has no lock yet
        folder.counted()
        with _interruptible(lambda: f"Removed {len(removed)} entries ({_size(sum(removed))})"):
            for _ in _by_folder(
                folder,
                "Clearing",
                lambda files: removed.extend(file.size for file in folder.drop(filter(chosen, files))),
            ):
                pass
            left_bytes, left = folder.usage()
    except OSError as error:
        _echo(
            f"{folder.root}: removed {len(removed)} entries, then stopped: {error}. "
            "The folder and its file lock must be writable for you, and no symbolic link.",
            err=True,
        )
        raise typer.Exit(2) from None
    closed = dict(folder.listing.closed())
    if as_json:
        _print_json(
            path=folder.root,
            removed=len(removed),
            freed=sum(removed),
            left=left,
            left_bytes=left_bytes,
            unreadable=closed,
        )
        return
    _echo(
        f"{folder.root}: removed {len(removed)} entries ({_size(sum(removed))}); {left} are left ({_size(left_bytes)})"
    )
    _echo_closed(closed)


def _folder(path: Path) -> Folder:
    folder = Folder(str(path), 1 << 62)
    try:
        os.listdir(folder.root)
    except (FileNotFoundError, NotADirectoryError):
        _echo(f"{path} holds no encoder cache: there is no folder {ROOT_NAME} in it.", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        _echo(f"{path} cannot be looked into: {error}. Run this as the user that vLLM runs as.", err=True)
        raise typer.Exit(2) from None
    return folder


def _by_folder(folder: Folder, what: str, work: Callable[[Iterator[Published]], T]) -> Iterator[T]:
    """``work`` on the entries' files of each folder, with a progress bar on a terminal. In several threads, because a
    disk serves several requests at once."""
    shards, old = folder.listing.folders()
    names = sorted(shards) + old
    pool = ThreadPoolExecutor(_THREADS)
    try:
        results = pool.map(lambda name: work(folder.listing.published(name)), names)
        if not sys.stderr.isatty():
            yield from results
        else:
            with typer.progressbar(results, length=len(names), label=what, file=sys.stderr) as shown:
                yield from shown
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interruptible(so_far: Callable[[], str]) -> Iterator[None]:
    """End with a sentence at Ctrl-C. Each step before it is whole: nothing needs repair."""
    try:
        yield
    except KeyboardInterrupt:
        _echo(f"Interrupted. {so_far()}. The store is unharmed; run the command again to finish.", err=True)
        raise typer.Exit(130) from None


def _echo_closed(folders: dict[str, str]) -> None:
    for folder, reason in folders.items():
        _echo(f"  not looked into: {folder}: {reason}")


def _verify(file: str) -> str:
    """Why the entry fails; empty when every byte is right."""
    try:
        found = open_path(file)
    except (BadEntry, OSError) as error:
        return str(error)
    try:
        found.read_into(memoryview(bytearray(found.entry.payload)))
    except (BadEntry, OSError) as error:
        return str(error)
    finally:
        found.close()
    return ""


def _header(file: str) -> tuple[Entry | None, str]:
    """What an entry says of itself, or why it cannot be read."""
    try:
        found = open_path(file)
    except (BadEntry, OSError) as error:
        return None, str(error)
    found.close()
    return found.entry, ""


def _model(entry: Entry | None) -> str:
    return "(unreadable)" if entry is None else entry.about.get("model") or "(no name)"


def _seconds(text: str) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        _echo(f"--older-than {text!r} is not accepted; use a number and s, m, h or d, such as 12h.", err=True)
        raise typer.Exit(2)
    return float(match[1]) * _UNITS[match[2]]


def _age(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _echo(text: str, err: bool = False) -> None:
    typer.echo(_printable(text), err=err)


def _printable(text: str) -> str:
    """``text`` with a backslash escape for each character that a terminal obeys or cannot encode."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _print_json(**values: Any) -> None:
    typer.echo(json.dumps(values, indent=1))
