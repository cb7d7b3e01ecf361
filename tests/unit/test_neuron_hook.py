# SPDX-License-Identifier: Apache-2.0
"""The hook on stand-ins of every published worker layout, wrapped by the loader's own code."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support import neuron_plugin

torch = pytest.importorskip("torch")

from support.neuron_plugin import configs, lay, runtime_of
from vllm_omni_patch.loading import apply
from vllm_omni_patch.matrix import judge
from vllm_omni_patch.patches.available_memory import PATCH
from vllm_omni_patch.patches.available_memory.flags import NEURON_FLAGS
from vllm_omni_patch.patches.available_memory.neuron import hooks, releases
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB
from vllm_omni_patch.patches.available_memory.report import output

OLD, NEW = (target for target in PATCH.targets if target.distribution == "vllm-neuron")
LAYOUTS = [neuron_plugin.FREE_OR_20_GIB, neuron_plugin.TWO_BRANCHES]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for flag in NEURON_FLAGS:
        monkeypatch.delenv(flag.name, raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm_neuron":
            del sys.modules[name]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts a runtime with the given figures at ``torch.classes.neuron``."""

    def put(pair: Any) -> None:
        monkeypatch.setattr(torch.classes, "neuron", runtime_of(pair), raising=False)

    put((11 * GIB, 13 * GIB))
    return put


def load(folder: Path, source: str, path: str = neuron_plugin.OLD_PATH) -> ModuleType:
    name = lay(folder, source, path)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def hooked(folder: Path, source: str) -> ModuleType:
    module = load(folder, source)
    assert judge.decide(PATCH, OLD, None, module).apply
    apply.install(PATCH, OLD, module, lambda: None)
    return module


def weights(bytes_: int) -> Any:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(bytes_, dtype=torch.uint8, device="meta"), requires_grad=False)
    return module


def worker_of(module: ModuleType, **changes: Any) -> Any:
    changes.setdefault("model", weights(10 * GIB))
    return module.NeuronWorker(**configs(**changes))


# -- the number


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
def test_the_budget_replaces_the_free_bytes(tmp_path: Path, device: Any, source: str) -> None:
    module = load(tmp_path, source)
    worker = worker_of(module)
    assert worker.determine_available_memory() == 13 * GIB  # what the release does
    done = apply.install(PATCH, OLD, module, lambda: None)
    assert worker.determine_available_memory() == 6_957_847_019
    done.undo()
    assert worker.determine_available_memory() == 13 * GIB


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
@pytest.mark.parametrize("figures", [(-1, -1), (10 * GIB, 0), RuntimeError("nrt: gone"), OSError("no device")])
def test_a_failing_query_raises_and_is_never_20_gib(tmp_path: Path, device: Any, source: str, figures: Any) -> None:
    module = hooked(tmp_path, source)
    device(figures)
    with pytest.raises(RuntimeError):
        worker_of(module).determine_available_memory()


def test_an_error_that_the_original_swallows_is_raised_again(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.SWALLOWS_TWICE)
    device((-1, -1))
    with pytest.raises(RuntimeError, match="unusable"):
        worker_of(module).determine_available_memory()


def test_a_runtime_that_is_not_registered_raises(tmp_path: Path) -> None:
    module = load(tmp_path, neuron_plugin.FREE_OR_20_GIB)
    assert worker_of(module).determine_available_memory() == 20 * GIB  # the real torch says that there is no such class
    apply.install(PATCH, OLD, module, lambda: None)
    with pytest.raises(RuntimeError, match=r"cannot be asked for memory: .*neuron"):
        worker_of(module).determine_available_memory()


