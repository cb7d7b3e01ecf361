# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """A real encoder cache engine on a folder of its own. Needs torch."""
    from support.ec_requests import engine

    made = engine(tmp_path)
    yield made
    made.close()
