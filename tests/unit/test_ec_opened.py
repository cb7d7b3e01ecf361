# SPDX-License-Identifier: Apache-2.0
"""Whose weights a model has: what loaders opened, what the processes of an engine say of it, and adapters' files."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_patch.patches.ec_connector.cache.model import Claims, ModelIdentity, settle
from vllm_omni_patch.patches.ec_connector.vllm.configured_weights import name_of, remember_name, weights_of
from vllm_omni_patch.patches.ec_connector.vllm.items import ItemKeys
from vllm_omni_patch.patches.ec_connector.vllm.model_identity import model_identity
from vllm_omni_patch.patches.ec_connector.vllm.opened import Opened
from vllm_omni_patch.patches.ec_connector.vllm.weight_files import _stripes, weights_identity

OLD, NEW = "a" * 40, "c" * 40


class Resolved(str):
    """huggingface_hub's ``ResolvedRevision``, which vLLM keeps from 0.28: what was asked for, and the commit."""

    resolved: str


def resolved(revision: str, commit: str) -> Resolved:
    text = Resolved(revision)
    text.resolved = commit
    return text


def config(model: str, revision: Any = None, noted: str | None = None, **more: Any) -> SimpleNamespace:
    """As far as it is read: ``noted`` is the commit that transformers before 5.18 leaves in a configuration."""
    hf = SimpleNamespace(to_dict=lambda: {"model_type": "blip-2", "_name_or_path": model}, _commit_hash=noted)
    settings = {"model": model, "revision": revision, "hf_config": hf, "tokenizer": more.pop("tokenizer", model)}
    return SimpleNamespace(
        model_config=SimpleNamespace(**settings, **more.pop("model_config", {})),
        load_config=SimpleNamespace(load_format="auto"),
        ec_transfer_config=SimpleNamespace(engine_id="e"),
        **more,
    )


def loaded(vllm_config: Any, *opened: tuple[str, Any]) -> str:
    """The weights' text after a loader returned ``opened``: (source, result) each."""
    seen = Opened(vllm_config)
    for source, result in opened:
        seen.add(source, result)
    return seen.weights


def write_model(folder: Path, payload: bytes = b"a") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(payload)
    (folder / "config.json").write_text("{}")
    return str(folder)


def write_snapshot(cache: Path, commit: str, *names: str) -> str:
    """A downloaded snapshot of ``org/vl`` as huggingface_hub leaves it, with ``names`` pointing to it."""
    model = cache / "models--org--vl"
    for name in names:
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / name).write_text(commit)
    return write_model(model / "snapshots" / commit, commit.encode())


