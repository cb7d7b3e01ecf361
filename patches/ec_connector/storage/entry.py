# SPDX-License-Identifier: Apache-2.0
"""The bytes of one stored encoder output: a header that describes itself, then the tensor's memory.

One entry, on a disk, in shared memory or on a server, is ``header + payload``. All numbers are little-endian::

    magic 8s | version H | header length I | rows Q | columns Q | payload length Q | created d (Unix seconds)
    id length I | label length H | dtype 16s | binding 32s | checksum 32s | digest 32s
    id bytes | label bytes (JSON: model, vLLM version) | header check 16s | zero padding to a multiple of 64

``checksum`` is what each read recomputes. It must keep up with a copy out of the page cache, so for payloads above
256 KiB it is a SHA-256 over the 64-bit sums of each 4 KiB block and not over every byte: any wrong bit, burst, torn,
missing or moved block changes it, while two changes *within one block* that cancel as 64-bit integers do not. The full
SHA-256 ``digest`` of the payload closes that gap where there is time: entries that came over a network, and
``vllm-omni-patch ec verify``.

Nothing is unpickled, and every length is checked against the real size of the file before memory is allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .key import BINDING_BYTES, MAX_ID_BYTES, Key

if TYPE_CHECKING:
    import torch

MAGIC = b"\x89VOPEC\r\n"
VERSION = 1
# Item sizes in bytes. An output of any other dtype is declined.
ITEM_SIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
ALIGN = 64
# The first read of an entry: holds the whole header unless the id is longer than about 3.8 KiB.
FIRST_READ = 4096
MAX_HEADER = 64 * 1024
MAX_LABEL_BYTES = 8 * 1024
# Far above any encoder output: a header that says more, as one in a sparse file can, must not decide what is allocated.
MAX_PAYLOAD = 16 << 30
BLOCK = 4096
# Up to here the checksum is a SHA-256 of every byte: 0.1 to 0.2 ms.
SMALL = 256 * 1024
# A piece is read and summed while it is in a processor cache; smaller ones cost more in calls than they save.
PIECE = 4 * 1024 * 1024

_FIXED = struct.Struct(f"<8sHIQQQdIH16s{BINDING_BYTES}s32s32s")
_CHECK_BYTES = 16


class FormatError(ValueError):
    """The bytes are not a sound entry. The text says what is wrong."""


@dataclass(frozen=True)
class Header:
    """A decoded header. ``size`` is its own length in bytes, ``payload`` the tensor's."""

    rows: int
    columns: int
    dtype: str
    payload: int
    created: float
    id_bytes: bytes
    label: bytes
    binding: bytes
    checksum: bytes
    digest: bytes
    size: int

    def matches(self, key: Key, rows: int | None) -> bool:
        """Whether this entry is the one that ``key`` means, with ``rows`` rows where given."""
        return self.id_bytes == key.id_bytes and self.binding == key.binding and (rows is None or rows == self.rows)

    @property
    def about(self) -> dict[str, Any]:
        """The label as data; empty when it is damaged."""
        try:
            value = json.loads(self.label)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def encode_header(key: Key, rows: int, columns: int, dtype: str, payload: memoryview, label: bytes) -> bytes:
    """Header for ``payload`` (``rows x columns`` items of ``dtype``). Computes checksum and digest.

    Raises:
        FormatError: the entry cannot be described: unknown dtype, empty or of another length than its shape says,
            an id above ``MAX_ID_BYTES``, a big-endian host.
    """
    if sys.byteorder != "little":
        raise FormatError("entries are little-endian and this host is not")
    if dtype not in ITEM_SIZE or rows < 1 or columns < 1 or payload.nbytes != rows * columns * ITEM_SIZE[dtype]:
        raise FormatError(f"cannot store {payload.nbytes} bytes as {rows} x {columns} of {dtype}")
    if payload.nbytes > MAX_PAYLOAD:
        raise FormatError(f"{payload.nbytes} bytes are not stored (up to {MAX_PAYLOAD} are)")
    if not 0 < len(key.id_bytes) <= MAX_ID_BYTES:
        raise FormatError(f"an id of {len(key.id_bytes)} bytes is not stored (1 to {MAX_ID_BYTES} are)")
    if len(label) > MAX_LABEL_BYTES:
        label = b"{}"
    size = _round_up(_FIXED.size + len(key.id_bytes) + len(label) + _CHECK_BYTES)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        size,
        rows,
        columns,
        payload.nbytes,
        time.time(),
        len(key.id_bytes),
        len(label),
        dtype.encode("ascii"),
        key.binding,
        checksum(payload),
        hashlib.sha256(payload).digest(),
    )
    body = fixed + key.id_bytes + label
    return (body + _check(body)).ljust(size, b"\0")


