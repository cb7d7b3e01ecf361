# SPDX-License-Identifier: Apache-2.0
"""The bytes of an entry: what is written is what is read, and nothing damaged is taken for sound."""

from __future__ import annotations

import random
import struct

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_patch.patches.ec_connector.storage import entry
from vllm_omni_patch.patches.ec_connector.storage.entry import FormatError
from vllm_omni_patch.patches.ec_connector.storage.key import MAX_ID_BYTES, Key, encode_id, stable_u64


def key(mm_hash: str = "abc") -> Key:
    return Key(mm_hash, encode_id(mm_hash), stable_u64(mm_hash), "bfloat16", b"b" * 32)


def payload(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


@pytest.mark.parametrize("mm_hash", ["x", "../../x", "a\0b", "\ud800" * 10, "ü" * 10_000])
def test_header_round_trip(mm_hash: str) -> None:
    data = payload(7 * 4 * 2)
    header = entry.encode_header(key(mm_hash), 7, 4, "bfloat16", data, b'{"model": "m"}')
    assert len(header) % entry.ALIGN == 0
    read = entry.decode_header(header, len(header) + data.nbytes)
    assert (read.rows, read.columns, read.dtype, read.payload) == (7, 4, "bfloat16", 56)
    assert read.id_bytes == encode_id(mm_hash) and read.about == {"model": "m"}
    assert read.checksum == entry.checksum(data)
    assert read.matches(key(mm_hash), 7) and read.matches(key(mm_hash), None)
    assert not read.matches(key(mm_hash), 8) and not read.matches(key(mm_hash + "."), 7)
    assert entry.declared_payload(header) == 56
    assert entry.entry_size(len(encode_id(mm_hash)), 14, 56) == len(header) + 56


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "size"),
    [(0, 4, "bfloat16", 0), (4, 4, "int8", 16), (4, 4, "bfloat16", 31), (4, 4, "float64", 128)],
)
def test_what_cannot_be_described_is_refused(rows: int, columns: int, dtype: str, size: int) -> None:
    with pytest.raises(FormatError):
        entry.encode_header(key(), rows, columns, dtype, payload(size), b"")


def test_too_long_an_id_is_refused() -> None:
    with pytest.raises(FormatError):
        entry.encode_header(key("x" * (MAX_ID_BYTES + 1)), 1, 1, "bfloat16", payload(2), b"")


def test_every_byte_of_the_header_is_guarded() -> None:
    data = payload(64)
    header = entry.encode_header(key(), 4, 8, "bfloat16", data, b"{}")
    end = len(header)
    # Padding after the check says nothing and may be anything.
    meaningful = entry._FIXED.size + 3 + 2 + 16
    for position in range(meaningful):
        damaged = bytearray(header)
        damaged[position] ^= 0x41
        with pytest.raises(FormatError):
            entry.decode_header(damaged, end + 64)


@pytest.mark.parametrize("length", [0, 1, 17, 200, 255])
def test_a_header_cut_off_is_refused(length: int) -> None:
    header = entry.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}")
    with pytest.raises(FormatError):
        entry.decode_header(header[:length], length)


def test_impossible_lengths_are_refused_before_anything_is_allocated() -> None:
    header = bytearray(entry.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}"))
    struct.pack_into("<I", header, 10, 1 << 31)
    with pytest.raises(FormatError, match="header length"):
        entry.decode_header(header, len(header) + 64)
    huge = bytearray(entry.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}"))
    struct.pack_into("<QQQ", huge, 14, 1 << 40, 1 << 20, 1 << 61)
    with pytest.raises(FormatError):
        entry.decode_header(huge, len(huge) + 64)
    with pytest.raises(FormatError, match="bytes long instead of"):
        entry.decode_header(bytes(entry.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}")), 10**12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * entry.BLOCK), st.data())
def test_any_changed_byte_changes_a_small_checksum(size: int, data: st.DataObject) -> None:
    original = payload(size)
    changed = memoryview(bytearray(original))
    for position in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=4)):
        changed[position] ^= data.draw(st.integers(1, 255))
    assert entry.checksum(original) != entry.checksum(changed)


LARGE = entry.SMALL + 3 * entry.BLOCK + 5


@pytest.mark.parametrize("size", [LARGE, entry.PIECE + entry.BLOCK, 2 * entry.PIECE + 1])
def test_large_checksum_sees_flips_bursts_and_moved_blocks(size: int) -> None:
    original = payload(size)
    right = entry.checksum(original)
    rng = random.Random(1)
    for _ in range(50):
        changed = bytearray(original)
        position = rng.randrange(size)
        changed[position] ^= 1 << rng.randrange(8)
        assert entry.checksum(memoryview(changed)) != right
    for length in (8, 512, entry.BLOCK, 64 * 1024):
        changed = bytearray(original)
        start = rng.randrange(size - length)
        changed[start : start + length] = bytes(length)
        assert entry.checksum(memoryview(changed)) != right
    swapped = bytearray(original)
    block = entry.BLOCK
    swapped[:block], swapped[block : 2 * block] = original[block : 2 * block], original[:block]
    assert entry.checksum(memoryview(swapped)) != right
    assert entry.checksum(original[: size - 1]) != right


def test_checksum_in_pieces_is_the_checksum_of_the_whole() -> None:
    data = payload(LARGE)
    pieces = entry.Checksum(LARGE)
    cut = 5 * entry.BLOCK
    pieces.add(data[:cut])
    pieces.add(data[cut:])
    assert pieces.digest() == entry.checksum(data)


def test_large_checksum_is_the_documented_one() -> None:
    """64-bit little-endian sums of 4 KiB blocks, then the tail, into SHA-256 after the length."""
    import hashlib

    data = payload(LARGE)
    expected = hashlib.sha256(struct.pack("<Q", LARGE))
    whole = LARGE // entry.BLOCK * entry.BLOCK
    for start in range(0, whole, entry.BLOCK):
        words = struct.unpack_from(f"<{entry.BLOCK // 8}Q", data, start)
        expected.update(struct.pack("<Q", sum(words) % 2**64))
    expected.update(data[whole:])
    assert entry.checksum(data) == expected.digest()


@pytest.mark.parametrize("dtype", sorted(entry.ITEM_SIZE))
def test_item_sizes_are_torch_s(dtype: str) -> None:
    assert torch.empty(1, dtype=getattr(torch, dtype)).element_size() == entry.ITEM_SIZE[dtype]
    shared = torch.zeros(3, 2, dtype=getattr(torch, dtype))
    assert entry.bytes_of(shared).nbytes == 6 * entry.ITEM_SIZE[dtype]
