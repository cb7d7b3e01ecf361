# SPDX-License-Identifier: Apache-2.0
"""Whose weights a model has: what vLLM's loaders opened.

Where weights lie is the business of vLLM and the hub's library (cache folders, revisions, offline mode, other hubs); a
hook on the loaders tells what they returned. Nothing here looks for a model by its name. Imports neither vLLM nor
torch.
"""

from __future__ import annotations

import os
import re
from typing import Any

from vllm_omni_patch import ledger

from .weight_files import weights_identity

_log = ledger.logger("ec")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Opened:
    """What one process opened to load its model.

    ``weights`` is its text for :class:`Claims`: ``""`` while nothing was opened, or when something was that cannot be
    told from others.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = getattr(vllm_config, "model_config", None)
        self._source = str(getattr(model, "model", "") or "")
        self._tokenizer = str(getattr(model, "tokenizer", "") or "")
        self._commit = resolved_commit(model)
        draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
        self._draft = str(getattr(draft, "model", "") or "")
        self._texts: set[str] = set()

    @property
    def weights(self) -> str:
        """Digests of all that was opened, in one text."""
        return "" if "" in self._texts else "+".join(sorted(self._texts))

    def add(self, source: str, result: Any) -> None:
        """Take in what a loader's ``_prepare_weights`` returned for ``source``, a model's id or path.

        A draft model has no part in encoder outputs, and not every rank loads it. A model has further sources where
        its parts are kept in other repositories (Ultravox).
        """
        if source == self._draft and source != self._source:
            return
        try:
            text = weights_identity(place(result), self._tokenizer)
        except Exception as error:
            _log.debug("what %.200r was loaded from cannot be described: %s", source, error)
            text = ""
        if source == self._source and not os.path.exists(source) and not self._agrees(text):
            text = ""
        self._texts.add(text)

    def _agrees(self, text: str) -> bool:
        """Weights of the commit that configuration and processors are of; a hub's branch may move while we start."""
        commit = text.removeprefix("commit:")
        if commit == text:
            return True  # described by its files
        if commit[:40] == self._commit:
            return True
        _log.warning(
            "Encoder cache: the weights of %r are those of commit %s; the configuration's commit is %s. Entries serve "
            "this run only. Start again, or pin --revision to a commit.",
            self._source,
            commit[:40],
            self._commit or "unknown",
        )
        return False


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


def place(result: Any) -> str:
    """The folder or file in what a loader's ``_prepare_weights`` returns; ``""`` where there is none on this host.

    Loaders return a path, a list of files, or a tuple that begins with one of them.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, (list, tuple)):
        folders = {os.path.dirname(str(file)) for file in first}
        first = folders.pop() if len(folders) == 1 else ""
    path = os.fspath(first) if isinstance(first, (str, os.PathLike)) else ""
    return path if os.path.exists(path) else ""


def in_advance(vllm_config: Any) -> str:
    """Weights that the configuration alone tells: a folder or file on this host, or a model of the hub at one commit.

    For a scheduler on a host without workers. A branch is only known where it was opened.
    """
    model = getattr(vllm_config, "model_config", None)
    source = str(getattr(model, "model_weights", "") or getattr(model, "model", "") or "")
    if os.path.exists(source):
        return weights_identity(source, str(getattr(model, "tokenizer", "") or ""))
    revision = getattr(model, "revision", None)
    commit = getattr(revision, "resolved", None) or revision or ""
    return f"commit:{commit}" if _COMMIT.fullmatch(commit) and "://" not in source else ""


# What this process calls a model -> a name that does not depend on the road to it.
_NAMES: dict[str, str] = {}


def remember_name(vllm_config: Any) -> None:
    """Have :func:`name_of` answer for the model of an engine that has our connector."""
    model = getattr(vllm_config, "model_config", None)
    commit = resolved_commit(model)
    name = in_advance(vllm_config) or (f"commit:{commit}" if commit else "")
    if name:
        _NAMES[str(getattr(model, "model", ""))] = name


def name_of(model_id: Any) -> Any:
    """A name for a model in content hashes, the same for its id, its snapshot's path and links; else ``model_id``."""
    return _NAMES.get(model_id, model_id) if isinstance(model_id, str) else model_id
