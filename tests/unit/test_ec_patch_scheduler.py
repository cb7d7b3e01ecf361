# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side promises, on a real engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from support.ec_requests import Adapter, available, request
from vllm_omni_patch.patches.ec_connector.vllm.items import ItemKeys
from vllm_omni_patch.patches.ec_connector.vllm.scheduler import SchedulerSide


def keep(store: Any, key: str, rows: int = 32) -> None:
    assert store.put(key, torch.randn(rows, 64))
    assert store.flush(10)


def test_a_stored_item_is_promised_and_loaded(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    asked = request("r1", ("a", 32), ("b", 32))
    keep(store, "a")
    side.see(asked)
    assert [side.has_item("a"), side.has_item("b")] == [True, False]
    side.allocated(asked, 0)
    side.allocated(asked, 1)
    (load,) = side.plan().loads
    assert (load.request_id, load.index, load.mm_hash, load.key, load.rows) == ("r1", 0, "a", "a", 32)
    assert side.plan().loads == []


def test_one_lookup_per_item_and_step(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "a")
    before = store.stats.snapshot().lookups
    for number in range(5):
        side.see(request(f"r{number}", ("a", 32)))
        assert side.has_item("a")
    assert store.stats.snapshot().lookups == before + 1
    side.plan()
    assert side.has_item("a")
    assert store.stats.snapshot().lookups == before + 2


def test_an_entry_of_another_length_is_a_miss_and_replaced(store: Any) -> None:
    """An identifier that a client chose, used again for an input of another length."""
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "img-1", rows=138)
    side.see(request("r1", ("img-1", 638)))
    assert not side.has_item("img-1")
    keep(store, "img-1", rows=638)
    side.plan()
    assert side.has_item("img-1")
    assert store.get("img-1", "cpu", 138) is None


def test_unknown_rows_are_checked_by_the_worker(store: Any) -> None:
    """0.15 to 0.22 ask by identifier before the request was seen."""
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "a", rows=7)
    asked = request("r1", ("a", 32))
    assert side.has_item("a")
    side.allocated(asked, 0)
    assert side.plan().loads[0].rows == 32


def test_an_allocated_item_that_was_not_promised_is_not_loaded(store: Any) -> None:
    """From 0.18 vLLM tells of the items that it encodes itself, too, and looking again then would be a race."""
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    asked = request("r1", ("a", 32))
    side.see(asked)
    assert not side.has_item("a")
    keep(store, "a")
    side.allocated(asked, 0)
    assert side.plan().loads == []


def test_a_promise_is_taken_back_with_the_entry(store: Any) -> None:
    """The first request of a step was promised the item and not scheduled; then the entry went."""
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "a")
    assert side.has_items(request("r1", ("a", 32))) == [True]
    side.plan()
    store.discard("a")
    second = request("r2", ("a", 32))
    assert side.has_items(second) == [False]
    side.allocated(second, 0)
    assert side.plan().loads == []


@pytest.mark.parametrize("identifier", ["renderer0-mm-1-image-0", "chatcmpl-12ab-image-0", "r1-image-0"])
def test_request_scoped_identifiers_are_never_looked_up(store: Any, identifier: str) -> None:
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    before = store.stats.snapshot().lookups
    assert side.has_items(request("r1", (identifier, 32))) == [False]
    assert store.stats.snapshot().lookups == before


def test_embeddings_that_a_client_sent_are_not_looked_up(store: Any) -> None:
    """Under a uuid that also names a stored image, say."""
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "x")
    asked = request("r1", ("x", 32))
    asked.mm_features[0].data = {"image_embeds": object()}
    assert side.has_items(asked) == [False]


def test_metadata_only_items_travel_with_the_step(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), can_fail_one=True)
    tensor = torch.randn(32, 64)
    store.put("a", tensor)
    store.flush(10)
    asked = request("r1", ("a", 32), data=False)
    assert available(side, asked)
    store.discard("a")
    assert side.has_item("a"), "it is in hand, whatever happens to the entry"
    side.allocated(asked, 0)
    plan = side.plan()
    assert torch.equal(plan.tensors["a"], tensor)
    side.finished(asked)
    assert side.plan().tensors == {} and not side.has_item("a")


def test_a_metadata_only_item_that_is_nowhere_fails_its_request_alone(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    side = SchedulerSide(store, ItemKeys(), can_fail_one=True)
    with caplog.at_level(logging.WARNING):
        assert not available(side, request("r1", ("gone", 32), data=False))
    assert "request r1" in caplog.text and "gone" in caplog.text
    assert available(side, request("r2", ("gone", 32)))
    assert side.take_unavailable() == {"r1"}
    assert side.take_unavailable() == set()


def test_a_new_generation_offers_nothing_of_before(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    keep(store, "a")
    assert side.has_item("a")
    store.new_generation()  # as another process of the engine does
    side.plan()
    assert not side.has_item("a")
    keep(store, "a")
    side.plan()
    assert side.has_item("a")


def test_no_lookups_where_the_configuration_forbids_them(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), lookups=False)
    keep(store, "a")
    assert not side.has_item("a")


def test_adapters_have_entries_of_their_own(store: Any, tmp_path: Path) -> None:
    """vLLM prefixes the adapter's name. The same name from another path, or with other weights, is another adapter."""
    keys = ItemKeys(tower_lora=True)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode() * 100)
    one, two = (Adapter("a", str(tmp_path / name)) for name in ("one", "two"))
    found = {keys.key("a:x", "r", one), keys.key("a:x", "r", two), keys.key("x", "r", None)}
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"new" * 100)
    found.add(keys.key("a:x", "r", one))
    assert len(found) == 4 and None not in found
    assert keys.key("a:x", "r", Adapter("a", str(tmp_path / "missing"))) is None
    side = SchedulerSide(store, keys, keyless=False, wait=5.0)
    key = keys.key("a:x", "r1", two)
    assert key is not None
    keep(store, key)
    assert not side.has_item("a:x"), "the adapter is unknown before the request was seen"
    asked = request("r1", ("a:x", 32), lora=two)
    assert side.has_items(asked) == [True]
    side.allocated(asked, 0)
    assert side.plan().loads[0].key == key


def test_what_is_remembered_of_a_request_goes_with_it(store: Any) -> None:
    side = SchedulerSide(store, ItemKeys(), wait=5.0)
    for number in range(100):
        asked = request(f"r{number}", (f"i{number}", 32), ("shared", 32))
        available(side, asked)
        side.finished(asked)
    assert not side._requests and not side._items