def header_length(first: bytes | memoryview) -> int:
    """Length in bytes of the header whose beginning is ``first``.

    Raises:
        FormatError: not the beginning of an entry of this version.
    """
    if len(first) < _FIXED.size:
        raise FormatError(f"only {len(first)} bytes long")
    magic, version, size = struct.unpack_from("<8sHI", first)
    if magic != MAGIC:
        raise FormatError("not an encoder cache entry")
    if version != VERSION:
        raise FormatError(f"format version {version}; this release reads {VERSION}")
    if not _FIXED.size + _CHECK_BYTES <= size <= MAX_HEADER or size % ALIGN:
        raise FormatError(f"impossible header length {size}")
    return int(size)


def declared_payload(first: bytes | memoryview) -> int:
    """Payload length in bytes that a header says, where only the header is at hand."""
    return int(_FIXED.unpack_from(first)[5])


def decode_header(data: bytes | memoryview, total: int) -> Header:
    """Decode a header from ``data`` (at least ``header_length`` bytes) of an entry that is ``total`` bytes long.

    Raises:
        FormatError: damaged, inconsistent, or the entry's real length is not what the header says.
    """
    size = header_length(data)
    if len(data) < size:
        raise FormatError(f"header cut off at {len(data)} of {size} bytes")
    fields = _FIXED.unpack_from(data)
    _, _, _, rows, columns, payload, created, id_length, label_length, dtype_field, binding, check_sum, digest = fields
    end = _FIXED.size + id_length + label_length
    if id_length > MAX_ID_BYTES or label_length > MAX_LABEL_BYTES or _round_up(end + _CHECK_BYTES) != size:
        raise FormatError("header lengths do not add up")
    if bytes(data[end : end + _CHECK_BYTES]) != _check(bytes(data[:end])):
        raise FormatError("header damaged")
    dtype = dtype_field.rstrip(b"\0").decode("ascii", "replace")
    if dtype not in ITEM_SIZE or rows < 1 or columns < 1 or payload != rows * columns * ITEM_SIZE[dtype]:
        raise FormatError(f"impossible shape {rows} x {columns} of {dtype!r} in {payload} bytes")
    if payload > MAX_PAYLOAD:
        raise FormatError(f"impossible payload of {payload} bytes")
    if size + payload != total:
        raise FormatError(f"{total} bytes long instead of {size + payload}")
    return Header(
        rows=rows,
        columns=columns,
        dtype=dtype,
        payload=payload,
        created=created,
        id_bytes=bytes(data[_FIXED.size : _FIXED.size + id_length]),
        label=bytes(data[_FIXED.size + id_length : end]),
        binding=binding,
        checksum=check_sum,
        digest=digest,
        size=size,
    )


def read_header(handle: int, total: int) -> Header:
    """Read and decode the header of an open file that is ``total`` bytes long.

    Raises:
        FormatError: see :func:`decode_header`.
        OSError: the storage failed.
    """
    data = os.pread(handle, FIRST_READ, 0)
    length = header_length(data)
    if length > len(data):
        data = os.pread(handle, length, 0)
    return decode_header(data, total)


def entry_size(id_bytes: int, label: int, payload: int) -> int:
    """Bytes of a whole entry with an id, a label and a payload of these lengths."""
    return _round_up(_FIXED.size + id_bytes + label + _CHECK_BYTES) + payload


class Checksum:
    """The running checksum of a payload of ``total`` bytes, fed front to back in pieces.

    Every piece but the last must be a multiple of ``BLOCK`` bytes long.
    """

    def __init__(self, total: int) -> None:
        self._hash = hashlib.sha256(struct.pack("<Q", total))
        self._small = total <= SMALL

    def add(self, piece: memoryview) -> None:
        """Take in the next piece (a contiguous view of bytes)."""
        whole = 0 if self._small else piece.nbytes // BLOCK * BLOCK
        if whole:
            self._hash.update(_block_sums(piece[:whole]))
        if whole != piece.nbytes:
            self._hash.update(piece[whole:])

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()


def checksum(payload: memoryview) -> bytes:
    """Checksum of a whole payload."""
    total = Checksum(payload.nbytes)
    for start in range(0, payload.nbytes, PIECE):
        total.add(payload[start : start + PIECE])
    return total.digest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; shares, does not copy."""
    import torch

    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _block_sums(piece: memoryview) -> memoryview:
    import torch

    # Sums of 64-bit words, modulo 2**64: the same in any order of addition, and vectorised where a CRC is not.
    words = torch.frombuffer(piece, dtype=torch.int64).view(-1, BLOCK // 8)
    sums: Any = words.sum(1).numpy()
    return memoryview(sums).cast("B")


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]


def _round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
