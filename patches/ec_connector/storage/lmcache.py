# SPDX-License-Identifier: Apache-2.0
"""Entries on a server, through LMCache's ``StorageManager`` (encoder cache design, "Layering").

An entry becomes small objects, so that no reader needs a pool as large as the largest entry and a lookup fetches only
the header: under the entry's key (``CacheEngineKey`` as the design's table has it, the model's name replaced by the
namespace digest because the LMCache server refuses keys above 150 characters) the header, and under keys made from the
entry's checksum the payload in pieces. The header is stored last, and pieces of different entries never mix.

The manager gets a plain memory pool of its own and a role that keeps it away from the GPU: LMCache would page-lock a
pool, and open a CUDA context, in the scheduler's process too. It is built on a daemon thread, which makes its event
loop's thread one, so that no process stays behind when a server hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import math
import socket
import time
from typing import Any

import torch

from vllm_omni_patch import ledger

from ..config import GIB, MIB, ECConfig, without_userinfo
from .entry import Entry, FormatError, bytes_of
from .key import KEY_WORKER_ID, KEY_WORLD_SIZE, Key

_log = ledger.logger("ec")
PIECE = 4 * MIB
# A scheduler mostly fetches headers; memory that is not used is not touched.
LOOKUP_POOL = 4 * PIECE
# Seconds between two looks for free memory in the pool.
_POLL = 0.0005


class LMCacheRemote:
    """One ``StorageManager`` with remote backends only. Calls may block or raise; the tier above bounds them."""

    def __init__(self, config: ECConfig, model: str, dtype: str, lookups_only: bool) -> None:
        self._config = config
        self._model = model
        self._dtype = dtype
        self._pool = LOOKUP_POOL if lookups_only else max(config.remote_pool_bytes, 4 * PIECE)
        self._manager: Any = None

    def connect(self) -> None:
        """Build the manager and connect.

        Raises:
            ConnectionError: no backend, or a backend could not connect.
            Exception: whatever LMCache raises.
        """
        if self._manager is not None:
            return
        manager = _build_manager(self._config, self._model, self._pool)
        self._manager = manager
        url = without_userinfo(self._config.remote_url)
        try:
            backends = self._backends()
            if not backends:
                raise ConnectionError(f"LMCache knows no backend for {url!r}")
            for backend in backends:
                if backend.connection is None:
                    raise ConnectionError(f"cannot connect to {url or 'the remote storage plugin'}")
                _hurry_answers(backend)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Give the manager up without waiting for its server. Never raises.

        LMCache's own ``close`` waits for the server, and with redis for itself: the event loop is stopped instead,
        which leaves its thread nothing to do.
        """
        manager, self._manager = self._manager, None
        if manager is None:
            return
        for backend in manager.storage_backends.values():
            connected = getattr(_connector(backend), "client_socket", None)
            with contextlib.suppress(Exception):
                if connected is not None:
                    # A thread that waits in a receive of this socket wakes up.
                    connected.shutdown(socket.SHUT_RDWR)
                    connected.close()
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_wind_down(manager), manager.loop).result(1.0)
        with contextlib.suppress(Exception):
            manager.loop.call_soon_threadsafe(manager.loop.stop)
            manager.thread.join(0.5)
        with contextlib.suppress(Exception):
            manager.storage_backends["LocalCPUBackend"].memory_allocator.close()

    def find(self, key: Key, seconds: float) -> Entry | None:
        """The entry whose header is stored under ``key``; ``None`` when there is none.

        Raises:
            FormatError: what is stored there is no header.
            Exception: the server failed or did not answer in time.
        """
        address = self._address(key)
        if not self._exists(address, seconds):
            return None
        data = self._fetch(address, None)
        return None if data is None else Entry.decode(data)

    def read(self, key: Key, entry: Entry) -> memoryview:
        """The payload of ``entry``, verified, in memory of its own.

        Raises:
            FormatError: a piece is missing or the bytes differ.
        """
        buffer = bytes_of(torch.empty(entry.payload, dtype=torch.uint8))
        for index, start in enumerate(range(0, entry.payload, PIECE)):
            end = min(start + PIECE, entry.payload)
            if self._fetch(self._piece(key, entry, index), buffer[start:end]) is None:
                raise FormatError(f"piece {index} is missing or has another length")
        entry.verify(buffer)
        return buffer

    def write(self, key: Key, entry: Entry, payload: memoryview, seconds: float) -> str:
        """Store an entry; ``"stored"``.

        Raises:
            TimeoutError: not there after ``seconds``.
            Exception: the server failed, or does not keep what it took.
        """
        deadline = time.monotonic() + seconds
        for index, start in enumerate(range(0, payload.nbytes, PIECE)):
            address = self._piece(key, entry, index)
            self._send(address, payload[start : start + PIECE], deadline)
            # Some connectors log a failed put and return.
            if not self._exists(address, _left(deadline)):
                raise OSError("the server does not keep what it took")
        address = self._address(key)
        self._send(address, memoryview(bytearray(entry.header)), deadline)
        if self._fetch(address, None) != entry.header:
            raise OSError("the server keeps another entry than it took")
        return "stored"

    def remove(self, key: Key) -> bool:
        """Remove an entry's header where the backend can; True when it is gone."""
        removed = self._manager.remove(self._address(key))
        return bool(removed)

    def _backends(self) -> list[Any]:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return [backend for backend in self._manager.storage_backends.values() if isinstance(backend, RemoteBackend)]

    def _exists(self, address: Any, seconds: float) -> bool:
        for backend in self._backends():
            if backend.connection is None:
                raise ConnectionError("connection lost")
            # Asked directly, because the backend's own ``contains`` turns every failure into a no and waits without
            # limit.
            answer = asyncio.run_coroutine_threadsafe(backend.connection.exists(address), self._manager.loop)
            if _result(answer, seconds):
                return True
        return False

    def _fetch(self, address: Any, into: memoryview | None) -> bytes | None:
        """Bytes of one object, or its bytes copied ``into`` (which must be as long) and ``b""``; ``None``: missing."""
        # Not through the manager: it keeps what it got in the pool until no memory is left to store from, and answers
        # from there when the server has another entry by now.
        obj = next(filter(None, (backend.get_blocking(address) for backend in self._backends())), None)
        if obj is None:
            return None
        try:
            if obj.tensor is None:
                return None
            data = bytes_of(obj.tensor.contiguous().view(torch.uint8))
            if into is None:
                return bytes(data)
            if data.nbytes != into.nbytes:
                return None
            into[:] = data
            return b""
        finally:
            obj.ref_count_down()

    def _send(self, address: Any, data: memoryview, deadline: float) -> None:
        from lmcache.v1.memory_management import MemoryFormat

        shape = torch.Size([data.nbytes, 1])
        obj = None
        while obj is None:
            obj = self._manager.allocate(shape, torch.uint8, MemoryFormat.EC_TD, eviction=False, busy_loop=False)
            if obj is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("no memory in the pool to send an entry from")
                time.sleep(_POLL)
        try:
            obj.tensor.view(-1).copy_(torch.frombuffer(data, dtype=torch.uint8))
            # Not through the manager, which keeps the futures to itself.
            for backend in self._backends():
                _result(backend.submit_put_task(address, obj), _left(deadline))
        finally:
            obj.ref_count_down()

    def _address(self, key: Key) -> Any:
        return self._make_key(key.namespace, key.chunk_hash)

    def _piece(self, key: Key, entry: Entry, index: int) -> Any:
        name = hashlib.sha256(f"{key.namespace}/{key.name} {entry.checksum} {index}".encode()).digest()
        return self._make_key(key.namespace, int.from_bytes(name[:8], "big"))

    def _make_key(self, folder: str, chunk_hash: int) -> Any:
        from lmcache.utils import CacheEngineKey

        dtype = getattr(torch, self._dtype)
        fields: dict[str, Any] = {
            "model_name": folder,
            "world_size": KEY_WORLD_SIZE,
            "worker_id": KEY_WORKER_ID,
            "chunk_hash": chunk_hash,
            "request_configs": {},
        }
        try:
            return CacheEngineKey(dtype=dtype, **fields)
        except Exception:
            # LMCache's table lacks the dtype; the namespace digest in the name says it anyway.
            return CacheEngineKey(dtype=torch.uint8, **fields)


