# SPDX-License-Identifier: Apache-2.0
"""Identity of the weights that vLLM's loaders opened.

Where weights lie is for vLLM and the hub's library to find (cache folders, revisions, offline mode, other hubs). A hook
on the loaders passes on what they returned; nothing here looks for a model by its name. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_omni_patch import ledger

from .configured_weights import resolved_commit
from .weight_files import weights_identity

_log = ledger.logger("ec")


class Opened:
    """What one process opened to load its model.

    ``weights`` is its text for :class:`Claims`: ``""`` while nothing was opened, or when something was opened that has
    no identity.
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
            "Encoder cache: the weights of %r are of commit %s and the configuration of commit %s. Entries serve this "
            "run only. Start again, or pin --revision to a commit.",
            self._source,
            commit[:40],
            self._commit or "unknown",
        )
        return False


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