# What a user may set, and where huggingface_hub then looks. Elsewhere lies another commit: in each of PLACES.
PLACES = ("home/.cache/huggingface/hub", "xdg/huggingface/hub", "hf/hub", "hub", "old", "home/mine/hub", "base/x/hub")
SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "home/.cache/huggingface/hub"),
    "XDG_CACHE_HOME": ({"XDG_CACHE_HOME": "{root}/xdg"}, "xdg/huggingface/hub"),
    "HF_HOME": ({"HF_HOME": "{root}/hf"}, "hf/hub"),
    "HF_HOME over XDG": ({"HF_HOME": "{root}/hf", "XDG_CACHE_HOME": "{root}/xdg"}, "hf/hub"),
    "HF_HOME with ~": ({"HF_HOME": "~/mine"}, "home/mine/hub"),
    "HF_HOME with a variable": ({"HF_HOME": "$BASE/x", "BASE": "{root}/base"}, "base/x/hub"),
    "HF_HUB_CACHE": ({"HF_HUB_CACHE": "{root}/hub", "HF_HOME": "{root}/hf"}, "hub"),
    "HUGGINGFACE_HUB_CACHE": ({"HUGGINGFACE_HUB_CACHE": "{root}/old"}, "old"),
    "HF_HUB_CACHE without the model": ({"HF_HUB_CACHE": "{root}/empty"}, ""),
    "HF_HOME without the model": ({"HF_HOME": "{root}/empty"}, ""),
    "download_dir": ({"DOWNLOAD_DIR": "{root}/hub", "HF_HOME": "{root}/hf"}, "hub"),
}
REVISIONS = ("", "branch", "v1.0", "abcdef0", "commit")
CHILD = """
import os, sys, json
from types import SimpleNamespace
from huggingface_hub import snapshot_download
from vllm_omni_patch.patches.ec_connector.vllm.opened import Opened
out = []
for revision, commit in json.loads(sys.argv[1]):
    model = SimpleNamespace(model="org/vl", revision=revision or None, hf_config=SimpleNamespace(_commit_hash=commit))
    seen = Opened(SimpleNamespace(model_config=model))
    try:
        folder = snapshot_download("org/vl", revision=revision or None, cache_dir=os.environ.get("DOWNLOAD_DIR"),
                                   local_files_only=True)
    except Exception as error:
        out.append([type(error).__name__, "", seen.weights])
        continue
    seen.add("org/vl", (folder, [folder + "/model.safetensors"], True))
    out.append([folder, open(folder + "/model.safetensors").read(), seen.weights])
print(json.dumps(out))
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_identity_is_that_of_the_files_the_library_opens(name: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    commits = {}
    for number, place in enumerate(PLACES, start=1):
        commits[place] = f"{number:x}" * 40
        names = ("main", "branch", "v1.0", "abcdef0")
        write_snapshot(tmp_path / place, commits[place], *names)
    settings, place = SETTINGS[name]
    hub = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "TRANSFORMERS_CACHE", "HF_HUB_OFFLINE"}
    env = {key: value for key, value in os.environ.items() if key not in hub}
    env |= {key: value.format(root=tmp_path) for key, value in settings.items()} | {"HOME": str(tmp_path / "home")}
    right = commits.get(place, "")
    asked = [(right if revision == "commit" else revision, right) for revision in REVISIONS]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)], env=env, capture_output=True, text=True, check=True
    )
    for folder, content, weights in json.loads(done.stdout):
        assert content == right, folder
        assert weights == (f"commit:{right}" if right else ""), folder


def test_one_set_of_weights_has_one_key_whatever_path_leads_to_it(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", NEW, "main")
    (tmp_path / "link").symlink_to(snapshot)
    (tmp_path / "cache").symlink_to(tmp_path / "hub")
    through = str(tmp_path / "cache" / "models--org--vl" / "snapshots" / NEW)
    paths = [
        (config("org/vl", resolved("main", NEW)), "org/vl"),
        (config("org/vl", None, NEW), "org/vl"),
        (config("org/vl", NEW), "org/vl"),
        (config("org/vl", "v1.0", NEW), "org/vl"),
        (config(snapshot), snapshot),
        (config(through), through),
        (config(str(tmp_path / "link")), str(tmp_path / "link")),
    ]
    assert {bound(one, source, snapshot if source == "org/vl" else source) for one, source in paths} == {
        bound(config(snapshot), snapshot, snapshot)
    }
    plain = write_model(tmp_path / "plain")
    (tmp_path / "other").symlink_to(plain)
    assert bound(config(plain), plain, plain) == bound(
        config(str(tmp_path / "other")), str(tmp_path / "other"), str(tmp_path / "other")
    )
    file, link = tmp_path / "model.gguf", tmp_path / "elsewhere" / "renamed.gguf"
    file.write_bytes(b"a" * 1000)
    link.parent.mkdir()
    link.symlink_to(file)
    assert weights_identity(str(file)) == weights_identity(str(link)) != ""


def bound(vllm_config: Any, source: str, folder: str) -> str:
    weights = loaded(vllm_config, (source, (folder, [f"{folder}/model.safetensors"], True, "index")))
    identity = model_identity(vllm_config)
    assert weights and identity.weights_unknown
    return replace(identity, weights=weights).namespace_digest().hex()


@pytest.mark.parametrize(
    ("revision", "noted", "known"),
    [
        (resolved("main", OLD), None, False),
        (None, OLD, False),
        (None, None, False),
        ("main", None, False),
        (OLD, None, False),
        (NEW, None, True),
        (resolved("main", NEW), OLD, True),
    ],
)
def test_weights_of_another_commit_than_the_configuration_are_unknown(
    revision: Any, noted: str | None, known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub moved on while we started: processors and weights do not belong together."""
    snapshot = write_snapshot(tmp_path, NEW)
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        weights = loaded(config("org/vl", revision, noted), ("org/vl", (snapshot, [], True)))
    assert weights == (f"commit:{NEW}" if known else "")
    assert ("pin --revision" in caplog.text) is not known


