# SPDX-License-Identifier: Apache-2.0
"""What the observation reads in transformers. It follows ``Cache.__new__`` and reads the layers of what that made."""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Target


def _use(name: str, *attributes: str) -> Target:
    contract = Contract(class_attributes=attributes)
    return Target("transformers.cache_utils", name, "", distribution="transformers", contract=contract)


USES: tuple[Target, ...] = (
    _use("Cache", "layers"),
    _use("CacheLayerMixin", "keys", "values"),
    _use("EncoderDecoderCache", "self_attention_cache", "cross_attention_cache"),
)
