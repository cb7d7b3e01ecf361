# SPDX-License-Identifier: Apache-2.0
"""Encode in the same step what was promised and could not be loaded.

vLLM has no recovery of its own: a promised item that is not in ``encoder_cache`` when embeddings are gathered is a
``RuntimeError`` in the worker (``AssertionError`` up to 0.23), and with it the end of the engine. Between loading and
gathering vLLM runs its encoder over ``scheduled_encoder_inputs``; the wrappers here add the items to that list. The
step's own ``SchedulerOutput`` is left as it is, because with one process the scheduler holds the same object.

The extra work is not in the encoder budget of the step: a failed load is rare, and one item more is not what the
budget protects from. Nothing here does anything unless our connector is the one that was chosen.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_omni_patch import ledger

from . import configured
from .items import Load, indices_in, is_metadata_only

_log = ledger.logger("ec")


def extend(
    scheduled: Mapping[str, list[int]],
    failed: Sequence[Load],
    features_of: Callable[[str], Sequence[Any] | None],
    connector: Any,
) -> dict[str, list[int]]:
    """``scheduled`` (request id -> item indices) with the failed items added, in an order that all ranks share.

    ``features_of`` gives a request's items. One whose request has no data for it is taken from another request of the
    step that has; where none has, it is left out with an error line (the scheduler sends such items' tensors along,
    so they do not fail to load). ``connector`` counts how many of the failed items are encoded after all.
    """
    extended = {request_id: list(indices) for request_id, indices in scheduled.items()}
    coming = {f.identifier for r, i in indices_in(extended) if (f := _feature(features_of, r, i)) is not None}
    for load in failed:
        if load.mm_hash in coming:
            continue
        feature = _feature(features_of, load.request_id, load.index)
        if feature is None or is_metadata_only(feature):
            _log.error(
                "Encoder cache: %s %.80r of request %s could not be loaded and has no data to encode.",
                "item" if feature is None else feature.modality,
                load.mm_hash,
                load.request_id,
            )
            continue
        extended.setdefault(load.request_id, []).append(load.index)
        coming.add(load.mm_hash)
    connector.encodes_again(sum(load.mm_hash in coming for load in failed))
    return extended


def _feature(features_of: Callable[[str], Sequence[Any] | None], request_id: str, index: int) -> Any:
    features = features_of(request_id)
    return features[index] if features is not None and index < len(features) else None


def around_v1_encoder(
    connector: Any, wrapped: Callable[..., Any], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``GPUModelRunner._execute_mm_encoder(scheduler_output)`` of the V1 runner.

    ``runner.requests[id].mm_features`` are the request's items (0.11.1 and later).
    """

    failed = connector.take_failed_loads()
    if not failed and args and not args[0].scheduled_encoder_inputs:
        return wrapped(*args, **kwargs)  # most steps

    def call(scheduler_output: Any, *more: Any, **named: Any) -> Any:
        scheduled = scheduler_output.scheduled_encoder_inputs
        if failed:
            scheduled = extend(scheduled, failed, features_of, connector)
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.scheduled_encoder_inputs = scheduled
        if scheduled:
            connector.about_to_encode(
                (request_id, feature, runner.requests[request_id].lora_request)
                for request_id, index in indices_in(scheduled)
                if (feature := _feature(features_of, request_id, index)) is not None
            )
        return wrapped(scheduler_output, *more, **named)

    def features_of(request_id: str) -> Sequence[Any] | None:
        state = runner.requests.get(request_id)
        return None if state is None else state.mm_features

    return call(*args, **kwargs)


def around_v2_inputs(
    connector: Any, wrapped: Callable[..., Any], encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``EncoderRunner.prepare_mm_inputs(scheduled_encoder_inputs)`` of the V2 runner (0.28 and later).

    ``encoder.encoder_cache.mm_features[id]`` are the request's items. V2 leaves out items whose tensor is there.
    """

    def call(scheduled_encoder_inputs: dict[str, list[int]], *more: Any, **named: Any) -> Any:
        failed = connector.take_failed_loads()
        if failed:
            scheduled_encoder_inputs = extend(scheduled_encoder_inputs, failed, features_of, connector)
        if scheduled_encoder_inputs:
            connector.about_to_encode(
                (request_id, feature, None)
                for request_id, index in indices_in(scheduled_encoder_inputs)
                if (feature := _feature(features_of, request_id, index)) is not None
            )
        return wrapped(scheduled_encoder_inputs, *more, **named)

    def features_of(request_id: str) -> Sequence[Any] | None:
        features: Sequence[Any] | None = encoder.encoder_cache.mm_features.get(request_id)
        return features

    return call(*args, **kwargs)


# Model runner ("v1", "v2") -> the target whose wrapper is in place in this process.
INSTALLED: dict[str, str] = {}
_MODULES = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.mm.encoder_runner"}


def require(vllm_config: Any) -> None:
    """Make sure that a failed load is harmless in this worker, before anything is promised to it.

    Raises:
        RuntimeError: the wrapper for the runner in use is not in place.
    """
    runner = "v2" if configured.uses_v2_runner(vllm_config) else "v1"
    importlib.import_module(_MODULES[runner])
    if runner not in INSTALLED:
        raise RuntimeError(
            f"{configured.NAME} cannot start: this worker lacks the recovery from a failed load "
            f"({_MODULES[runner]}), and without it a deleted or damaged entry would end the engine. Run "
            "'vllm-omni-patch status' to see why, or start vLLM without --ec-transfer-config."
        )
