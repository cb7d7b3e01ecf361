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
