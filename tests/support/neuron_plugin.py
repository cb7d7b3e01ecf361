# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the vllm-neuron plugin and its runtime, laid out as its releases are.

The plugin cannot be installed here. What is under test is the real hook on a class of the published shape; only the
runtime's own memory query, at the very edge, is played.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

_BASE = """
GIB = 1 << 30
CALLS = []


class WorkerBase:
    def init_device(self):
        raise NotImplementedError

    def get_kv_cache_spec(self):
        raise NotImplementedError


def ask_runtime():
    import torch

    CALLS.append("runtime")
    used, free = torch.classes.neuron.Runtime().get_vnc_memory_stats()
    if (used, free) == (-1, -1):
        raise RuntimeError("no figures")
    return free
"""

_COMMON = """
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def init_device(self):
        pass

    def load_model(self):
        pass

    def get_kv_cache_spec(self):
        return self.specs
"""

# Release 0.1.0.
CONSTANT = f"""{_BASE}

class NeuronWorker(WorkerBase):{_COMMON}
    def determine_available_memory(self):
        return 1_073_741_824
"""

# Releases 0.2 to 0.4.
FREE_OR_20_GIB = f"""{_BASE}

class NeuronWorker(WorkerBase):{_COMMON}
    def determine_available_memory(self):
        try:
            return ask_runtime()
        except Exception:
            return 20 * GIB
"""

# Releases 0.5.x: block-KV layouts ask for free bytes, contiguous ones compute; one fork answers first for pooling.
TWO_BRANCHES = f"""{_BASE}

class NeuronWorker(WorkerBase):{_COMMON}
    def determine_available_memory(self):
        if self.pooling:
            return self.cache_config.block_size or 1
        if self.block_kv:
            return self._query_runtime_memory()
        return self._calculate_contiguous_kv_memory()

    def _query_runtime_memory(self):
        try:
            return ask_runtime()
        except Exception:
            return 20 * GIB

    def _calculate_contiguous_kv_memory(self):
        CALLS.append("contiguous")
        return (self.scheduler_config.max_num_seqs + 1) * 1024
"""

# A release whose outer method swallows as well.
SWALLOWS_TWICE = TWO_BRANCHES.replace(
    "            return self._query_runtime_memory()\n",
    "            try:\n                return self._query_runtime_memory()\n"
    "            except Exception:\n                return 20 * GIB\n",
)

# A fork with a bound of its own behind the free bytes.
SLAB_LIMIT = TWO_BRANCHES.replace(
    "return self._query_runtime_memory()", "return min(self._query_runtime_memory(), 2 * GIB)"
)

# Releases 0.21 and later.
NATIVE = f"""{_BASE}

class NeuronWorker(WorkerBase):{_COMMON}
    def determine_available_memory(self) -> int:
        return self._compute_kv_budget(24 * GIB, 10 * GIB, 0.9)

    def _get_kv_cap_fraction(self):
        return 0.30

    def _compute_kv_budget(self, total_hbm_bytes, bytes_used, gpu_mem_util):
        return 4242
"""

OLD_PATH, NEW_PATH = "worker", "vllm/worker"


def lay(folder: Path, source: str, path: str = OLD_PATH, version: str | None = None) -> str:
    """Write a ``vllm_neuron`` package below ``folder``; returns the worker module's name."""
    package = folder / "vllm_neuron"
    home = package
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("" if version is None else f"__version__ = {version!r}\n")
    for part in path.split("/"):
        home = home / part
        home.mkdir()
        (home / "__init__.py").write_text("")
    (home / "neuron_worker.py").write_text(source)
    return f"vllm_neuron.{path.replace('/', '.')}.neuron_worker"


def runtime_of(pair: Any) -> SimpleNamespace:
    """What ``torch.classes.neuron`` is on a device whose figures are ``pair``."""

    class Runtime:
        def get_vnc_memory_stats(self) -> Any:
            if isinstance(pair, Exception):
                raise pair
            return pair

    return SimpleNamespace(Runtime=Runtime)


def configs(**changes: Any) -> dict[str, Any]:
    """The attributes of a worker: its vLLM configs with the defaults that matter here."""
    cache: dict[str, Any] = {"gpu_memory_utilization": 0.9, "block_size": 32}
    parallel: dict[str, Any] = {"world_size": 1, "tensor_parallel_size": 8, "data_parallel_size_local": 1}
    model: dict[str, Any] = {
        "max_model_len": 4096,
        "quantization": None,
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
    }
    attributes: dict[str, Any] = {"pooling": False, "block_kv": True, "rank": 0, "local_rank": 0, "specs": {}}
    cache.update(changes.pop("cache", {}))
    parallel.update(changes.pop("parallel", {}))
    attributes.update(
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_runner=SimpleNamespace(model=changes.pop("model", None)),
    )
    attributes.update(changes)
    return attributes
