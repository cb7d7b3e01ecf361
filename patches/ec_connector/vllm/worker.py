# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the connector: loads what was promised, lists what must be encoded after all, stores the rest.

Nothing here raises into a model step. Imports torch only inside functions, and not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_patch import ledger

from .items import ItemKeys, Load, is_precomputed
from .scheduler import StepPlan

if TYPE_CHECKING:
    import torch

_log = ledger.logger("ec")
# Items of one step are noted when the encoder is about to run and asked for when its outputs are saved, so this many
# is far above any step; it only bounds the memory of releases that never save (a consumer).
_MAX_NOTED = 4096

Agree = Callable[[Sequence[bool]], list[bool]]


class WorkerSide:
    """State of the connector in one worker; all calls come from the model thread.

    Args:
        engine: the store; ``open``, ``put``, ``discard`` and ``new_generation`` are used.
        keys: keys of items.
        device: where loaded tensors go, as torch names it.
        first: whether this is the first rank. It counts what all do alike, and keeps copies of what a remote sent.
        stores: whether this rank writes (a producer's first rank).
        weights_changed: whether the encoder's weights differ from those at the last call. Raises where they cannot be
            compared.
        agree: turns this rank's flags into those that all ranks hold. Every rank calls it in the same order, once in
            each step that loads or encodes: a rank that encodes alone would deadlock in the vision tower's all-reduce.
    """

    def __init__(
        self,
        engine: Any,
        keys: ItemKeys,
        *,
        device: str,
        first: bool = True,
        stores: bool,
        weights_changed: Callable[[], bool],
        agree: Agree | None = None,
    ) -> None:
        self._engine = engine
        self._engine.stats.speaks = first
        self._keys = keys
        self._device = device
        self._stores = stores
        self._weights_changed = weights_changed
        self._agree = agree
        self._idle = False
        self._looked = False
        self._failed: list[Load] = []
        self._noted: dict[str, str | None] = {}

    def load(self, encoder_cache: MutableMapping[str, torch.Tensor], plan: StepPlan) -> None:
        """vLLM's ``start_load_caches``: put this step's promised items into ``encoder_cache``, all ranks alike."""
        self._failed = []
        self._looked = bool(plan.loads)
        if not plan.loads:
            return
        looked = self._look()
        tensors = [self._open(load, encoder_cache, plan, looked) for load in plan.loads]
        agreed, ours = self._settle(looked, [tensor is not None for tensor in tensors])
        for load, tensor, together in zip(plan.loads, tensors, agreed, strict=True):
            # What came with the step has nothing that could be encoded in its place.
            if together and tensor is not None and (ours or load.mm_hash in plan.tensors):
                encoder_cache[load.mm_hash] = tensor
                continue
            # A tensor that this rank has and another one lacks must not stay either: every rank encodes.
            encoder_cache.pop(load.mm_hash, None)
            self._failed.append(load)
            if tensor is None and ours and self._keys.holds(load):
                self._discard(load)

    def _look(self) -> tuple[bool, bool]:
        """Whether this rank can compare its weights, and whether they are those of the present generation."""
        if self._idle:
            return False, False
        try:
            return True, not self._weights_changed()
        except Exception as error:
            _log.warning(
                "Encoder cache: cannot compare the encoder's weights with those that were loaded (%r). Nothing is "
                "loaded or stored from now on; every item is encoded.",
                error,
            )
            return False, False

    def _settle(self, looked: tuple[bool, bool], flags: list[bool]) -> tuple[list[bool], bool]:
        """``flags`` as all ranks hold them, and whether the weights of all are those of the present generation.

        Where they are not, a new generation begins on all ranks. Where one rank cannot compare, it is the last one, and
        all are idle from then on.
        """
        shared = [*looked, *flags]
        known, same, *agreed = shared if self._agree is None else self._agree(shared)
        if not same and not self._idle:
            self._idle = not known
            if known:
                _log.info("Encoder cache: the encoder's weights were written in place.")
            self._engine.new_generation()
        return agreed, same

    def _open(
        self, load: Load, encoder_cache: Mapping[str, torch.Tensor], plan: StepPlan, looked: tuple[bool, bool]
    ) -> torch.Tensor | None:
        try:
            tensor = encoder_cache.get(load.mm_hash)
            if tensor is not None and _fits(tensor, load):
                return tensor
            if load.mm_hash in plan.tensors:
                tensor = plan.tensors[load.mm_hash].to(self._device)
            elif load.key and all(looked) and self._keys.holds(load):
                tensor = self._engine.open(load.key, plan.places[load.mm_hash], self._device)
            else:
                return None
            return tensor if tensor is not None and _fits(tensor, load) else None
        except Exception as error:
            _log.warning("Encoder cache: %.80r could not be loaded (%r); it is encoded instead.", load.mm_hash, error)
            return None

    def _discard(self, load: Load) -> None:
        if not load.key:
            return
        try:
            self._engine.discard(load.key)
        except Exception as error:
            _log.warning("Encoder cache: the bad entry of %.80r could not be removed: %r.", load.mm_hash, error)

    def take_failed(self) -> list[Load]:
        """Promised items of this step that must be encoded; handed out once."""
        taken, self._failed = self._failed, []
        return taken

    def about_to_encode(self, items: Iterable[tuple[str, Any, Any]]) -> None:
        """Note what the encoder is going to produce, because vLLM's ``save_caches`` names an ``mm_hash`` only.

        ``items``: (request id, feature, the request's adapter or ``None``). Called on all ranks alike.
        """
        looked, self._looked = self._looked, False
        if not looked and (self._stores or self._agree is not None):
            self._settle(self._look(), [])
        if self._idle or not self._stores:
            return
        if len(self._noted) > _MAX_NOTED:
            self._noted.clear()
        for request_id, feature, lora_request in items:
            key = None if is_precomputed(feature) else self._keys.key(feature.identifier, request_id, lora_request)
            self._noted[feature.identifier] = key

    def save(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        """vLLM's ``save_caches``: store one output, unless a client computed it or its id is of one request."""
        if not self._stores:
            return
        try:
            # An item that was not noted was encoded by a path without our hook. What it is remains unknown, so it is
            # not stored.
            key = self._noted.pop(mm_hash, None)
            tensor = encoder_cache.get(mm_hash)
            if key is not None and tensor is not None:
                self._engine.put(key, tensor)
        except Exception as error:
            _log.warning("Encoder cache: %.80r could not be stored: %r.", mm_hash, error)


def _fits(tensor: torch.Tensor, load: Load) -> bool:
    """Two-dimensional, with the rows that the request's placeholders take and the encoder's width where known.

    Anything else would fail in the middle of a step, for every request in it.
    """
    if tensor.dim() != 2:
        return False
    rows, width = tensor.shape
    return (load.rows is None or rows == load.rows) and (load.width is None or width == load.width)


def agree_over(group: Any) -> Agree:
    """Minimum of the flags over a torch process group on the CPU (gloo)."""

    def agree(flags: Sequence[bool]) -> list[bool]:
        import torch
        import torch.distributed as dist

        shared = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
        return [bool(flag) for flag in shared.tolist()]

    return agree
