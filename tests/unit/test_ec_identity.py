# SPDX-License-Identifier: Apache-2.0
"""Keys, fingerprints and the ids that must never be stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch.patches.ec_connector.cache.model import ModelIdentity
from vllm_omni_patch.patches.ec_connector.storage.key import is_request_scoped, stable_u64
from vllm_omni_patch.patches.ec_connector.vllm import model_identity as reader
from vllm_omni_patch.patches.ec_connector.vllm.model_identity import model_identity


@pytest.mark.parametrize(
    "identifier",
    [
        "renderer0-mm-1-image-0",
        "renderer12-mm-345-vision_chunk-6",
        "my-lora:renderer0-mm-1-image-0",
        "chatcmpl-8f1c0a-image-0",
        "cmpl-abc-0-audio-1",
        "0-image-0",
        "17-1a2b3c4d-video-2",
    ],
)
def test_ids_that_count_requests_are_never_stored(identifier: str) -> None:
    assert is_request_scoped(identifier)


@pytest.mark.parametrize(
    "identifier",
    ["a" * 64, "my-lora:" + "0f" * 32, "cat-photo", "product-image", "../../x", "日本", "image-0", "shoes-image-0"],
)
def test_content_hashes_and_client_ids_are_stored(identifier: str) -> None:
    assert not is_request_scoped(identifier)


def test_an_id_made_from_any_known_request_id_is_request_scoped() -> None:
    assert is_request_scoped("custom request/1-image-0", request_id="custom request/1")
    assert not is_request_scoped("custom request/1-image-0", request_id="another")


def test_u64_is_the_one_of_the_design_page() -> None:
    import hashlib

    assert stable_u64("abc") == int.from_bytes(hashlib.sha256(b"abc").digest()[:8], "big")
    assert stable_u64("\ud800") != stable_u64("\ud801")


def config(model: str, **changes: Any) -> SimpleNamespace:
    hf = {
        "model_type": "blip-2",
        "architectures": ["Blip2"],
        "_name_or_path": "/somewhere",
        "vision_config": {"hidden_size": 64, "_internal": 1, "torch_dtype": "float32"},
        "text_config": {"hidden_size": 128},
        **changes.pop("hf", {}),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=changes.pop("revision", None),
            hf_config=SimpleNamespace(to_dict=lambda: hf),
            quantization=changes.pop("quantization", None),
            multimodal_config=SimpleNamespace(video_pruning_rate=changes.pop("pruning", None)),
            seed=0,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        ec_transfer_config=SimpleNamespace(engine_id=changes.pop("engine_id", "e")),
    )


def test_a_namespace_stands_for_name_revision_and_weights() -> None:
    here = ModelIdentity("/mnt/a", "r", "files:1:x", {"encoder": {"v": 1}})
    there = ModelIdentity("/mnt/b", "r", "files:1:y", {"encoder": {"v": 1}})
    assert here.namespace_digest("", "", "bfloat16", "") != there.namespace_digest("", "", "bfloat16", "")
    assert here.namespace_digest("prod", "", "bfloat16", "") == there.namespace_digest("prod", "", "bfloat16", "")
    other_encoder = ModelIdentity("/mnt/a", "r", "files:1:x", {"encoder": {"v": 2}})
    assert here.namespace_digest("prod", "", "bfloat16", "") != other_encoder.namespace_digest(
        "prod", "", "bfloat16", ""
    )


def test_every_part_of_the_binding_counts() -> None:
    model = ModelIdentity("m")
    parts = [("", "", "bfloat16", ""), ("n", "", "bfloat16", ""), ("", "s", "bfloat16", ""), ("", "", "float16", "")]
    parts.append(("", "", "bfloat16", "e"))
    assert len({model.namespace_digest(*part) for part in parts}) == len(parts)


def test_a_configuration_without_anything_is_still_an_identity() -> None:
    empty = model_identity(SimpleNamespace())
    assert len(empty.namespace_digest()) == 32 and empty.engine_id == ""


def test_identity_follows_config_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    base = model_identity(config("org/model"))
    assert base.engine_id == "e"
    different = {
        "run": model_identity(config("org/model", engine_id="other")),
        "revision": model_identity(config("org/model", revision="r2")),
        "quantization": model_identity(config("org/model", quantization="fp8")),
        "encoder": model_identity(config("org/model", hf={"vision_config": {"hidden_size": 65}})),
        "pruning": model_identity(config("org/model", pruning=0.5)),
        "name": model_identity(config("other/model")),
    }
    monkeypatch.setattr(reader, "vllm_version", lambda: "0.0.0")
    different["vllm"] = model_identity(config("org/model"))
    prints = [base.namespace_digest()] + [other.namespace_digest() for other in different.values()]
    assert len(set(prints)) == len(prints)


def test_identity_ignores_what_varies_by_itself() -> None:
    base = model_identity(config("m")).namespace_digest()
    assert base == model_identity(config("m", hf={"_name_or_path": "/elsewhere"})).namespace_digest()
    assert base == model_identity(config("m", hf={"text_config": {"hidden_size": 1}})).namespace_digest()
    changed = {"vision_config": {"hidden_size": 64, "_internal": 2, "torch_dtype": "bfloat16"}}
    assert base == model_identity(config("m", hf=changed)).namespace_digest()


def test_roads_count_only_where_the_weights_do_not_speak_for_themselves() -> None:
    for weights, same in (("commit:a", True), ("files:1:x", True), ("", False), ("run:1", False)):
        prints = {
            ModelIdentity(name, revision, weights).namespace_digest() for name, revision in (("m", "main"), ("/m", ""))
        }
        assert (len(prints) == 1) is same, weights


def test_a_file_of_scales_counts_by_what_it_holds(tmp_path: Path) -> None:
    prints = []
    for name, text in (("a", "1"), ("b", "1"), ("a", "2")):
        (tmp_path / name).write_text(text)
        changed = config("m")
        changed.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(tmp_path / name)
        prints.append(model_identity(changed).namespace_digest())
    assert prints[0] == prints[1] != prints[2]


def test_identity_follows_mm_processor_kwargs_and_does_not_show_them() -> None:
    def of(value: Any) -> ModelIdentity:
        changed = config("m")
        changed.model_config.multimodal_config.mm_processor_kwargs = value
        return model_identity(changed)

    values: list[Any] = [None, {"do_rescale": True}, {"do_rescale": False}, {"size": {"a": 1}}, {"kind": {"x", "y"}}]
    assert len({of(value).namespace_digest() for value in values}) == len(values)
    assert of({"a": 1, "b": object}).namespace_digest() == of({"b": object, "a": 1}).namespace_digest()
    assert of({"a": lambda: 1}).namespace_digest() == of({"a": lambda: 1}).namespace_digest(), "no addresses"
    assert of(None).namespace_digest() == model_identity(config("m")).namespace_digest() == of({}).namespace_digest()
    assert "secret" not in repr(of({"token": "secret"}))


def test_unknown_weights_are_those_of_one_run() -> None:
    scheduler, worker, next_run = config("org/model"), config("org/model"), config("org/model", engine_id="next")
    first = model_identity(scheduler)
    assert first.weights_unknown and not first.run_unknown
    assert (
        first.namespace_digest()
        == model_identity(worker).namespace_digest()
        != model_identity(next_run).namespace_digest()
    )
    fixed = config("org/model")
    fixed.instance_id = "drawn by vLLM"
    assert first.namespace_digest() != model_identity(fixed).namespace_digest(), "an operator fixed the engine's id"
    assert first.namespace_digest("prod", "", "", "") == model_identity(next_run).namespace_digest("prod", "", "", "")
    assert model_identity(config("org/model", engine_id=None)).run_unknown


def test_dummy_weights_are_the_same_in_the_next_run() -> None:
    one, two = config("org/name"), config("org/name", engine_id="next")
    for each in (one, two):
        each.load_config.load_format = "dummy"
    assert model_identity(one).weights == ""
    assert model_identity(one).namespace_digest() == model_identity(two).namespace_digest()
