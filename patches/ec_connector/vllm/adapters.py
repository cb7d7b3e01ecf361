# SPDX-License-Identifier: Apache-2.0
"""The files of LoRA adapters: those on disk now, and those that a worker loaded. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .weight_files import weights_identity


class AdapterFiles:
    """Digests of the files of adapters as they are now."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[Any, ...], str]] = {}

    def digest(self, lora_request: Any) -> str:
        """Of one adapter; empty when its files are not on this host."""
        path = str(getattr(lora_request, "lora_path", None) or getattr(lora_request, "path", "") or "")
        seen = _stamp(path)
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = (seen, weights_identity(path))
            self._known[path] = known
        return known[1]


class LoadedAdapters:
    """The files from which a worker has loaded each adapter. They may be replaced while vLLM keeps what it read."""

    def __init__(self) -> None:
        self._files = AdapterFiles()
        self._digests: dict[int, str] = {}

    def load(self, lora_request: Any, load: Callable[[], Any]) -> Any:
        """What ``load`` returns or raises. Files that change meanwhile are not known."""
        before = self._look(lora_request)
        self._digests.pop(lora_request.lora_int_id, None)
        result = load()
        if before and before == self._look(lora_request):
            self._digests[lora_request.lora_int_id] = before
        return result

    def _look(self, lora_request: Any) -> str:
        try:
            return self._files.digest(lora_request)
        except Exception:
            return ""

    def digest(self, adapter: int) -> str:
        """Digest of the files that vLLM read for the adapter with this id; empty where that is not known."""
        return self._digests.get(adapter, "")


def _stamp(folder: str) -> tuple[Any, ...]:
    """What changes when a file of ``folder`` is replaced or written to; only the kernel sets the time of change."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found))
