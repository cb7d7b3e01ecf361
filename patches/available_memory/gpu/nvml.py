# SPDX-License-Identifier: Apache-2.0
"""How many bytes of device memory this process holds, from NVML's process table.

Three states: measured, zero, unknown. A lookup that misses is *unknown*: reading it as 0 bytes is how a KV budget
comes to claim a whole card (vllm-omni issue 6243, sglang-omni issue 1685). Only the row with this process's own PID is
ever used. The device-level memory query is never made: unified-memory parts and MIG slices answer it wrongly or not at
all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .devices import DeviceIdentity, NoMatch, resolve

# "No value" is all ones in 64 bits; virtualized drivers return figures just below it. No device has 2**63 bytes.
ABSURD = 1 << 63
# The table may grow between the call for its size and the call for its rows.
TABLE_ATTEMPTS = 3


@dataclass(frozen=True)
class Reading:
    """Bytes of device memory that one process holds. ``bytes`` is ``None`` exactly when the state is ``unknown``;
    ``reason`` then says why, and otherwise how the device was found."""

    state: Literal["measured", "zero", "unknown"]
    bytes: int | None
    reason: str

    @classmethod
    def unknown(cls, reason: str) -> Reading:
        """A reading that could not be made."""
        return cls("unknown", None, reason)


def read_own(identity: DeviceIdentity, pid: int | None = None, load: Callable[[], Any] | None = None) -> Reading:
    """Device memory of process ``pid`` (default: this one) on ``identity``, in bytes. Never raises.

    ``load`` imports the NVML binding; the default is ``nvidia-ml-py``'s ``pynvml``.
    """
    try:
        nvml = (load or _pynvml)()
    except Exception as error:
        return Reading.unknown(f"the NVML binding cannot be imported ({error}); install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return Reading.unknown(f"NVML failed to initialize: {_text(error)}")
    try:
        match = resolve(nvml, identity)
        return _own_row(nvml, match.handle, os.getpid() if pid is None else pid, match.how)
    except NoMatch as error:
        return Reading.unknown(str(error))
    except Exception as error:
        return Reading.unknown(f"the NVML query failed: {_text(error)}")
    finally:
        try:
            nvml.nvmlShutdown()
        except Exception:  # the reading is made; a failing shutdown changes nothing about it
            pass


def _own_row(nvml: Any, handle: Any, pid: int, how: str) -> Reading:
    rows = _table(nvml, handle)
    own = [row for row in rows if int(row.pid) == pid]
    if not own:
        return Reading.unknown(
            f"PID {pid} is not among the {len(rows)} processes that NVML lists on this device "
            "(inside a container NVML lists the host's PIDs)"
        )
    if len(own) > 1:
        return Reading.unknown(f"PID {pid} is listed {len(own)} times on this device")
    return classify(own[0].usedGpuMemory, pid, how)


def classify(value: Any, pid: int, how: str = "") -> Reading:
    """State of one table value: ``None`` (WSL, MIG without per-process values), negative and absurd are unknown."""
    if value is None:
        return Reading.unknown(f"NVML lists PID {pid} without a value (usual on WSL, vGPU and some MIG slices)")
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return Reading.unknown(f"NVML reports {value!r} as the memory of PID {pid}")
    if count < 0 or count >= ABSURD:
        return Reading.unknown(f"NVML reports {count} bytes for PID {pid}, which is not a valid size")
    return Reading("zero" if count == 0 else "measured", count, how)


def _table(nvml: Any, handle: Any) -> list[Any]:
    for attempt in range(TABLE_ATTEMPTS):
        try:
            return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError as error:
            if attempt + 1 == TABLE_ATTEMPTS or getattr(error, "value", None) != nvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise
    raise RuntimeError("unreachable")


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
