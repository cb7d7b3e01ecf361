# SPDX-License-Identifier: Apache-2.0
"""Which NVML device is ``cuda:<n>`` of this process.

CUDA numbers devices by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, NVML by PCI bus; an index of one is not an
index of the other. A device is therefore matched by its UUID or PCI bus id, and by a bare index only where the two
orders cannot differ. What cannot be matched is unknown: reading a wrong card would be worse than reading none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

_UUID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True)
class DeviceIdentity:
    """What torch and the environment report about one device.

    ``index`` is the number in this process (``cuda:<index>``), ``uuid`` the device's UUID as torch gives it (no
    ``GPU-`` before it), ``pci_bus_id`` as ``domain:bus:device.0`` in hexadecimal. ``visible`` is
    ``CUDA_VISIBLE_DEVICES`` (``None`` when unset) and ``order`` is ``CUDA_DEVICE_ORDER``.
    """

    index: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    visible: str | None = None
    order: str | None = None

    @classmethod
    def of_torch(cls, device: Any) -> DeviceIdentity:
        """Identity of a ``torch.device`` of type ``cuda``; fields that this torch does not give stay ``None``."""
        import torch

        index = device.index if device.index is not None else torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        numbers = [int(part) for part in parts if part is not None]
        pci = "{:08x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == 3 else None
        return cls(
            index=int(index),
            uuid=None if uuid is None else str(uuid),
            pci_bus_id=pci,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            order=os.environ.get("CUDA_DEVICE_ORDER"),
        )


@dataclass(frozen=True)
class Match:
    """An NVML device handle, how it was found, and whether it is a MIG slice."""

    handle: Any
    how: str
    mig: bool = False


class NoMatch(Exception):
    """The device could not be matched; the text gives the reason. Callers turn it into an unknown reading."""


def visible_entries(visible: str | None) -> list[str] | None:
    """Entries of ``CUDA_VISIBLE_DEVICES`` up to the first that CUDA would not take; ``None`` when unset.

    CUDA ignores an invalid entry and everything after it, so ``"0,,1"`` is one device and ``"-1"`` is none.
    """
    if visible is None:
        return None
    entries: list[str] = []
    for item in visible.split(","):
        entry = item.strip()
        if not entry or not (entry.isdecimal() or entry.upper().startswith(_UUID_PREFIXES)):
            break
        entries.append(entry)
    return entries


def resolve(nvml: Any, identity: DeviceIdentity) -> Match:
    """The NVML handle of ``identity``; ``nvml`` is the initialised ``pynvml`` module.

    A MIG slice is matched by its own name only: its parent's figures are never used for it.

    Raises:
        NoMatch: nothing identifies the device without doubt.
    """
    entries = visible_entries(identity.visible)
    entry = _entry(entries, identity)
    if entry is not None and entry.upper().startswith("MIG-"):
        handle = _call(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        if handle is None:
            raise NoMatch(f"NVML does not know the MIG slice {entry}")
        return Match(handle, f"MIG name {entry}", mig=True)

    match = _by_uuid(nvml, identity) or _by_pci(nvml, identity)
    if match is None and not identity.uuid and not identity.pci_bus_id:
        # A device that torch names and NVML does not know is not the one that a number happens to point at.
        match = _by_entry(nvml, entry) or _by_index(nvml, identity)
    if match is None:
        raise NoMatch(
            f"cuda:{identity.index} has no UUID or PCI bus id that NVML knows, and its index is ambiguous with "
            f"CUDA_VISIBLE_DEVICES={identity.visible!r}, CUDA_DEVICE_ORDER={identity.order!r}"
        )
    if not match.mig and _mig_enabled(nvml, match.handle):
        raise NoMatch("MIG is enabled on this GPU and the slice in use has no name that NVML knows")
    return match


def _entry(entries: list[str] | None, identity: DeviceIdentity) -> str | None:
    if entries is None:
        return None
    if identity.index >= len(entries):
        if identity.uuid or identity.pci_bus_id:
            return None  # torch holds the device, so the variable was changed after CUDA started
        raise NoMatch(f"CUDA_VISIBLE_DEVICES={identity.visible!r} has no entry number {identity.index}")
    return entries[identity.index]


def _by_uuid(nvml: Any, identity: DeviceIdentity) -> Match | None:
    if not identity.uuid:
        return None
    bare = re.sub(r"^(GPU-|MIG-)", "", identity.uuid, flags=re.IGNORECASE)
    for prefix in _UUID_PREFIXES:
        handle = _call(nvml, nvml.nvmlDeviceGetHandleByUUID, prefix + bare)
        if handle is not None:
            return Match(handle, f"UUID {prefix}{bare}", mig=prefix == "MIG-")
    return None


def _by_pci(nvml: Any, identity: DeviceIdentity) -> Match | None:
    if not identity.pci_bus_id:
        return None
    handle = _call(nvml, nvml.nvmlDeviceGetHandleByPciBusId, identity.pci_bus_id)
    return None if handle is None else Match(handle, f"PCI bus id {identity.pci_bus_id}")


def _by_entry(nvml: Any, entry: str | None) -> Match | None:
    """A full UUID or a prefix of exactly one device's UUID, as CUDA accepts it."""
    if entry is None or not entry.upper().startswith("GPU-"):
        return None
    found = []
    for index in range(_call(nvml, nvml.nvmlDeviceGetCount) or 0):
        handle = _call(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else _call(nvml, nvml.nvmlDeviceGetUUID, handle)
        if uuid and uuid.lower().startswith(entry.lower()):
            found.append(Match(handle, f"UUID {uuid}"))
    if len(found) > 1:
        raise NoMatch(f"{entry} matches {len(found)} UUIDs")
    return found[0] if found else None


def _by_index(nvml: Any, identity: DeviceIdentity) -> Match | None:
    """By number, where CUDA's order and NVML's cannot differ."""
    entries = visible_entries(identity.visible)
    if entries is None:
        number = identity.index
    elif identity.index < len(entries) and entries[identity.index].isdecimal():
        number = int(entries[identity.index])
    else:
        return None
    count = _call(nvml, nvml.nvmlDeviceGetCount) or 0
    if number >= count or not (count == 1 or identity.order == "PCI_BUS_ID"):
        return None
    handle = _call(nvml, nvml.nvmlDeviceGetHandleByIndex, number)
    return None if handle is None else Match(handle, f"index {number}")


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    mode = _call(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return bool(mode and mode[0])


def _call(nvml: Any, function: Any, *args: Any) -> Any:
    """Result of an NVML call; ``None`` when the library refuses it, which for a lookup means "not this way"."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None