def test_the_package_that_registers_the_runtime_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_neuronx.py").write_text(
        "import torch\nfrom support import neuron_plugin\n"
        "torch.classes.neuron = neuron_plugin.runtime_of((11 << 30, 13 << 30))\n"
    )
    module = hooked(tmp_path, neuron_plugin.FREE_OR_20_GIB)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert worker_of(module).determine_available_memory() == 6_957_847_019
    finally:
        vars(torch.classes).pop("neuron", None)
        sys.modules.pop("torch_neuronx", None)


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
def test_compile_host_and_device_give_the_same_blocks(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    module = hooked(tmp_path, source)
    page = 1 * MIB
    for pair in ((11 * GIB, 13 * GIB), (11 * GIB, 13 * GIB - 3 * MIB)):
        device(pair)
        assert worker_of(module).determine_available_memory() // page == 6635
    device(RuntimeError("there is no device"))
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert worker_of(module).determine_available_memory() // page == 6635


@pytest.mark.parametrize("name", ["VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "VLLM_NEURON_MIN_KV_BUDGET_GIB"])
def test_a_bad_setting_stops_the_worker(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    monkeypatch.setenv(name, "nan")
    with pytest.raises(RuntimeError, match=f"{name}='nan'"):
        worker_of(module).determine_available_memory()


def nxd_model(**config: Any) -> Any:
    """A model as the plugin's loader leaves it: nothing on the host, and the library's configuration."""
    module = torch.nn.Module()
    module.neuron_config = SimpleNamespace(**{"is_block_kv_layout": True, "pa_block_size": 32, **config})
    return module


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
def test_a_start_that_stock_survives_is_not_stopped(tmp_path: Path, device: Any, source: str) -> None:
    """24 GiB, 17 of weights, 4 of KV laid out, used 21.30: stock plans 172 blocks of 16 MiB and starts."""
    module = load(tmp_path, source)
    device((int(21.30 * GIB), 24 * GIB - int(21.30 * GIB)))
    page = 16 * MIB
    worker = worker_of(module, model=nxd_model(pa_num_blocks=256), specs={"layer": spec("FullAttentionSpec", 32, page)})
    assert worker.determine_available_memory() // page == 172
    apply.install(PATCH, OLD, module, lambda: None)
    assert worker.determine_available_memory() == 4 * GIB == 256 * page


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
@pytest.mark.parametrize("model", [torch.nn.Module(), nxd_model(pa_num_blocks=256, pa_block_size=64)])
def test_a_model_that_tells_no_layout_keeps_the_workers_number(
    tmp_path: Path, device: Any, source: str, model: Any
) -> None:
    module = hooked(tmp_path, source)
    device((int(21.30 * GIB), 24 * GIB - int(21.30 * GIB)))
    worker = worker_of(module, model=model, specs={"layer": spec("FullAttentionSpec", 32, MIB)})
    assert worker.determine_available_memory() == 24 * GIB - int(21.30 * GIB)


def test_release_0_1_answers_with_a_constant_and_keeps_it(tmp_path: Path, device: Any) -> None:
    module = load(tmp_path, neuron_plugin.CONSTANT)
    device((int(23.5 * GIB), GIB // 2))
    worker = worker_of(module, model=torch.nn.Module())
    assert worker.determine_available_memory() == 1_073_741_824
    apply.install(PATCH, OLD, module, lambda: None)
    assert worker.determine_available_memory() == 1_073_741_824
    device((11 * GIB, 13 * GIB))
    assert worker_of(module).determine_available_memory() == 6_957_847_019
    (row,) = [row for row in OLD.documented if row.release == "0.1.0"]
    assert "1,073,741,824" in row.reason and "free bytes" not in row.reason


def test_contiguous_kv_of_the_early_releases(tmp_path: Path, device: Any) -> None:
    """Block numbers of vLLM do not address it; there is one block per sequence, and the one that vLLM keeps."""
    module = hooked(tmp_path, neuron_plugin.FREE_OR_20_GIB)
    device((int(23.5 * GIB), GIB // 2))
    specs = {"layer": spec("FullAttentionSpec", 4096, 64 * MIB)}
    worker = worker_of(module, model=nxd_model(is_block_kv_layout=False), specs=specs)
    assert worker.determine_available_memory() == 5 * 64 * MIB


def test_explicit_bytes_win(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    device((-1, -1))
    worker = worker_of(module, cache={"kv_cache_memory_bytes": 4 * GIB})
    assert worker.determine_available_memory() == 4 * GIB


def test_a_block_override_is_left_to_vllm(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    device((23 * GIB, GIB // 2))
    worker = worker_of(module, cache={"num_gpu_blocks_override": 256})
    assert worker.determine_available_memory() == GIB // 2


# -- the branches of 0.5 that are not ours


def test_the_contiguous_branch_is_the_originals(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    device((-1, -1))  # nothing of ours is asked
    worker = worker_of(module, block_kv=False)
    assert worker.determine_available_memory() == 5 * 1024
    assert module.CALLS == ["contiguous"]


def test_the_pooling_branch_is_the_originals(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    device((-1, -1))
    assert worker_of(module, pooling=True).determine_available_memory() == 32


def test_a_further_bound_of_the_worker_holds(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.SLAB_LIMIT)
    assert worker_of(module).determine_available_memory() == 2 * GIB


@pytest.mark.parametrize("figures", [(11 * GIB, 13 * GIB), (-1, -1)])
def test_the_worker_is_left_as_it_was(tmp_path: Path, device: Any, figures: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    device(figures)
    worker = worker_of(module, _query_runtime_memory=(own := lambda: 7))
    before = dict(vars(worker))
    try:
        worker.determine_available_memory()
    except RuntimeError:
        assert figures == (-1, -1)
    assert vars(worker) == before and worker._query_runtime_memory is own


def test_helpers_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    source = neuron_plugin.TWO_BRANCHES.replace("_query_runtime_memory", "_free_now")
    module = load(tmp_path, source)
    before = vars(module.NeuronWorker)["determine_available_memory"]
    with pytest.raises(RuntimeError, match="cannot be told from the contiguous one"):
        apply.install(PATCH, OLD, module, lambda: None)
    assert vars(module.NeuronWorker)["determine_available_memory"] is before


# -- native, drifted, twice, unknown release


def test_the_newer_layout_is_left_alone(tmp_path: Path) -> None:
    module = load(tmp_path, neuron_plugin.NATIVE, neuron_plugin.NEW_PATH)
    decision = judge.decide(PATCH, NEW, "0.21.0.1.0.0", module)
    assert (decision.verdict, decision.apply) == ("native", False)
    with pytest.raises(RuntimeError, match="computes its own KV budget"):
        apply.install(PATCH, NEW, module, lambda: None)
    assert worker_of(module).determine_available_memory() == 4242


def test_the_newer_path_is_native_whatever_its_helpers_are_called(tmp_path: Path) -> None:
    source = neuron_plugin.NATIVE.replace("_compute_kv_budget", "_plan").replace("_get_kv_cap_fraction", "_fraction")
    module = load(tmp_path, source, neuron_plugin.NEW_PATH)
    assert judge.decide(PATCH, NEW, "0.29.0.1.2.0", module).verdict == "native"
    with pytest.raises(RuntimeError, match="by its path"):
        apply.install(PATCH, NEW, module, lambda: None)


def test_a_backport_in_the_old_layout_is_native(tmp_path: Path) -> None:
    module = load(tmp_path, neuron_plugin.NATIVE)
    assert judge.decide(PATCH, OLD, "0.5.1", module).verdict == "native"


@pytest.mark.parametrize("release", [None, "dev", "0.1.0", "0.5.1", "0.21.0.1.0.0", "9.9.9"])
def test_the_release_number_decides_nothing(tmp_path: Path, release: str | None) -> None:
    old = load(tmp_path / "old", neuron_plugin.FREE_OR_20_GIB)
    assert judge.decide(PATCH, OLD, release, old).apply
    for name in [name for name in sys.modules if name.startswith("vllm_neuron")]:
        del sys.modules[name]
    new = load(tmp_path / "new", neuron_plugin.NATIVE, neuron_plugin.NEW_PATH)
    assert judge.decide(PATCH, NEW, release, new).verdict == "native"


def test_unlisted_skip_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tmp_path, neuron_plugin.FREE_OR_20_GIB)
    monkeypatch.setenv("VLLM_OMNI_PATCH_UNLISTED", "skip")
    assert not judge.decide(PATCH, OLD, "9.9.9", module).apply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("def determine_available_memory(self)", "def determine_available_memory(self, profile)"), "profile"),
        (("def determine_available_memory", "def determine_num_available_blocks"), "determine_available_memory"),
        (("def get_kv_cache_spec(self):\n        return", "def layout(self):\n        return"), None),
        (("def load_model", "def load"), "load_model"),
    ],
)
def test_a_drifted_worker_is_left_alone(tmp_path: Path, change: tuple[str, str], reason: str | None) -> None:
    module = load(tmp_path, neuron_plugin.FREE_OR_20_GIB.replace(*change))
    decision = judge.decide(PATCH, OLD, "0.5.1", module)
    if reason is None:  # still inherited from a base of the same module
        assert decision.apply
        return
    assert not decision.apply and reason in decision.reason


def test_every_published_release_has_one_verdict_per_layout() -> None:
    assert [row.release for row in OLD.documented] == [row.release for row in NEW.documented]
    for old, new in zip(OLD.documented, NEW.documented, strict=True):
        assert (old.verdict, new.verdict) in {("applies", "absent"), ("absent", "native")}
        assert old.reason and new.reason
    assert (OLD.module, NEW.module) == (releases.OLD_MODULE, releases.NEW_MODULE)


# -- failures in our own code


def test_an_unexpected_worker_gets_a_clear_error_not_a_guess(tmp_path: Path, device: Any) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    worker = worker_of(module)
    del worker.cache_config.gpu_memory_utilization
    with pytest.raises(RuntimeError, match=r"gpu_memory_utilization.*Leave available_memory out of VLLM_OMNI_PATCH"):
        worker.determine_available_memory()


@pytest.mark.parametrize("source", LAYOUTS, ids=("0.2-0.4", "0.5"))
@pytest.mark.parametrize("broken", ["emit", "complete"])
def test_a_failing_report_does_not_change_the_number(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, source: str, broken: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("the report is broken")

    module = hooked(tmp_path, source)
    monkeypatch.setattr(output, broken, fail)
    assert worker_of(module).determine_available_memory() == 6_957_847_019


def test_a_failing_log_handler_does_not_change_the_number(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("the disk is full")

    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    monkeypatch.setattr(hooks.logger, "handlers", [Broken()])
    monkeypatch.setattr(hooks.logger, "level", logging.DEBUG)
    assert worker_of(module).determine_available_memory() == 6_957_847_019


# -- what is read from the worker


@pytest.mark.parametrize(
    ("parallel", "workers", "replicas"),
    [
        ({"local_world_size": 4, "world_size": 8}, 4, 1),
        ({"world_size": 8}, 8, 1),  # vLLM before 0.11.1
        ({"local_world_size": 4, "data_parallel_size_local": 2}, 4, 2),
        ({"local_world_size": 4, "data_parallel_size_local": 0}, 4, 1),
        (
            {
                "local_world_size": 8,
                "data_parallel_size_local": 2,
                "distributed_executor_backend": "external_launcher",
            },
            8,
            1,
        ),
    ],
)
def test_workers_and_replicas_of_a_host(parallel: dict[str, Any], workers: int, replicas: int) -> None:
    view = hooks.view_of(SimpleNamespace(**configs(parallel=parallel)))
    assert (view.local_workers, view.replicas) == (workers, replicas)


def test_a_drafter_is_seen_and_its_absence_is_ordinary() -> None:
    attributes = configs(model=weights(8))
    assert hooks.view_of(SimpleNamespace(**attributes)).drafter is None
    attributes["model_runner"].drafter = SimpleNamespace(model=(drafter := weights(8)))
    assert hooks.view_of(SimpleNamespace(**attributes)).drafter is drafter


def spec(name: str, block_size: int, page: int) -> Any:
    return type(name, (), {"block_size": block_size, "page_size_bytes": page})()


def test_the_need_of_real_looking_layers(tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    monkeypatch.setenv("VLLM_OMNI_PATCH_NEURON_POLICY", "need")
    layers_ = {f"layer.{n}": spec("FullAttentionSpec", 32, 65536) for n in range(32)}
    got = worker_of(module, specs=layers_).determine_available_memory()
    assert got == (4 * 128 + 1) * 32 * 65536
    assert got // 65536 // 32 == 513  # as vLLM's core divides
    mixed = {**layers_, "layer.32": spec("SlidingWindowSpec", 32, 65536)}
    with pytest.raises(RuntimeError, match="one kind and block size; found FullAttentionSpec"):
        worker_of(module, specs=mixed).determine_available_memory()


# -- the report


def test_the_report_tells_where_the_number_came_from(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path / "reports"))
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    with caplog.at_level(logging.INFO, logger="vllm.omni_patch.memory"):
        specs = {f"layer.{n}": spec("FullAttentionSpec", 32, 65536) for n in range(16)}
        worker_of(module, specs=specs).determine_available_memory()
    (path,) = (tmp_path / "reports").glob("memory-*.json")
    data = json.loads(path.read_text())
    assert (data["platform"], data["policy"], data["kv_bytes"]) == ("neuron", "cap", 6_957_847_019)
    inputs = {item["name"]: item for item in data["inputs"]}
    assert inputs["weights"]["value"] == 10 * GIB and inputs["requested"]["value"] == 23_192_823_398
    assert inputs["cap_fraction"]["value"] == 0.30
    assert (data["blocks"], data["block_bytes"]) == (6635, 1 << 20)
    assert "6957847019 bytes, policy cap" in caplog.text


def test_the_originals_own_branch_is_reported_too(tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_PATCH_REPORT_DIR", str(tmp_path / "reports"))
    module = hooked(tmp_path, neuron_plugin.TWO_BRANCHES)
    worker_of(module, block_kv=False).determine_available_memory()
    (path,) = (tmp_path / "reports").glob("memory-*.json")
    assert json.loads(path.read_text())["policy"] == "stock"


# -- a process of its own, through the startup file

SCRIPT = """
import sys, json
sys.path[:0] = [{tests!r}, {folder!r}]
import torch
from support.neuron_plugin import configs, runtime_of
torch.classes.neuron = runtime_of((11 << 30, 13 << 30))
import {module} as plugin
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.empty(10 << 30, dtype=torch.uint8, device="meta"), requires_grad=False)
number = plugin.NeuronWorker(**configs(model=model)).determine_available_memory()
states = {{}}
if "vllm_omni_patch.ledger" in sys.modules:
    from vllm_omni_patch import ledger
    states = {{entry.target: entry.state for entry in ledger.entries()}}
print(json.dumps([number, states]))
"""


def run_process(folder: Path, source: str, path: str, version: str | None, flag: str | None) -> tuple[int, Any]:
    module = lay(folder, source, path, version)
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(folder), module=module)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "NEURON_"))}
    if flag is not None:
        environ["VLLM_OMNI_PATCH"] = flag
    # What the startup file does when it is installed; with it installed, this is the second call, which is harmless.
    script = "import vllm_omni_patch; vllm_omni_patch.activate()\n" + script
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    number, states = json.loads(run.stdout.splitlines()[-1])
    return number, states


def test_a_process_with_the_flag(tmp_path: Path) -> None:
    source = neuron_plugin.FREE_OR_20_GIB
    number, states = run_process(tmp_path, source, neuron_plugin.OLD_PATH, "0.5.1", "available_memory")
    assert number == 6_957_847_019
    assert states[OLD.name] == "applied"


def test_a_process_with_a_placeholder_version(tmp_path: Path) -> None:
    source = neuron_plugin.TWO_BRANCHES
    number, states = run_process(tmp_path, source, neuron_plugin.OLD_PATH, None, "available_memory")
    assert number == 6_957_847_019
    assert states[OLD.name] == "applied"


@pytest.mark.parametrize("flag", [None, "0", "ec_connector"])
def test_a_process_without_the_patch(tmp_path: Path, flag: str | None) -> None:
    number, states = run_process(tmp_path, neuron_plugin.FREE_OR_20_GIB, neuron_plugin.OLD_PATH, "0.5.1", flag)
    assert number == 13 * GIB
    assert OLD.name not in states


def test_a_process_with_a_native_plugin(tmp_path: Path) -> None:
    # Its number says 0.1.0, as the placeholder on public indexes does.
    number, states = run_process(tmp_path, neuron_plugin.NATIVE, neuron_plugin.NEW_PATH, "0.1.0", "available_memory")
    assert number == 4242
    assert states[NEW.name] == "native"
