# SPDX-License-Identifier: Apache-2.0
"""What the remote tier calls in LMCache. None of it is a public interface, so the matrix judges each release."""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Parameter, Target


def _use(module: str, name: str, *, optional: bool = False, **contract: object) -> Target:
    wanted = Contract(**contract)  # type: ignore[arg-type]
    return Target(f"lmcache.{module}", name, "", distribution="lmcache", contract=wanted, optional=optional)


def _parameters(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name) for name in names)


USES: tuple[Target, ...] = (
    _use(
        "v1.storage_backend.storage_manager",
        "StorageManager",
        parameters=_parameters("config", "metadata", "event_manager"),
        base_methods=("create_backends", "allocate", "remove"),
        class_attributes=("storage_backends", "allocator_backend", "loop"),
    ),
    _use(
        "v1.storage_backend.local_cpu_backend",
        "LocalCPUBackend",
        parameters=_parameters("config", "metadata", "dst_device", "lmcache_worker", "memory_allocator"),
        base_methods=("allocate",),
    ),
    _use(
        "v1.storage_backend.remote_backend",
        "RemoteBackend",
        base_methods=("get_blocking", "submit_put_task"),
    ),
    _use("v1.config", "LMCacheEngineConfig", module_attributes=("_CONFIG_DEFINITIONS", "_CONFIG_ALIASES")),
    _use("v1.event_manager", "EventManager", parameters=()),
    _use(
        "v1.metadata",
        "LMCacheMetadata",
        class_attributes=(
            *("model_name", "world_size", "local_world_size", "worker_id", "local_worker_id"),
            *("kv_dtype", "kv_shape", "role"),
        ),
    ),
    _use(
        "utils",
        "CacheEngineKey",
        class_attributes=("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "request_configs"),
    ),
    _use("v1.protocol", "REMOTE_METADATA_FMT", module_attributes=("REMOTE_METADATA_BYTES",)),
    _use("v1.memory_management", "MemoryFormat", class_attributes=("EC_TD",)),
    # It moved with 0.5.2; the remote tier asks for it in both places.
    _use("v1.memory_management", "HostMemoryAllocator", optional=True, parameters=_parameters("size")),
    _use(
        "v1.memory_allocators.host_memory_allocator",
        "HostMemoryAllocator",
        optional=True,
        parameters=_parameters("size"),
    ),
)
