# SPDX-License-Identifier: Apache-2.0
"""Hook on vLLM-Omni's GPU worker, which sizes KV itself.

vLLM-Omni 0.16 to 0.28 (``vllm_omni/worker/base.py``) subtract what NVML lists for this process: a process that is not
listed counts as 0 bytes (vllm-omni issue 6243), and the transient activation peak is not subtracted at all. 0.30 went
back to the three profiling terms and reads no NVML. The module itself shows which of the two a release does.

With ``VLLM_OMNI_PATCH_GPU_BUDGET=process`` both use vLLM's path, with the corrected profile; the older releases are
told that their own reading is not available. With ``stock`` the number stays vLLM-Omni's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm_omni_patch import flags, ledger
from vllm_omni_patch.patch import Hook, Undo

from . import hooks
from .flags import GPU_BUDGET
from .swap import swapped

logger = ledger.logger("memory")

READER = "get_process_gpu_memory"


def install(hook: Hook) -> Undo:
    """Wrap ``OmniGPUWorkerBase.determine_available_memory``."""

    def determine(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
        def run() -> Any:
            with own_reading(hook.module, flags.read(GPU_BUDGET) == "process"):
                return hooks.run_gpu(hook.module, wrapped, worker, args, kwargs)

        return hooks.once(wrapped, worker, args, kwargs, run)

    return hook.wrap(determine)


@contextmanager
def own_reading(module: ModuleType, process: bool) -> Iterator[None]:
    """Stand in for the worker's own NVML reading, where the release has one, for the length of the block.

    ``process``: it answers "not available", so that the worker uses the profile. Otherwise it answers as before, and
    a miss that was read as 0 bytes becomes a warning.
    """
    original = getattr(module, READER, None)
    if original is None:
        yield
        return

    def withheld(*args: Any, **kwargs: Any) -> None:
        return None

    def watched(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        if value == 0:
            logger.warning(
                "vLLM-Omni reads 0 bytes of device memory for this process and sizes KV as if it used none. "
                "Set %s=process to size it from the profile.",
                GPU_BUDGET.name,
            )
        return value

    with swapped(module, READER, withheld if process else watched):
        yield
