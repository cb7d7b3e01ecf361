# SPDX-License-Identifier: Apache-2.0
"""What vLLM hands to a connector, with the attributes that the connector reads: requests, items, adapters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.cache.memory import Place, here
from vllm_omni_patch.patches.ec_connector.vllm.items import Load
from vllm_omni_patch.patches.ec_connector.vllm.scheduler import StepPlan


@dataclass
class Position:
    offset: int
    length: int


@dataclass
class Feature:
    identifier: str
    modality: str = "image"
    data: dict[str, Any] | None = field(default_factory=lambda: {"pixel_values": object()})
    mm_position: Position = field(default_factory=lambda: Position(4, 32))


@dataclass
class Adapter:
    lora_name: str
    lora_path: str
    lora_int_id: int = 1


@dataclass
class Request:
    request_id: str
    mm_features: list[Feature]
    rows: list[int]
    lora_request: Adapter | None = None

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.rows[index]


def request(request_id: str, *items: tuple[str, int], data: bool = True, lora: Adapter | None = None) -> Request:
    """A request with (identifier, rows) items; ``data=False``: they came as metadata only."""
    features = []
    for name, rows in items:
        start = features[-1].mm_position.offset + features[-1].mm_position.length + 4 if features else 4
        features.append(Feature(name, mm_position=Position(start, rows)))
        if not data:
            features[-1].data = None
    return Request(request_id, features, [rows for _, rows in items], lora)


def engine(folder: Path, role: str = "both", engine_id: str = "engine", **config: Any) -> ECCacheEngine:
    """A real engine on ``folder``: a disk tier, and shared memory in a folder beside it."""
    import torch

    shm = folder / "shm"
    shm.mkdir(exist_ok=True, parents=True)
    settings = ECConfig(disk_path=str(folder / "disk"), shm_path=str(shm), stats_seconds=0, **config)
    identity = ModelIdentity("model", engine_id=engine_id)
    return ECCacheEngine(settings, identity, role=role, dtype=torch.float32)  # type: ignore[arg-type]


def available(side: Any, asked: Request, computed: int = 0) -> bool:
    """Ask ``ensure_available`` step by step, as vLLM does, until the request may run or is to fail."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if side.ensure_available(asked, computed):
            return True
        if asked.request_id in side._unavailable:
            return False
        side.plan()
        time.sleep(0.001)
    raise AssertionError("the request waits for ever")


def planned(store: ECCacheEngine, loads: list[Load], tensors: dict[str, Any] | None = None) -> StepPlan:
    """The plan of a step that loads ``loads``, with what ``store`` has of them in memory; the rest has gone."""
    places = {}
    for load in loads:
        fetch = store.fetch(load.key, load.rows)
        assert fetch is None or fetch.settled(20)
        gone = Place(here(), os.getpid(), 1 << 20, 0, 0, 0, 0, 0, "float32", b"", b"")
        places[load.mm_hash] = gone if fetch is None or fetch.memory is None else fetch.memory.place
    return StepPlan(loads, places, tensors or {})
