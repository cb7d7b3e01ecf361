# SPDX-License-Identifier: Apache-2.0
"""``fs://host:port/path``: entries in files of a folder that other hosts mount too.

The files are this package's own rather than LMCache's, whose ``fs`` connector lets concurrent writers of one key
destroy each other's temporary file. There is no limit on the folder's bytes.
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from .entry import Entry, FormatError, bytes_of
from .files import BadEntry, FileStore
from .key import Key
from .remote import Gone


class SharedFolder:
    """A :class:`~.remote.Remote` in files."""

    def __init__(self, path: str, touch_seconds: float) -> None:
        self._store = FileStore(path, None, touch_seconds=touch_seconds)

    def connect(self) -> None:
        """Make the folder where missing."""
        self._store.folder.make()

    def drop(self) -> None:
        """Nothing is kept open."""
        self._store.folder.upkeep.stop()

    def find(self, key: Key, seconds: float) -> Entry | None:
        """See :class:`~.remote.Remote`."""
        try:
            return self._store.find(key)
        except BadEntry as error:
            raise FormatError(str(error)) from None

    def read(self, key: Key, entry: Entry) -> memoryview:
        """See :class:`~.remote.Remote`."""
        import torch

        memory = bytes_of(torch.empty(entry.payload, dtype=torch.uint8))
        try:
            read = self._store.read(key, entry.rows, lambda found: memory if found == entry else _changed())
        except BadEntry as error:
            self._store.remove(key, error.seen)
            raise FormatError(str(error)) from None
        if read is None:
            raise Gone
        return memory

    def write(self, key: Key, entry: Entry, payload: memoryview, seconds: float) -> str:
        """See :class:`~.remote.Remote`."""
        return self._store.write(key, entry, payload, force=True)

    def remove(self, key: Key) -> bool:
        """See :class:`~.remote.Remote`."""
        return self._store.remove(key)


def shared_folder_path(url: str) -> str:
    """Path of an ``fs://`` URL; ``fs:///path`` and ``fs://host:port/path`` are the same folder. ``""``: another URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return os.path.abspath(unquote(parts.path)) if parts.scheme == "fs" and parts.path.strip("/") else ""


def _changed() -> memoryview:
    raise Gone
