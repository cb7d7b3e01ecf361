# SPDX-License-Identifier: Apache-2.0
"""Own device memory and device identity, with the real ``nvidia-ml-py`` on a scripted ``libnvidia-ml.so.1``."""

from __future__ import annotations

import os

import pytest

from support.nvml_library import (
    ALL_ONES,
    DRIVER_NOT_LOADED,
    GIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    PCI,
    UNKNOWN_ERROR,
    UUIDS,
    NvmlLibrary,
)
from vllm_omni_patch.patches.available_memory.gpu.devices import DeviceIdentity, NoMatch, resolve, visible_entries
from vllm_omni_patch.patches.available_memory.gpu.nvml import Reading, classify, read_own

pytest_plugins = ["support.nvml_library"]

OWN = 217
STRANGER = 546113
FIRST = DeviceIdentity(index=0, uuid=UUIDS[0].removeprefix("GPU-"))


def row(pid: int, count: int, device: int = 0) -> str:
    return f"process {UUIDS[device]} {pid} {count}"


def test_measured(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(row(STRANGER, 40 * GIB), row(OWN, 11 * GIB))
    reading = read_own(FIRST, pid=OWN)
    assert (reading.state, reading.bytes) == ("measured", 11 * GIB)


def test_own_pid_is_the_default(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(row(os.getpid(), 5 * GIB))
    assert read_own(FIRST).bytes == 5 * GIB


def test_zero_is_zero_and_not_unknown(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(row(OWN, 0))
    assert read_own(FIRST, pid=OWN) == Reading("zero", 0, f"UUID {UUIDS[0]}")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ((), "PID 217 is not among the 0 processes"),
        ((row(STRANGER, 60 * GIB),), "PID 217 is not among the 1 processes"),
        ((row(OWN, 11 * GIB, device=1),), "PID 217 is not among the 0 processes"),
        ((row(OWN, ALL_ONES),), "without a value"),
        ((row(OWN, ALL_ONES - 4096),), "not a valid size"),
        ((row(OWN, ALL_ONES - 1_813_955),), "not a valid size"),
        ((row(OWN, GIB), row(OWN, 2 * GIB)), "listed 2 times"),
        ((f"rc nvmlInit {DRIVER_NOT_LOADED}",), "NVML failed to initialize"),
        ((f"rc nvmlDeviceGetComputeRunningProcesses {UNKNOWN_ERROR}",), "the NVML query failed"),
        ((f"rc nvmlDeviceGetComputeRunningProcesses {NOT_SUPPORTED}",), "the NVML query failed"),
        ((f"rc nvmlDeviceGetComputeRunningProcesses {NO_PERMISSION}",), "the NVML query failed"),
    ],
)
def test_a_miss_is_unknown_and_says_why(nvml_library: NvmlLibrary, lines: tuple[str, ...], text: str) -> None:
    nvml_library.write(*lines)
    reading = read_own(FIRST, pid=OWN)
    assert (reading.state, reading.bytes) == ("unknown", None)
    assert text in reading.reason


def test_a_failing_shutdown_does_not_lose_the_reading(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(row(OWN, GIB), f"rc nvmlShutdown {UNKNOWN_ERROR}")
    assert read_own(FIRST, pid=OWN).bytes == GIB


def test_a_missing_binding_is_unknown() -> None:
    def load() -> object:
        raise ImportError("No module named 'pynvml'")

    reading = read_own(FIRST, load=load)
    assert reading.state == "unknown"
    assert "install nvidia-ml-py" in reading.reason


def test_a_growing_table_is_read_again(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(row(OWN, GIB), "race 2")
    assert read_own(FIRST, pid=OWN).bytes == GIB
    nvml_library.write(row(OWN, GIB), "race 9")
    assert read_own(FIRST, pid=OWN).state == "unknown"


@pytest.mark.parametrize("value", [None, -1, -(1 << 63), ALL_ONES, ALL_ONES - 4096, "many", float("nan"), float("inf")])
def test_values_that_are_no_size(value: object) -> None:
    assert classify(value, OWN).state == "unknown"


def test_unified_memory_growth_without_the_device_query(nvml_library: NvmlLibrary) -> None:
    """On unified memory the device query is not supported, the process list works; growth is exactly 512 MiB."""
    nvml_library.write(row(OWN, 741_326_848), devices=1)
    before = read_own(FIRST, pid=OWN).bytes
    nvml_library.write(row(OWN, 1_278_197_760), devices=1)
    after = read_own(FIRST, pid=OWN).bytes
    assert before is not None and after is not None
    assert after - before == 512 << 20
    assert nvml_library.memory_queries == 0


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0,,1", ["0"]),
        (" 2 , 3 ", ["2", "3"]),
        ("1", ["1"]),
        ("GPU-af7b61d8", ["GPU-af7b61d8"]),
        ("MIG-0000", ["MIG-0000"]),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_entries(visible: str | None, entries: list[str] | None) -> None:
    assert visible_entries(visible) == entries


def resolved(identity: DeviceIdentity) -> int:
    """Number of the device line that the identity resolves to."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = resolve(pynvml, identity).handle
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    finally:
        pynvml.nvmlShutdown()
    return UUIDS.index(uuid)


@pytest.mark.parametrize(
    ("identity", "device"),
    [
        # torch's own identity wins over every number: CUDA's first device may be NVML's third.
        (DeviceIdentity(0, uuid=UUIDS[2].removeprefix("GPU-")), 2),
        (DeviceIdentity(0, uuid=UUIDS[2]), 2),
        (DeviceIdentity(0, uuid=UUIDS[2].removeprefix("GPU-").upper()), 2),
        (DeviceIdentity(0, pci_bus_id="00000000:65:00.0"), 1),
        (DeviceIdentity(0, pci_bus_id=PCI[2].upper()), 2),
        (DeviceIdentity(0, uuid="no-such-uuid", pci_bus_id=PCI[1]), 1),
        (DeviceIdentity(1, uuid=UUIDS[0].removeprefix("GPU-"), visible="2,0"), 0),
        # Without it, a UUID or an unambiguous beginning of one, as CUDA accepts it.
        (DeviceIdentity(0, visible=UUIDS[1]), 1),
        (DeviceIdentity(0, visible="GPU-af7b61d8"), 0),
        (DeviceIdentity(1, visible=f"{UUIDS[0]},GPU-c0ff"), 2),
        # A number counts only when the two orders are the same.
        (DeviceIdentity(0, visible="1", order="PCI_BUS_ID"), 1),
        (DeviceIdentity(1, visible=" 2 , 1 ", order="PCI_BUS_ID"), 1),
        (DeviceIdentity(2, order="PCI_BUS_ID"), 2),
    ],
)
def test_the_right_device(nvml_library: NvmlLibrary, identity: DeviceIdentity, device: int) -> None:
    assert resolved(identity) == device


@pytest.mark.parametrize(
    "identity",
    [
        DeviceIdentity(0),
        DeviceIdentity(0, visible="1"),
        DeviceIdentity(0, visible="1", order="FASTEST_FIRST"),
        DeviceIdentity(0, visible=""),
        DeviceIdentity(0, visible="-1"),
        DeviceIdentity(1, visible="0,,1", order="PCI_BUS_ID"),
        DeviceIdentity(0, visible="7", order="PCI_BUS_ID"),
        DeviceIdentity(3, order="PCI_BUS_ID"),
        DeviceIdentity(0, visible="GPU-af7b"),
        DeviceIdentity(0, visible="GPU-dead"),
        DeviceIdentity(0, uuid="no-such-uuid", order="PCI_BUS_ID"),
        DeviceIdentity(0, pci_bus_id="00000000:ff:00.0", order="PCI_BUS_ID"),
        DeviceIdentity(0, visible="MIG-0000"),
    ],
)
def test_no_guess(nvml_library: NvmlLibrary, identity: DeviceIdentity) -> None:
    """Nothing identifies the device: no match, and an unknown reading although device 0 holds a row of this PID."""
    with pytest.raises(NoMatch):
        resolved(identity)
    nvml_library.write(row(OWN, 9 * GIB))
    assert read_own(identity, pid=OWN).state == "unknown"


def test_one_device_needs_no_order(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(devices=1)
    assert resolved(DeviceIdentity(0)) == 0
    assert resolved(DeviceIdentity(0, visible="0")) == 0


def test_cuda_order_is_not_nvml_order(nvml_library: NvmlLibrary) -> None:
    """ollama issue 7429: torch's device 0 is NVML's device 1, where this process holds 10 GiB."""
    nvml_library.write(row(OWN, 10 * GIB, device=1))
    assert read_own(DeviceIdentity(0, uuid=UUIDS[1].removeprefix("GPU-")), pid=OWN).bytes == 10 * GIB


SLICE = "MIG-11111111-2222-3333-4444-555555555555"
MIG = (f"migmode {UUIDS[0]} 1", f"mig {UUIDS[0]} {SLICE}")


@pytest.mark.parametrize(
    "identity",
    [
        DeviceIdentity(0, visible=SLICE),
        DeviceIdentity(0, uuid=SLICE.removeprefix("MIG-")),
        DeviceIdentity(0, uuid=UUIDS[0].removeprefix("GPU-"), visible=SLICE),
    ],
)
def test_a_slice_is_read_by_its_own_name(nvml_library: NvmlLibrary, identity: DeviceIdentity) -> None:
    nvml_library.write(*MIG, row(OWN, 100 * GIB), f"process {SLICE} {OWN} {6 * GIB}")
    assert read_own(identity, pid=OWN).bytes == 6 * GIB


@pytest.mark.parametrize(
    ("identity", "lines"),
    [
        # The parent lists us, or refuses; the slice has no row or no value. The parent's figure is never used.
        (DeviceIdentity(0, visible=SLICE), (*MIG, row(OWN, 100 * GIB))),
        (DeviceIdentity(0, visible=SLICE), (*MIG, row(OWN, 100 * GIB), f"process {SLICE} {OWN} {ALL_ONES}")),
        (DeviceIdentity(0, visible=SLICE), (*MIG, f"rc nvmlDeviceGetComputeRunningProcesses {NO_PERMISSION}")),
        (DeviceIdentity(0, uuid=UUIDS[0].removeprefix("GPU-")), (*MIG, row(OWN, 100 * GIB))),
        (DeviceIdentity(0, pci_bus_id=PCI[0]), (*MIG, row(OWN, 100 * GIB))),
        (DeviceIdentity(0, visible="MIG-0000", pci_bus_id=PCI[0]), (*MIG, row(OWN, 100 * GIB))),
    ],
)
def test_a_parent_never_speaks_for_a_slice(
    nvml_library: NvmlLibrary, identity: DeviceIdentity, lines: tuple[str, ...]
) -> None:
    nvml_library.write(*lines)
    assert read_own(identity, pid=OWN).state == "unknown"


def test_mig_mode_off_is_an_ordinary_device(nvml_library: NvmlLibrary) -> None:
    nvml_library.write(f"migmode {UUIDS[0]} 0", row(OWN, GIB))
    assert read_own(FIRST, pid=OWN).bytes == GIB


def test_the_device_query_is_never_made(nvml_library: NvmlLibrary) -> None:
    for lines in ((row(OWN, GIB),), (), MIG, (f"rc nvmlDeviceGetHandleByUUID {UNKNOWN_ERROR}",)):
        nvml_library.write(*lines)
        read_own(FIRST, pid=OWN)
        assert nvml_library.memory_queries == 0
