# SPDX-License-Identifier: Apache-2.0
"""The cache itself, which knows nothing of vLLM: an engine that stores encoder outputs by ``mm_hash``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import ECConfig, load_ec_config
from .model import ModelIdentity

if TYPE_CHECKING:
    from .engine import ECCacheEngine

__all__ = ["ECCacheEngine", "ECConfig", "ModelIdentity", "load_ec_config"]


def __getattr__(name: str) -> Any:
    # The engine needs torch; who reads a configuration or an identity need not have it.
    if name == "ECCacheEngine":
        from .engine import ECCacheEngine

        return ECCacheEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
