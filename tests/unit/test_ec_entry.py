# SPDX-License-Identifier: Apache-2.0
"""The bytes of an entry: a safetensors file; what is written is read, and nothing damaged is taken for sound."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_omni_patch.patches.ec_connector.storage import entry
from vllm_omni_patch.patches.ec_connector.storage.entry import Entry, FormatError
from vllm_omni_patch.patches.ec_connector.storage.key import MAX_ID_BYTES, Key, encode_id, stable_u64


def key(mm_hash: str = "abc") -> Key:
    return Key(encode_id(mm_hash), stable_u64(mm_hash), "bfloat16", b"b" * 32)


def payload(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


def made(mm_hash: str = "abc", rows: int = 4, columns: int = 8) -> tuple[Entry, memoryview]:
    data = payload(rows * columns * 2)
    return Entry.describe(key(mm_hash), rows, columns, "bfloat16", data, {"model": "m", "vllm": "0.32.0"}), data


IDS = ["x", "../../x", "a\0b", "\ud800" * 10, "ü" * 10_000, "100%", "\\ud800"]


@pytest.mark.parametrize("mm_hash", IDS)
def test_round_trip(mm_hash: str) -> None:
    wrote, data = made(mm_hash, 7, 4)
    read = Entry.decode(wrote.header, len(wrote.header) + data.nbytes)
    assert read == wrote and len(read.header) % entry.ALIGN == 0
    assert (read.rows, read.columns, read.dtype, read.payload, read.size) == (
        7,
        4,
        "bfloat16",
        56,
        len(read.header) + 56,
    )
    assert read.id_bytes == encode_id(mm_hash) and read.about == {"model": "m", "vllm": "0.32.0"}
    assert read.matches(key(mm_hash), 7) and read.matches(key(mm_hash), None)
    assert not read.matches(key(mm_hash), 8) and not read.matches(key(mm_hash + "."), 7)
    read.verify(data)


@pytest.mark.parametrize("dtype", sorted(entry.ITEM_SIZE))
@pytest.mark.parametrize("mm_hash", ["abc", 'a\0b/\ud800"\\'])
def test_safetensors_opens_an_entry(dtype: str, mm_hash: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tensor = torch.randn(33, 65).to(getattr(torch, dtype))
    data = entry.bytes_of(tensor)
    assert data.nbytes == 33 * 65 * entry.ITEM_SIZE[dtype]
    wrote = Entry.describe(key(mm_hash), 33, 65, dtype, data, {"model": "m \ud800"})
    path = tmp_path / "x.ec"
    path.write_bytes(wrote.header + bytes(data))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            assert list(file.keys()) == ["output"] and file.metadata()["model"] == "m ?"
            found = file.get_tensor("output")
    except Exception as error:
        if dtype.endswith("fnuz") and "FNUZ" in str(error):
            pytest.skip(f"this release of safetensors does not know {dtype}")
        raise
    assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "size"),
    [(0, 4, "bfloat16", 0), (4, 4, "int8", 16), (4, 4, "bfloat16", 31), (4, 4, "float64", 128)],
)
def test_what_cannot_be_described_is_not_stored(rows: int, columns: int, dtype: str, size: int) -> None:
    with pytest.raises(FormatError):
        Entry.describe(key(), rows, columns, dtype, payload(size), {})


def test_too_long_an_id_is_not_stored() -> None:
    with pytest.raises(FormatError):
        Entry.describe(key("x" * (MAX_ID_BYTES + 1)), 1, 1, "bfloat16", payload(2), {})


def test_a_payload_above_the_most_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "MAX_PAYLOAD", 63)
    with pytest.raises(FormatError, match="are not stored"):
        made()


def served(data: bytes) -> bool:
    """Whether the bytes of a whole entry are found under their key and pass for sound."""
    try:
        found = Entry.decode(data, len(data))
        found.verify(memoryview(data)[len(found.header) :])
    except FormatError:
        return False
    return found.matches(key(), 4)


def test_a_flip_of_any_byte_is_a_miss() -> None:
    """Of length, header, padding, checksum and payload."""
    wrote, data = made()
    whole = wrote.header + bytes(data)
    assert served(whole)
    for position in range(len(whole)):
        for mask in (1, 0x20, 0x41, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= mask
            assert not served(bytes(damaged)), position


def test_large_payloads_bursts_moved_blocks_and_changes_that_cancel() -> None:
    size = 2 * entry.PIECE + 2
    wrote, data = made(rows=1, columns=size // 2)
    rng = random.Random(1)
    damages: list[bytearray] = []
    for length in (1, 8, 512, 4096, 64 * 1024):
        changed = bytearray(data)
        start = rng.randrange(size - length)
        changed[start : start + length] = bytes(length)
        damages.append(changed)
    swapped = bytearray(data)
    swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
    cancelling = bytearray(data)
    for position in (7, 15):  # as 64-bit numbers their sum stays
        cancelling[position] ^= 0x80
    for changed in (*damages, swapped, cancelling):
        with pytest.raises(FormatError, match="checksum"):
            wrote.verify(memoryview(changed))
    with pytest.raises(FormatError, match="checksum"):
        wrote.verify(data[:-2])


def test_the_checksum_is_the_documented_one() -> None:
    """XXH3-128 over header and payload, the checksum's own digits taken as zeros."""
    import xxhash

    wrote, data = made()
    text = json.loads(wrote.header[8:])["__metadata__"]["xxh3_128"]
    blank = wrote.header.replace(text.encode(), b"0" * 32)
    assert len(blank) == len(wrote.header)
    assert text == wrote.checksum == xxhash.xxh3_128(blank + bytes(data)).hexdigest()
    pieces = wrote.check()
    for start in range(0, data.nbytes, 5):
        pieces.update(data[start : start + 5])
    assert pieces.hexdigest() == text


