# SPDX-License-Identifier: Apache-2.0
"""One build step: lay the two startup files at the top of site-packages, in a regular and an editable install.

Everything else stands in setup.cfg. ``editable_wheel`` has no public hook for further files, so its strategy (a
callable that is handed the open wheel) is wrapped; tests/unit/test_install.py fails when setuptools changes that.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

STARTUP_FILES = ("vllm_omni_patch.pth", "vllm_omni_patch.start")
HERE = Path(__file__).resolve().parent / "startup_files"


class BuildPy(build_py):
    """Copies the startup files beside the packages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in STARTUP_FILES:
                shutil.copyfile(HERE / name, Path(self.build_lib) / name)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + [str(Path(self.build_lib) / name) for name in STARTUP_FILES]


class EditableWheel(editable_wheel):
    """Adds the startup files to the wheel of an editable install."""

    def _select_strategy(self, name, tag, build_lib):  # type: ignore[no-untyped-def]
        return _WithStartupFiles(super()._select_strategy(name, tag, build_lib))


class _WithStartupFiles:
    def __init__(self, strategy) -> None:  # type: ignore[no-untyped-def]
        self._strategy = strategy

    def __call__(self, wheel, files, mapping) -> None:  # type: ignore[no-untyped-def]
        self._strategy(wheel, files, mapping)
        for name in STARTUP_FILES:
            wheel.writestr(name, (HERE / name).read_bytes())

    def __enter__(self) -> _WithStartupFiles:
        self._strategy.__enter__()
        return self

    def __exit__(self, *exc: object) -> object:
        return self._strategy.__exit__(*exc)


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
