# SPDX-License-Identifier: Apache-2.0
"""What will happen to a target whose module is not imported yet: ``matrix.decide``, on the text of the module.

Used where the answer is needed early (groups, strict mode) or where nothing may be imported (``status``). A module
that has no text to read is judged by the matrix alone; its live object is still checked when it is imported.
"""

from __future__ import annotations

import os
import tokenize
from dataclasses import replace
from functools import lru_cache

from vllm_omni_patch.code import installed
from vllm_omni_patch.code.contract import fingerprint
from vllm_omni_patch.code.source import SourceView
from vllm_omni_patch.matrix import judge
from vllm_omni_patch.matrix.judge import Decision
from vllm_omni_patch.matrix.table import Row, for_patch
from vllm_omni_patch.patch import Patch, Target


def decide(patch: Patch, target: Target, release: str | None) -> Decision:
    """Whether ``target`` of ``patch`` would be installed in the package that is here. Imports nothing of it.

    Raises:
        FlagError: ``VLLM_OMNI_PATCH_UNLISTED`` holds a value that it does not accept.
    """
    described = f"{target.distribution} {release or 'of unknown version'}"
    path = module_file(target.module)
    view = _view(path, os.path.getmtime(path)) if path and path.endswith(".py") else None
    if path is None or view is not None:
        return judge.decide_view(patch, target, release, view, lambda: _digest(view, target.qualname))
    row = for_patch(patch).row(patch.name, target.name, release)
    if row is not None and row.verdict != "applies":
        return Decision(row.verdict, False, f"{described}: {row.reason}", "warning")
    known = row is not None
    what = "listed; there is no source text here to check it on" if known else "not listed, and not readable"
    return Decision("applies" if known else "unlisted", known, f"{described}: {what}", "info")


def evidence(patch: Patch, target: Target, release: str | None) -> Row:
    """What is proved of a target that applies here: by runs of ``release`` where they saw the code that is here.

    ``static`` (or ``documented``) otherwise: the contract was read on this code.
    """
    known = for_patch(patch).row(patch.name, target.name, release)
    path = module_file(target.module)
    view = _view(path, os.path.getmtime(path)) if path and path.endswith(".py") else None
    here = Row(patch.name, target.name, target.distribution, release or "", "applies", evidence=target.evidence)
    if known is None or not known.devices:
        return here
    return replace(here, fingerprint=_digest(view, target.qualname)).proved_like(known)


def _digest(view: SourceView | None, qualname: str) -> str:
    return "" if view is None else fingerprint(view, qualname)


def forget() -> None:
    """Let go of the syntax tree that was read last."""
    _view.cache_clear()


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


# One only: the syntax tree of a model runner takes tens of MiB.
@lru_cache(maxsize=1)
def _view(path: str, modified: float) -> SourceView | None:
    try:
        with tokenize.open(path) as file:
            return SourceView(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
