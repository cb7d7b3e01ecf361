# SPDX-License-Identifier: Apache-2.0
"""Installers: the wrappers that this patch puts around vLLM's functions, each with its undo.

Where this process has another connector, or none, a wrapper calls the original and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_omni_patch.patch import Hook, Undo

from .vllm import configured, configured_weights, recompute, refusals

_MODULE = "vllm_omni_patch.patches.ec_connector.vllm.connector"


def register(hook: Hook) -> Undo:
    """Add the connector's name to ``ECConnectorFactory``; its module is imported when it is chosen.

    Raises:
        RuntimeError: the name is taken.
    """
    factory = hook.original
    if configured.NAME in factory._registry:
        owner = factory._registry[configured.NAME].__module__
        raise RuntimeError(f"{configured.NAME} is already registered, by {owner}")
    factory.register_connector(configured.NAME, _MODULE, configured.NAME)
    loader = factory._registry[configured.NAME]

    def load() -> Any:
        hook.note_use()
        return loader()

    factory._registry[configured.NAME] = load

    def undo() -> None:
        if factory._registry.get(configured.NAME) is load:
            del factory._registry[configured.NAME]

    return undo


def registered(hook: Hook) -> bool:
    """Whether the factory resolves the name."""
    return configured.NAME in hook.original._registry


def recover_v1(hook: Hook) -> Undo:
    """Encode failed loads in the V1 runner's ``_execute_mm_encoder``."""
    return _recovery(hook, "v1", recompute.around_v1_encoder)


def recover_v2(hook: Hook) -> Undo:
    """Encode failed loads in the V2 runner's ``EncoderRunner.prepare_mm_inputs``."""
    return _recovery(hook, "v2", recompute.around_v2_inputs)


def _recovery(hook: Hook, runner: str, around: Callable[..., Any]) -> Undo:
    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        connector = chosen()
        if connector is None:
            return wrapped(*args, **kwargs)
        return around(connector, wrapped, instance, args, kwargs)

    undo = hook.wrap(wrapper)
    recompute.INSTALLED[runner] = hook.target.name

    def undo_all() -> None:
        recompute.INSTALLED.pop(runner, None)
        undo()

    return undo_all


def sample_weights(hook: Hook) -> Undo:
    """``Worker.load_model``: the weights at its end are the checkpoint's; the connector samples them."""

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        connector = chosen()
        if connector is not None:
            connector.weights_loaded(instance.get_model)
        return result

    return hook.wrap(wrapper)


def new_generation_in_worker(hook: Hook) -> Undo:
    """``reload_weights`` and ``update_weights`` of the worker begin a new generation, even if they raise.

    No step runs in a worker during such a call, so nothing is stored between the first byte written and the new
    generation.
    """

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        finally:
            connector = chosen()
            if connector is not None:
                connector.weights_replaced()

    return hook.wrap(wrapper)


def note_opened(hook: Hook) -> Undo:
    """``_prepare_weights`` of vLLM's loaders: pass the connector the files that the model is loaded from."""

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        connector = chosen()
        if connector is not None:
            source = args[0] if args else kwargs.get("model_name_or_path", kwargs.get("model_config"))
            # The GGUF loader from 0.12 takes the model's configuration instead of its name.
            connector.weights_opened(str(getattr(source, "model", source)), result)
        return result

    return hook.wrap(wrapper)


def note_adapter(hook: Hook) -> Undo:
    """``WorkerLoRAManager._load_adapter``: note the files that an adapter was loaded from."""

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        connector = chosen()
        if connector is None:
            return wrapped(*args, **kwargs)
        request = args[0] if args else kwargs["lora_request"]
        return connector.adapters.load(request, lambda: wrapped(*args, **kwargs))

    return hook.wrap(wrapper)


def hash_by_weights(hook: Hook) -> Undo:
    """``MultiModalHasher.hash_kwargs``: vLLM mixes the model's id or path into each item's ``mm_hash``.

    The same weights under another path would give the same image another ``mm_hash``, so a name of the weights takes
    the place of the id.
    """

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if "model_id" in kwargs:
            kwargs = {**kwargs, "model_id": configured_weights.name_of(kwargs["model_id"])}
        return wrapped(*args, **kwargs)

    return hook.wrap(wrapper)


def keep_mm_embeds(hook: Hook) -> Undo:
    """Leave ``enable_mm_embeds`` as the user set it where the connector is a cache and not a transfer.

    From 0.30 vLLM turns it on for every consumer, because in a disaggregated setup requests arrive with metadata
    only. An ``ec_both`` instance gets its requests whole; there it would only let clients send tensors of any shape,
    and one of a wrong shape ends the engine. An ``ec_consumer`` keeps vLLM's setting, except on 0.28 and 0.29, where
    a connector cannot fail a single request: there the front end rejects requests without data.
    """

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        settings = getattr(getattr(instance, "model_config", None), "multimodal_config", None)
        if settings is None or not configured.is_ours(instance):
            return wrapped(*args, **kwargs)
        before = settings.enable_mm_embeds
        result = wrapped(*args, **kwargs)
        if _is_kv_consumer(instance):
            return result
        if instance.ec_transfer_config.ec_role == "ec_both":
            settings.enable_mm_embeds = before
            settings.allow_missing_mm_embeddings = False
        elif hook.attribute == "_resolve_allow_missing_mm_embeddings":
            settings.allow_missing_mm_embeddings = False
        return result

    return hook.wrap(wrapper)


def explain_role(hook: Hook) -> Undo:
    """``ECTransferConfig.__post_init__``: where vLLM rejects ``ec_both``, add the release from which it works."""

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except ValueError as error:
            if instance.ec_connector == configured.NAME and instance.ec_role == "ec_both":
                import vllm

                release = str(getattr(vllm, "__version__", ""))
                raise ValueError(f"{error} {refusals.role_refusal(release)}") from error
            raise

    return hook.wrap(wrapper)


def check_early(hook: Hook) -> Undo:
    """``EngineArgs.create_engine_config``: reject what cannot work in the process that the user started.

    The connector rejects it too, but there the reason is in a worker's log, above a traceback of the front end. The
    process also hashes the items of requests, so it notes the name of the weights.
    """

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        config = wrapped(*args, **kwargs)
        if configured.is_ours(config):
            import vllm

            refusals.check(config, str(getattr(vllm, "__version__", "")))
            configured_weights.remember_name(config)
        return config

    return hook.wrap(wrapper)


def chosen() -> Any:
    """The worker's connector in this process if it is this patch's, else ``None``."""
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    if not has_ec_transfer():
        return None
    connector = get_ec_transfer()
    return connector if getattr(connector, "encodes_failed_loads", False) else None


def _is_kv_consumer(vllm_config: Any) -> bool:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return bool(getattr(transfer, "is_kv_consumer", False))
