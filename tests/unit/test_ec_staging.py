# SPDX-License-Identifier: Apache-2.0
"""The ring that outputs wait in: no two at one place, everything comes back."""

from __future__ import annotations

import random
from collections import deque

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.ec_connector.cache.staging import Slot, Staging

PAGE = 4096


@pytest.mark.parametrize("seed", range(5))
def test_slots_in_use_never_overlap_and_keep_what_was_written(seed: int) -> None:
    staging = Staging(64 * PAGE)
    rng = random.Random(seed)
    used: deque[tuple[Slot, int]] = deque()
    taken = 0
    for step in range(3000):
        slot = staging.take(rng.choice((1, 100, PAGE, 5 * PAGE + 7, 20 * PAGE))) if rng.random() < 0.6 else None
        if slot is not None:
            taken += 1
            slot.memory.fill_(step % 251)
            used.append((slot, step % 251))
        elif used:
            slot, value = used.popleft()
            assert bool((slot.memory == value).all())
            staging.give_back(slot)
    while used:
        slot, value = used.popleft()
        assert bool((slot.memory == value).all())
        staging.give_back(slot)
    assert taken > 500
    whole = staging.take(64 * PAGE)
    assert whole is not None and staging.take(1) is None
    staging.give_back(whole)
    assert staging.take(1) is not None


def test_one_large_output_at_a_time_gets_memory_of_its_own() -> None:
    staging = Staging(4 * PAGE)
    large = staging.take(100 * PAGE)
    assert large is not None and large.memory.numel() == 100 * PAGE
    assert staging.take(100 * PAGE) is None
    small = staging.take(PAGE)
    assert small is not None
    staging.give_back(large)
    staging.give_back(small)
    assert staging.take(100 * PAGE) is not None


def test_slots_given_back_out_of_order_come_back_in_the_end() -> None:
    staging = Staging(4 * PAGE)
    slots = [staging.take(PAGE) for _ in range(4)]
    assert staging.take(1) is None
    for index in (2, 0, 3, 1):
        slot = slots[index]
        assert slot is not None
        staging.give_back(slot)
    assert staging.take(4 * PAGE) is not None


def test_populating_changes_nothing() -> None:
    staging = Staging(16 * PAGE)
    slot = staging.take(PAGE)
    assert slot is not None
    slot.memory.fill_(7)
    staging.populate()
    assert bool((slot.memory == 7).all())
