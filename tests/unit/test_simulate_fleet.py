# SPDX-License-Identifier: Apache-2.0
"""``scripts/simulate_fleet.py``: small fleets counted by hand, and the table in docs/fleet.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "simulate_fleet.py"
if not SCRIPT.exists():
    pytest.skip("the scripts are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def simulation() -> Any:
    spec = importlib.util.spec_from_file_location("simulate_fleet", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_fleet"] = module
    spec.loader.exec_module(module)
    return module


# (server, image) of each request, room (own, local, shared), and what is found (own, local, shared, encoded).
CASES = [
    ("a server alone", [(0, 1), (0, 1), (0, 2), (0, 1)], (1, 9, 0), (1, 1, 0, 2)),
    ("nothing is shared", [(0, 1), (1, 1), (0, 2), (1, 1)], (0, 9, 0), (0, 1, 0, 3)),
    ("what another server has stored", [(0, 1), (1, 1), (1, 1)], (0, 9, 9), (0, 1, 1, 1)),
    ("a copy is evicted, the shared entry stays", [(0, 1), (0, 2), (0, 1)], (0, 1, 9), (0, 0, 1, 2)),
    ("least recently used", [(0, 1), (0, 2), (0, 1), (0, 3), (0, 1), (0, 2)], (0, 2, 0), (0, 2, 0, 4)),
    ("no cache at all", [(0, 1), (0, 1)], (0, 0, 0), (0, 0, 0, 2)),
]


@pytest.mark.parametrize(("requests", "room", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_fleet_counted_by_hand(simulation: Any, requests: Any, room: Any, found: Any) -> None:
    counts = simulation.replay(requests, 2, simulation.Layout("", *room))
    assert (counts.own, counts.local, counts.shared, counts.encoded) == found


def test_a_trace_depends_on_its_seed_alone(simulation: Any) -> None:
    first = simulation.trace(2000, 4, 100, 1.0, seed=3)
    assert first == simulation.trace(2000, 4, 100, 1.0, seed=3) != simulation.trace(2000, 4, 100, 1.0, seed=4)
    images = [image for _, image in first]
    assert {server for server, _ in first} == {0, 1, 2, 3}
    # The first image is asked for twice as often as the second; within four standard deviations.
    assert 1.4 < images.count(0) / images.count(1) < 2.8


def test_the_page_shows_what_the_script_prints() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "docs" / "fleet.md").read_text(), "copy the script's output into docs/fleet.md"
