# SPDX-License-Identifier: Apache-2.0
"""Declaring a patch is data: importing it brings in none of its hooks and nothing heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PATCHES = "vllm_omni_patch.patches"
HEAVY = ("torch", "vllm", "transformers", "lmcache", "wrapt", "pynvml")


@pytest.mark.parametrize("name", ["available_memory", "ec_connector", "model_local_kv"])
def test_a_declaration_imports_no_hook_and_nothing_heavy(name: str) -> None:
    patch = importlib.import_module(f"{PATCHES}.{name}").PATCH
    named = [entry for target in patch.targets for entry in (target.install, target.verify) if entry]
    modules = sorted({entry.partition(":")[0] for entry in named})
    assert modules
    code = f"import sys, {PATCHES}.{name}; print([n for n in {[*HEAVY, *modules]} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