def test_what_loaders_return(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    file = f"{folder}/model.safetensors"
    right = weights_identity(folder)
    assert right.startswith("files:1:")
    for result in ((folder, [file], True), (folder, [file], True, "index"), ([file], True), [file], folder):
        assert loaded(config(folder), (folder, result)) == right
    gone = str(tmp_path / "gone")
    for result in (["s3://bucket/a.safetensors"], "s3://bucket", gone, ([], True), None, [file, f"{gone}/b"]):
        assert loaded(config(folder), (folder, result)) == ""
    assert loaded(config(folder)) == "", "a loader that we do not see"


def test_all_sources_of_a_model_count_and_a_draft_does_not(tmp_path: Path) -> None:
    main, tower, draft = (write_model(tmp_path / name, name.encode()) for name in ("main", "tower", "draft"))
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(model=draft))
    one = loaded(config(main), (main, main), ("org/tower", tower))
    assert (
        one
        == loaded(config(main), ("org/tower", tower), (main, main), (main, main))
        != loaded(config(main), (main, main))
    )
    with_draft = config(main, speculative_config=speculative)
    assert loaded(with_draft, (main, main), (draft, draft)) == loaded(config(main), (main, main))
    assert loaded(config(main), (main, main), ("org/tower", "s3://b")) == ""


def test_what_was_opened_within_a_snapshot_counts(tmp_path: Path) -> None:
    snapshot = Path(write_snapshot(tmp_path / "hub", NEW))
    blobs = tmp_path / "hub" / "models--org--vl" / "blobs"
    blobs.mkdir()
    for name in ("q4.gguf", "q8.gguf"):
        (blobs / name).write_bytes(name.encode())
        (snapshot / name).symlink_to(blobs / name)
    (snapshot / "sub").mkdir()
    texts = {weights_identity(str(snapshot / name)) for name in ("", "q4.gguf", "q8.gguf", "sub")}
    assert texts == {f"commit:{NEW}{end}" for end in ("", "/q4.gguf", "/q8.gguf", "/sub")}
    unlike = write_model(tmp_path / "snapshots" / NEW)
    assert weights_identity(unlike).startswith("files:"), "only the hub's cache never changes what it holds"


def test_the_processes_of_an_engine_agree_or_nobody_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = ModelIdentity("org/vl", weights="run:e", engine_id="e")
    ranks = [Claims(str(tmp_path)), Claims(str(tmp_path))]
    scheduler = Claims(str(tmp_path))
    assert not scheduler.any() and scheduler.agreed() == ""
    for rank in ranks:
        rank.write("")
    assert scheduler.any() and scheduler.agreed() == ""
    ranks[0].write("commit:1")
    assert scheduler.agreed() == "", "the other rank has not opened anything"
    ranks[1].write("commit:1")
    assert {settle(identity, one).weights for one in (*ranks, scheduler)} == {"commit:1"}
    assert not caplog.records
    ranks[1].write("commit:2")
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        assert {settle(identity, one).weights for one in (*ranks, scheduler)} == {"run:e"}
    assert "not every process opened the same one" in caplog.text
    unwritable = Claims(str(tmp_path / "gone"))
    unwritable.write("commit:1")
    assert unwritable.agreed() == "commit:1"


