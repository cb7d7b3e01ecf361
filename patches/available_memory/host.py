# SPDX-License-Identifier: Apache-2.0
"""Memory that this process may still take on its host: MemAvailable and every cgroup limit above it.

Reads only files below ``root``. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

# cgroup v1 has no word for "no limit": it stores the largest multiple of the page size below 2**63, whose exact value
# depends on the page size. No machine has 2**62 bytes.
UNLIMITED = 1 << 62


class Bound(NamedTuple):
    """One bound on the memory still to be had, in bytes. ``available`` is ``None`` where it could not be read."""

    source: str
    limit: int | None
    used: int | None
    available: int | None
    state: Literal["measured", "unknown"]


@dataclass
class HostMemory:
    """``available`` bytes, the tightest of ``bounds``; ``notes`` say what could not be read.

    ``available`` is measured when there is no note, and otherwise no more than an upper bound of it.
    """

    available: int
    source: str
    bounds: list[Bound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Files(NamedTuple):
    version: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


# memory.high does not kill, but a group above it is throttled to a crawl, so it bounds a budget as well.
_V2 = _Files("v2", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Files("v1", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: str | os.PathLike[str] = "/") -> HostMemory:
    """Bytes that this process can still take: the tightest of MemAvailable and each cgroup v1/v2 limit on its path.

    What a group still has is its limit less its use, where page cache that the kernel would drop first
    (``inactive_file``) is not use: reading the weights from disk fills the cache up to the limit. A limit that cannot
    be read is left out with a note; one whose use cannot be read still bounds by its limit.

    Raises:
        RuntimeError: MemAvailable cannot be read, so that nothing bounds the result.
    """
    base = Path(root)
    total = _mem_available(base)
    bounds = [Bound("MemAvailable of /proc/meminfo", None, None, total, "measured")]
    notes: list[str] = []
    for files, folder, shown in _cgroups(base, notes):
        bounds.extend(_limits(files, folder, shown, notes))
    # A measured 0 is tight, an unreadable limit (None) is not a bound.
    best = min((bound for bound in bounds if bound.available is not None), key=lambda bound: bound.available or 0)
    return HostMemory(best.available or 0, best.source, bounds, notes)


def _mem_available(base: Path) -> int:
    try:
        for line in (base / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                number, unit = rest.split()
                if unit != "kB":
                    raise ValueError(line)
                return int(number) * 1024
    except (OSError, ValueError) as error:
        raise RuntimeError(f"Available host memory is unknown: /proc/meminfo cannot be read ({error}).") from error
    raise RuntimeError("Available host memory is unknown: /proc/meminfo has no MemAvailable line.")


def _cgroups(base: Path, notes: list[str]) -> Iterator[tuple[_Files, Path, str]]:
    """Each memory cgroup of this process from its own up to the top one that is mounted here."""
    try:
        lines = (base / "proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            notes.append(f"cgroup limits not looked at: /proc/self/cgroup cannot be read ({error})")
        return
    mounts = _mounts(base)
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            files, kind = _V2, "cgroup2"
        elif "memory" in controllers.split(","):
            files, kind = _V1, "cgroup"
        else:
            continue
        mount = mounts.get(kind)
        if mount is None:
            # No mount table to go by: the places where every distribution mounts them.
            usual = Path("/sys/fs/cgroup") if kind == "cgroup2" else Path("/sys/fs/cgroup/memory")
            mount = ("/", usual)
        top, point = mount
        if not _below(base, point).is_dir():
            notes.append(f"cgroup {files.version} limits not looked at: {point} is not mounted here")
            continue
        yield from _climb(base, files, path, top, point)


def _climb(base: Path, files: _Files, path: str, top: str, point: Path) -> Iterator[tuple[_Files, Path, str]]:
    # A bind mount (a container without its own cgroup namespace) shows only what is below ``top``.
    inside = path[len(top.rstrip("/")) :] if path == top or path.startswith(top.rstrip("/") + "/") else "/"
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # the group lies above the namespace's root; the mount shows what can be seen of it
        parts = []
    while parts and not _below(base, point.joinpath(*parts)).is_dir():
        parts.pop()
    for length in range(len(parts), -1, -1):
        shown = point.joinpath(*parts[:length])
        yield files, _below(base, shown), str(shown)


def _mounts(base: Path) -> dict[str, tuple[str, Path]]:
    """Mount of the v2 tree and of v1's memory tree: filesystem type -> (group at its top, mount point)."""
    found: dict[str, tuple[str, Path]] = {}
    try:
        lines = (base / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if not separator or len(fields) < 5 or len(tail) < 3:
            continue
        kind, options = tail[0], tail[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            found.setdefault(kind, (_unescape(fields[3]), Path(_unescape(fields[4]))))
    return found


def _limits(files: _Files, folder: Path, shown: str, notes: list[str]) -> Iterator[Bound]:
    for name in files.limits:
        limit = _number(folder / name, f"{shown}/{name}", notes)
        if isinstance(limit, _Word):
            continue
        source = f"cgroup {files.version} {shown}/{name}"
        if limit is None:
            yield Bound(source, None, None, None, "unknown")
            continue
        used = _number(folder / files.usage, f"{shown}/{files.usage}", notes)
        if not isinstance(used, int):
            notes.append(f"the usage of {shown} is unknown; its limit of {limit} bytes is used as the bound")
            yield Bound(f"{source} itself, usage unknown", limit, None, limit, "unknown")
            continue
        used = max(used - _reclaimable(folder, files.reclaimable, shown, notes), 0)
        yield Bound(source, limit, used, max(limit - used, 0), "measured")


class _Word:
    """A reading that is neither a number nor unknown."""


_ABSENT, _NO_LIMIT = _Word(), _Word()


def _number(path: Path, shown: str, notes: list[str]) -> int | _Word | None:
    """The file's number; ``_NO_LIMIT``; ``_ABSENT`` (the top group has no limit file); ``None`` with a note."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        notes.append(f"{shown} cannot be read ({error.strerror or error}); left out")
        return None
    if text == "max":
        return _NO_LIMIT
    if not text.isdigit():
        notes.append(f"{shown} holds {text[:40]!r}, not a number; left out")
        return None
    return _NO_LIMIT if int(text) >= UNLIMITED else int(text)


def _reclaimable(folder: Path, name: str, shown: str, notes: list[str]) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name and value.strip().isdigit():
                return int(value)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{shown}/memory.stat cannot be read ({error.strerror or error}); page cache counts as use")
    # Without the statistics all of the use counts, which can only make the result smaller.
    return 0


def _below(base: Path, path: Path) -> Path:
    return base / str(path).lstrip("/")


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
