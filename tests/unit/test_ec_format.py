# SPDX-License-Identifier: Apache-2.0
"""The bytes of an entry: what is written is what is read, and nothing damaged is taken for sound."""

from __future__ import annotations

import random
import struct

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vllm_omni_patch.patches.ec_connector import format  # noqa: E402
from vllm_omni_patch.patches.ec_connector.format import FormatError  # noqa: E402
from vllm_omni_patch.patches.ec_connector.key import MAX_ID_BYTES, Key, encode_id, stable_u64  # noqa: E402


def key(mm_hash: str = "abc") -> Key:
    return Key(mm_hash, encode_id(mm_hash), stable_u64(mm_hash), "bfloat16", b"b" * 32)


def payload(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


@pytest.mark.parametrize("mm_hash", ["x", "../../x", "a\0b", "\ud800" * 10, "ü" * 10_000])
def test_header_round_trip(mm_hash: str) -> None:
    data = payload(7 * 4 * 2)
    header = format.encode_header(key(mm_hash), 7, 4, "bfloat16", data, b'{"model": "m"}')
    assert len(header) % format.ALIGN == 0
    read = format.decode_header(header, len(header) + data.nbytes)
    assert (read.rows, read.columns, read.dtype, read.payload) == (7, 4, "bfloat16", 56)
    assert read.id_bytes == encode_id(mm_hash) and read.about == {"model": "m"}
    assert read.checksum == format.checksum(data)
    assert read.matches(key(mm_hash), 7) and read.matches(key(mm_hash), None)
    assert not read.matches(key(mm_hash), 8) and not read.matches(key(mm_hash + "."), 7)
    assert format.declared_payload(header) == 56
    assert format.entry_size(len(encode_id(mm_hash)), 14, 56) == len(header) + 56


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "size"),
    [(0, 4, "bfloat16", 0), (4, 4, "int8", 16), (4, 4, "bfloat16", 31), (4, 4, "float64", 128)],
)
def test_what_cannot_be_described_is_refused(rows: int, columns: int, dtype: str, size: int) -> None:
    with pytest.raises(FormatError):
        format.encode_header(key(), rows, columns, dtype, payload(size), b"")


def test_too_long_an_id_is_refused() -> None:
    with pytest.raises(FormatError):
        format.encode_header(key("x" * (MAX_ID_BYTES + 1)), 1, 1, "bfloat16", payload(2), b"")


def test_every_byte_of_the_header_is_guarded() -> None:
    data = payload(64)
    header = format.encode_header(key(), 4, 8, "bfloat16", data, b"{}")
    end = len(header)
    # Padding after the check says nothing and may be anything.
    meaningful = format._FIXED.size + 3 + 2 + 16
    for position in range(meaningful):
        damaged = bytearray(header)
        damaged[position] ^= 0x41
        with pytest.raises(FormatError):
            format.decode_header(damaged, end + 64)


@pytest.mark.parametrize("length", [0, 1, 17, 200, 255])
def test_a_header_cut_off_is_refused(length: int) -> None:
    header = format.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}")
    with pytest.raises(FormatError):
        format.decode_header(header[:length], length)


def test_impossible_lengths_are_refused_before_anything_is_allocated() -> None:
    header = bytearray(format.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}"))
    struct.pack_into("<I", header, 10, 1 << 31)
    with pytest.raises(FormatError, match="header length"):
        format.decode_header(header, len(header) + 64)
    huge = bytearray(format.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}"))
    struct.pack_into("<QQQ", huge, 14, 1 << 40, 1 << 20, 1 << 61)
    with pytest.raises(FormatError):
        format.decode_header(huge, len(huge) + 64)
    with pytest.raises(FormatError, match="bytes long instead of"):
        format.decode_header(bytes(format.encode_header(key(), 4, 8, "bfloat16", payload(64), b"{}")), 10**12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * format.BLOCK), st.data())
def test_any_changed_byte_changes_a_small_checksum(size: int, data: st.DataObject) -> None:
    original = payload(size)
    changed = memoryview(bytearray(original))
    for position in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=4)):
        changed[position] ^= data.draw(st.integers(1, 255))
    assert format.checksum(original) != format.checksum(changed)


LARGE = format.SMALL + 3 * format.BLOCK + 5


@pytest.mark.parametrize("size", [LARGE, format.PIECE + format.BLOCK, 2 * format.PIECE + 1])
def test_large_checksum_sees_flips_bursts_and_moved_blocks(size: int) -> None:
    original = payload(size)
    right = format.checksum(original)
    rng = random.Random(1)
    for _ in range(50):
        changed = bytearray(original)
        position = rng.randrange(size)
        changed[position] ^= 1 << rng.randrange(8)
        assert format.checksum(memoryview(changed)) != right
    for length in (8, 512, format.BLOCK, 64 * 1024):
        changed = bytearray(original)
        start = rng.randrange(size - length)
        changed[start : start + length] = bytes(length)
        assert format.checksum(memoryview(changed)) != right
    swapped = bytearray(original)
    block = format.BLOCK
    swapped[:block], swapped[block : 2 * block] = original[block : 2 * block], original[:block]
    assert format.checksum(memoryview(swapped)) != right
    assert format.checksum(original[: size - 1]) != right


def test_checksum_in_pieces_is_the_checksum_of_the_whole() -> None:
    data = payload(LARGE)
    pieces = format.Checksum(LARGE)
    cut = 5 * format.BLOCK
    pieces.add(data[:cut])
    pieces.add(data[cut:])
    assert pieces.digest() == format.checksum(data)


def test_large_checksum_is_the_documented_one() -> None:
    """64-bit little-endian sums of 4 KiB blocks, then the tail, into SHA-256 after the length."""
    import hashlib

    data = payload(LARGE)
    expected = hashlib.sha256(struct.pack("<Q", LARGE))
    whole = LARGE // format.BLOCK * format.BLOCK
    for start in range(0, whole, format.BLOCK):
        words = struct.unpack_from(f"<{format.BLOCK // 8}Q", data, start)
        expected.update(struct.pack("<Q", sum(words) % 2**64))
    expected.update(data[whole:])
    assert format.checksum(data) == expected.digest()


@pytest.mark.parametrize("dtype", sorted(format.ITEM_SIZE))
def test_item_sizes_are_torch_s(dtype: str) -> None:
    assert torch.empty(1, dtype=getattr(torch, dtype)).element_size() == format.ITEM_SIZE[dtype]
    shared = torch.zeros(3, 2, dtype=getattr(torch, dtype))
    assert format.bytes_of(shared).nbytes == 6 * format.ITEM_SIZE[dtype]