def test_a_scheduler_on_a_host_without_workers_knows_what_cannot_move(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert weights_of(config(folder)) == weights_identity(folder)
    assert weights_of(config("org/vl", NEW)) == weights_of(config("org/vl", resolved("main", NEW))) == f"commit:{NEW}"
    assert weights_of(config("org/vl", "main", NEW)) == weights_of(config("org/vl")) == ""
    streamed = config(folder, NEW, model_config={"model_weights": "s3://bucket/model"})
    assert weights_of(streamed) == ""


def test_one_name_in_content_hashes_for_all_roads(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, NEW)
    paths = [("org/a", resolved("main", NEW), None), ("org/b", None, NEW), (snapshot, None, None)]
    for model, revision, noted in paths:
        assert name_of(model) == model
        remember_name(config(model, revision, noted))
    assert {name_of(model) for model, _, _ in paths} == {f"commit:{NEW}"}
    remember_name(config("org/unknown"))
    assert name_of("org/unknown") == "org/unknown" and name_of(None) is None


def test_weights_replaced_behind_one_path_are_other_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", b"a" * 300_000)
    path = os.path.join(folder, "model.safetensors")
    first = weights_identity(folder)
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = weights_identity(folder)
    assert first != second, "same size and time, another beginning"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert weights_identity(folder) not in (first, second)


def test_a_model_in_one_file_is_known_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a" * 1000)
    first = weights_identity(str(path))
    assert first == weights_identity(str(path)) != ""
    path.write_bytes(b"b" * 5000)
    second = weights_identity(str(path))
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"vision")
    assert len({first, second, weights_identity(str(path))}) == 3


def test_an_index_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert weights_identity(str(tmp_path)) == ""
    assert weights_identity(write_model(tmp_path)) != ""


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_weights_go_with_the_processor_s_files(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    texts = set()
    for text in (None, '{"image_mean": [0.5]}', '{"image_mean": [0.1]}'):
        if text:
            (tmp_path / "model" / name).write_text(text)
        texts.add(weights_identity(folder))
    assert len(texts) == 3
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / name).write_text("{}")
    assert loaded(config(folder, tokenizer=str(tmp_path / "tokenizer")), (folder, folder)) not in texts


def test_a_change_in_the_middle_of_a_weight_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    small, large = bytes(1 << 20), bytes(4 << 20)
    for data, start, length in ((small, 500_000, 100), (small, 1 << 19, 1), (large, 2 << 20, 1 << 17)):
        path.write_bytes(data)
        status = os.stat(path)
        before = weights_identity(str(tmp_path))
        path.write_bytes(data[:start] + b"z" * length + data[start + length :])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert weights_identity(str(tmp_path)) != before


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_stripes_reach_both_ends(size: int) -> None:
    stripes = list(_stripes(size))
    assert stripes == sorted(stripes) and len(stripes) <= 64
    assert not size or (stripes[0] == 0 and max(stripes) < size <= max(stripes) + 16384)


@pytest.mark.parametrize("way", ["written in place", "renamed over"])
def test_an_adapter_replaced_with_equal_size_and_time_has_another_key(way: str, tmp_path: Path) -> None:
    keys = ItemKeys(tower_lora=True)
    adapter = SimpleNamespace(lora_path=str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"a" * 5000)
    status = os.stat(file)
    first = keys.key("id", None, adapter)
    assert first == keys.key("id", None, adapter) == ItemKeys(tower_lora=True).key("id", None, adapter)
    if way == "written in place":
        with open(file, "r+b") as opened:
            opened.write(b"b" * 5000)
    else:
        (tmp_path / "new").write_bytes(b"b" * 5000)
        os.rename(tmp_path / "new", file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = keys.key("id", None, adapter)
    assert first and second and first != second
    assert keys.key("id", None, SimpleNamespace(lora_path="org/adapter")) is None, "its files are not known"
