# SPDX-License-Identifier: Apache-2.0
"""HBM of one Neuron logical core: the static table, and what a device's own figure is taken for.

A compile host has no device to ask. Both sides must therefore arrive at one total, or their KV block counts differ
and the compiled programs are not found again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..report.units import GIB, MIB

# The runtime's own query takes about 3 MiB and forks have seen totals short by as much; memory kept back by the
# runtime stays well below this, while two platforms differ by gigabytes.
SNAP_BYTES = 64 * MIB


@dataclass(frozen=True)
class HbmPlatform:
    """A family of targets. ``core_gib`` is the HBM (GiB) that one logical core is given by the table.

    ``cores_at_lnc1``: logical cores that share those GiB when a logical core is one physical core; each is given all of
    them, as the determine_available_memory design has it (section 4, ``get_total_available_memory``). ``lncs``: sizes
    of a logical core, in physical cores, that the family has; the first is its default.
    """

    family: str
    targets: tuple[str, ...]
    core_gib: int
    cores_at_lnc1: int
    lncs: tuple[int, ...]
    source: str

    @property
    def core_bytes(self) -> int:
        """``core_gib`` in bytes."""
        return self.core_gib * GIB


TABLE = (
    HbmPlatform(
        "trn1",
        ("trn1", "trn1n", "inf2", "gen2"),
        16,
        1,
        (1,),
        "AWS architecture pages of Trainium and Inferentia2: 32 GiB for 2 NeuronCore-v2; compiler limit 16 GB (inf2 "
        "inferred from the common architecture)",
    ),
    HbmPlatform(
        "trn2",
        ("trn2", "trn2n", "trn2u", "gen3"),
        24,
        2,
        (2, 1),
        "AWS Trainium2 page: 96 GiB in 4 stacks for 8 NeuronCore-v3; compiler limit 25,769,803,776 bytes",
    ),
    HbmPlatform(
        "trn3",
        ("trn3", "trn3u", "trn3pds", "gen4"),
        36,
        2,
        (2, 1),
        "AWS Trainium3 page: 144 GiB in 4 stacks for 8 NeuronCore-v4",
    ),
)


@dataclass(frozen=True)
class CoreHbm:
    """HBM of one logical core, in bytes, with where it came from. ``warning`` is for the log; empty when all is well.

    ``platform`` and ``lnc`` are ``None`` where they are unknown.
    """

    bytes: int
    source: str
    platform: HbmPlatform | None
    lnc: int | None
    warning: str = ""


def platform_of(target: str) -> HbmPlatform:
    """The family of ``target``, a value of ``NEURON_PLATFORM_TARGET_OVERRIDE`` (case does not matter).

    Raises:
        RuntimeError: it is empty or not in the table; nothing is guessed for it.
    """
    wanted = target.strip().lower()
    for platform in TABLE:
        if wanted in platform.targets:
            return platform
    known = ", ".join(name for platform in TABLE for name in platform.targets)
    what = f"{target!r} is not a target with a known HBM size" if wanted else "is not set"
    raise RuntimeError(f"NEURON_PLATFORM_TARGET_OVERRIDE {what}; use one of {known}.")


def static_core_hbm(target: str, lnc: int | None) -> CoreHbm:
    """HBM of a logical core of ``target`` from the table: what a host without a device uses.

    ``lnc`` is the configured size of a logical core in physical cores, ``None`` for the family's default.

    Raises:
        RuntimeError: unknown target, or an LNC that the family does not have.
    """
    platform = platform_of(target)
    lnc = _lnc_of(platform, lnc)
    return CoreHbm(platform.core_bytes, f"table, {platform.family}: {platform.source}", platform, lnc)


def device_core_hbm(reported: int, target: str, lnc: int | None) -> CoreHbm:
    """HBM of the visible logical core, of which the runtime reports ``reported`` bytes (used + free).

    Within ``SNAP_BYTES`` of the table's figure the table's is used, so that the compile host's block count is met;
    otherwise the runtime's, with a warning. Without ``target`` the family is the one whose figure is that near.

    Raises:
        RuntimeError: unknown ``target``, or an LNC that the family does not have.
    """
    if target:
        platform: HbmPlatform | None = platform_of(target)
    else:
        platform = next((row for row in TABLE if abs(reported - row.core_bytes) <= SNAP_BYTES), None)
    if platform is None:
        return CoreHbm(reported, "Neuron runtime, used + free", None, lnc, _off_table(reported, None))
    lnc = _lnc_of(platform, lnc)
    if abs(reported - platform.core_bytes) <= SNAP_BYTES:
        exact = "" if reported == platform.core_bytes else f"; the runtime reports {reported} bytes"
        return CoreHbm(platform.core_bytes, f"table, {platform.family}: {platform.source}{exact}", platform, lnc)
    share = platform.core_bytes // platform.cores_at_lnc1
    if lnc == 1 and abs(reported - share) <= SNAP_BYTES:
        # A runtime that divides the stack between its cores itself.
        source = f"table, {platform.family}, one of {platform.cores_at_lnc1} logical cores of a stack"
        return CoreHbm(share, source, platform, lnc, _off_table(reported, platform))
    return CoreHbm(reported, "Neuron runtime, used + free", platform, lnc, _off_table(reported, platform))


def _lnc_of(platform: HbmPlatform, lnc: int | None) -> int:
    if lnc is None:
        return platform.lncs[0]
    if lnc not in platform.lncs:
        raise RuntimeError(
            f"NEURON_LOGICAL_NC_CONFIG={lnc} does not exist on {platform.family}; use "
            f"{' or '.join(map(str, platform.lncs))}."
        )
    return lnc


def _off_table(reported: int, platform: HbmPlatform | None) -> str:
    if platform is None:
        return (
            f"The Neuron runtime reports {reported} bytes of HBM, which is no known size of a logical core. The KV "
            "block count may differ from one compiled without a device."
        )
    more = ""
    if reported > platform.core_bytes + SNAP_BYTES:
        more = " It is more than one core has: the figure may be that of several cores."
    return (
        f"The Neuron runtime reports {reported} bytes of HBM where {platform.family} has {platform.core_bytes} per "
        f"logical core.{more} The runtime's figure is used, so the KV block count differs from one compiled without a "
        "device, and programs compiled there are not found again."
    )
