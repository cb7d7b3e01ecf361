# SPDX-License-Identifier: Apache-2.0
"""Keys, fingerprints and the ids that must never be stored."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch.patches.ec_connector import identity
from vllm_omni_patch.patches.ec_connector.identity import ModelIdentity, is_request_scoped, model_identity, stable_u64


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


def write_model(folder: str, payload: bytes) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(payload)
    with open(os.path.join(folder, "config.json"), "w") as text:
        json.dump({}, text)


def test_identity_follows_weights_config_and_version(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "model")
    write_model(folder, b"a" * 300_000)
    base = model_identity(config(folder))
    assert base.engine_id == "e"
    assert base.fingerprint == model_identity(config(folder, engine_id="other")).fingerprint
    assert base.weights.startswith("files:1:")
    different = {
        "revision": model_identity(config(folder, revision="r2")),
        "quantization": model_identity(config(folder, quantization="fp8")),
        "encoder": model_identity(config(folder, hf={"vision_config": {"hidden_size": 65}})),
        "pruning": model_identity(config(folder, pruning=0.5)),
        "name": model_identity(config("other/model")),
    }
    monkeypatch.setattr(identity, "vllm_version", lambda: "0.0.0")
    different["vllm"] = model_identity(config(folder))
    prints = [base.fingerprint] + [other.fingerprint for other in different.values()]
    assert len(set(prints)) == len(prints)


def test_identity_ignores_what_varies_by_itself(tmp_path: Any) -> None:
    folder = str(tmp_path / "model")
    write_model(folder, b"a")
    base = model_identity(config(folder)).fingerprint
    assert base == model_identity(config(folder, hf={"_name_or_path": "/elsewhere"})).fingerprint
    assert base == model_identity(config(folder, hf={"text_config": {"hidden_size": 1}})).fingerprint
    changed = {"vision_config": {"hidden_size": 64, "_internal": 2, "torch_dtype": "bfloat16"}}
    assert base == model_identity(config(folder, hf=changed)).fingerprint


def test_weights_replaced_behind_one_path_are_other_weights(tmp_path: Any) -> None:
    folder = str(tmp_path / "model")
    write_model(folder, b"a" * 300_000)
    path = os.path.join(folder, "model.safetensors")
    first = identity.weights_identity(folder, "")
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = identity.weights_identity(folder, "")
    assert first != second, "same size and time, another beginning"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert identity.weights_identity(folder, "") not in (first, second)


def test_a_downloaded_snapshot_is_known_by_its_commit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    base = tmp_path / "hub" / "models--org--name"
    write_model(str(base / "snapshots" / commit), b"a")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert identity.weights_identity("org/name", "") == f"commit:{commit}"
    assert identity.weights_identity("org/absent", "") == ""


def test_a_namespace_stands_for_name_revision_and_weights() -> None:
    here = ModelIdentity("/mnt/a", "r", "files:1:x", {"encoder": {"v": 1}})
    there = ModelIdentity("/mnt/b", "r", "files:1:y", {"encoder": {"v": 1}})
    assert here.bind("", "", "bfloat16", "") != there.bind("", "", "bfloat16", "")
    assert here.bind("prod", "", "bfloat16", "") == there.bind("prod", "", "bfloat16", "")
    other_encoder = ModelIdentity("/mnt/a", "r", "files:1:x", {"encoder": {"v": 2}})
    assert here.bind("prod", "", "bfloat16", "") != other_encoder.bind("prod", "", "bfloat16", "")


def test_every_part_of_the_binding_counts() -> None:
    model = ModelIdentity("m")
    parts = [("", "", "bfloat16", ""), ("n", "", "bfloat16", ""), ("", "s", "bfloat16", ""), ("", "", "float16", "")]
    parts.append(("", "", "bfloat16", "e"))
    assert len({model.bind(*part) for part in parts}) == len(parts)


def test_a_configuration_without_anything_is_still_an_identity() -> None:
    empty = model_identity(SimpleNamespace())
    assert len(empty.fingerprint) == 64 and empty.engine_id == ""


def test_a_model_in_one_file_is_known_by_the_file(tmp_path: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a" * 1000)
    first = model_identity(config(str(path)))
    assert not first.weights_unknown and first.weights == model_identity(config(str(path))).weights
    path.write_bytes(b"b" * 5000)
    second = model_identity(config(str(path)))
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"vision")
    third = model_identity(config(str(path)))
    assert len({first.fingerprint, second.fingerprint, third.fingerprint}) == 3


@pytest.mark.parametrize("model", ["s3://bucket/model", "gs://bucket/model/x", "org/model:Q4_K_M", "org/model"])
def test_weights_that_are_nowhere_here_are_those_of_one_run(
    model: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    scheduler, worker, next_run = config(model), config(model), config(model, engine_id="next")
    first = model_identity(scheduler)
    assert first.weights_unknown and not first.run_unknown
    assert first.fingerprint == model_identity(worker).fingerprint
    assert first.fingerprint != model_identity(next_run).fingerprint
    fixed = config(model)
    fixed.instance_id = "drawn by vLLM"
    assert first.fingerprint != model_identity(fixed).fingerprint, "an operator fixed the engine's id"
    assert first.bind("prod", "", "", "") == model_identity(next_run).bind("prod", "", "", "")
    assert model_identity(config(model, engine_id=None)).run_unknown


def test_a_model_in_object_storage_is_not_known_by_its_configuration(tmp_path: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    streamed = config(str(tmp_path))
    assert model_identity(streamed).weights_unknown, "an index holds no weights"
    write_model(str(tmp_path), b"a")
    assert not model_identity(streamed).weights_unknown
    streamed.model_config.model_weights = "s3://bucket/model"
    assert model_identity(streamed).weights_unknown


def test_dummy_weights_and_downloaded_ones_are_the_same_in_the_next_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    write_model(str(tmp_path / "models--org--name" / "snapshots" / commit), b"a")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    one, two = config("org/name"), config("org/name", engine_id="next")
    assert model_identity(one).fingerprint == model_identity(two).fingerprint
    for each in (one, two):
        each.model_config.model = str(tmp_path / "models--org--name" / "refs")
        each.load_config.load_format = "dummy"
    assert model_identity(one).weights == ""
    assert model_identity(one).fingerprint == model_identity(two).fingerprint


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_identity_follows_the_processor_s_files(name: str, tmp_path: Any) -> None:
    write_model(str(tmp_path / "model"), b"a")
    prints = set()
    for text in (None, '{"image_mean": [0.5]}', '{"image_mean": [0.1]}'):
        if text:
            (tmp_path / "model" / name).write_text(text)
        prints.add(model_identity(config(str(tmp_path / "model"))).fingerprint)
    assert len(prints) == 3
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / name).write_text("{}")
    elsewhere = config(str(tmp_path / "model"))
    elsewhere.model_config.tokenizer = str(tmp_path / "tokenizer")
    assert model_identity(elsewhere).fingerprint not in prints


def test_identity_follows_mm_processor_kwargs_and_does_not_show_them(tmp_path: Any) -> None:
    write_model(str(tmp_path), b"a")

    def of(value: Any) -> ModelIdentity:
        changed = config(str(tmp_path))
        changed.model_config.multimodal_config.mm_processor_kwargs = value
        return model_identity(changed)

    values: list[Any] = [None, {"do_rescale": True}, {"do_rescale": False}, {"size": {"a": 1}}, {"kind": {"x", "y"}}]
    assert len({of(value).fingerprint for value in values}) == len(values)
    assert of({"a": 1, "b": object}).fingerprint == of({"b": object, "a": 1}).fingerprint
    assert of({"a": lambda: 1}).fingerprint == of({"a": lambda: 1}).fingerprint, "no addresses"
    assert of(None).fingerprint == model_identity(config(str(tmp_path))).fingerprint == of({}).fingerprint
    assert "secret" not in repr(of({"token": "secret"}))


def test_a_change_in_the_middle_of_a_weight_file_is_seen(tmp_path: Any) -> None:
    path = tmp_path / "model.safetensors"
    small, large = bytes(1 << 20), bytes(4 << 20)
    for data, start, length in ((small, 500_000, 100), (small, 1 << 19, 1), (large, 2 << 20, 1 << 17)):
        path.write_bytes(data)
        status = os.stat(path)
        before = identity.weights_identity(str(tmp_path), "")
        path.write_bytes(data[:start] + b"z" * length + data[start + length :])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert identity.weights_identity(str(tmp_path), "") != before


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_stripes_reach_both_ends(size: int) -> None:
    stripes = list(identity._stripes(size))
    assert stripes == sorted(stripes) and len(stripes) <= 64
    assert not size or (stripes[0] == 0 and max(stripes) < size <= max(stripes) + 16384)
