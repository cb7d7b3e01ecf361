# SPDX-License-Identifier: Apache-2.0
"""The connector class and the hooks on the installed vLLM's own classes and configurations; no engine is started."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm")
import torch
import vllm
from packaging.version import Version
from vllm.distributed.ec_transfer.ec_connector import base, factory

from support import tiny_model
from vllm_omni_patch.loading.apply import install, remove
from vllm_omni_patch.patches.ec_connector import PATCH
from vllm_omni_patch.patches.ec_connector.vllm import configured, recompute, refusals
from vllm_omni_patch.patches.ec_connector.vllm.weight_files import weights_identity

RELEASE = Version(vllm.__version__)


@pytest.fixture(scope="module", autouse=True)
def hooks() -> Iterator[None]:
    """Every target of the patch that this release has, in place for these tests and out again."""
    done = []
    for target in PATCH.targets:
        try:
            module = importlib.import_module(target.module)
            done.append(install(PATCH, target, module, on_first_call=lambda: None))
        except (ImportError, LookupError, AttributeError):
            assert target.optional, f"{target.name} is missing"
    yield
    assert next(one for one in done if one.target.install.endswith(":register")).hook.used
    for one in reversed(done):
        assert remove(one) == ""
    assert configured.NAME not in factory.ECConnectorFactory._registry and not recompute.INSTALLED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.make(str(tmp_path_factory.mktemp("model")), dummy=True)


Make = Callable[..., Any]


@pytest.fixture
def make(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A real ``VllmConfig`` for the tiny model, with a store of its own."""
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path / "disk"))
    from vllm.engine.arg_utils import EngineArgs

    def build(role: str = "ec_both", folder: str = model, connector: str = configured.NAME, **more: Any) -> Any:
        transfer = {"ec_connector": connector, "ec_role": role}
        arguments = EngineArgs(
            model=folder,
            max_model_len=256,
            ec_transfer_config=transfer,
            enforce_eager=True,
            **{"load_format": "dummy", **more},
        )
        return arguments.create_engine_config()

    return build


def connector(config: Any, role: Any) -> Any:
    return factory.ECConnectorFactory.create_connector(config, role)


def test_the_factory_resolves_the_name(make: Make) -> None:
    made = connector(make(), base.ECConnectorRole.SCHEDULER)
    try:
        assert type(made).__name__ == configured.NAME and made.is_producer and made.is_consumer
    finally:
        made.shutdown()
        made.shutdown()


