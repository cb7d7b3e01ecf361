# SPDX-License-Identifier: Apache-2.0
"""``LMCacheECConnector``: vLLM's encoder cache interface over our engine, for vLLM 0.11.1 to 0.33.0.

vLLM's interface puts the scheduler's and the worker's methods on one class; each instance has one of the two sides
(``scheduler.py``, ``worker.py``) and answers the other side's calls with vLLM's defaults.
Releases differ in which methods exist and which are called; a method that a release does not know is never called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.ec_transfer.ec_connector import base

from vllm_omni_patch import ledger

from ..cache.engine import ECCacheEngine, Role
from ..config import load_ec_config
from . import configured, recompute, refusals
from .adapters import LoadedAdapters
from .configured_weights import weights_of
from .counts import SCHEDULER_COUNTS, WORKER_COUNTS, Deltas, Report
from .disaggregated import ItemMetadata, NothingFound
from .items import ItemKeys, Load
from .model_identity import model_identity
from .opened import Opened
from .scheduler import SchedulerSide, StepPlan
from .weights import WeightsSample
from .worker import WorkerSide, agree_over

if TYPE_CHECKING:
    import torch

_log = ledger.logger("ec")
# Bases that releases before 0.28 (worker metadata) and before 0.31 (statistics) do not have.
_WorkerMetadataBase: Any = getattr(base, "ECConnectorWorkerMetadata", object)
# Longest wait of a producer's step for its outputs to be stored, s. Storage that takes longer is slower than encoding.
_STORED_WITHIN = 1.0
_CAN_FAIL_ONE = hasattr(base.ECConnectorBase, "take_unavailable_requests")
_ASKS_FIRST = hasattr(base.ECConnectorBase, "ensure_cache_available")


class StepMetadata(base.ECConnectorMetadata):  # type: ignore[misc]
    """Travels from the scheduler to the workers with each step."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(_WorkerMetadataBase):  # type: ignore[misc]
    """Travels back from a worker to the scheduler, merged over ranks by vLLM."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.report.merged(other.report))


class LMCacheECConnector(base.ECConnectorBase):  # type: ignore[misc]
    """The connector that ``--ec-transfer-config '{"ec_connector": "LMCacheECConnector", ...}'`` names.

    Raises:
        ConnectorRefused: the role, the model or the model runner cannot be served (see ``refusals.py``).
        RuntimeError: this process lacks the recovery that makes a failed load harmless.
    """

    # What our hooks look for: a class attribute, so that they need not import this module.
    encodes_failed_loads = True

    def __init__(self, vllm_config: Any, role: base.ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        transfer = vllm_config.ec_transfer_config
        refusals.check(vllm_config, str(getattr(vllm, "__version__", "")))
        self._consumer = bool(transfer.is_ec_consumer)
        self._saved = False
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._weights: WeightsSample | None = None
        self.adapters = LoadedAdapters()
        in_scheduler = role == base.ECConnectorRole.SCHEDULER
        if not in_scheduler:
            recompute.require(vllm_config)
        self._engine = _build_engine(vllm_config, "scheduler" if in_scheduler else "worker")
        self._item_metadata = ItemMetadata(vllm_config)
        self._nothing_found = NothingFound(vllm_config, self._engine.stats, self._engine.config.describe())
        self._opened = Opened(vllm_config)
        if not in_scheduler:
            self._engine.claims.write("")  # until the loader opens something
        elif not self._engine.claims.any():
            self._engine.claims.write(weights_of(vllm_config))
        # vLLM calls shutdown() from 0.23.0 only, and no release calls it when its process dies of an error.
        self._closing = weakref.finalize(self, _close, self._engine)
        self._deltas = Deltas(SCHEDULER_COUNTS if in_scheduler else WORKER_COUNTS)
        self._counts: dict[str, float] = {}
        if in_scheduler:
            self._scheduler = self._build_scheduler(vllm_config)

    def _build_scheduler(self, vllm_config: Any) -> SchedulerSide:
        keys, adapters_unclear = _item_keys(vllm_config, None)
        widths = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None) or {}
        return SchedulerSide(
            self._engine,
            keys,
            lookups=not adapters_unclear,
            keyless=not configured.tower_lora(vllm_config),
            width_of=lambda modality: widths.get(modality),
            can_fail_one=_CAN_FAIL_ONE,
            wait=0.0 if _ASKS_FIRST else self._engine.config.lookup_deadline,
        )

    def _worker_side(self) -> WorkerSide:
        # Built at the first step: the connector itself is made while vLLM still sets up its process groups.
        if self._worker is None:
            from vllm.distributed.parallel_state import get_tp_group
            from vllm.platforms import current_platform

            keys, adapters_unclear = _item_keys(self._vllm_config, self.adapters)
            group = get_tp_group()
            self._worker = WorkerSide(
                self._engine,
                keys,
                device=str(current_platform.device_type),
                first=group.rank_in_group == 0,
                stores=self.is_producer and group.rank_in_group == 0 and not adapters_unclear,
                weights_changed=self._weights_changed,
                agree=agree_over(group.cpu_group) if group.world_size > 1 else None,
            )
        return self._worker

    @property
    def is_consumer(self) -> bool:
        """Also for releases before 0.17.0, whose base class does not have it."""
        return self._consumer

    # -- scheduler

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is promised from the store (0.15.0 and later)."""
        return self._scheduler is not None and self._scheduler.has_item(identifier)

    def has_caches(self, request: Any) -> list[bool]:
        """One answer per item of ``request`` (0.11.1 to 0.14.1)."""
        return [] if self._scheduler is None else self._scheduler.has_items(request)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether ``request`` may be scheduled now (0.23.0 and later)."""
        return self._scheduler is None or self._scheduler.ensure_available(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Item ``index`` of ``request`` has a place in the workers' cache."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, index)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """Nothing is held for an item once its step is planned."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """This step's loads, for the workers."""
        self._engine.stats.tick()
        return StepMetadata(StepPlan() if self._scheduler is None else self._scheduler.plan())

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers counted (0.28.0 and later)."""
        meta = getattr(connector_output, "ec_connector_worker_meta", None)
        if isinstance(meta, WorkerMetadata):
            for name, value in meta.report.counts.items():
                self._counts[name] = self._counts.get(name, 0.0) + value

    def take_unavailable_requests(self) -> set[str]:
        """Requests that cannot be answered, for vLLM to fail (0.30.0 and later)."""
        return set() if self._scheduler is None else self._scheduler.take_unavailable()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is sent, so nothing is kept; a producer's answer describes its items (0.26.0 and later)."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
            self._nothing_found.finished(request)
        return False, self._item_metadata.of(request)

    def has_pending_push_work(self) -> bool:
        """Stores run beside the engine's steps and need none of them."""
        return False

    # -- worker

    def register_caches(self, ec_caches: dict[str, torch.Tensor]) -> None:
        """No release calls it, and nothing needs to be registered."""

    def start_worker_services(self) -> None:
        """The engine's threads start with their first work."""

    def start_save_caches(self, **kwargs: Any) -> None:
        """Nothing is prepared for saving."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put this step's promised items into ``encoder_cache``. Never raises for an entry that is bad or gone."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._worker_side().load(encoder_cache, metadata.plan)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Store one encoder output. vLLM calls this for every role; only a producer's first rank stores."""
        if self.is_producer:
            self._worker_side().save(encoder_cache, mm_hash)
            self._saved = True

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ends a worker's step. A producer's answer means that its outputs are stored: the consumer is asked next."""
        if self._saved and not self._consumer:
            self._engine.flush(_STORED_WITHIN)
        self._saved = False
        self._engine.stats.tick()
        return None, None

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What this worker counted since its last step, where there is anything (0.28.0 and later)."""
        counts = self._deltas.take(self._engine.stats)
        return WorkerMetadata(Report(counts)) if counts else None

    def take_failed_loads(self) -> list[Load]:
        """Promised items of this step that must be encoded after all; asked by our hooks."""
        return [] if self._worker is None else self._worker.take_failed()

    def encodes_again(self, count: int) -> None:
        """So many of the failed loads are encoded after all; called by our hooks."""
        self._engine.stats.fallback(count)

    def about_to_encode(self, items: Iterable[tuple[str, Any, Any]]) -> None:
        """Items that the encoder is about to run over; called by our hooks."""
        if self.is_producer:
            self._worker_side().about_to_encode(items)

    def weights_opened(self, source: str, result: Any) -> None:
        """A loader has found the files of ``source``; called by our hooks while the model is loaded."""
        self._opened.add(source, result)
        self._engine.claims.write(self._opened.weights)

    def weights_loaded(self, model_of: Callable[[], Any]) -> None:
        """The worker has loaded the checkpoint, under whose weights entries are stored; called by our hook.

        ``model_of`` gives the model as it is at any later time. Never raises; without a first sample
        nothing is loaded or stored.
        """
        if self._weights is not None:
            return  # loaded once more: the sample shows whether these are the same weights
        try:
            self._weights = WeightsSample(model_of)
        except Exception as error:
            _log.warning("Encoder cache: cannot sample the encoder's weights: %r", error)

    def weights_replaced(self) -> None:
        """A call that writes weights has ended: a new generation, also where a sample would not show it."""
        self._engine.new_generation()
        if self._weights is not None:
            self._weights.forget()

    def _weights_changed(self) -> bool:
        if self._weights is None:
            raise RuntimeError("vLLM's Worker.load_model did not run in this process")
        return self._weights.changed()

    # -- both

    def get_ec_connector_stats(self) -> Any:
        """Counts of scheduler and workers since the last call (0.31.0 and later), from the scheduler's instance."""
        if self._scheduler is None:
            return None
        counts = self._deltas.take(self._engine.stats)
        if self._counts:
            counts.update(self._counts)
            self._counts = {}
        if not counts:
            return None
        from .stats import LMCacheECStats

        return LMCacheECStats(data=counts)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """vLLM's front end rebuilds the counts from plain data (0.31.0 and later)."""
        from .stats import LMCacheECStats

        return LMCacheECStats(data=dict(data or {}))

    def shutdown(self) -> None:
        """Drain what is queued and end every thread. May be called more than once."""
        self._closing()


def _build_engine(vllm_config: Any, role: Role) -> ECCacheEngine:
    from vllm.platforms import current_platform

    extra = getattr(vllm_config.ec_transfer_config, "ec_connector_extra_config", None)
    return ECCacheEngine(
        load_ec_config(extra),
        model_identity(vllm_config),
        role=role,
        dtype=vllm_config.model_config.dtype,
        device_type=str(current_platform.device_type),
    )


def _close(engine: ECCacheEngine) -> None:
    engine.stats.tick(last=True)
    engine.close()


def _item_keys(vllm_config: Any, loaded: LoadedAdapters | None) -> tuple[ItemKeys, bool]:
    """Keys of items, and whether adapters make them unclear.

    The V2 runner chooses the encoder's adapters before it asks the connector, so an item encoded after all would get
    another item's adapter: with ``enable_tower_connector_lora`` it neither loads nor stores.
    """
    adapters = configured.tower_lora(vllm_config)
    unclear = adapters and configured.uses_v2_runner(vllm_config)
    if unclear:
        _log.warning(
            "Encoder cache: idle, because the V2 model runner cannot encode an item again under its adapter. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0 to use both, or leave out --enable-tower-connector-lora."
        )
    return ItemKeys(adapters, loaded), unclear
