# SPDX-License-Identifier: Apache-2.0
"""The weights as a configuration names them, before a loader has opened any. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import re
from typing import Any

from .weight_files import weights_identity

_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolved_commit(model_config: Any) -> str:
    """The commit that a model's configuration was read from; ``""`` where vLLM does not know it.

    vLLM 0.28 and later resolve a revision once, for configuration, processors and weights (huggingface_hub's
    ``ResolvedRevision``); before, transformers noted the commit in the configuration.
    """
    revision = getattr(model_config, "revision", None)
    noted = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    for commit in (getattr(revision, "resolved", None), revision, noted):
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            return str(commit)
    return ""


def weights_of(vllm_config: Any) -> str:
    """Identity of the weights where the configuration alone settles it: a path on this host, or one commit of the hub.

    For a scheduler on a host without workers. A branch is known only where it was opened.
    """
    model = getattr(vllm_config, "model_config", None)
    source = str(getattr(model, "model_weights", "") or getattr(model, "model", "") or "")
    if os.path.exists(source):
        return weights_identity(source, str(getattr(model, "tokenizer", "") or ""))
    revision = getattr(model, "revision", None)
    commit = getattr(revision, "resolved", None) or revision or ""
    return f"commit:{commit}" if _COMMIT.fullmatch(commit) and "://" not in source else ""


# What this process calls a model -> a name that does not depend on the path to it.
_NAMES: dict[str, str] = {}


def remember_name(vllm_config: Any) -> None:
    """Have :func:`name_of` answer for the model of an engine that has our connector."""
    model = getattr(vllm_config, "model_config", None)
    commit = resolved_commit(model)
    name = weights_of(vllm_config) or (f"commit:{commit}" if commit else "")
    if name:
        _NAMES[str(getattr(model, "model", ""))] = name


def name_of(model_id: Any) -> Any:
    """A name for a model in content hashes, the same for its id, its snapshot's path and links; else ``model_id``."""
    return _NAMES.get(model_id, model_id) if isinstance(model_id, str) else model_id
