# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the connector: which items are promised from the store, and what the worker is to load.

vLLM asks ``ensure_cache_available(request)`` (0.23 and later) before it schedules a request, and holds the request back
on no, and only it. The first ask begins to load the request's items into memory, in the background. When all have
settled, vLLM asks ``has_cache_item(identifier)`` once per item that it is about to encode and, on yes, spends no
encoder budget on it. A yes is given only for an entry that lies verified in memory. Still, another process may not
reach it; the worker encodes what it cannot load (``recompute.py``).

Releases before 0.23 ask ``has_cache_item`` or ``has_caches`` only: the wait for an entry is then the scheduler's, and
short.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_patch import ledger

from .items import ItemKeys, Load, end_of, expected_rows, is_metadata_only, is_precomputed

_log = ledger.logger("ec")
# Items whose rows are remembered between a request's first look and its scheduling. Far above the items of all
# requests that wait at once; it only bounds the memory of a scheduler that runs for months.
_MAX_KNOWN = 65536
# Seconds that a request's first ask may wait for what it began.
_FIRST_WAIT = 0.0005
# Seconds that memory is held for a request, and for a step that was planned. Later it is found among the last ones that
# were used, or fetched again: a request may wait for its turn much longer than its items' memory can be spared.
_HOLD_SECONDS = 60.0
_SENT_SECONDS = 5.0


@dataclass
class StepPlan:
    """What the worker is to load in one step.

    ``places`` says by ``mm_hash`` where the outputs lie. ``tensors`` holds outputs of items that could not be encoded
    if a load failed.
    """

    loads: list[Load] = field(default_factory=list)
    places: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Item:
    """One item of a request. ``end`` is the position after its last placeholder; ``fetch`` holds its output in memory
    from the time the request is first seen until the item is computed."""

    mm_hash: str
    key: str | None
    rows: int | None
    end: int
    only_cached: bool
    fetch: Any = None
    asked: bool = False


