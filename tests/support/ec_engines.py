# SPDX-License-Identifier: Apache-2.0
"""Engines on folders of a test, for the tests of the encoder cache."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity

MIB = 1 << 20


def emptied(folder: Path | str, but: ECCacheEngine | None = None) -> bool:
    """Whether shared folders go out of ``folder``, but one engine's: the keeper that removes them takes its time."""
    stays = [] if but is None else [os.path.basename(but._run_folder.path)]
    deadline = time.monotonic() + 60
    while os.listdir(folder) != stays and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.listdir(folder) == stays


@pytest.fixture(name="build")
def engine_builder(tmp_path: Path) -> Any:
    """Builds engines that share the test's folders, and closes them."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    engines: list[ECCacheEngine] = []

    def make(
        role: str = "worker",
        identity: ModelIdentity | None = None,
        dtype: torch.dtype = torch.bfloat16,
        disk: bool = False,
        **config: Any,
    ) -> ECCacheEngine:
        values = {"shm_path": str(tmp_path / "shm"), "retry_seconds": 0.05, **config}
        if disk:
            values["disk_path"] = str(tmp_path / "disk")
        engine = ECCacheEngine(
            ECConfig(**values), identity or ModelIdentity("m", engine_id="engine"), role=role, dtype=dtype
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(5.0)


def output(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return (
        found is not None
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
    )


def entry_files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("*.ec"))
