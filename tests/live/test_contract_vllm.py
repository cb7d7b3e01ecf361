# SPDX-License-Identifier: Apache-2.0
"""The contract on the vLLM that is installed: text and objects agree, and every target is decided as the matrix says.

Modules are imported; no engine is started.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys

import pytest
import wrapt

from vllm_omni_patch import flags
from vllm_omni_patch.code import installed
from vllm_omni_patch.code.contract import check_live, check_source, fingerprint
from vllm_omni_patch.code.live import LiveView, source_text
from vllm_omni_patch.code.source import SourceView
from vllm_omni_patch.code.views import Missing
from vllm_omni_patch.loading import discover
from vllm_omni_patch.matrix import judge, table
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


def functions(source: SourceView, live: LiveView) -> list[str]:
    """Every function, and every method of every class, that the text defines."""
    found = []
    for name in source.scope:
        try:
            answer = source.find(name)
        except Missing:
            continue
        if answer[0].kind == "function":
            found.append(name)
        elif answer[0].kind == "class" and not hasattr(vars(live.module).get(name), "_fields"):
            for node in source._owners(name):
                found += [f"{name}.{member}" for member in source.body(node)]
    return list(dict.fromkeys(found))


def answer(view, qualname):
    try:
        return view.find(qualname)
    except Missing as missing:
        return str(missing)


@pytest.mark.parametrize("name", MODULES)
def test_text_and_object_have_the_same_signatures(name):
    module = load(name)
    source, live = SourceView(source_text(module)), LiveView(module)
    differ, asked = [], 0
    for qualname in functions(source, live):
        one, other = answer(source, qualname), answer(live, qualname)
        if not isinstance(one, list) or one[0].kind not in ("function", "property"):
            continue
        asked += 1
        if other[0] not in one:
            differ.append((qualname, one, other))
    assert differ == []
    assert asked >= 3


@pytest.mark.parametrize("name", MODULES)
def test_text_and_object_have_the_same_attributes(name):
    module = load(name)
    source, live = SourceView(source_text(module)), LiveView(module)
    differ = []
    for owner in [name for name in source.scope if isinstance(vars(module).get(name), type)]:
        for node in source._owners(owner):
            wanted = {*source._assigned_on_self(node), *source.body(node), "surely_not_there"}
            for attribute in (a for a in wanted if not a.startswith("__")):
                if source.has_class_attribute(owner, attribute) != live.has_class_attribute(owner, attribute):
                    differ.append(f"{owner}.{attribute}")
    # A dataclass takes the defaults that have a factory out of the class; they stay in its annotations.
    assert differ == []


def here() -> list:
    return [
        (patch, target)
        for patch in (one.patch for one in discover.find() if one.patch)
        for target in (*patch.targets, *patch.uses)
        if installed.find(installed.package_of(target.distribution, target.module))
    ]


def test_every_target_is_decided_as_listed():
    """On a listed release: what the matrix says of it is what the live object gives."""
    release = installed.find("vllm").release
    shipped = table.read(table.MATRIX)
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
        text = source_text(module)
        assert check_live(target.contract, module, target.qualname) == check_source(
            target.contract, text, target.qualname
        )
        if row.verdict == "applies":
            assert fingerprint(text, target.qualname) == row.fingerprint
            # A development build of the same code is known by that code.
            unlisted = judge.decide(patch, target, f"{release}.dev7+gabcdef", module)
            assert unlisted.apply and unlisted.like is not None
        decided += 1
    assert decided >= 10


def test_wrappers_on_a_real_method_change_no_answer():
    module = load("vllm.v1.worker.gpu_worker")
    contract = Contract(parameters=())
    assert check_live(contract, module, "Worker.determine_available_memory") == []
    original = vars(module.Worker)["determine_available_memory"]

    @functools.wraps(original)
    def traced(*args, **kwargs):
        return original(*args, **kwargs)

    try:
        module.Worker.determine_available_memory = traced
        wrapt.wrap_function_wrapper(module, "Worker.determine_available_memory", lambda w, i, a, k: w(*a, **k))
        assert check_live(contract, module, "Worker.determine_available_memory") == []
        assert check_live(Contract(parameters=(Parameter("x"),)), module, "Worker.determine_available_memory")
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
    if table.load().lists("vllm", release) and not flags.read(flags.SWITCH):
        assert done.returncode == 0, done.stdout
