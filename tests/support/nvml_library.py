# SPDX-License-Identifier: Apache-2.0
"""Compiles and scripts the small ``libnvidia-ml.so.1`` that the real ``nvidia-ml-py`` is run against in tests."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
ALL_ONES = (1 << 64) - 1
UUIDS = (
    "GPU-af7b61d8-0000-4000-8000-000000000000",
    "GPU-af7b9999-0000-4000-8000-000000000001",
    "GPU-c0ffee00-0000-4000-8000-000000000002",
)
PCI = ("00000000:17:00.0", "00000000:65:00.0", "00000000:b3:00.0")

# Return codes of nvml.h that tests script.
NO_PERMISSION = 4
NOT_SUPPORTED = 3
UNKNOWN_ERROR = 999
DRIVER_NOT_LOADED = 9


class NvmlLibrary:
    """The loaded library and its script. ``write`` replaces the script; each NVML call reads it anew."""

    def __init__(self, script: Path, library: ctypes.CDLL) -> None:
        self.script = script
        self.library = library

    def write(self, *lines: str, devices: int = 3) -> None:
        """Set the script: ``devices`` plain devices, then ``lines``."""
        head = [f"device {uuid} {pci}" for uuid, pci in zip(UUIDS[:devices], PCI, strict=False)]
        self.script.write_text("\n".join((*head, *lines)) + "\n")
        self.library.test_reset()

    @property
    def memory_queries(self) -> int:
        """How often the device-level memory query was made since the last :meth:`write`."""
        return int(self.library.test_memory_queries())


def compile_library(folder: Path) -> ctypes.CDLL:
    """Compile the library into ``folder`` and load it under its real name, so that ``pynvml`` finds it loaded."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the test's libnvidia-ml.so.1")
    path = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(path)]
    subprocess.run([*command, str(HERE / "nvml_library.c")], check=True)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def loaded_nvml(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled library; one per process, because a second one of the same name would not be loaded."""
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml_library(loaded_nvml: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlLibrary]:
    """A scripted library with three devices and empty process tables."""
    pytest.importorskip("pynvml")
    script = tmp_path / "nvml.txt"
    monkeypatch.setenv("NVML_SCRIPT", str(script))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    library = NvmlLibrary(script, loaded_nvml)
    library.write()
    yield library
    os.environ.pop("NVML_SCRIPT", None)