def test_each_method_takes_what_this_release_passes() -> None:
    """Every method of vLLM's base class binds its arguments by position and by name, and none is left abstract."""
    ours = factory.ECConnectorFactory._registry[configured.NAME]()
    assert not ours.__abstractmethods__
    methods = [name for name, _ in inspect.getmembers(base.ECConnectorBase, inspect.isfunction) if name[0] != "_"]
    assert {"start_load_caches", "save_caches", "build_connector_meta"} <= set(methods)
    for name in methods:
        _, *asked = inspect.signature(getattr(base.ECConnectorBase, name)).parameters.values()
        named = {p.name: None for p in asked if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        by_position = [None for p in asked if p.kind is p.POSITIONAL_OR_KEYWORD]
        only_by_name = {p.name: None for p in asked if p.kind is p.KEYWORD_ONLY}
        taken = inspect.signature(getattr(ours, name))
        taken.bind(None, **named)
        taken.bind(None, *by_position, **only_by_name)


def test_each_side_answers_the_calls_of_the_other_with_vllms_defaults(make: Make) -> None:
    config = make()
    scheduler, worker = (connector(config, role) for role in base.ECConnectorRole)
    request = SimpleNamespace(request_id="r", mm_features=[SimpleNamespace(identifier="a")], lora_request=None)
    try:
        assert not worker.has_cache_item("a") and worker.has_caches(request) == []
        assert worker.ensure_cache_available(request, 0) and worker.take_unavailable_requests() == set()
        worker.update_state_after_alloc(request, 0)
        assert worker.build_connector_meta(None).plan.loads == []
        assert worker.request_finished(request) == (False, None) and worker.get_ec_connector_stats() is None
        assert scheduler.get_finished({"r"}) == (None, None) and scheduler.take_failed_loads() == []
        assert scheduler.build_connector_worker_meta() is None
    finally:
        scheduler.shutdown()
        worker.shutdown()


def test_a_step_from_the_scheduler_to_the_worker_and_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store, promise, carry the metadata as bytes, load; all through the interface that vLLM calls."""
    import pickle

    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    config = make()
    scheduler, worker = (connector(config, role) for role in base.ECConnectorRole)
    encoder = torch.nn.Linear(4, 4)
    worker.weights_loaded(lambda: encoder)
    feature = SimpleNamespace(
        identifier="a", modality="image", data={"pixel_values": 1}, mm_position=SimpleNamespace(offset=4, length=32)
    )
    request = SimpleNamespace(
        request_id="r1",
        mm_features=[feature],
        lora_request=None,
        get_num_encoder_embeds=lambda index: 32,
    )
    try:
        tensor = torch.randn(32, 64)
        worker.about_to_encode([("r1", feature, None)])
        worker.save_caches({"a": tensor}, "a")
        assert worker._engine.flush(10)
        if hasattr(base.ECConnectorBase, "ensure_cache_available"):
            until = time.monotonic() + 20
            while not scheduler.ensure_cache_available(request, 0):  # it is being loaded into memory
                assert time.monotonic() < until
                scheduler.build_connector_meta(None)
        assert scheduler.has_cache_item("a") and not scheduler.has_cache_item("b")
        scheduler.update_state_after_alloc(request, 0)
        metadata = pickle.loads(pickle.dumps(scheduler.build_connector_meta(None)))
        cache: dict[str, Any] = {}
        worker.bind_connector_metadata(metadata)
        worker.start_load_caches(cache)
        worker.get_finished(set())
        assert torch.equal(cache["a"], tensor) and worker.take_failed_loads() == []
        meta = worker.build_connector_worker_meta()
        assert worker.build_connector_worker_meta() is None
        scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=pickle.loads(pickle.dumps(meta))))
        if hasattr(base.ECConnectorBase, "get_ec_connector_stats"):
            stats = scheduler.get_ec_connector_stats()
            assert stats.data["hits"] == 1 and stats.data["lookup_hits"] == 1 and not stats.is_empty()
            again = type(scheduler).build_ec_connector_stats(stats.data)
            assert again.aggregate(stats).reduce()["hits"] == 2
            assert scheduler.get_ec_connector_stats() is None
        scheduler.request_finished(request)
    finally:
        scheduler.shutdown()
        worker.shutdown()


@pytest.fixture
def worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's connector, chosen in this process."""
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    made = connector(make(), base.ECConnectorRole.WORKER)
    monkeypatch.setattr("vllm.distributed.ec_transfer.ec_transfer_state._EC_CONNECTOR_AGENT", made)
    yield made
    made.shutdown()


def store(made: Any, name: str, rows: int = 32) -> bool:
    """Let the encoder make ``name``; whether it can be loaded then."""
    made.about_to_encode([("r1", SimpleNamespace(identifier=name, modality="image", data={"pixel_values": 1}), None)])
    made.save_caches({name: torch.randn(rows, 64)}, name)
    assert made._engine.flush(10)
    return bool(made._engine.contains(name, rows))


class Runner:
    """What the worker asks of its model runner; the model is real."""

    def __init__(self) -> None:
        self.encoder_cache: dict[str, Any] = {}
        self.model = torch.nn.Linear(4, 4)
        self.fails = False

    def load_model(self, **_: Any) -> None:
        self.model = torch.nn.Linear(4, 4)

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, *_: Any, **__: Any) -> None:
        if self.fails:
            raise OSError("half of the weights were written")

    def reset_encoder_cache(self) -> None:
        self.encoder_cache.clear()


def vllm_worker(made: Any) -> Any:
    """vLLM's own worker, without a device."""
    from vllm.v1.worker.gpu_worker import Worker

    class Bare(Worker):  # type: ignore[misc]
        def __init__(self) -> None:
            self.vllm_config = made._vllm_config
            self.model_config = made._vllm_config.model_config
            self.model_runner = Runner()

        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            return contextlib.nullcontext()

    return Bare()


def test_weights_are_looked_at_when_they_are_loaded(worker: Any) -> None:
    """Those at the end of load_model are the checkpoint's; written to before the first step, they are others."""
    process = vllm_worker(worker)
    process.load_model()
    process.model_runner.model.weight.data.add_(1)
    before = worker._engine._run_folder.generation()
    assert before == "" and store(worker, "a")
    assert worker._engine._run_folder.generation() != ""


