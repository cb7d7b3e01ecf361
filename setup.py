# SPDX-License-Identifier: Apache-2.0
"""One build step: lay the startup file at the top of site-packages, in a regular and an editable install.

Everything else stands in setup.cfg. ``editable_wheel`` has no public hook for further files, so its strategy (a
callable that is handed the open wheel) is wrapped; tests/unit/test_install.py fails when setuptools changes that.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

STARTUP_FILE = Path(__file__).resolve().parent / "startup_files" / "vllm_omni_patch.pth"


class BuildPy(build_py):
    """Copies the startup file beside the packages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copyfile(STARTUP_FILE, Path(self.build_lib) / STARTUP_FILE.name)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / STARTUP_FILE.name)]


class EditableWheel(editable_wheel):
    """Adds the startup file to the wheel of an editable install."""

    def _select_strategy(self, name, tag, build_lib):  # type: ignore[no-untyped-def]
        return _WithStartupFile(super()._select_strategy(name, tag, build_lib))


class _WithStartupFile:
    def __init__(self, strategy) -> None:  # type: ignore[no-untyped-def]
        self._strategy = strategy

    def __call__(self, wheel, files, mapping) -> None:  # type: ignore[no-untyped-def]
        self._strategy(wheel, files, mapping)
        wheel.writestr(STARTUP_FILE.name, STARTUP_FILE.read_bytes())

    def __enter__(self) -> _WithStartupFile:
        self._strategy.__enter__()
        return self

    def __exit__(self, *exc: object) -> object:
        return self._strategy.__exit__(*exc)


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
