# SPDX-License-Identifier: Apache-2.0
"""The model of ``scripts/simulate_fleet.py`` against two real servers on one disk that get the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, OURS, counters, entries, wait_for

from scripts import simulate_fleet
from support import tiny_model
from support.engine_process import Server

pytestmark = pytest.mark.slow


def test_the_simulation_counts_what_two_servers_count(tmp_path: Path) -> None:
    """``ARGUMENTS`` leave room for two images in vLLM's own cache."""
    requests = simulate_fleet.trace(160, 2, images=24, exponent=1.0, seed=1)
    expected = simulate_fleet.replay(requests, 2, simulate_fleet.Layout("one disk", own=2, local=0, shared=1000))
    assert min(expected.own, expected.shared, expected.encoded) > 15
    model, env = tiny_model.make(str(tmp_path / "model")), {"LMCACHE_EC_LOCAL_DISK": str(tmp_path / "disk")}

    def engine(name: str) -> Server:
        return Server(model, str(tmp_path), ec=OURS, flag="ec_connector", env=env, arguments=ARGUMENTS, name=name)

    with engine("one") as one, engine("two") as two:
        servers = (one, two)
        for number, (server, image) in enumerate(requests):
            assert servers[server].image(image).ok
            new = len({image for _, image in requests[: number + 1]})
            wait_for(lambda new=new: len(entries(tmp_path / "disk")) >= new)  # type: ignore[misc]

        def total(name: str) -> float:
            return sum(counters(server).get(name, 0) for server in servers)

        wait_for(lambda: total("lookups") >= expected.shared + expected.encoded)
        wait_for(lambda: total("hits") + total("stored") >= expected.shared + expected.encoded)
        assert (total("hits"), total("stored")) == (expected.shared, expected.encoded)
        assert total("lookups") == len(requests) - expected.own and total("fallbacks") == 0