def test_resets_and_loads_of_equal_weights_begin_no_epoch(worker: Any) -> None:
    process = vllm_worker(worker)
    process.load_model()
    assert store(worker, "a")
    if hasattr(process, "reset_encoder_cache"):
        process.reset_encoder_cache()
    process.model_runner.model.weight.data.copy_(process.model_runner.model.weight.data.clone())
    assert store(worker, "b") and worker._engine.contains("a", 32)
    assert worker._engine._run_folder.generation() == ""


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_writes_weights_begins_an_epoch(worker: Any, fails: bool) -> None:
    """Also where a sample would show nothing, and where it ends with an error half way."""
    process = vllm_worker(worker)
    process.load_model()
    assert store(worker, "a")
    process.model_runner.fails = fails
    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        process.reload_weights()
    assert not worker._engine.contains("a", 32)
    begun = worker._engine._run_folder.generation()
    process.model_runner.model.weight.data.add_(1)  # what the call wrote, or the rest of it
    assert store(worker, "b") and worker._engine._run_folder.generation() == begun != ""


def test_a_worker_whose_weights_were_never_seen_stores_nothing(worker: Any) -> None:
    assert not store(worker, "a")
    assert worker._engine.stats.snapshot().stored == 0


def test_both_sides_know_the_weights_that_vllms_loader_opened(
    make: Make, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loader finds the files; with dummies the same configuration alone would do."""
    from vllm.config.load import LoadConfig
    from vllm.distributed.ec_transfer import ec_transfer_state
    from vllm.model_executor.model_loader import get_model_loader

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    config = make(folder=str(folder), load_format="auto")
    worker = connector(config, base.ECConnectorRole.WORKER)
    monkeypatch.setattr(ec_transfer_state, "_EC_CONNECTOR_AGENT", worker)
    get_model_loader(LoadConfig()).download_model(config.model_config)
    scheduler = connector(config, base.ECConnectorRole.SCHEDULER)
    try:
        for side in (worker, scheduler):
            assert not side._engine.contains("a")
            assert side._engine.identity.weights == weights_identity(str(folder)) != ""
    finally:
        scheduler.shutdown()
        worker.shutdown()


def test_an_adapter_is_known_by_the_files_that_vllms_manager_read(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.ec_transfer import ec_transfer_state
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    worker = connector(make(), base.ECConnectorRole.WORKER)
    monkeypatch.setattr(ec_transfer_state, "_EC_CONNECTOR_AGENT", worker)
    monkeypatch.setattr(WorkerLoRAManager, "__init__", lambda self: None)
    manager = WorkerLoRAManager()  # type: ignore[call-arg]
    manager._adapter_manager, manager._lora_model_cls, manager.lora_config = MagicMock(), MagicMock(), MagicMock()
    manager.max_position_embeddings = manager.vocab_size = 1
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = LoRARequest("a", 7, str(tmp_path))
    try:
        with pytest.raises(Exception, match="adapter"):  # it is none: vLLM reads its configuration first
            manager._load_adapter(adapter)
        assert worker.adapters.digest(7) == "", "not loaded"
        monkeypatch.setattr("vllm.lora.worker_manager.PEFTHelper", MagicMock())
        manager._load_adapter(lora_request=adapter)
        assert worker.adapters.digest(7) == weights_identity(str(tmp_path)) != ""
    finally:
        worker.shutdown()


def test_content_hashes_do_not_depend_on_the_road_to_the_weights(make: Make, model: str, tmp_path: Path) -> None:
    from vllm.multimodal.hasher import MultiModalHasher

    def hashed(folder: Path, **more: Any) -> str:
        config = make(folder=str(folder), load_format="auto", **more)
        algorithm = getattr(config.model_config.multimodal_config, "mm_hasher_algorithm", None)
        return str(MultiModalHasher.hash_kwargs(*filter(None, [algorithm]), model_id=str(folder), image=b"pixels"))

    for name in ("one", "two"):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    (tmp_path / "link").symlink_to(tmp_path / "one")
    stock = hashed(tmp_path / "one", connector="ECExampleConnector")
    hashes = [hashed(tmp_path / name) for name in ("one", "link", "two")]
    assert hashes[0] == hashes[1] and len({stock, *hashes}) == 3


def test_a_producers_step_ends_when_its_outputs_are_stored(worker: Any, tmp_path: Path) -> None:
    """A proxy asks the consumer as soon as the producer has answered, and the consumer does not wait for an entry."""
    encoder = torch.nn.Linear(4, 4)
    worker.weights_loaded(lambda: encoder)
    worker._consumer = False
    for number in range(20):
        worker.about_to_encode([("r", SimpleNamespace(identifier=f"{number}", modality="image", data={}), None)])
        worker.save_caches(encoder_cache={f"{number}": torch.ones(512, 512)}, mm_hash=f"{number}")
        worker.get_finished(set())
        assert len(list(tmp_path.rglob("*.ec"))) == number + 1


@pytest.mark.skipif(Version("0.30") > RELEASE, reason="answers have no item metadata before 0.30")
@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
def test_only_a_producers_answer_describes_its_items(make: Make, role: str) -> None:
    """BLIP-2 has no metadata that could stand for an image, so a proxy sends the image itself."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    def feature(name: str) -> Any:
        return MultiModalFeatureSpec(MultiModalKwargsItem(), "image", name, PlaceholderRange(offset=0, length=4))

    made = connector(make(role), base.ECConnectorRole.SCHEDULER)
    request = SimpleNamespace(request_id="r", mm_features=[feature("a"), feature("b"), feature("a")])
    try:
        described = {name: {"metadata": {}, "item_indices": at} for name, at in (("a", [0, 2]), ("b", [1]))}
        assert made.request_finished(request) == (False, described if role == "ec_producer" else None)
        assert made.request_finished(SimpleNamespace(request_id="r", mm_features=[])) == (False, None)
    finally:
        made.shutdown()


def test_registering_twice_is_refused_with_a_reason() -> None:
    from vllm_omni_patch.patches.ec_connector import hooks

    with pytest.raises(RuntimeError, match="already registered"):
        hooks.register(SimpleNamespace(original=factory.ECConnectorFactory))  # type: ignore[arg-type]


def test_encoder_decoder_models_are_refused(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    _write_whisper(folder)
    with pytest.raises(refusals.ConnectorRefused, match="encoder-decoder"):
        make(folder=str(folder), skip_tokenizer_init=True)
    # And by the connector itself, where no hook saw the configuration.
    config = make(folder=str(folder), skip_tokenizer_init=True, connector="ECExampleConnector")
    assert config.model_config.is_encoder_decoder
    config.ec_transfer_config.ec_connector = configured.NAME
    for role in base.ECConnectorRole:
        with pytest.raises(refusals.ConnectorRefused, match="encoder-decoder"):
            connector(config, role)


def test_a_worker_without_recovery_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "INSTALLED", {})
    with pytest.raises(RuntimeError, match="recovery from a failed load"):
        connector(make(), base.ECConnectorRole.WORKER)


@pytest.mark.parametrize("asked", [False, True])
def test_enable_mm_embeds_stays_as_the_user_set_it(make: Make, asked: bool) -> None:
    settings = make("ec_both", enable_mm_embeds=asked).model_config.multimodal_config
    assert settings.enable_mm_embeds is asked
    assert not getattr(settings, "allow_missing_mm_embeddings", False)


def test_a_consumer_and_other_connectors_keep_vllms_setting(make: Make) -> None:
    if Version("0.30.0") > RELEASE:
        pytest.skip("vLLM turns it on from 0.30.0")
    assert make("ec_consumer").model_config.multimodal_config.enable_mm_embeds
    other = make("ec_both", connector="ECExampleConnector").model_config.multimodal_config
    assert other.enable_mm_embeds and other.allow_missing_mm_embeddings


def test_stock_behaviour_with_another_connector(make: Make) -> None:
    """No wrapper looks at anything: what it calls is the original, with the arguments as they came."""
    from vllm_omni_patch.patches.ec_connector import hooks

    assert hooks.chosen() is None
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    step = SimpleNamespace(scheduled_encoder_inputs={})
    instance = SimpleNamespace(_batch_mm_inputs_from_scheduler=lambda output: ([], [], []) if output is step else None)
    assert runner._execute_mm_encoder(instance, step) == []


def _write_whisper(folder: Path) -> None:
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=128,
        num_mel_bins=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=64,
        max_source_positions=64,
        max_target_positions=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "n_fft": 400})
    )
