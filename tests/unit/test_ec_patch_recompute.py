# SPDX-License-Identifier: Apache-2.0
"""Encoding what could not be loaded: which items are added, and that the step itself is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from support.ec_requests import Feature
from vllm_omni_patch.patches.ec_connector.vllm import configured, recompute, refusals
from vllm_omni_patch.patches.ec_connector.vllm.items import Load


@dataclass
class Connector:
    failed: list[Load] = field(default_factory=list)
    noted: list[Any] = field(default_factory=list)
    again: int = 0

    def take_failed_loads(self) -> list[Load]:
        taken, self.failed = self.failed, []
        return taken

    def encodes_again(self, count: int) -> None:
        self.again += count

    def about_to_encode(self, items: Any) -> None:
        self.noted += list(items)


def load(request_id: str, index: int, name: str) -> Load:
    return Load(request_id, index, name, name, 32)


REQUESTS = {
    "r1": [Feature("a"), Feature("b")],
    "r2": [Feature("b"), Feature("c")],
    "r3": [Feature("d", data=None)],
}


def test_failed_items_join_the_scheduled_ones() -> None:
    scheduled = {"r2": [1]}
    connector = Connector()
    extended = recompute.extend(scheduled, [load("r1", 0, "a"), load("r1", 1, "b")], REQUESTS.get, connector)
    assert extended == {"r2": [1], "r1": [0, 1]} and connector.again == 2
    assert scheduled == {"r2": [1]}


def test_an_item_is_encoded_once() -> None:
    """Two requests of one step share an identifier; one of them encodes it anyway."""
    failed = [load("r1", 1, "b"), load("r2", 0, "b")]
    assert recompute.extend({"r2": [0]}, failed, REQUESTS.get, Connector()) == {"r2": [0]}


def test_an_item_without_data_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()
    assert recompute.extend({}, [load("r3", 0, "d"), load("gone", 0, "e")], REQUESTS.get, connector) == {}
    assert "has no data to encode" in caplog.text
    assert connector.again == 0, "what is not encoded is no fallback"


def v1_runner() -> Any:
    states = {name: SimpleNamespace(mm_features=f, lora_request=None) for name, f in REQUESTS.items()}
    return SimpleNamespace(requests=states)


def test_v1_leaves_the_step_as_it_was() -> None:
    connector = Connector([load("r1", 0, "a")])
    output = SimpleNamespace(scheduled_encoder_inputs={"r2": [1]}, total_num_scheduled_tokens=5)
    seen: list[Any] = []
    recompute.around_v1_encoder(connector, lambda step: seen.append(step), v1_runner(), (output,), {})
    assert seen[0].scheduled_encoder_inputs == {"r2": [1], "r1": [0]}
    assert seen[0].total_num_scheduled_tokens == 5
    assert output.scheduled_encoder_inputs == {"r2": [1]}
    assert [(r, f.identifier) for r, f, _ in connector.noted] == [("r2", "c"), ("r1", "a")]
    assert connector.again == 1


@pytest.mark.parametrize("named", [False, True])
def test_v1_passes_the_step_through_when_nothing_failed(named: bool) -> None:
    output = SimpleNamespace(scheduled_encoder_inputs={})
    args, kwargs = ((), {"scheduler_output": output}) if named else ((output,), {})

    def encoder(scheduler_output: Any) -> Any:
        return scheduler_output

    assert recompute.around_v1_encoder(Connector(), encoder, v1_runner(), args, kwargs) is output


def test_v2_extends_what_it_prepares() -> None:
    connector = Connector([load("r1", 0, "a")])
    encoder = SimpleNamespace(encoder_cache=SimpleNamespace(mm_features=REQUESTS))
    scheduled = {"r2": [1]}
    seen = recompute.around_v2_inputs(connector, lambda inputs: inputs, encoder, (scheduled,), {})
    assert seen == {"r2": [1], "r1": [0]} and scheduled == {"r2": [1]}
    assert recompute.around_v2_inputs(connector, lambda inputs: inputs, encoder, (scheduled,), {}) is scheduled


def config(role: str = "ec_both", v2: bool | None = False, encoder_decoder: bool = False) -> Any:
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_role=role, ec_connector=configured.NAME),
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder, model="tiny/whisper"),
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize(
    ("role", "release", "refused"),
    [
        ("ec_both", "0.17.0", True),
        ("ec_both", "0.17.1+cpu", True),
        ("ec_both", "0.18.0", False),
        ("ec_both", "0.32.0", False),
        ("ec_both", "0.17.2.dev3+gabc", False),
        ("ec_both", "dev", False),
        ("ec_producer", "0.11.1", False),
        ("ec_consumer", "0.17.0", False),
    ],
)
def test_a_role_that_a_release_cannot_do_is_refused(role: str, release: str, refused: bool) -> None:
    if not refused:
        refusals.check(config(role), release)
        return
    with pytest.raises(refusals.ConnectorRefused, match=r"0\.18\.0"):
        refusals.check(config(role), release)


def test_encoder_decoder_models_are_refused() -> None:
    with pytest.raises(refusals.ConnectorRefused, match=r"tiny/whisper.*encoder-decoder"):
        refusals.check(config(encoder_decoder=True), "0.32.0")


def test_a_v2_runner_without_transfer_is_refused() -> None:
    """In a process of its own, since it imports vLLM where there is one; its 0.32.0 V2 runner takes part."""
    code = """
import sys
from types import SimpleNamespace as N
from vllm_omni_patch.patches.ec_connector.vllm import configured, refusals
config = N(ec_transfer_config=N(ec_role="ec_both", ec_connector=configured.NAME), use_v2_model_runner=True,
           model_config=N(is_encoder_decoder=False, model="tiny"))
try:
    import vllm.v1.worker.gpu.ec_connector
    has_transfer = True
except ImportError:
    has_transfer = False
try:
    refusals.check(config, "0.32.0" if has_transfer else "0.20.0")
    refused = False
except (refusals.ConnectorRefused, ModuleNotFoundError):
    refused = True
print("AS EXPECTED" if refused != has_transfer else (has_transfer, refused))
"""
    refusals.check(config(v2=False), "0.20.0")
    env = {name: value for name, value in os.environ.items() if name != "VLLM_OMNI_PATCH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "AS EXPECTED" in done.stdout, done.stdout + done.stderr


def test_a_worker_without_recovery_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.mm.encoder_runner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(recompute.importlib, "import_module", lambda name: sys.modules[name])
    monkeypatch.setattr(recompute, "INSTALLED", {})
    with pytest.raises(RuntimeError, match="lacks the recovery from a failed load"):
        recompute.require(config())
    recompute.INSTALLED["v1"] = "target"
    recompute.require(config())
    with pytest.raises(RuntimeError, match=r"encoder_runner"):
        recompute.require(config(v2=True))
