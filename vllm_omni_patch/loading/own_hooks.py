# SPDX-License-Identifier: Apache-2.0
"""Installers of what ``own.py`` declares. An error in them leaves vLLM's own call and its result as they are."""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm_omni_patch import ledger
from vllm_omni_patch.patch import Hook, Undo
from vllm_omni_patch.telemetry import log_lines


def install_log(hook: Hook) -> Undo:
    """Log the lines that were held back as soon as vLLM has set up its log."""

    def configure(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        try:
            log_lines.release()
        except Exception:  # somebody's handler raises; the lines went to the handlers before it
            pass
        return result

    return hook.wrap(configure)


def install_engine_start(hook: Hook) -> Undo:
    """Notice engine starts where our own plugin is not called: filtered by VLLM_PLUGINS, or in a forked child.

    In strict mode the wrapper raises, as the plugin does.
    """
    from vllm_omni_patch.loading import loader

    def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        loader.engine_starts("startup file")
        return result

    return hook.wrap(load)


def install_registry(hook: Hook) -> Undo:
    """Put our collector on the registry that ``get_prometheus_registry`` returns outside multiprocess mode."""
    from vllm_omni_patch.telemetry import exposition

    registry = vars(hook.module)["REGISTRY"]
    exposition.register(registry, hook.note_use)
    return lambda: exposition.unregister(registry)


def serves(hook: Hook) -> bool:
    """Whether vLLM returns the registry that has our collector.

    In multiprocess mode it makes one for each caller, which ``install_multiprocess`` handles.
    """
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or hook.original() is vars(hook.module)["REGISTRY"]


def install_multiprocess(hook: Hook) -> Undo:
    """Put our collector wherever a ``MultiProcessCollector`` puts itself.

    In multiprocess mode ``prometheus_fastapi_instrumentator`` does not use vLLM's registry: it makes one for each
    scrape and registers a ``MultiProcessCollector`` on it.
    """
    from vllm_omni_patch.telemetry import exposition

    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        registry = args[0] if args else kwargs.get("registry")
        if registry:
            try:
                exposition.register(registry)
            except Exception as error:
                ledger.log(logging.WARNING, f"our metrics are missing from /metrics: {error}", "metrics")
        return result

    return hook.wrap(init)
