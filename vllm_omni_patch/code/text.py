# SPDX-License-Identifier: Apache-2.0
"""The source file of one module: a digest of its bytes, and its code view for when the digest is not a known one."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property, lru_cache
from types import ModuleType

from vllm_omni_patch.code import installed
from vllm_omni_patch.code.view import CodeView

DIGEST_LENGTH = 16


class ModuleText:
    """A module's source file.

    Args:
        data: its bytes; ``None`` where the module is there without source text (an extension, byte code only).
    """

    def __init__(self, data: bytes | None) -> None:
        self.data = data

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256 of the bytes; empty where there is no source text."""
        return "" if self.data is None else hashlib.sha256(self.data).hexdigest()[:DIGEST_LENGTH]

    @cached_property
    def view(self) -> CodeView:
        """What a contract can ask of the text. Parsing a model runner takes about half a second and tens of MiB.

        Raises:
            SyntaxError, ValueError, RecursionError: it is not Python that this interpreter reads.
        """
        return CodeView(self.data or b"")


def of_module(module: ModuleType) -> ModuleText:
    """The text of the file that ``module`` was imported from."""
    return _of_file(getattr(module, "__file__", None) or "")


def of_installed(module: str) -> ModuleText | None:
    """The text of a module of an installed package, without importing it; ``None``: there is no such module."""
    path = module_file(module)
    return None if path is None else _of_file(path)


def module_file(module: str) -> str | None:
    """The file of a module of an installed package, found without importing the package."""
    package, *rest = module.split(".")
    folder = installed.folder_of(package)
    if folder is None:
        return None
    base = os.path.join(folder, *rest)
    for path in (os.path.join(base, "__init__.py"), f"{base}.py"):
        if os.path.isfile(path):
            return path
    parent, name = os.path.split(base)
    names = sorted(os.listdir(parent)) if rest and os.path.isdir(parent) else []
    built = [n for n in names if n.startswith(f"{name}.") and n.endswith((".so", ".pyc"))]
    return os.path.join(parent, built[0]) if built else None


def _of_file(path: str) -> ModuleText:
    try:
        return _read(path, os.stat(path).st_mtime_ns) if path.endswith(".py") else ModuleText(None)
    except OSError:
        return ModuleText(None)


# One only: the syntax tree of a model runner takes tens of MiB.
@lru_cache(maxsize=1)
def _read(path: str, modified: int) -> ModuleText:
    with open(path, "rb") as file:
        return ModuleText(file.read())


def forget() -> None:
    """Release the text that was read last, and its syntax tree."""
    _read.cache_clear()
