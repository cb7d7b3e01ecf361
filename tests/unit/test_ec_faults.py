# SPDX-License-Identifier: Apache-2.0
"""Damage between lookup and load, killed writers, a crowd on one small folder: no wrong tensor, no leftover."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support import ec_faults_engine


@pytest.mark.parametrize(
    ("faults", "kills", "seconds"),
    [(45, 0, 0), (0, 8, 0), (0, 0, 2), pytest.param(300, 300, 60, marks=pytest.mark.slow)],
    ids=["faults", "kills", "crowd", "many of each"],
)
def test_nothing_goes_wrong(faults: int, kills: int, seconds: int, tmp_path: Path) -> None:
    wanted = ["--faults", str(faults), "--kills", str(kills), "--seconds", str(seconds), "--folder", str(tmp_path)]
    assert ec_faults_engine.main(wanted) == 0
