# SPDX-License-Identifier: Apache-2.0
"""How a family puts its declaration on an owner class: beside a native one, once, and reversibly."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_omni_patch.patch import Hook, Target
from vllm_omni_patch.patches.model_local_kv import PATCH
from vllm_omni_patch.patches.model_local_kv.families.attach import attach, declares
from vllm_omni_patch.patches.model_local_kv.families.targets import TARGETS
from vllm_omni_patch.patches.model_local_kv.specs import CORRECTED, METHOD


def hook_for(owner: Any) -> Hook:
    target = Target("somewhere", getattr(owner, "__name__", "owner"), "x:y")
    return Hook(PATCH, target, ModuleType("somewhere"), ModuleType("somewhere"), target.qualname, owner)


def test_a_class_without_declaration_gets_the_protocol_method() -> None:
    class Owner:
        rows = 3

    hook = hook_for(Owner)
    assert not declares(hook)
    undo = attach(hook, lambda owner: [owner.rows])
    assert declares(hook)
    assert getattr(Owner(), METHOD)() == [3]
    assert CORRECTED not in vars(Owner)
    undo()
    assert METHOD not in vars(Owner) and not declares(hook)


def test_a_native_declaration_stays_and_ours_goes_beside_it() -> None:
    class Owner:
        def model_local_kv_specs(self) -> list[str]:
            return ["native"]

    native = Owner.model_local_kv_specs
    undo = attach(hook_for(Owner), lambda owner: ["ours"])
    assert Owner.model_local_kv_specs is native
    assert getattr(Owner(), CORRECTED)() == ["ours"]
    undo()
    assert CORRECTED not in vars(Owner) and Owner.model_local_kv_specs is native


def test_a_native_declaration_of_a_base_class_counts_too() -> None:
    class Base:
        def model_local_kv_specs(self) -> list[str]:
            return ["native"]

    class Owner(Base):
        pass

    attach(hook_for(Owner), lambda owner: ["ours"])
    assert Owner().model_local_kv_specs() == ["native"]
    assert CORRECTED in vars(Owner)


@pytest.mark.parametrize("native", [False, True])
def test_applying_twice_keeps_one_declaration(native: bool) -> None:
    class Owner:
        pass

    if native:
        Owner.model_local_kv_specs = lambda self: ["native"]  # type: ignore[attr-defined]
    attach(hook_for(Owner), lambda owner: ["first"])
    attach(hook_for(Owner), lambda owner: ["second"])
    name = CORRECTED if native else METHOD
    assert getattr(Owner(), name)() == ["second"]
    assert (METHOD in vars(Owner)) and (CORRECTED in vars(Owner)) is native


def test_undo_leaves_somebody_elses_method() -> None:
    class Owner:
        pass

    undo = attach(hook_for(Owner), lambda owner: [])
    Owner.model_local_kv_specs = lambda self: ["theirs"]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="replaced by other code"):
        undo()
    assert Owner().model_local_kv_specs() == ["theirs"]  # type: ignore[attr-defined]


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(TypeError, match="not a class"):
        attach(hook_for(42), lambda owner: [])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.qualname)
def test_targets_name_functions_that_exist(target: Target) -> None:
    for name in (target.install, target.verify):
        module, _, function = name.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    # Native declarations are completed; no target stands aside for them. See attach.
    assert target.optional and target.note and target.native is None
    assert target in PATCH.targets


def test_families_import_neither_torch_nor_vllm() -> None:
    modules = ", ".join(sorted({target.install.partition(":")[0] for target in TARGETS}))
    code = f"import sys, {modules}; print([n for n in ('torch', 'vllm', 'transformers', 'wrapt') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
