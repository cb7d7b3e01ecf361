# SPDX-License-Identifier: Apache-2.0
"""The vLLM that is installed: objects agree with their text, and every target is decided as the matrix says.

Modules are imported; no engine is started.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys

import pytest
import wrapt

from vllm_omni_patch import flags
from vllm_omni_patch.code import installed, runtime, text
from vllm_omni_patch.code.fingerprint import fingerprint
from vllm_omni_patch.code.view import CodeView
from vllm_omni_patch.loading import discover
from vllm_omni_patch.matrix import files, judge
from vllm_omni_patch.patch import Contract, Parameter

pytest.importorskip("vllm")

MODULES = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.worker_base",
    "vllm.v1.worker.ec_connector_model_runner_mixin",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.encoder_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.engine.core",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "vllm.distributed.ec_transfer.ec_connector.base",
    "vllm.config.vllm",
    "vllm.utils.mem_utils",
    "vllm.model_executor.models.registry",
    "vllm.entrypoints.llm",
    "transformers.cache_utils",
)


def load(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"this release has no {name}: {error}")


@pytest.mark.parametrize("name", MODULES)
def test_objects_agree_with_the_text_that_they_come_from(name):
    """Every function and method of a module, with the parameters that its text has."""
    module = load(name)
    view = text.of_module(module).view
    differ, asked = [], 0
    for qualname in functions(view):
        found = view.find(qualname)
        if found[0].kind != "function" or len(found) > 1:
            continue
        asked += 1
        wanted = tuple(Parameter(one.name, (one.kind,)) for one in found[0].parameters)
        if problems := runtime.check(Contract(wanted), module, qualname):
            differ.append((qualname, problems))
    assert differ == []
    assert asked >= 3


def functions(view: CodeView) -> list[str]:
    """Every function, and every method of every class, that the text defines."""
    found = []
    for name, (node, *_) in view.scope.items():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(name)
        elif isinstance(node, ast.ClassDef):
            found += [f"{name}.{member}" for member in view.body(node)]
    return found


def here() -> list:
    return [
        (patch, target)
        for patch in (one.patch for one in discover.find() if one.patch)
        for target in (*patch.targets, *patch.uses)
        if installed.find(installed.package_of(target.distribution, target.module))
    ]


def test_every_target_is_decided_as_listed():
    """On a listed release: what the matrix says of it, and its file is the one that the matrix knows."""
    release = installed.find("vllm").release
    shipped = files.read(files.MATRIX)
    if not shipped.lists("vllm", release):
        pytest.skip(f"vllm {release} is not in matrix.json")
    decided = 0
    for patch, target in here():
        if target.distribution != "vllm" or patch.matrix:
            continue
        row = shipped.row(patch.name, target.name, release)
        try:
            module = importlib.import_module(target.module)
        except ModuleNotFoundError:
            assert row.verdict == "absent", target.name
            continue
        except ImportError:
            continue  # a device's worker that does not import on this machine
        decision = judge.decide(patch, target, release, module)
        assert (decision.verdict, decision.apply) == (row.verdict, row.verdict == "applies"), decision.reason
        source = text.of_module(module)
        # A CPU build has the file that the release's wheel has.
        assert source.digest == shipped.digests["vllm", target.module, row.release], target.module
        if row.verdict == "applies":
            assert fingerprint(source.view, target.qualname) == row.fingerprint
            # A development build of the same code is known by that code.
            unlisted = judge.decide(patch, target, f"{release}.dev7+gabcdef", module)
            assert unlisted.apply and unlisted.like is not None
        decided += 1
    assert decided >= 10


def test_wrappers_on_a_real_method_change_no_answer():
    module = load("vllm.v1.worker.gpu_worker")
    contract = Contract(parameters=())
    assert runtime.check(contract, module, "Worker.determine_available_memory") == []
    original = vars(module.Worker)["determine_available_memory"]

    @functools.wraps(original)
    def traced(*args, **kwargs):
        return original(*args, **kwargs)

    try:
        module.Worker.determine_available_memory = traced
        wrapt.wrap_function_wrapper(module, "Worker.determine_available_memory", lambda w, i, a, k: w(*a, **k))
        assert runtime.check(contract, module, "Worker.determine_available_memory") == []
        assert runtime.check(Contract(parameters=(Parameter("x"),)), module, "Worker.determine_available_memory")
    finally:
        module.Worker.determine_available_memory = original


def test_the_command_reads_this_environment_and_imports_none_of_it():
    code = (
        "import sys; from vllm_omni_patch.commands.matrix import main\n"
        "try: main()\n"
        "finally: print('imported', [n for n in ('vllm', 'torch', 'lmcache') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "imported []"
    release = installed.find("vllm").release
    assert f"vllm {release}" in done.stdout
    if files.load().lists("vllm", release) and not flags.read(flags.SWITCH):
        assert done.returncode == 0, done.stdout
