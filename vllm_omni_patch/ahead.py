# SPDX-License-Identifier: Apache-2.0
"""What will happen to a target whose module is not imported yet: ``matrix.decide``, on the text of the module.

Used where the answer is needed early (groups, strict mode) or where nothing may be imported (``status``). A module
that has no text to read is judged by the matrix alone; its live object is still checked when it is imported.
"""

from __future__ import annotations

import os
import tokenize
from functools import lru_cache

from vllm_omni_patch import flags, installed
from vllm_omni_patch.contract import check_source, fingerprint, native_source
from vllm_omni_patch.matrix import Decision
from vllm_omni_patch.patch import Patch, Target
from vllm_omni_patch.source import SourceView
from vllm_omni_patch.table import for_patch
from vllm_omni_patch.views import Missing


def decide(patch: Patch, target: Target, release: str | None) -> Decision:
    """Whether ``target`` of ``patch`` would be installed in the package that is here. Imports nothing of it.

    Raises:
        FlagError: ``VLLM_OMNI_PATCH_UNLISTED`` holds a value that it does not accept.
    """
    unlisted = flags.read(flags.UNLISTED)
    described = f"{target.distribution} {release or 'of unknown version'}"
    path = module_file(target.module)
    if path is None:
        return Decision("absent", False, f"{described} has no module {target.module}")
    table = for_patch(patch)
    row = table.row(patch.name, target.name, release)
    view = _view(path, os.path.getmtime(path)) if path.endswith(".py") else None
    upstream = native_source(target.native, view, target.qualname) if view is not None else ""
    if upstream:
        return Decision("native", False, f"{described}: {upstream}; the patch stands aside")
    if row is not None and row.verdict != "applies":
        return Decision(row.verdict, False, f"{described}: {row.reason}", "warning")
    if view is None:
        known = row is not None
        what = "listed; there is no source text here to check it on" if known else "not listed, and not readable"
        return Decision("applies" if known else "unlisted", known, f"{described}: {what}", "info")
    try:
        view.find(target.qualname)
    except Missing as missing:
        return Decision("absent" if row is None else "drifted", False, f"{described}: {missing}", "warning")
    problems = check_source(target.contract, view, target.qualname)
    if problems:
        return Decision("drifted", False, f"{described}: {'; '.join(problems)}", "warning")
    if row is not None:
        return Decision("applies", True, f"{described}: listed, and its source fits")
    like = table.same_code(patch.name, target.name, fingerprint(view, target.qualname))
    if like is not None:
        said = f"{described}: not listed; its code is that of {like.release}"
        return Decision("applies", True, said, "info", like.release)
    newest = table.newest(patch.name, target.name)
    last = f"last listed: {newest.release}" if newest else "the matrix lists no release for this target"
    if unlisted == "apply":
        return Decision("unlisted", True, f"{described}: not listed ({last}); {flags.UNLISTED.name}=apply", "warning")
    reason = f"{described}: not listed, and its code is that of no listed release ({last})"
    return Decision("unlisted", False, f"{reason}; set {flags.UNLISTED.name}=apply to hook it all the same", "warning")


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
