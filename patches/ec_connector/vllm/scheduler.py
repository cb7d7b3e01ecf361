# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the connector: which items are promised from the store, and what the worker is to load.

vLLM asks ``has_cache_item(identifier)`` once per item it is about to encode and, on yes, spends no encoder budget on
it. A yes is given only after the entry's header was read and found to be the right one. It is still a promise about
something another process may delete; the worker encodes what it then cannot load (``recompute.py``).

Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_patch import ledger

from .items import ItemKeys, Load, expected_rows, is_metadata_only, is_precomputed

_log = ledger.logger("ec")
# Items whose rows are remembered between a request's first look and its scheduling. Far above the items of all
# requests that wait at once; it only bounds the memory of a scheduler that runs for months.
_MAX_KNOWN = 65536


@dataclass
class StepPlan:
    """What the worker is to load in one step.

    ``tensors`` holds, by ``mm_hash``, embeddings that the scheduler has in hand for items that could not be encoded if
    a load failed.
    """

    loads: list[Load] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Known:
    request_id: str
    key: str | None
    rows: int | None


class SchedulerSide:
    """State of the connector in the scheduler; all calls come from the scheduler's one thread.

    Args:
        engine: the store; ``contains(key, rows)`` and ``get(key, device, rows)`` are used.
        keys: keys of items.
        lookups: whether this role and configuration may promise anything.
        keyless: whether an item may be looked up before its request was seen (its adapter is then unknown).
        width_of: width of a modality's encoder output where vLLM measured it, else ``None``.
        can_fail_one: whether this release lets a connector fail a single request (0.30 and later).
    """

    def __init__(
        self,
        engine: Any,
        keys: ItemKeys,
        *,
        lookups: bool = True,
        keyless: bool = True,
        width_of: Callable[[str], int | None] = lambda modality: None,
        can_fail_one: bool = False,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._lookups = lookups
        self._keyless = keyless
        self._width_of = width_of
        self._can_fail_one = can_fail_one
        self._known: dict[str, _Known] = {}
        self._answers: dict[tuple[str, int | None], bool] = {}
        self._promised: set[str] = set()
        self._loads: dict[str, Load] = {}
        self._in_hand: dict[str, Any] = {}
        self._unavailable: set[str] = set()
        # Request id -> the indices of its items without data.
        self._seen: dict[str, list[int]] = {}

    def has_item(self, mm_hash: str) -> bool:
        """vLLM's ``has_cache_item``: a verified yes, or no. One lookup per item and step."""
        promised = self._lookups and self._has(mm_hash)
        if promised:
            self._promised.add(mm_hash)
        else:
            self._promised.discard(mm_hash)
        return promised

    def _has(self, mm_hash: str) -> bool:
        if mm_hash in self._in_hand:
            return True
        known = self._known.get(mm_hash)
        if known is None:
            if not self._keyless:
                return False
            known = _Known("", self._keys.key(mm_hash, None), None)
        return known.key is not None and self._lookup(known.key, known.rows)

    def _lookup(self, key: str, rows: int | None) -> bool:
        asked = (key, rows)
        if asked not in self._answers:
            self._answers[asked] = bool(self._engine.contains(key, rows))
        return self._answers[asked]

    def has_items(self, request: Any) -> list[bool]:
        """vLLM's ``has_caches`` of 0.11.1 to 0.14.1: one answer per item of the request."""
        self.see(request)
        return [self.has_item(feature.identifier) for feature in request.mm_features or ()]

    def see(self, request: Any) -> None:
        """Remember rows and keys of a request's items before vLLM asks for them by ``mm_hash`` alone."""
        if request.request_id in self._seen:
            return
        # Before 0.26 no call says that a request has ended.
        if max(len(self._known), len(self._seen)) > _MAX_KNOWN:
            self._known.clear()
            self._seen.clear()
        features = request.mm_features or ()
        for index, feature in enumerate(features):
            self._known[feature.identifier] = self._describe(request, index, feature)
        self._seen[request.request_id] = [i for i, feature in enumerate(features) if is_metadata_only(feature)]

    def _describe(self, request: Any, index: int, feature: Any) -> _Known:
        key = None
        if not is_precomputed(feature):
            key = self._keys.key(feature.identifier, request.request_id, getattr(request, "lora_request", None))
        return _Known(request.request_id, key, expected_rows(request, index))

    def ensure_available(self, request: Any) -> bool:
        """vLLM's ``ensure_cache_available``: False keeps the request out of this step.

        An ordinary item is not fetched here. One without data cannot be encoded, so it is fetched here and travels to
        the worker with the step; if no tier has it, that one request fails.
        """
        self.see(request)
        if not self._can_fail_one or request.request_id in self._unavailable:
            return request.request_id not in self._unavailable
        for index in self._seen[request.request_id]:
            feature = request.mm_features[index]
            if not self._fetch(request, index, feature.identifier):
                self._unavailable.add(request.request_id)
                _log.warning(
                    "Encoder cache: request %s fails. It has no data for %s %.80r, and the output could not be loaded. "
                    "Send it again with the data, or after the producer has stored the output.",
                    request.request_id,
                    feature.modality,
                    feature.identifier,
                )
                return False
        return True

    def _fetch(self, request: Any, index: int, mm_hash: str) -> bool:
        if mm_hash in self._in_hand:
            return True
        known = self._describe(request, index, request.mm_features[index])
        tensor = None if known.key is None else self._engine.get(known.key, "cpu", known.rows)
        if tensor is None:
            return False
        self._in_hand[mm_hash] = tensor
        return True

    def take_unavailable(self) -> set[str]:
        """Requests that vLLM must fail; each is named once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def allocated(self, request: Any, index: int) -> None:
        """vLLM's ``update_state_after_alloc``: the item has a place in the worker's cache in this step.

        From 0.18 vLLM calls it for items that it encodes itself, too; those were not promised.
        """
        feature = request.mm_features[index]
        if feature.identifier not in self._promised:
            return
        known = self._describe(request, index, feature)
        # Promised, so it goes to the worker in any case: what it cannot load, it encodes. Without a key (known only
        # now to be none), or with rows that the entry lacks, the load fails there.
        self._loads[feature.identifier] = Load(
            request.request_id,
            index,
            feature.identifier,
            known.key or "",
            known.rows,
            self._width_of(str(feature.modality)),
            self._keys.adapter_of(getattr(request, "lora_request", None)),
        )

    def plan(self) -> StepPlan:
        """vLLM's ``build_connector_meta``: this step's loads; forgets the step."""
        loads = list(self._loads.values())
        tensors = {load.mm_hash: self._in_hand[load.mm_hash] for load in loads if load.mm_hash in self._in_hand}
        self._loads = {}
        self._promised = set()
        self._answers = {}
        return StepPlan(loads, tensors)

    def finished(self, request: Any) -> None:
        """A request has ended: forget what was remembered for it."""
        self._seen.pop(request.request_id, None)
        for feature in request.mm_features or ():
            known = self._known.get(feature.identifier)
            if known is not None and known.request_id == request.request_id:
                del self._known[feature.identifier]
                self._in_hand.pop(feature.identifier, None)
