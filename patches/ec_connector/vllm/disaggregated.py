# SPDX-License-Identifier: Apache-2.0
"""What encoder servers of their own need beyond storing and loading: producer and consumer must mean the same item.

vLLM's example proxy gives the producer a ``uuid`` of its own for each item, and the consumer the same ``uuid`` only if
the producer's answer has the item's metadata. Otherwise the two have different ``mm_hash``es, and nothing is found.
"""

from __future__ import annotations

from typing import Any

from vllm_omni_patch import ledger

from ..stats import ECStats
from ..storage.key import is_request_scoped
from . import items

_log = ledger.logger("ec")
# A consumer that finds none of so many different items is set up wrongly; the first few may come before their producer
# has stored them.
_ENOUGH = 20


class ItemMetadata:
    """``ec_transfer_params`` of a producer's answers (vLLM 0.30.0 and later; earlier answers have no such field).

    An ``ec_both`` instance adds nothing: its answers go to clients. A consumer learns here which items cannot be
    encoded, because they came as metadata.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._collect: Any = None
        self._failed = False
        transfer = vllm_config.ec_transfer_config
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import (
                PlaceholderMetadataResolver,
                collect_ec_item_metadata,
            )
        except ImportError:
            return
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        if transfer.is_ec_consumer:
            items.placeholder_fields = self._resolver.fields_for
        if transfer.ec_role == "ec_producer":
            self._collect = collect_ec_item_metadata

    def of(self, request: Any) -> dict[str, Any] | None:
        """Metadata of each item by ``mm_hash``, or ``None`` where there is nothing to say. Never raises."""
        if self._collect is None or not request.mm_features:
            return None
        try:
            described: dict[str, Any] = self._collect(request.mm_features, self._resolver)
            for mm_hash, item in described.items():
                if is_request_scoped(mm_hash, request.request_id):
                    item["metadata"] = {}  # not stored, so the consumer needs the data
            return described or None
        except Exception as error:
            if not self._failed:
                self._failed = True
                _log.warning(
                    "Encoder cache: cannot read the metadata of a request's items (%r), so the answers have none. Set "
                    "the proxy to send items with their data (vLLM's example proxy: --no-rewrite).",
                    error,
                )
            return None


class NothingFound:
    """Warns, once, about an ``ec_consumer`` that finds nothing of what it looks up."""

    def __init__(self, vllm_config: Any, stats: ECStats, storage: str) -> None:
        self._watches = vllm_config.ec_transfer_config.ec_role == "ec_consumer"
        self._stats = stats
        self._storage = storage
        self._items: set[str] = set()

    def finished(self, request: Any) -> None:
        """A request has ended. Cheap: nothing is looked at before there were enough different items."""
        if not self._watches:
            return
        self._items.update(feature.identifier for feature in request.mm_features or ())
        if len(self._items) < _ENOUGH:
            return
        counts = self._stats.values()
        if counts["lookup_hits"] or counts["hits"]:
            self._watches = False
        elif counts["lookups"] >= _ENOUGH:
            self._watches = False
            _log.warning(
                "Encoder cache: this consumer has looked up %d items and found none, so it encodes everything itself. "
                "Compare with the producer: (1) The items' ids (here for example %.80r). A proxy that gives only the "
                "producer a uuid makes them differ: run vLLM's example proxy with --no-rewrite. (2) The storage "
                "(here: %s). (3) The weights, vLLM's release, dtype, quantization, mm_processor_kwargs, ec_namespace, "
                "ec_salt. `vllm-omni-patch ec stats FOLDER` lists what a folder holds.",
                counts["lookups"],
                next(iter(self._items)),
                self._storage,
            )
        self._items = set(list(self._items)[:_ENOUGH])
