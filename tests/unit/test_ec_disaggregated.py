# SPDX-License-Identifier: Apache-2.0
"""A consumer that never finds what a producer stored says so once; nobody else says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.ec_requests import request
from vllm_omni_patch.patches.ec_connector.stats import ECStats
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
