# SPDX-License-Identifier: Apache-2.0
"""Compile host and device never meet: what each leaves beside the programs, and what it makes of the other's.

Every test runs the hooked worker on both sides, as two starts would, and reads the files that they leave.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import neuron_plugin
from support.neuron_plugin import configs, runtime_of
from vllm_omni_patch.loading import apply
from vllm_omni_patch.patches.available_memory import PATCH
from vllm_omni_patch.patches.available_memory.flags import NEURON_FLAGS
from vllm_omni_patch.patches.available_memory.neuron import record
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB
from vllm_omni_patch.patches.available_memory.neuron.record import SidesDifferError

OLD = next(target for target in PATCH.targets if target.distribution == "vllm-neuron")
CAP = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MIB = 1 << 20
BLOCK = 2 * MIB
FULL, SHORT = 24 * GIB, int(1.2 * GIB) + int(22.5 * GIB)


class Sides:
    """Starts of one model on a compile host and on a device, with the programs in ``folder``."""

    def __init__(self, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.folder, self._patch = module, folder, monkeypatch

    def _start(self, environ: dict[str, str], more: dict[str, Any]) -> int:
        spec = type("FullAttentionSpec", (), {"block_size": 32, "page_size_bytes": BLOCK})()
        model = torch.nn.Module()
        size = more.pop("weights", GIB)
        model.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
        with self._patch.context() as context:
            for name, value in {"NEURON_COMPILED_ARTIFACTS": str(self.folder), **environ}.items():
                context.setenv(name, value)
            worker = self.module.NeuronWorker(**configs(model=model, **{"specs": {"layer": spec}, **more}))
            return int(worker.determine_available_memory()) // BLOCK

    def compile_host(self, environ: dict[str, str] | None = None, **more: Any) -> int:
        """Blocks planned on a host without a device."""
        self._patch.setattr(torch.classes, "neuron", runtime_of(RuntimeError("there is no device")), raising=False)
        base = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
        return self._start({**base, **(environ or {})}, more)

    def device(self, environ: dict[str, str] | None = None, total: int = FULL, **more: Any) -> int:
        """Blocks planned where the runtime reports ``total`` bytes."""
        used = int(1.2 * GIB)
        self._patch.setattr(torch.classes, "neuron", runtime_of((used, total - used)), raising=False)
        return self._start(environ or {}, more)

    def files(self, side: str = "") -> list[Path]:
        return sorted(self.folder.glob(f"{record.PREFIX}-*-{side.replace(' ', '-') or '*'}-*.json"))


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    for flag in NEURON_FLAGS:
        monkeypatch.delenv(flag.name, raising=False)
    caplog.set_level(logging.INFO, logger="vllm.omni_patch.memory")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = neuron_plugin.lay(tmp_path, neuron_plugin.FREE_OR_20_GIB)
    __import__(name)
    module = sys.modules[name]
    apply.install(PATCH, OLD, module, lambda: None)
    yield Sides(module, tmp_path / "programs", monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_neuron"]:
        del sys.modules[name]


def warned(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and words in r.getMessage()]


# -- the promise: equal block counts, or an error that prints both totals


def test_equal_sides_start_and_leave_what_they_assumed(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    assert sides.compile_host() == sides.device() == 3317
    (path,) = sides.files("compile host")
    data = json.loads(path.read_text())
    assert (data["side"], data["blocks"], data["total"]) == ("compile host", 3317, FULL)
    made_of = data["settings"]
    assert (made_of["cap_fraction"], made_of["gpu_memory_utilization"], made_of["platform"]) == (0.3, 0.9, "trn2")
    assert (made_of["weights"], made_of["policy"], made_of["block"]) == (GIB, "cap", BLOCK)
    assert len(sides.files("device")) == 1
    assert f"the same KV blocks ({path})" in caplog.text
    assert not warned(caplog, "")


def test_a_device_with_less_memory_stops_with_both_totals(sides: Sides) -> None:
    """24 GiB by the table against 1.2 + 22.5 of the runtime: 3317 blocks compiled, 3276 served."""
    assert sides.compile_host() == 3317
    with pytest.raises(SidesDifferError) as caught:
        sides.device(total=SHORT)
    text = str(caught.value)
    for words in (str(FULL), str(SHORT), "3317", "3276", "differ in HBM", "--num-gpu-blocks-override 3276"):
        assert words in text
    assert str(sides.files("compile host")[0]) in text
    assert not sides.files("device")


def test_the_same_found_by_the_compile_host_before_it_compiles(sides: Sides) -> None:
    assert sides.device(total=SHORT) == 3276
    with pytest.raises(SidesDifferError) as caught:
        sides.compile_host()
    for words in (str(FULL), str(SHORT), "3317", "3276", "This compile host"):
        assert words in str(caught.value)
    assert not sides.files("compile host")


@pytest.mark.parametrize(
    ("here", "there", "name"),
    [
        ({CAP: "0.2"}, {}, "cap_fraction"),
        ({}, {CAP: "0.2"}, "cap_fraction"),
        ({"VLLM_OMNI_PATCH_NEURON_POLICY": "need"}, {}, "policy"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, {}, "platform"),
    ],
)
def test_a_setting_on_one_side_only_stops_the_device(
    sides: Sides, here: dict[str, str], there: dict[str, str], name: str
) -> None:
    planned = sides.compile_host(here)
    with pytest.raises(SidesDifferError) as caught:
        sides.device(there)
    text = str(caught.value)
    assert name in text and str(planned) in text and f"{FULL} bytes" in text
    if here == {CAP: "0.2"}:
        assert "2211" in text and "3317" in text


@pytest.mark.parametrize("more", [{"cache": {"gpu_memory_utilization": 0.92}}, {"weights": 18 * GIB}])
def test_whatever_the_difference_is_it_stops_the_device(sides: Sides, more: dict[str, Any]) -> None:
    sides.compile_host()
    with pytest.raises(SidesDifferError, match="differ in"):
        sides.device(**more)


@pytest.mark.parametrize("cache", [{"num_gpu_blocks_override": 256}, {"kv_cache_memory_bytes": 256 * BLOCK}])
def test_a_size_set_by_hand_is_compared_too(sides: Sides, cache: dict[str, Any]) -> None:
    sides.compile_host(cache=cache)
    sides.device(cache=cache, total=SHORT)  # the totals play no part
    with pytest.raises(SidesDifferError, match="256 blocks"):
        sides.device()


def test_equal_blocks_by_hand_are_equal_where_layers_are_of_several_kinds(sides: Sides) -> None:
    """One number of bytes does not describe a block there, and the totals still play no part."""
    full, window = (
        type(name, (), {"block_size": 32, "page_size_bytes": BLOCK})() for name in ("FullAttentionSpec", "WindowSpec")
    )
    more = {"specs": {"a": full, "b": window}, "cache": {"num_gpu_blocks_override": 256}}
    sides.compile_host(**more)
    sides.device(total=SHORT, **more)
    with pytest.raises(SidesDifferError, match="256 blocks"):
        sides.device(**{**more, "cache": {"num_gpu_blocks_override": 255}})


def test_other_settings_with_the_same_blocks_are_no_difference(sides: Sides) -> None:
    cache = {"num_gpu_blocks_override": 3317}
    sides.compile_host(cache=cache)
    assert sides.device() == 3317


def test_a_change_begins_on_the_compile_host(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    sides.compile_host()
    sides.device()
    assert sides.compile_host({CAP: "0.2"}) == 2211
    (line,) = warned(caplog, "last planned other KV blocks")
    assert "differ in cap_fraction" in line and "3317" in line and "2211" in line
    assert sides.device({CAP: "0.2"}) == 2211
    assert sides.device() == 3317  # compiled before, and still there
    with pytest.raises(SidesDifferError):
        sides.device({CAP: "0.25"})


def test_a_device_alone_may_change_as_it_likes(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    assert [sides.device({CAP: value}) for value in ("0.3", "0.2")] == [3317, 2211]
    assert not warned(caplog, "")


# -- what is not compared


@pytest.mark.parametrize(
    "other",
    [
        {"model_config": {"hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"], num_hidden_layers=80)}},
        {"model_config": {"hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"])}},
        {"model_config": {"quantization": "fp8"}},
        {"model_config": {"max_model_len": 8192}},
        {"parallel": {"tensor_parallel_size": 4}},
        {"rank": 1},
    ],
)
def test_another_models_record_beside_it_is_not_compared(
    sides: Sides, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if "model_config" in other:
        base = vars(configs()["model_config"])
        other = {"model_config": SimpleNamespace(**{**base, **other["model_config"]})}
    sides.compile_host({CAP: "0.2"}, **other)
    assert sides.device() == 3317
    assert len(sides.files("compile host")) == 1 and not warned(caplog, "")


def test_two_models_of_one_shape_share_their_programs(sides: Sides) -> None:
    named = [SimpleNamespace(**{**vars(configs()["model_config"]), "model": name}) for name in ("/a/base", "org/tuned")]
    sides.compile_host({CAP: "0.2"}, model_config=named[0])
    with pytest.raises(SidesDifferError):
        sides.device(model_config=named[1])


def test_kv_that_a_library_laid_out_is_not_compared(sides: Sides) -> None:
    model = torch.nn.Module()
    model.neuron_config = SimpleNamespace(is_block_kv_layout=True, pa_num_blocks=512, pa_block_size=32)
    sides.compile_host()
    assert sides.device(model_runner=SimpleNamespace(model=model)) == 512


@pytest.mark.parametrize("start", ["compile_host", "device"])
@pytest.mark.parametrize("where", ["", "s3://bucket/programs", "below a file"])
def test_a_place_that_cannot_be_used_is_one_line(
    sides: Sides, where: str, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "below a file":
        (sides.folder.parent / "file").write_text("")
        where = str(sides.folder.parent / "file" / "programs")
    assert getattr(sides, start)({"NEURON_COMPILED_ARTIFACTS": where}) == 3317
    lines = [r for r in caplog.records if "compare" in r.getMessage().partition("\n")[0]]
    assert len(lines) == 1, caplog.text
    # Only a compile host is sure to have another side.
    assert lines[0].levelno == (logging.WARNING if start == "compile_host" else logging.INFO)
    assert not Path("s3:").exists()


def test_a_folder_that_cannot_be_written_still_compares(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    sides.compile_host()
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert sides.device() == 3317
    with pytest.raises(SidesDifferError):
        sides.device({CAP: "0.2"})
    assert not warned(caplog, "")
    sides.compile_host({CAP: "0.25"})
    assert len(warned(caplog, "Read-only file system")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"format": 1}',
        "\x00\xff",
        '{"format": 1, "side": "device"}',
        None,
        "negative",
        "side",
    ],
)
def test_a_damaged_record_is_said_and_not_fatal(
    sides: Sides, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    sides.compile_host()
    (record,) = sides.files()
    if text in ("negative", "side"):
        data = json.loads(record.read_text())
        record.write_text(json.dumps({**data, **({"blocks": -1} if text == "negative" else {"side": "elsewhere"})}))
    elif text is None:
        record.unlink()
        record.mkdir()
    else:
        record.write_text(text, encoding="latin-1")
    assert sides.device({CAP: "0.2"}) == 2211
    (line,) = warned(caplog, "is not a usable record")
    assert str(record) in line


def test_a_record_of_a_later_release_is_passed_over(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    sides.compile_host()
    (record,) = sides.files()
    record.write_text(json.dumps({"format": 99}))
    assert sides.device({CAP: "0.2"}) == 2211
    assert not warned(caplog, "")


def test_a_comparison_that_breaks_does_not_stop_the_worker(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(record, "exchange", broken)
    assert sides.device() == 3317
    assert len(warned(caplog, "were not compared (ZeroDivisionError: ours)")) == 1


# -- places and writers


def test_where_the_programs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    artifacts, cache = "NEURON_COMPILED_ARTIFACTS", "NEURON_COMPILE_CACHE_URL"
    assert record.place("org/model", {artifacts: "/a", cache: "/b"}) == "/a"
    assert record.place("org/model", {cache: "file:///b"}) == "/b"
    assert record.place("org/model", {cache: "s3://b/c"}) == "s3://b/c"
    assert record.place("org/model", {}) == ""
    (tmp_path / "local-models/org/model/neuron-compiled-artifacts").mkdir(parents=True)
    assert record.place("org/model", {}) == "local-models/org/model/neuron-compiled-artifacts"
    model = tmp_path / "model"
    (model / "neuron-compiled-artifacts").mkdir(parents=True)
    assert record.place(str(model), {}) == str(model / "neuron-compiled-artifacts")
    assert record.place("", {}) == ""


def at_once(count: int, work: Callable[[int], None]) -> list[BaseException]:
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_writers_at_once_leave_whole_files_only(tmp_path: Path) -> None:
    """Both sides, several settings, all at once: each file is whole, and none is another's."""

    def work(number: int) -> None:
        side = (record.DEVICE, record.COMPILE_HOST)[number % 2]
        plan = record.Plan(side, GIB, 512, FULL, {"cap_fraction": (number // 2 % 3) / 10, "block": BLOCK})
        for _ in range(20):
            outcome = record.exchange(plan, lambda total: GIB, {"architectures": ["A"]}, str(tmp_path))
            if outcome.warnings:
                raise ValueError(outcome.warnings)

    assert at_once(12, work) == []
    files = list(tmp_path.iterdir())
    assert len(files) == 6 and all(json.loads(path.read_text())["blocks"] == 512 for path in files)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
