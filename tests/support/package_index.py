# SPDX-License-Identifier: Apache-2.0
"""Wheels and source archives of small packages, and an index of them that pip reads without a network."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

# Whatever is read must never run.
TRAP = "raise SystemExit('this was imported')\n"


def wheel(folder: Path, name: str, release: str, files: dict[str, str], tag: str = "py3-none-any") -> Path:
    """A wheel of ``files`` (paths below site-packages)."""
    stem = f"{name.replace('-', '_')}-{release}"
    path = folder / f"{stem}-{tag}.whl"
    info = f"{stem}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    everything = {**files, **metadata}
    record = "".join(f"{entry},,\n" for entry in [*everything, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for entry, text in {**everything, f"{info}/RECORD": record}.items():
            archive.writestr(entry, text)
    return path


def sdist(folder: Path, name: str, release: str, files: dict[str, str], root: str = "") -> Path:
    """A source archive; ``root`` is a folder within it, such as ``src/``."""
    path = folder / f"{name}-{release}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for entry, text in {"setup.py": TRAP, **{f"{root}{entry}": text for entry, text in files.items()}}.items():
            data = text.encode()
            member = tarfile.TarInfo(f"{name}-{release}/{entry}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def tree(folder: Path, files: dict[str, str]) -> Path:
    """``files`` laid out below ``folder``."""
    for entry, text in files.items():
        path = folder / entry
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def use_only(monkeypatch, folder: Path) -> None:
    """Let pip see nothing but the archives in ``folder``."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