def _build_manager(config: ECConfig, model: str, pool: int) -> Any:
    from lmcache.v1 import protocol
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    settings = _lmcache_config(LMCacheEngineConfig, config, pool)
    metadata = LMCacheMetadata(
        model_name=model or "encoder",
        world_size=KEY_WORLD_SIZE,
        local_world_size=KEY_WORLD_SIZE,
        worker_id=KEY_WORKER_ID,
        local_worker_id=KEY_WORKER_ID,
        kv_dtype=torch.float16,
        kv_shape=(1, 1, 256, 1, 1),
        # Not "worker": a worker opens a CUDA stream and a page-locked pool. The pool that "scheduler" goes without
        # is brought along.
        role="scheduler",
    )

    class Manager(StorageManager):  # type: ignore[misc]
        def create_backends(self) -> dict[str, str]:
            backend = LocalCPUBackend(settings, metadata, "cpu", None, memory_allocator=_plain_pool(pool))
            allocate = backend.allocate

            def allocate_now(*args: Any, **kwargs: Any) -> Any:
                # A connector that is sent impossible lengths would wait for memory forever.
                return allocate(*args, **{**kwargs, "busy_loop": False})

            backend.allocate = allocate_now
            self.storage_backends["LocalCPUBackend"] = backend
            created: dict[str, str] = super().create_backends()
            return created

    # LMCache keeps the layout of a remote header in two module variables, and the last connector built sets them. A KV
    # cache in this process may have set them for several layer groups.
    before = (protocol.REMOTE_METADATA_FMT, protocol.REMOTE_METADATA_BYTES)
    try:
        manager = Manager(settings, metadata, EventManager())
    finally:
        if before[0] is not None:
            protocol.REMOTE_METADATA_FMT, protocol.REMOTE_METADATA_BYTES = before
    manager.allocator_backend = manager.storage_backends["LocalCPUBackend"]
    return manager


