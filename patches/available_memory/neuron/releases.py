# SPDX-License-Identifier: Apache-2.0
"""What is published about each vllm-neuron release: where its worker stands and what it returns.

The plugin comes from AWS's own package repository and cannot be fetched by the matrix checker, so these rows were read
from public source trees by a person (evidence ``documented``). They are shown in the matrix; in a process the imported
class itself decides, since packages of this name on public indexes carry numbers without code.
"""

from __future__ import annotations

from vllm_omni_patch.patch import Documented

OLD_MODULE = "vllm_neuron.worker.neuron_worker"
NEW_MODULE = "vllm_neuron.vllm.worker.neuron_worker"

_CONSTANT = "returns 1,073,741,824 bytes (1 GiB) whatever the device has; gpu_memory_utilization is ignored"
_FREE = "returns the free bytes, or 20 GiB when the query fails; gpu_memory_utilization is ignored"
_BLOCK = f"the block-KV branch {_FREE}; contiguous KV and pooling stay the plugin's own"
_MOVED = f"the worker moved to {NEW_MODULE}"
_EARLY = f"the worker stands in {OLD_MODULE}"
_SEED = "bounds KV by gpu_memory_utilization, model bytes and the cap fraction itself"
_LATER = "divides a stack by its logical cores and has a headroom mode of its own (documentation only; source not seen)"

_FIRST = "0.1.0"
_OLD = ("0.2.0", "0.3.0", "0.4.0", "0.4.1")
_BLOCK_KV = ("0.5.0", "0.5.1")
_NATIVE = ("0.21.0.1.0.0", "0.24.0.1.1.0", "0.26.0.1.0.0")
_NATIVE_LATER = ("0.29.0.1.2.0",)

# Rows of the target in OLD_MODULE, and of the one in NEW_MODULE.
OLD_LAYOUT: tuple[Documented, ...] = (
    Documented(_FIRST, "applies", _CONSTANT),
    *(Documented(release, "applies", _FREE) for release in _OLD),
    *(Documented(release, "applies", _BLOCK) for release in _BLOCK_KV),
    *(Documented(release, "absent", _MOVED) for release in (*_NATIVE, *_NATIVE_LATER)),
)
NEW_LAYOUT: tuple[Documented, ...] = (
    *(Documented(release, "absent", _EARLY) for release in (_FIRST, *_OLD, *_BLOCK_KV)),
    *(Documented(release, "native", _SEED) for release in _NATIVE),
    *(Documented(release, "native", _LATER) for release in _NATIVE_LATER),
)
