# SPDX-License-Identifier: Apache-2.0
"""Every kind of install lays the startup file where Python reads it, and uninstalling takes it away.

One source archive and one wheel are built; each install goes into a virtual environment of its own. The runtime
dependencies are left out: stage 1 needs none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILE = "vllm_omni_patch.pth"
ARMED = "import sys; print(any(type(f).__module__ == 'vllm_omni_patch' for f in sys.meta_path))"


def run(*words: object, cwd: Path | None = None, **env: str) -> str:
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",) and not k.startswith("VLLM_")}
    done = subprocess.run(
        [str(word) for word in words], env={**keep, **env}, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.fail(f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose site-packages hold pip and setuptools; the environments below see them."""
    folder = tmp_path_factory.mktemp("base")
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/pip", "install", "-q", "--upgrade", "setuptools>=77", "wheel", "build")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a clone holds, without what builds left in this one."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    ignore = shutil.ignore_patterns(
        "*.egg-info", "__pycache__", "build", "dist", ".*", "docs", "tests", "examples", "scripts"
    )
    shutil.copytree(ROOT, folder, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def built(base: Path, source: Path) -> Path:
    """``dist`` with a source archive, and a wheel that is built from it."""
    run(base / "venv/bin/python", "-m", "build", "--no-isolation", "--outdir", base / "dist", source)
    return base / "dist"


class Venv:
    """A virtual environment that has pip, made by copying nothing: the base environment's pip works on it."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base = folder, base
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin/python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *words: object, **env: str) -> str:
        return run(self.base / "venv/bin/pip", "--python", self.python, *words, **env)

    def armed(self, *options: str, **env: str) -> bool:
        return run(self.python, *options, "-c", ARMED, cwd=Path("/"), VLLM_OMNI_PATCH="1", **env).strip() == "True"

    def uninstall(self, **env: str) -> None:
        self.pip("uninstall", "-q", "-y", "vllm-omni-patch", **env)


@pytest.fixture
def venv(tmp_path: Path, base: Path) -> Venv:
    return Venv(tmp_path / "venv", base)


def laid(folder: Path) -> list[str]:
    """What is ours at the top of ``folder`` and read at interpreter start."""
    return [path.name for path in folder.glob("vllm_omni_patch.*") if path.suffix in (".pth", ".start")]


def test_the_archives_hold_what_they_should(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (archive,) = built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in names if name.endswith((".pth", ".start"))] == [FILE]
    assert {
        "vllm_omni_patch/matrix/matrix.json",
        "vllm_omni_patch/py.typed",
        "vllm_omni_patch/patches/__init__.py",
    } <= names
    packages = {path.parent.relative_to(ROOT / "patches") for path in (ROOT / "patches").rglob("__init__.py")}
    assert {f"vllm_omni_patch/patches/{path}/__init__.py".replace("/./", "/") for path in packages} <= names
    assert not [name for name in names if name.startswith(("patches/", "tests/", "startup_files/"))]
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    assert f"startup_files/{FILE}" in inside


@pytest.mark.parametrize("kind", ["wheel", "sdist", "folder", "editable"])
def test_each_install_lays_the_startup_file_and_uninstall_removes_it(
    venv: Venv, built: Path, source: Path, tmp_path: Path, kind: str
) -> None:
    assert not venv.armed()
    if kind == "editable":
        source = Path(shutil.copytree(source, tmp_path / "editable"))
    what = {
        "wheel": [next(built.glob("*.whl"))],
        "sdist": [next(built.glob("*.tar.gz"))],
        "folder": [source],
        "editable": ["-e", source],
    }[kind]
    if kind != "wheel":
        # The base's setuptools builds them all: what is fetched for build isolation is the same.
        venv.pip("install", "-q", "--no-deps", "setuptools>=77")
        what = ["--no-build-isolation", *what]
    venv.pip("install", "-q", "--no-deps", *what)
    assert laid(venv.site) == [FILE]
    assert venv.armed()
    assert venv.armed("-I")
    where = run(venv.python, "-c", "import vllm_omni_patch.patches as p; print(p.__path__[0])", cwd=Path("/")).strip()
    assert Path(where) == (source / "patches" if kind == "editable" else venv.site / "vllm_omni_patch" / "patches")
    off = "import sys; print([m for m in sys.modules if 'vllm' in m and '__editable__' not in m])"
    assert run(venv.python, "-c", off, cwd=Path("/")) == "[]\n"
    venv.uninstall()
    assert laid(venv.site) == []
    assert not venv.armed()


def test_a_user_install_lays_it_in_the_users_site_folder(base: Path, built: Path, tmp_path: Path) -> None:
    home = tmp_path / "user"
    # A user install is for an interpreter outside virtual environments: the one that they are made from.
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not python.exists():
        python = Path(os.path.realpath(sys.executable))
    env = {"PYTHONUSERBASE": str(home), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    (wheel,) = built.glob("*.whl")
    pip = [base / "venv/bin/pip", "--python", python]  # Debian's Python has no pip of its own
    run(*pip, "install", "-q", "--user", "--no-deps", "--ignore-installed", wheel, **env)
    (site,) = home.glob("lib/python*/site-packages")
    assert laid(site) == [FILE]
    assert run(python, "-c", ARMED, cwd=Path("/"), VLLM_OMNI_PATCH="1", **env).strip() == "True"
    alone = run(python, "-s", "-c", ARMED, cwd=Path("/"), VLLM_OMNI_PATCH="1", **env).strip()
    assert alone == "False", "without the user's site folder nothing of it is read"
    run(*pip, "uninstall", "-q", "-y", "vllm-omni-patch", **env)
    assert laid(site) == []


def test_the_floor_of_wrapt_lets_opentelemetry_in() -> None:
    """LMCache 0.5.6 asks for opentelemetry-api<=1.40, whose auto-instrumentation (0.61b0) asks for wrapt<2."""
    text = (ROOT / "setup.cfg").read_text()
    (needed,) = [Requirement(line) for line in text.splitlines() if line.strip().startswith("wrapt")]
    # The releases that scripts/test_wrapt.sh runs the loader's tests on.
    assert [one for one in ("1.14.0", "1.14.1", "1.17.3", "2.5.2", "3.0.0") if one in needed.specifier] == [
        "1.14.1", "1.17.3", "2.5.2",
    ]  # fmt: skip