class SchedulerSide:
    """State of the connector in the scheduler; all calls come from the scheduler's thread.

    Args:
        engine: the store; ``fetch``, ``serves`` and ``open`` are used.
        keys: keys of items.
        lookups: whether this role and configuration may promise anything.
        keyless: whether an item may be looked up before its request was seen (its adapter is then unknown).
        width_of: width of a modality's encoder output where vLLM measured it, else ``None``.
        can_fail_one: whether this release lets a connector fail a single request (0.30 and later).
        wait: seconds that :meth:`has_item` may wait for an item; 0 where the release asks :meth:`ensure_available`.
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
        wait: float = 0.0,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._lookups = lookups
        self._keyless = keyless
        self._width_of = width_of
        self._can_fail_one = can_fail_one
        self._wait = wait
        self._requests: dict[str, list[_Item]] = {}
        # The newest item of an mm_hash: equal hashes are equal outputs.
        self._items: dict[str, _Item] = {}
        # mm_hash -> (key, what lies in memory)
        self._promised: dict[str, tuple[str, Any]] = {}
        self._answers: dict[tuple[str, int | None], Any] = {}
        self._loads: dict[str, Load] = {}
        self._unavailable: set[str] = set()
        # What was asked for, oldest first: memory is held for a request no longer than _HOLD_SECONDS.
        self._held: deque[tuple[float, _Item]] = deque()
        # Outputs on their way to the workers.
        self._sent: deque[tuple[float, Any]] = deque()

    def has_item(self, mm_hash: str) -> bool:
        """vLLM's ``has_cache_item``: a yes means verified in memory. One lookup per item and step."""
        found = self._available(mm_hash) if self._lookups or self._is_only_cached(mm_hash) else None
        if found is None:
            self._promised.pop(mm_hash, None)
            return False
        self._promised[mm_hash] = found
        return True

    def _is_only_cached(self, mm_hash: str) -> bool:
        item = self._items.get(mm_hash)
        return item is not None and item.only_cached

    def _available(self, mm_hash: str) -> tuple[str, Any] | None:
        item = self._items.get(mm_hash)
        if item is None:
            if not self._keyless:
                return None
            item = _Item(mm_hash, self._keys.key(mm_hash, None), None, 0, False)
        if item.key is None:
            return None
        fetch = item.fetch
        if fetch is None and self._wait:
            fetch = self._look(item.key, item.rows)
        if fetch is None or not fetch.settled() or fetch.memory is None:
            return None
        # One without data was served when its request was let through, and nothing else can be done with it.
        return (item.key, fetch) if item.only_cached or self._engine.serves(item.key, fetch) else None

    def _look(self, key: str, rows: int | None) -> Any:
        asked = (key, rows)
        if asked not in self._answers:
            fetch = self._engine.fetch(key, rows)
            if fetch is not None:
                fetch.settled(self._wait)
            self._answers[asked] = fetch
        return self._answers[asked]

    def has_items(self, request: Any) -> list[bool]:
        """vLLM's ``has_caches`` of 0.11.1 to 0.14.1: one answer per item of the request."""
        return [self.has_item(item.mm_hash) for item in self.see(request)]

    def see(self, request: Any) -> list[_Item]:
        """The request's items, remembered before vLLM asks for them by ``mm_hash`` alone."""
        items = self._requests.get(request.request_id)
        if items is not None:
            return items
        # Before 0.26 no call says that a request has ended.
        if max(len(self._items), len(self._requests)) > _MAX_KNOWN:
            self._items.clear()
            self._requests.clear()
        items = [self._describe(request, index, feature) for index, feature in enumerate(request.mm_features or ())]
        self._items.update((item.mm_hash, item) for item in items)
        self._requests[request.request_id] = items
        return items

    def _describe(self, request: Any, index: int, feature: Any) -> _Item:
        key = None
        if not is_precomputed(feature):
            key = self._keys.key(feature.identifier, request.request_id, getattr(request, "lora_request", None))
        return _Item(
            feature.identifier,
            key,
            expected_rows(request, index),
            end_of(feature),
            is_metadata_only(feature),
        )

    def ensure_available(self, request: Any, computed: int) -> bool:
        """vLLM's ``ensure_cache_available``: False keeps the request out of this step.

        ``computed`` tokens need no encoder output any more. A request waits until each of the others is in memory or
        known not to be there, at most ``load_deadline``. An item without data cannot be encoded: if no tier has it,
        that one request fails (0.30 and later).
        """
        if request.request_id in self._unavailable:
            return False
        waiting = began = False
        items = self.see(request)
        for item in items:
            if item.end <= computed:
                item.fetch, item.asked = None, False
                continue
            if not item.asked:
                began |= self._begin(item)
            waiting |= item.fetch is not None and not item.fetch.settled()
        if waiting and began:
            # A small entry takes less than this: without the wait it would cost a step.
            until = time.monotonic() + _FIRST_WAIT
            waiting = not all(
                item.fetch is None or item.fetch.settled(max(0.0, until - time.monotonic())) for item in items
            )
        return not waiting and self._complete(request, items, computed)

    def _begin(self, item: _Item) -> bool:
        """Begin to load an item; False where nothing is to be waited for."""
        item.asked = True
        if item.key is None or not (self._lookups or item.only_cached):
            return False
        item.fetch = self._engine.fetch(item.key, item.rows)
        self._held.append((time.monotonic() + _HOLD_SECONDS, item))
        return item.fetch is not None

    def _complete(self, request: Any, items: list[_Item], computed: int) -> bool:
        """Whether no item that cannot be encoded is missing; if one is, the request is to fail."""
        if not self._can_fail_one:
            return True
        for index, item in enumerate(items):
            if not item.only_cached or item.end <= computed:
                continue
            if item.key is not None and item.fetch is not None and self._engine.serves(item.key, item.fetch):
                continue
            self._unavailable.add(request.request_id)
            _log.warning(
                "Encoder cache: request %s fails. It has no data for %s %.80r, and the output could not be loaded. "
                "Send it again with the data, or after the producer has stored the output.",
                request.request_id,
                request.mm_features[index].modality,
                item.mm_hash,
            )
            return False
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
        item = self._describe(request, index, feature)
        # Promised, so it goes to the worker in any case: what it cannot load, it encodes. Without a key (known only
        # now to be none, or another one), or with rows that the entry lacks, the load fails there.
        key = item.key if item.key == self._promised[feature.identifier][0] else None
        self._loads[feature.identifier] = Load(
            request.request_id,
            index,
            feature.identifier,
            key or "",
            item.rows,
            self._width_of(str(feature.modality)),
            self._keys.adapter_of(getattr(request, "lora_request", None)),
        )

    def plan(self) -> StepPlan:
        """vLLM's ``build_connector_meta``: this step's loads; forgets the step."""
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, item = self._held.popleft()
            item.fetch, item.asked = None, False
        while self._sent and self._sent[0][0] <= now:
            self._sent.popleft()
        plan = StepPlan()
        for mm_hash, load in self._loads.items():
            _, fetch = self._promised[mm_hash]
            plan.loads.append(load)
            plan.places[mm_hash] = fetch.memory.place
            self._sent.append((now + _SENT_SECONDS, fetch))
            if self._is_only_cached(mm_hash):
                tensor = self._engine.open(load.key, fetch.memory.place, "cpu")
                if tensor is not None:
                    plan.tensors[mm_hash] = tensor
        self._loads = {}
        self._promised = {}
        self._answers = {}
        return plan

    def finished(self, request: Any) -> None:
        """A request has ended: forget what was remembered for it."""
        for item in self._requests.pop(request.request_id, ()):
            item.fetch = None
            if self._items.get(item.mm_hash) is item:
                del self._items[item.mm_hash]
