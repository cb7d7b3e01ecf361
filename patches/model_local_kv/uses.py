# SPDX-License-Identifier: Apache-2.0
"""The observation in transformers: it follows the instances of ``Cache`` and reads the layers of what that made."""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Target

from .flags import OBSERVE


def _use(name: str, *attributes: str) -> Target:
    contract = Contract(class_attributes=attributes)
    return Target("transformers.cache_utils", name, "", distribution="transformers", contract=contract)


USES: tuple[Target, ...] = (
    _use("CacheLayerMixin", "keys", "values"),
    _use("EncoderDecoderCache", "self_attention_cache", "cross_attention_cache"),
)

# It changes no instance, so on an unlisted release the contract is sufficient.
CACHE = Target(
    module="transformers.cache_utils",
    qualname="Cache",
    install="vllm_omni_patch.patches.model_local_kv.watch:install",
    verify="vllm_omni_patch.patches.model_local_kv.watch:follows",
    distribution="transformers",
    contract=Contract(class_attributes=("layers",)),
    by_contract=True,
    setting=OBSERVE,
    note=f"its __new__ and __del__, only with {OBSERVE.name}=1",
    consequence="caches are not observed; declarations are still reported",
)
