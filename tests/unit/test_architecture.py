# SPDX-License-Identifier: Apache-2.0
"""The import graph that docs/architecture.md draws: no circles, few storeys, and what a patch may import."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"vllm_omni_patch": ROOT / "vllm_omni_patch", "vllm_omni_patch.patches": ROOT / "patches"}
PUBLIC = {f"vllm_omni_patch.{name}" for name in ("patch", "flags", "ledger", "metrics")}
# Ours alone: the encoder cache's folder in memory goes with the last process too.
SHARED = "vllm_omni_patch.telemetry.shared_folder"

pytestmark = pytest.mark.skipif(not (ROOT / "patches").is_dir(), reason="not in a checkout")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            if "patches" not in parts:  # an editable install may put a link there
                found[name] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Modules of ours that ``name`` imports anywhere in its code; what is named by a string does not count."""
    path, found = modules()[name], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = home[: len(home) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {one if (one := f"{module}.{alias.name}") in modules() else module for alias in node.names}
    return frozenset(found & modules().keys() - {name})


def test_imports_have_no_circle_and_few_storeys() -> None:
    storeys: dict[str, int] = {}
    for name in TopologicalSorter({one: imports(one) for one in modules()}).static_order():  # CycleError: a circle
        storeys[name] = 1 + max((storeys[one] for one in imports(name)), default=0)
    assert storeys["vllm_omni_patch.loading.loader"] <= 8
    assert {one: n for one, n in storeys.items() if n > (11 if ".patches." in one else 9)} == {}


def test_a_patch_imports_what_is_public_and_its_own_modules_relatively() -> None:
    for name, path in modules().items():
        if not name.startswith("vllm_omni_patch.patches."):
            continue
        own = ".".join(name.split(".")[:3])
        foreign = {one for one in imports(name) if not f"{one}.".startswith(f"{own}.")}
        assert foreign <= PUBLIC | {SHARED}, f"{path}: {sorted(foreign - PUBLIC)}"
        absolute = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(own)
        ]
        assert not absolute, f"{path} imports {absolute} by the absolute name"
