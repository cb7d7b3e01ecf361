# SPDX-License-Identifier: Apache-2.0
"""The places of one engine's entries, in the order in which they are asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_omni_patch import ledger

from ..config import GIB, ECConfig
from ..stats import ECStats
from ..storage.entry import Entry
from ..storage.files import BadEntry, FileStore, OpenEntry
from ..storage.key import Key
from ..storage.remote import RemoteTier, bad_entry
from ..storage.run_folder import RunFolder
from ..storage.shared_folder import SharedFolder, shared_folder_path

_log = ledger.logger("ec")
T = TypeVar("T")
# Errors that say nothing about the entry, or that a lookup meets as well.
_OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EACCES, errno.EPERM)


@dataclass
class FileTier:
    """A :class:`FileStore` in its place. ``private``: in the folder that goes with this engine's last process."""

    name: str
    store: FileStore
    private: bool = False

    def write(self, key: Key, entry: Entry, payload: memoryview, *, force: bool = False) -> str:
        """See :meth:`FileStore.write`."""
        return self.store.write(key, entry, payload, force=force)

    def recover(self) -> None:
        """Make the folder again where it vanished; a private one is not: nobody would remove it in the end.

        Raises:
            OSError: it cannot be made.
        """
        try:
            self.store.folder.make(parents=not self.private)
        except FileNotFoundError as error:
            message = "this engine's folder in shared memory was removed while the engine runs"
            raise FileNotFoundError(error.errno, message, os.path.dirname(self.store.folder.root)) from None


@dataclass
class Tiers:
    """All tiers. A store goes to the first of ``local`` that takes it, and to each of ``remote``."""

    local: list[FileTier]
    run_folder: RunFolder
    stats: ECStats
    remote: list[RemoteTier] = field(default_factory=list)
    largest: int = 0

    @classmethod
    def build(cls, config: ECConfig, run_folder: RunFolder, role: str, model: str, dtype: str, stats: ECStats) -> Tiers:
        """Make the tiers that ``config`` asks for. A folder that cannot be made now is tried again at each store."""
        local = []
        if config.disk_path:
            store = FileStore(
                config.disk_path, config.disk_bytes, touch_seconds=config.touch_seconds, blocklist=run_folder
            )
            local.append(FileTier(f"disk {config.disk_path}", store))
        limit = max(0, config.cpu_bytes - config.staging)
        room = run_folder.room()
        if limit > room:
            if not config.disk_path:
                _log.warning(
                    "Encoder cache: %s has room for only %.2f GiB, so the CPU tier is limited to it, not %.2f GiB. "
                    "To fix: enlarge it (docker: --shm-size), or set ec_shm_path or ec_local_disk.",
                    run_folder.parent,
                    room / GIB,
                    limit / GIB,
                )
            limit = room
        memory = FileStore(run_folder.path, limit, touch_seconds=0.0, spare=limit // 4, blocklist=run_folder)
        local.append(FileTier("shared CPU memory", memory, private=True))
        for tier in local:
            try:
                tier.recover()
            except OSError as error:
                _log.warning("Encoder cache: cannot use %s now: %s. It is tried again at each store.", tier.name, error)
        tiers = cls(local, run_folder, stats)
        tiers.largest = max(tier.store.limit or 0 for tier in local)
        if config.has_remote:
            tiers.remote.append(_remote_tier(config, role, model, dtype, stats, run_folder))
        return tiers

    def contains(self, key: Key, rows: int | None) -> bool:
        """Whether any tier has a matching entry that is not blocklisted."""
        for tier in self.local:
            try:
                if tier.store.find(key, rows):
                    return True
            except BadEntry as error:
                self.bad(tier, key, error)
            except OSError as error:
                self.stats.read_failure(tier.name, error)
        if not self.remote or not key.shared or self.run_folder.blocklisted(key.path):
            return False
        return any(tier.contains(key, rows) for tier in self.remote)

    def has(self, key: Key, rows: int, columns: int, dtype: str) -> bool:
        """Whether a put would only write what is there already."""
        return any(tier.store.has(key, rows, columns, dtype) for tier in self.local)

    def bad(self, tier: FileTier, key: Key, error: BadEntry) -> None:
        """Remove a damaged entry, or blocklist it where it cannot be removed."""
        gone = tier.store.reject(key, error.seen)
        if self.run_folder.first_to_find(key.path, f"{error.seen.st_ino} {error.seen.st_mtime_ns}"):
            bad_entry(self.stats, key, tier.name, error, gone)

    def unreadable(self, tier: FileTier, key: Key, error: OSError) -> None:
        """A load failed. Blocklist an entry whose file is there and cannot be read, unless this process is what lacks
        something: the next lookup, which reads the header only, would promise it again."""
        self.stats.read_failure(tier.name, error)
        if error.errno not in _OWN_TROUBLE:
            tier.store.reject(key, remove=False)

    def discard(self, key: Key) -> None:
        """Remove an entry everywhere; blocklist it where that fails."""
        for tier in self.local:
            tier.store.reject(key)
        if key.shared and not all([tier.discard(key) for tier in self.remote]):
            self.run_folder.blocklist(key.path)

    def load_local(self, tier: FileTier, key: Key, rows: int | None, take: Callable[[OpenEntry], T | None]) -> T | None:
        """What ``take`` makes of the matching entry in ``tier``; ``None`` also where it is damaged or unreadable."""
        try:
            return tier.store.use(key, rows, take)
        except BadEntry as error:
            self.bad(tier, key, error)
        except OSError as error:
            self.unreadable(tier, key, error)
        return None

    def load_remote(self, key: Key, rows: int | None) -> tuple[Entry, memoryview] | None:
        """The entry and its verified payload, from the first remote that has it."""
        if not key.shared or self.run_folder.blocklisted(key.path):
            return None
        for tier in self.remote:
            loaded = tier.load(key, rows)
            if loaded is not None:
                return loaded
        return None

    def close(self, timeout: float) -> None:
        """Leave all tiers."""
        for local in self.local:
            local.store.folder.upkeep.stop()
        for tier in self.remote:
            tier.close(timeout)


def _remote_tier(
    config: ECConfig, role: str, model: str, dtype: str, stats: ECStats, run_folder: RunFolder
) -> RemoteTier:
    path = shared_folder_path(config.remote_url)
    if path:
        folder = SharedFolder(path, config.touch_seconds)
        return RemoteTier(config.remote_url, folder, config, stats, run_folder.blocklist, run_folder.first_to_find)
    from ..storage.lmcache import LMCacheRemote

    remote = LMCacheRemote(config, model, dtype, lookups_only=role == "scheduler")
    name = config.remote_url or ", ".join(config.remote_options["remote_storage_plugins"])
    return RemoteTier(name, remote, config, stats, run_folder.blocklist, run_folder.first_to_find)
