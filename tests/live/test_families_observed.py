# SPDX-License-Identifier: Apache-2.0
"""What the observation sees while the real Qwen3-TTS decoder serves: no cache is missed, and none is a stranger.

Needs vLLM-Omni beside its vLLM: ``scripts/check_families.py`` makes the environments and runs this file in each.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import omni_caches as omni
from support.omni_caches import MiB
from vllm_omni_patch.patches.model_local_kv import hooks, watch
from vllm_omni_patch.patches.model_local_kv.flags import OBSERVE

RELEASE = omni.omni_release()
pytestmark = pytest.mark.skipif(RELEASE < (0, 28), reason=f"vLLM-Omni {RELEASE} is inert for Qwen3-TTS")
ROW = int({(0, 28): 4.4375}.get(RELEASE, 2.21875) * MiB)


class Runner:
    """What the report reads from a runner."""

    def __init__(self, stage: Any, config: Any) -> None:
        self.model = stage
        self.vllm_config = config
        self.model_config = config.model_config
        self.scheduler_config = SimpleNamespace(max_num_seqs=64)
        self.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
        self.device = torch.device("cpu")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``served(requests, frames)``: one decode call; ``served.rows()``: declared against observed after it."""
    monkeypatch.setenv(OBSERVE.name, "1")
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    process = watch.Watch()
    monkeypatch.setattr(hooks, "WATCH", process)
    config = omni.qwen3_config(tmp_path)
    stage = omni.qwen3_stage(config)
    runner = Runner(stage, config)

    def decode(requests: list[dict[str, Any]], frames: int) -> list[dict[str, Any]]:
        codes = torch.randint(0, 16, (len(requests), stage._num_quantizers, frames))
        with torch.no_grad():
            stage.decoder.batched_chunked_decode(
                codes, [frames] * len(requests), caches=requests, max_batch_size=stage._decode_batch_max_size
            )
        return list(process.refresh()["observed"])

    with omni.installed(omni.MODELS + omni.QWEN3):
        undo = process.follow(importlib.import_module("transformers.cache_utils").Cache)
        hooks.report_load(runner)
        yield decode
    undo()


def test_before_traffic_it_was_never_seen(served: Any) -> None:
    rows = hooks.WATCH.refresh()["observed"]
    assert [(row["owner"], row["status"], row["created"]) for row in rows] == [("decoder", "never seen", 0)]


def test_requests_with_reference_audio_match_their_declaration(served: Any) -> None:
    requests: list[dict[str, Any]] = [{"prefix_frames": 72} for _ in range(2)]
    served(requests, 73)
    for _ in range(4):
        rows = served(requests, 25)
    (row,) = rows
    assert (row["owner"], row["status"]) == ("decoder", "matched")
    assert row["observed_row"] == ROW
    assert row["rows_seen"] >= 4, "kept caches and working copies were alive at once"
    assert 2 * ROW <= row["live"] < row["observed_peak"] <= row["storage_peak"]


def test_a_request_without_reference_audio_keeps_nothing(served: Any) -> None:
    request: dict[str, Any] = {"prefix_frames": 0}
    served([request], 1)
    (row,) = served([request], 25)
    assert row["status"] == "over-declared"
    assert row["live"] == 0
    assert row["created"] > 0
