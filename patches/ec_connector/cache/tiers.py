# SPDX-License-Identifier: Apache-2.0
"""The places of one engine's entries, in the order in which they are asked."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from vllm_omni_patch import ledger

from ..config import GIB, ECConfig
from ..stats import ECStats
from ..storage.entry import Header
from ..storage.files import BadEntry, FileStore
from ..storage.key import Key
from ..storage.remote import RemoteTier, SharedFolder, bad_entry, shared_folder_path
from ..storage.run_folder import Runtime

_log = ledger.logger("ec")
# Errors that say nothing about the entry, or that a lookup meets as well.
_OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EACCES, errno.EPERM)


@dataclass
class FileTier:
    """A :class:`FileStore` in its place. ``private``: in the folder that goes with this engine's last process."""

    name: str
    store: FileStore
    private: bool = False

    def write(self, key: Key, header: bytes, payload: memoryview, *, force: bool = False) -> str:
        """See :meth:`FileStore.write`."""
        return self.store.write(key, header, payload, force=force)

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
    runtime: Runtime
    stats: ECStats
    remote: list[RemoteTier] = field(default_factory=list)
    largest: int = 0

    @classmethod
    def build(cls, config: ECConfig, runtime: Runtime, role: str, model: str, dtype: str, stats: ECStats) -> Tiers:
        """Make the tiers that ``config`` asks for. A folder that cannot be made now is tried again at each store."""
        local = []
        if config.disk_path:
            store = FileStore(
                "disk", config.disk_path, config.disk_bytes, fsync=config.fsync, touch_seconds=config.touch_seconds
            )
            local.append(FileTier(f"disk {config.disk_path}", store))
        limit = max(0, config.cpu_bytes - config.staging)
        room = runtime.room()
        if limit > room:
            if not config.disk_path:
                _log.warning(
                    "Encoder cache: %s has room for %.2f GiB only; the CPU tier is kept to that instead of %.2f GiB. "
                    "Enlarge it (docker: --shm-size), set ec_shm_path, or set ec_local_disk.",
                    runtime.parent,
                    room / GIB,
                    limit / GIB,
                )
            limit = room
        memory = FileStore("memory", runtime.entries, limit, touch_seconds=0.0, spare=limit // 4)
        local.append(FileTier("shared CPU memory", memory, private=True))
        for tier in local:
            try:
                tier.recover()
            except OSError as error:
                _log.warning("Encoder cache: %s cannot be used at present: %s.", tier.name, error)
        tiers = cls(local, runtime, stats)
        tiers.largest = max(tier.store.limit or 0 for tier in local)
        if config.has_remote:
            tiers.remote.append(_remote_tier(config, role, model, dtype, stats, runtime))
        return tiers

    def contains(self, key: Key, rows: int | None) -> bool:
        """Whether any tier has a matching entry that is not refused."""
        for tier in self.local:
            try:
                if tier.store.contains(key, rows):
                    return not self.runtime.refused(key.path)
            except BadEntry as error:
                self.bad(tier, key, error)
            except OSError as error:
                self.stats.read_failure(tier.name, error)
        if not self.remote or not key.shared or self.runtime.refused(key.path):
            return False
        return any(tier.contains(key, rows) for tier in self.remote)

    def has(self, key: Key, rows: int, columns: int, dtype: str) -> bool:
        """Whether a put would only write what is there already."""
        return any(tier.store.has(key, rows, columns, dtype) for tier in self.local)

    def bad(self, tier: FileTier, key: Key, error: BadEntry) -> None:
        """Remove a damaged entry, or refuse it where it cannot be removed; one that is refused is old news."""
        if self.runtime.refused(key.path):
            return
        gone = tier.store.remove(key, error.seen)
        if not gone:
            self.runtime.refuse(key.path)
        if self.runtime.first_to_find(key.path, f"{error.seen.st_ino} {error.seen.st_mtime_ns}"):
            bad_entry(self.stats, key, tier.name, error, gone)

    def unreadable(self, tier: FileTier, key: Key, error: OSError) -> None:
        """A load failed. Refuse an entry whose file is there and cannot be read, unless this process is what lacks
        something: the next lookup, which reads the header only, would promise it again."""
        self.stats.read_failure(tier.name, error)
        if error.errno not in _OWN_TROUBLE and os.path.lexists(os.path.join(tier.store.folder.root, key.path)):
            self.runtime.refuse(key.path)

    def discard(self, key: Key) -> None:
        """Remove an entry everywhere; refuse it where that fails."""
        local = [tier.store.remove(key) for tier in self.local]
        remote = [tier.discard(key) for tier in self.remote if key.shared]
        if not all(local + remote):
            self.runtime.refuse(key.path)

    def load_remote(self, key: Key, rows: int | None) -> tuple[Header, memoryview] | None:
        """Header and verified payload from the first remote that has the entry."""
        for tier in self.remote if key.shared else ():
            loaded = tier.load(key, rows)
            if loaded is not None:
                return loaded
        return None

    def close(self, timeout: float) -> None:
        """Leave all tiers."""
        for tier in self.remote:
            tier.close(timeout)


def _remote_tier(config: ECConfig, role: str, model: str, dtype: str, stats: ECStats, runtime: Runtime) -> RemoteTier:
    path = shared_folder_path(config.remote_url)
    if path:
        folder = SharedFolder(path, config.fsync, config.touch_seconds)
        return RemoteTier(config.remote_url, folder, config, stats, runtime.refuse, runtime.first_to_find)
    from ..storage.lmcache import LMCacheRemote

    remote = LMCacheRemote(config, model, dtype, lookups_only=role == "scheduler")
    name = config.remote_url or ", ".join(config.remote_options["remote_storage_plugins"])
    return RemoteTier(name, remote, config, stats, runtime.refuse, runtime.first_to_find)
