# SPDX-License-Identifier: Apache-2.0
"""A consumer that never finds what a producer stored says so once; one that got metadata alone never encodes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.ec_requests import request
from vllm_omni_patch.patches.ec_connector.stats import ECStats
from vllm_omni_patch.patches.ec_connector.vllm import items
from vllm_omni_patch.patches.ec_connector.vllm.disaggregated import NothingFound


def run(role: str, items: int, hit: int | None = None, same: bool = False, looked: bool = True) -> None:
    """``items`` requests of one item each, looked up once; the lookup number ``hit`` finds an entry."""
    stats = ECStats("scheduler", 0)
    config: Any = SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_role=role))
    watch = NothingFound(config, stats, "the disk in /var/cache/ec")
    for number in range(items):
        if looked:
            stats.add("lookups")
        if number == hit:
            stats.add("lookup_hits")
        watch.finished(request(f"r{number}", ("a" if same else f"item-{number}", 4)))
        watch.finished(request(f"text-{number}"))


def test_a_consumer_that_finds_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run("ec_consumer", 100)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("Encoder cache: this consumer has looked up 20 items and found none")
    assert "--no-rewrite" in text and "the disk in /var/cache/ec" in text and "'item-" in text


@pytest.mark.parametrize(
    "case",
    [
        {"role": "ec_both", "items": 100},
        {"role": "ec_producer", "items": 100},
        {"role": "ec_consumer", "items": 19},
        {"role": "ec_consumer", "items": 100, "hit": 0},
        {"role": "ec_consumer", "items": 100, "hit": 19},
        # One item over and over, and items that vLLM has in its own caches and never looks up.
        {"role": "ec_consumer", "items": 100, "same": True},
        {"role": "ec_consumer", "items": 100, "looked": False},
    ],
    ids=str,
)
def test_no_false_alarm(case: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    run(**case)
    assert caplog.records == []


QWEN = {"image": {"image_grid_thw"}, "video": {"video_grid_thw", "timestamps"}}


@pytest.mark.parametrize(
    ("modality", "data", "alone"),
    [
        ("image", None, True),
        ("image", {"image_grid_thw"}, True),
        ("image", {"image_grid_thw", "pixel_values"}, False),
        ("image", {"image_grid_thw", "image_embeds"}, False),
        ("video", {"video_grid_thw"}, True),
        ("video", {"video_grid_thw", "timestamps"}, True),
        ("video", {"video_grid_thw", "pixel_values_videos"}, False),
        ("audio", {"input_features"}, False),
        ("audio", set(), False),
    ],
)
def test_what_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch, modality: str, data: Any, alone: bool) -> None:
    """An item that is encoded without its data ends the engine."""
    feature = SimpleNamespace(modality=modality, data=None if data is None else dict.fromkeys(data))
    monkeypatch.setattr(items, "placeholder_fields", lambda modality: QWEN.get(modality, set()))
    assert items.is_metadata_only(feature) is alone
    monkeypatch.setattr(items, "placeholder_fields", lambda modality: set())
    assert items.is_metadata_only(feature) is (data is None)
