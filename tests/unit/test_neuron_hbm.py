# SPDX-License-Identifier: Apache-2.0
"""One total for the compile host and the device, or a warning that they will not meet."""

from __future__ import annotations

import pytest

from vllm_omni_patch.patches.available_memory.neuron.hbm import device_core_hbm, static_core_hbm
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB

SNAP_BYTES = 64 << 20

TARGETS = [
    *((name, 16) for name in ("trn1", "trn1n", "inf2", "gen2")),
    *((name, 24) for name in ("trn2", "trn2n", "trn2u", "gen3", "TRN2")),
    *((name, 36) for name in ("trn3", "trn3u", "trn3pds", "gen4")),
]


@pytest.mark.parametrize(("target", "gib"), TARGETS)
def test_table(target: str, gib: int) -> None:
    assert static_core_hbm(target, None).bytes == gib * GIB
    assert device_core_hbm(gib * GIB, target, None).bytes == gib * GIB


def test_the_bytes_of_trn2_are_the_compilers() -> None:
    assert static_core_hbm("trn2", None).bytes == 25_769_803_776


@pytest.mark.parametrize("target", ["inf1", "trn9", "cuda"])
def test_an_unknown_target_is_named(target: str) -> None:
    with pytest.raises(RuntimeError, match=f"'{target}' is not a target with a known HBM size; use one of trn1"):
        static_core_hbm(target, None)


def test_no_target_is_said_to_be_unset() -> None:
    with pytest.raises(RuntimeError, match="NEURON_PLATFORM_TARGET_OVERRIDE is not set"):
        static_core_hbm("", None)


@pytest.mark.parametrize(("target", "gib"), [("trn2", 24), ("trn3", 36)])
def test_at_lnc_1_each_core_is_given_its_whole_stack(target: str, gib: int) -> None:
    assert static_core_hbm(target, 1).bytes == gib * GIB
    assert device_core_hbm(gib * GIB, target, 1).bytes == device_core_hbm(gib * GIB, "", 1).bytes == gib * GIB


def test_a_runtime_that_divides_the_stack_is_believed_with_a_warning() -> None:
    hbm = device_core_hbm(12 * GIB, "trn2", 1)
    assert hbm.bytes == 12 * GIB and "12884901888" in hbm.warning and "one of 2 logical cores" in hbm.source


def test_an_lnc_that_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match=r"NEURON_LOGICAL_NC_CONFIG=2 does not exist on trn1; use 1\."):
        static_core_hbm("inf2", 2)


@pytest.mark.parametrize("off", [0, -1, 3 << 20, -(3 << 20), SNAP_BYTES, -SNAP_BYTES])
@pytest.mark.parametrize("target", ["trn2", ""])
def test_a_total_near_the_table_is_the_tables(off: int, target: str) -> None:
    hbm = device_core_hbm(24 * GIB + off, target, None)
    assert (hbm.bytes, hbm.warning, hbm.platform.family if hbm.platform else "") == (24 * GIB, "", "trn2")
    assert (str(24 * GIB + off) in hbm.source) == (off != 0)


@pytest.mark.parametrize("off", [SNAP_BYTES + 1, -SNAP_BYTES - 1])
@pytest.mark.parametrize("target", ["trn2", ""])
def test_a_total_further_off_is_the_runtimes_with_a_warning(off: int, target: str) -> None:
    hbm = device_core_hbm(24 * GIB + off, target, None)
    assert hbm.bytes == 24 * GIB + off
    assert str(24 * GIB + off) in hbm.warning and "block count" in hbm.warning


def test_the_sum_of_two_cores_is_called_so() -> None:
    assert "several cores" in device_core_hbm(48 * GIB, "trn2", None).warning
    assert "several cores" not in device_core_hbm(23 * GIB, "trn2", None).warning


def test_an_unknown_size_without_a_target_is_the_runtimes() -> None:
    assert device_core_hbm(20 * GIB, "", None).bytes == 20 * GIB
