# SPDX-License-Identifier: Apache-2.0
"""``ECCacheEngine``: encoder outputs in and out of storage by ``mm_hash``.

It speaks tensors and ``mm_hash`` strings and knows nothing of vLLM (encoder cache design, "Layering" and "Engine API").
Storage is, in the order in which it is asked:

* the CPU tier: files in a private folder of shared memory, so that the scheduler process sees what a worker process
  stored, and neither holds a pool of its own. With a disk tier it only takes what the disk could not, because the
  kernel's page cache is the memory copy of the disk;
* the disk tier: files in a folder that processes, engines and restarts share;
* the remote tier: LMCache's ``StorageManager``, or for ``fs://`` the same files in the shared folder.

The first two are ours instead of an LMCache plugin because LMCache's engine reads back only what its own process
stored, keeps its disk index in memory, counts its limit per process, and fills its whole pool in each process.

Nothing raises into a model step: what cannot be stored is declined, what cannot be loaded is a miss.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Literal

import torch

from vllm_omni_patch import flags, ledger

from ..config import MAX_SECONDS, ECConfig
from ..flags import DISABLE
from ..stats import ECStats
from ..storage.entry import ITEM_SIZE, Entry
from ..storage.key import MAX_ID_BYTES, Key, encode_id, is_request_scoped, stable_u64
from ..storage.run_folder import RunFolder
from .fetch import Fetch, Fetcher
from .loads import Loads
from .memory import Place
from .model import Claims, ModelIdentity, settle, vllm_version, within_run
from .staging import Staging
from .tiers import Tiers
from .writer import Job, Writer

Role = Literal["scheduler", "worker", "both"]
_log = ledger.logger("ec")


class ECCacheEngine:
    """Put, get and look up encoder outputs. Thread-safe.

    ``dtype`` is the encoder's dtype and part of the key: another model dtype is another entry, never a cast. The KV
    cache's dtype plays no part. A stored output may have another dtype than ``dtype``; it comes back with its own.
    ``device_type`` "cuda" makes the staging buffer page-locked.
    """

    def __init__(
        self,
        config: ECConfig,
        identity: ModelIdentity,
        *,
        role: Role = "both",
        dtype: torch.dtype,
        device_type: str = "cpu",
    ) -> None:
        self.config = config = within_run(config, identity)
        self.identity = identity
        self.role: Role = role
        self.stats = ECStats(role, config.stats_seconds)
        self._dtype = dtype_name(dtype)
        self._device_type = device_type
        self._disabled = bool(flags.read(DISABLE))
        self._closed = False
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._staging: Staging | None = None
        self._namespace_digest: tuple[str, bytes] | None = None
        self._generation_lost = self._generation_warned = False
        self._run_folder = RunFolder(identity.engine_id, config.shm_path)
        self.claims = Claims(self._run_folder.path)
        self._settled = bool(config.namespace) or not identity.weights_unknown
        self._tiers = Tiers.build(config, self._run_folder, role, identity.name, self._dtype, self.stats)
        self._loads = Loads(self._tiers, self.stats, config.load_deadline, self._keep_copy)
        self._fetcher = Fetcher(
            self._tiers,
            self.stats,
            budget=config.memory_bytes,
            deadline=config.load_deadline,
            retry_seconds=config.retry_seconds,
            keep=self._keep_copy,
        )
        self._atexit = _close_at_exit(self)
        if self._disabled:
            _log.info(
                "Encoder cache (%s) is disabled (%s): nothing is stored, looked up or counted.", role, DISABLE.name
            )
        else:
            _log.info("Encoder cache (%s) on %s.", role, config.describe())

    def contains(self, mm_hash: str, rows: int | None = None) -> bool:
        """Whether a :meth:`get` should succeed: an entry with a sound header of this id, model and ``rows`` is there.

        Bounded: local tiers read one header; a remote is waited for no longer than ``lookup_deadline``. Never raises.
        The payload is not verified, so a :meth:`get` may still miss.
        """
        if self._is_off():
            return False
        self.stats.add("lookups")
        found = False
        try:
            key = self._key(mm_hash)
            if key is not None and not self._closed:
                found = self._tiers.contains(key, rows)
        except Exception as error:
            self.stats.unexpected("a lookup", error)
        if found:
            self.stats.add("lookup_hits")
        self.stats.tick()
        return found

    def fetch(self, mm_hash: str, rows: int | None = None) -> Fetch | None:
        """Begin to load the entry of ``mm_hash`` with ``rows`` rows into memory that all processes of this host can
        map; ``None`` for an id under which nothing is stored.

        Never waits for storage and never raises. :meth:`serves` says whether the result may be used.
        """
        if self._is_off():
            return None
        try:
            key = self._key(mm_hash)
            return None if key is None or self._closed else self._fetcher.fetch(key, rows)
        except Exception as error:
            self.stats.unexpected("a lookup", error)
            return None

    def serves(self, mm_hash: str, fetch: Fetch) -> bool:
        """Whether ``fetch`` has loaded the entry of ``mm_hash`` for the weights of now. Never raises."""
        try:
            return self._fetcher.serves(fetch, self._key(mm_hash))
        except Exception as error:
            self.stats.unexpected("a lookup", error)
            return False

    def open(self, mm_hash: str, place: Place, device: str) -> torch.Tensor | None:
        """The output at ``place``, [rows, columns], on ``device``: on the CPU mapped, elsewhere copied once.

        ``None`` where it is another output, or of other weights than this process serves. A process that cannot reach
        the memory (another host or container) loads the entry itself, within ``load_deadline``. Never raises.
        """
        return self._load(mm_hash, lambda key: self._loads.open(key, place, device) if place.is_of(key) else None)

    def put(self, mm_hash: str, tensor: torch.Tensor) -> bool:
        """Store an output of shape [rows, columns], any device, any strides; the tensor is not kept.

        Makes one copy on the calling thread; checksums and input/output follow on the writer thread. True: the entry is
        there, or on its way. False: declined (other than two dimensions, empty, unknown dtype, request-scoped id) or
        no room in the queue; counted as dropped. Never raises.
        """
        if self._is_off():
            return False
        try:
            reason = self._put(mm_hash, tensor)
        except Exception as error:
            self.stats.unexpected("a store", error)
            reason = "error"
        if reason:
            self.stats.add("dropped", 1, reason)
        self.stats.tick()
        return not reason

    def get(self, mm_hash: str, device: str, rows: int | None = None) -> torch.Tensor | None:
        """The stored output, [rows, columns], on ``device``; ``None`` is a miss. Never raises.

        The bytes are verified by checksum and the tensor's memory is its own. A damaged entry is removed, so that it
        is not found again.
        """
        return self._load(mm_hash, lambda key: self._loads.get(key, device, rows))

    def _load(self, mm_hash: str, load: Callable[[Key], torch.Tensor | None]) -> torch.Tensor | None:
        """``load`` of the entry's key, timed and counted; whatever it raises is a miss."""
        if self._is_off():
            return None
        began = time.perf_counter()
        loaded: torch.Tensor | None = None
        try:
            key = self._key(mm_hash)
            if key is not None and not self._closed:
                loaded = load(key)
        except Exception as error:
            self.stats.unexpected("a load", error)
        if loaded is None:
            self.stats.add("misses")
        else:
            self.stats.add("hits")
            self.stats.add("bytes_loaded", loaded.numel() * loaded.element_size())
            self.stats.add("load_seconds", time.perf_counter() - began)
        self.stats.tick()
        return loaded

    def discard(self, mm_hash: str) -> None:
        """Forget an entry that could not be used, in every tier and for every process of this engine. Never raises.

        Where it cannot be removed (read-only folder, remote) this engine no longer offers it until it is put again.
        """
        if self._is_off():
            return
        try:
            key = self._key(mm_hash)
            if key is not None and not self._closed:
                self._fetcher.discard(key)
                self._tiers.discard(key)
                self._run_folder.blocklist(key.path)  # what another process has of it in memory
        except Exception as error:
            self.stats.unexpected("forgetting an entry", error)

    def new_generation(self) -> None:
        """Serve nothing stored before this moment (weights reloaded in place). Holds for the engine's processes on
        this host; other engines and the next run, which load the weights from the model again, are not concerned."""
        self._run_folder.new_generation()
        _log.info("Encoder cache: started a new generation; entries stored before it are not served.")

    def flush(self, timeout: float) -> bool:
        """Wait until everything put so far is stored or dropped; False after ``timeout`` seconds."""
        writer = self._writer
        return writer is None or self.stats.forked or writer.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drain (at most ``timeout`` seconds, default ``close_deadline``), end all threads, leave shared memory.

        Idempotent; afterwards lookups are misses and puts are declined. In a forked child everything is a miss, and
        this does nothing: threads, locks and shared memory are its parent's.
        """
        if self.stats.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            writer = self._writer
        limit = min(self.config.close_deadline if timeout is None else timeout, MAX_SECONDS)
        try:
            if writer is not None:
                writer.close(limit)
        finally:
            try:
                self._fetcher.close(min(limit, 1.0))
                self._loads.close()
                self._tiers.close(limit)
            finally:
                self._run_folder.close()
                self.stats.tick(last=True)
                atexit.unregister(self._atexit)

    def _is_off(self) -> bool:
        """Nothing is looked for, so nothing is counted: switched off, or a fork of the engine's process."""
        return self._disabled or self.stats.forked

    def _key(self, mm_hash: str) -> Key | None:
        """The entry's address in the present generation; ``None`` for an id under which nothing may be stored."""
        if not isinstance(mm_hash, str) or not mm_hash or is_request_scoped(mm_hash):
            return None
        data = encode_id(mm_hash)
        if len(data) > MAX_ID_BYTES:
            return None
        generation = self._generation()
        if generation is None:
            return None
        if not self._settled:
            self.identity, self._settled = settle(self.identity, self.claims), True
        known = self._namespace_digest
        if known is None or known[0] != generation:
            digest = self.identity.namespace_digest(self.config.namespace, self.config.salt, self._dtype, generation)
            self._namespace_digest = known = (generation, digest)
        return Key(data, stable_u64(mm_hash), self._dtype, known[1], shared=not generation)

    def _generation(self) -> str | None:
        """The present generation; ``None`` while it cannot be told, and then nothing is served."""
        try:
            generation = self._run_folder.generation()
        except OSError as error:
            self._generation_lost = True
            if not self._generation_warned:
                self._generation_warned = True
                _log.warning(
                    "Encoder cache: cannot read from shared memory whether the weights were replaced (%s). Nothing is "
                    "loaded or stored until it can be read; serving continues.",
                    error,
                )
            return None
        self._generation_lost = False
        return generation

    def _put(self, mm_hash: str, tensor: torch.Tensor) -> str:
        if self._closed:
            return "closed"
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.numel() == 0:
            return "not a two-dimensional output"
        dtype = dtype_name(tensor.dtype)
        if dtype not in ITEM_SIZE or tensor.layout is not torch.strided:
            return f"dtype {dtype}"
        key = self._key(mm_hash)
        if key is None:
            return "generation unknown" if self._generation_lost else "id not storable"
        rows, columns = tensor.shape
        storing = self._storing()
        if storing is None:
            return "closed"
        writer, staging = storing
        if writer.pending(key):
            self.stats.add("duplicates")
            return ""
        blocklisted = self._run_folder.blocklisted(key.path)
        if not blocklisted and self._tiers.has(key, rows, columns, dtype):
            self.stats.add("duplicates")
            return ""
        length = tensor.numel() * tensor.element_size()
        if length > self._tiers.largest:
            return "too large"
        slot = None if writer.full() else staging.take(length)
        if slot is None:
            return "queue full"
        try:
            ready = None
            target = slot.memory.view(tensor.dtype).view(rows, columns)
            target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensor.device))
                ready = event.synchronize
            if writer.submit(Job(key, slot, rows, columns, dtype, blocklisted, not key.shared, ready)):
                return ""
        except BaseException:
            staging.give_back(slot)
            raise
        staging.give_back(slot)
        return "queue full"

    def _keep_copy(self, key: Key, entry: Entry, payload: memoryview) -> None:
        """Put what came from a remote into the local tiers, where there is room in the queue."""
        if not self.stats.speaks:
            return  # the first rank got it, too
        try:
            storing = self._storing()
            if storing is None:
                return
            writer, staging = storing
            slot = None if writer.full() or entry.payload > self._tiers.largest else staging.take(entry.payload)
            if slot is None:
                return
            slot.memory.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            if not writer.submit(Job(key, slot, entry.rows, entry.columns, entry.dtype, local_only=True)):
                staging.give_back(slot)
        except Exception as error:
            self.stats.unexpected("keeping a copy of a remote entry", error)

    def _storing(self) -> tuple[Writer, Staging] | None:
        """The writer and its buffer, made at the first use; ``None`` once the engine is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._writer is None or self._staging is None:
                self._staging = Staging(self.config.staging, pin=self._device_type == "cuda")
                about = {"model": self.identity.name, "vllm": vllm_version(), "key_dtype": self._dtype}
                self._writer = Writer(
                    self._staging,
                    self._tiers.local,
                    self._tiers.remote,
                    about,
                    self.stats,
                    queue_entries=self.config.queue_entries,
                    retry_seconds=self.config.retry_seconds,
                    stored=lambda key: self._run_folder.allow(key.path),
                )
            return self._writer, self._staging


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _close_at_exit(engine: ECCacheEngine) -> Callable[[], None]:
    """Drain at the exit of an interpreter that never called :meth:`ECCacheEngine.close`."""
    reference = weakref.ref(engine)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close(2.0)

    atexit.register(close)
    return close