@pytest.mark.parametrize("length", [0, 1, 7, 8, 17, 60, 200, 300])
def test_a_header_cut_off_is_no_entry(length: int) -> None:
    wrote, _ = made()
    with pytest.raises(FormatError):
        Entry.decode(wrote.header[:length], length)


def forged(**changes: Any) -> bytes:
    """A header with other fields than it should have; its checksum is whatever it was."""
    fields = json.loads(made()[0].header[8:])
    for name, value in changes.items():
        fields["output" if name in fields["output"] else "__metadata__"][name] = value
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 64) * 64 - 8
    return length.to_bytes(8, "little") + text.ljust(length)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": [1 << 33, 64], "data_offsets": [0, 1 << 40]}, "impossible payload"),
        ({"shape": [4, 8, 1]}, "damaged"),
        ({"shape": [4.0, 8]}, "damaged"),
        ({"shape": [True, 32]}, "damaged"),
        ({"shape": [-4, -8]}, "damaged"),
        ({"shape": [4, 9]}, "impossible shape"),
        ({"shape": 4}, "damaged"),
        ({"data_offsets": [2, 66]}, "impossible shape"),
        ({"dtype": "I16"}, "impossible shape"),
        ({"dtype": ["BF16"]}, "damaged"),
        ({"mm_hash": 7}, "damaged"),
        ({"namespace": "zz"}, "damaged"),
        ({"ec_entry": "1"}, "format version"),
    ],
)
def test_impossible_fields_are_refused_before_anything_is_allocated(changes: dict[str, Any], why: str) -> None:
    header = forged(**changes)
    offsets = changes.get("data_offsets", [0, 64])
    with pytest.raises(FormatError, match=why):
        Entry.decode(header, len(header) + offsets[1])


def test_lengths_that_are_not_the_file_s_are_refused() -> None:
    header = bytearray(made()[0].header)
    with pytest.raises(FormatError, match="bytes long instead of"):
        Entry.decode(header, 10**12)
    for length in (0, 1 << 31, (1 << 64) - 8, len(header) - 8 + 1):
        header[:8] = length.to_bytes(8, "little")
        with pytest.raises(FormatError, match="header length"):
            Entry.decode(header, len(header) + 64)


@pytest.mark.parametrize("text", [b"[" * 5000, b'{"__metadata__":' * 3000, b"\xff" * 64, b"", b"{}", b"null", b"[]"])
def test_other_json_is_no_entry(text: bytes) -> None:
    start = made()[0].header[8:102]
    for body in (text, start + text):
        length = -(-(8 + len(body)) // 64) * 64 - 8
        with pytest.raises(FormatError):
            Entry.decode(length.to_bytes(8, "little") + body.ljust(length))


def test_an_entry_of_another_file_format_is_none(tmp_path: Path) -> None:
    """Neither of the format before this one, nor a safetensors file of somebody else's."""
    save = pytest.importorskip("safetensors.torch").save
    for data in (b"\x89VOPEC\r\n" + bytes(300), save({"output": torch.ones(4, 8, dtype=torch.bfloat16)})):
        with pytest.raises(FormatError, match="not an encoder cache entry of format version 2"):
            Entry.decode(data, len(data))
