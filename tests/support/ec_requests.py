# SPDX-License-Identifier: Apache-2.0
"""What vLLM hands to a connector, with the attributes that the connector reads: requests, items, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity


@dataclass
class Feature:
    identifier: str
    modality: str = "image"
    data: dict[str, Any] | None = field(default_factory=lambda: {"pixel_values": object()})


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
    features = [Feature(name) if data else Feature(name, data=None) for name, _ in items]
    return Request(request_id, features, [rows for _, rows in items], lora)


def engine(folder: Path, role: str = "both", engine_id: str = "engine", **config: Any) -> ECCacheEngine:
    """A real engine on ``folder``: a disk tier, and shared memory in a folder beside it."""
    import torch

    shm = folder / "shm"
    shm.mkdir(exist_ok=True, parents=True)
    settings = ECConfig(disk_path=str(folder / "disk"), shm_path=str(shm), stats_seconds=0, **config)
    identity = ModelIdentity("model", engine_id=engine_id)
    return ECCacheEngine(settings, identity, role=role, dtype=torch.float32)  # type: ignore[arg-type]