def _lmcache_config(factory: Any, config: ECConfig, pool: int) -> Any:
    extra = config.remote_options.get("extra_config")
    values: dict[str, Any] = {
        **{key: value for key, value in config.remote_options.items() if key != "extra_config"},
        # The hot cache would be a second copy of what the CPU tier keeps; the backend stays as the pool.
        "local_cpu": False,
        "max_local_cpu_size": pool / GIB,
        "local_disk": None,
        "blocking_timeout_secs": max(1, math.ceil(config.load_deadline)),
        # Without it a remote returns a KV chunk's shape whatever was stored.
        "extra_config": {**(extra or {}), "save_chunk_meta": True},
    }
    if config.remote_url:
        values["remote_url"] = config.remote_url
    return factory.from_defaults(**values)


def _plain_pool(size: int) -> Any:
    try:
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
    except ImportError:
        from lmcache.v1.memory_management import HostMemoryAllocator
    return HostMemoryAllocator(size)


async def _wind_down(manager: Any) -> None:
    """End what runs on the manager's loop, then its connections; a hung server cannot hold this up."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=0.3)
    for backend in manager.storage_backends.values():
        pool = getattr(_connector(backend), "pool", None)
        if pool is not None and hasattr(pool, "disconnect"):
            await pool.disconnect()


class _PromptSocket(socket.socket):
    """Acknowledges at once what it receives.

    The LMCache server sends an answer in two parts and holds the second back until the first is acknowledged, which
    costs each load the 40 ms of a delayed acknowledgement.
    """

    def recv(self, *args: Any) -> bytes:
        self._hurry()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._hurry()
        return super().recv_into(*args)

    def _hurry(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _connector(backend: Any) -> Any:
    """The connector itself, without the ones that LMCache wraps around it to measure and to audit."""
    connector = getattr(backend, "connection", None)
    for _ in range(4):
        unwrap = getattr(connector, "getWrappedConnector", None)
        if unwrap is None:
            break
        connector = unwrap()
    return connector


def _hurry_answers(backend: Any) -> None:
    connection = _connector(backend)
    connected = getattr(connection, "client_socket", None)
    if isinstance(connected, socket.socket):
        connection.client_socket = _PromptSocket(fileno=connected.detach())


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _result(future: concurrent.futures.Future[Any], seconds: float) -> Any:
    """What a call on LMCache's event loop returns or raises.

    Raises:
        TimeoutError: nothing within ``seconds``; the call is cancelled.
    """
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise TimeoutError(f"no answer within {seconds:.3g} s") from None
