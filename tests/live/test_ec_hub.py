# SPDX-License-Identifier: Apache-2.0
"""Whose weights made an embedding: a model of a hub that moves on between two engines, and an engine that is offline.

The hub is a server on loopback; vLLM and huggingface_hub are the real ones. A stale snapshot of the model lies where
the hub's cache would be without ``XDG_CACHE_HOME``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, OURS, counted, counters, entries

from support import tiny_model
from support.engine_process import Answer, Server
from support.hub import Hub

pytestmark = pytest.mark.slow  # four boots
REPO = "org/vl"
IMAGES = (1, 2)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    hub = Hub(REPO)
    yield hub
    hub.close()


def test_no_embedding_of_other_weights_is_served_and_offline_has_the_same_key(hub: Hub, tmp_path: Path) -> None:
    first, second = (tiny_model.make(str(tmp_path / f"commit-{seed}"), seed=0, vision_seed=seed) for seed in (1, 2))
    online = {
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "elsewhere"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "LMCACHE_EC_LOCAL_DISK": str(tmp_path / "disk"),
        "NO_PROXY": "127.0.0.1",
    }
    _stale_snapshot(tmp_path / "home" / ".cache" / "huggingface" / "hub", first)

    def asked(name: str, model: str = REPO, **env: str) -> list[Answer]:
        """Answers of a new engine."""
        with Server(
            model, str(tmp_path), ec=OURS, flag="ec_connector", env={**online, **env}, arguments=ARGUMENTS, name=name
        ) as server:
            answers = [server.image(seed) for seed in IMAGES]
            assert all(answer.ok for answer in answers), server.log()[-3000:]
            assert "cannot be identified" not in server.log()
            hit = env.get("HF_HUB_OFFLINE") == "1"
            assert counted(server, "hits" if hit else "stored", len(IMAGES)) == len(IMAGES)
            assert counters(server).get("stored" if hit else "hits", 0) == 0
            return answers

    hub.publish(first)
    old = asked("first")
    assert len(entries(tmp_path / "disk")) == len(IMAGES)
    hub.publish(second)
    new = asked("second")
    with Server(second, str(tmp_path), env=online, arguments=ARGUMENTS, name="stock") as stock:
        right = [stock.image(seed) for seed in IMAGES]
    assert all(one.same(other, 1e-4) for one, other in zip(new, right, strict=True))
    assert not any(one.same(other, 1e-4) for one, other in zip(new, old, strict=True))
    hub.close()
    offline = asked("offline", HF_HUB_OFFLINE="1")
    assert all(one.same(other, 1e-4) for one, other in zip(offline, right, strict=True))
    assert len(entries(tmp_path / "disk")) == 2 * len(IMAGES)


def _stale_snapshot(cache: Path, folder: str) -> None:
    """What an earlier download would have left: another commit, and ``main`` pointing to it."""
    commit = "a" * 40
    model = cache / f"models--{REPO.replace('/', '--')}"
    shutil.copytree(folder, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
