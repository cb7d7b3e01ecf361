# SPDX-License-Identifier: Apache-2.0
"""One stored encoder output, in the safetensors layout.

An entry in a file, in shared memory or on a server is ``header + payload``; ``safetensors.safe_open`` opens its file::

    length of the JSON, 8 bytes little-endian | JSON, padded with spaces to a multiple of 64 | payload

    {"__metadata__": {"ec_entry": "2", "xxh3_128": "<32 hex digits>", "mm_hash": "<percent-encoded>",
                      "namespace": "<64 hex digits>", "model": "...", "vllm": "...", "key_dtype": "..."},
     "output": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, payload bytes]}}

The checksum is XXH3-128 over every byte of header and payload, with its own digits taken as zeros. One thread computes
75, 85, 38 and 33 GB/s of it over 0.5, 8, 32 and 128 MiB where a copy runs at 47, 38, 20 and 19 and BLAKE3 at 10, 10, 8
and 7 (EPYC with AVX-512): a load from the page cache must stay within 1.5 copies into fresh memory
(``scripts/bench_ec.py``). It detects damage, not forgery: whoever may write to a tier may store what they like.

Nothing is unpickled, and every length is checked against the real size of the file before memory is allocated.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from .key import MAX_ID_BYTES, Key

if TYPE_CHECKING:
    import torch

VERSION = 2
# torch's name of a dtype: safetensors' name, bytes per item. An output of any other dtype is declined.
_DTYPES = {
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
ITEM_SIZE = {name: size for name, (_, size) in _DTYPES.items()}
_TORCH_NAME = {code: name for name, (code, _) in _DTYPES.items()}
ALIGN = 64
# The first read of an entry: holds the whole header unless the id is longer than about 3.5 KiB.
FIRST_READ = 4096
# Percent-encoding makes up to three characters of a byte of an id.
MAX_HEADER = 256 * 1024
_ABOUT = ("model", "vllm", "key_dtype")
_MAX_ABOUT = 1024
# Far above any encoder output: a header that says more, as one in a sparse file can, must not decide what is allocated.
MAX_PAYLOAD = 16 << 30
# A piece is read and summed while it is in a processor cache; smaller ones cost more in calls than they save.
PIECE = 4 * 1024 * 1024

_LENGTH_BYTES = 8
_ANY_VERSION = b'{"__metadata__":{"ec_entry":"'
_START = _ANY_VERSION + b'%d","xxh3_128":"' % VERSION
# Where the checksum's digits are.
_DIGITS = slice(_LENGTH_BYTES + len(_START), _LENGTH_BYTES + len(_START) + 32)
_NO_DIGITS = b"0" * 32


class FormatError(ValueError):
    """The bytes are not a sound entry. The text says what is wrong."""


@dataclass(frozen=True)
class Entry:
    """What an entry says of itself. ``header`` is its encoded form, from which all else was read.

    ``rows`` and ``columns`` are the tensor's shape, ``dtype`` is torch's name; ``about`` is for people (``model``,
    ``vllm``, ``key_dtype``) and decides nothing.
    """

    rows: int
    columns: int
    dtype: str
    id_bytes: bytes
    namespace_digest: bytes
    about: Mapping[str, str]
    header: bytes

    @property
    def payload(self) -> int:
        """Length of the tensor in bytes."""
        return self.rows * self.columns * ITEM_SIZE[self.dtype]

    @property
    def size(self) -> int:
        """Length of the whole entry in bytes."""
        return len(self.header) + self.payload

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits."""
        return self.header[_DIGITS].decode("ascii", "replace")

    def matches(self, key: Key, rows: int | None) -> bool:
        """Whether this entry is the one that ``key`` means, with ``rows`` rows where given."""
        same = self.id_bytes == key.id_bytes and self.namespace_digest == key.namespace_digest
        return same and (rows is None or rows == self.rows)

    def verify(self, payload: memoryview) -> None:
        """Compare header and payload with the checksum.

        Raises:
            FormatError: they differ.
        """
        check = self.check()
        _update(check, payload)
        if check.hexdigest() != self.checksum:
            raise FormatError("checksum differs")

    def check(self) -> Any:
        """The checksum with the header taken in; ``update`` it with the payload and compare ``hexdigest``."""
        return _checksum(self.header)

    @classmethod
    def describe(
        cls, key: Key, rows: int, columns: int, dtype: str, payload: memoryview, about: Mapping[str, str]
    ) -> Entry:
        """The entry of ``payload``: ``rows x columns`` items of ``dtype``. Computes the checksum.

        Raises:
            FormatError: it cannot be described: unknown dtype, empty or of another length than its shape says, an id
                above ``MAX_ID_BYTES``, a big-endian host.
        """
        if sys.byteorder != "little":
            raise FormatError("entries are little-endian and this host is not")
        if dtype not in ITEM_SIZE or rows < 1 or columns < 1 or payload.nbytes != rows * columns * ITEM_SIZE[dtype]:
            raise FormatError(f"cannot store {payload.nbytes} bytes as {rows} x {columns} of {dtype}")
        if payload.nbytes > MAX_PAYLOAD:
            raise FormatError(f"{payload.nbytes} bytes are not stored (up to {MAX_PAYLOAD} are)")
        if not 0 < len(key.id_bytes) <= MAX_ID_BYTES:
            raise FormatError(f"an id of {len(key.id_bytes)} bytes is not stored (1 to {MAX_ID_BYTES} are)")
        about = {name: value.encode("utf-8", "replace").decode()[:_MAX_ABOUT] for name, value in about.items()}
        metadata = {
            "ec_entry": str(VERSION),
            "xxh3_128": _NO_DIGITS.decode(),
            "mm_hash": quote_from_bytes(key.id_bytes),
            "namespace": key.namespace_digest.hex(),
            **about,
        }
        tensor = {"dtype": _DTYPES[dtype][0], "shape": [rows, columns], "data_offsets": [0, payload.nbytes]}
        text = json.dumps({"__metadata__": metadata, "output": tensor}, separators=(",", ":")).encode("ascii")
        length = -(-(_LENGTH_BYTES + len(text)) // ALIGN) * ALIGN - _LENGTH_BYTES
        header = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
        check = _checksum(header)
        _update(check, payload)
        header = header[: _DIGITS.start] + check.hexdigest().encode("ascii") + header[_DIGITS.stop :]
        return cls(rows, columns, dtype, key.id_bytes, key.namespace_digest, about, header)

    @classmethod
    def decode(cls, data: bytes | memoryview, total: int | None = None) -> Entry:
        """Decode the header in ``data`` (at least ``header_length`` bytes) of an entry that is ``total`` bytes long.

        The checksum is not compared, for that takes the payload.

        Raises:
            FormatError: damaged, inconsistent, or the entry's real length is not what the header says.
        """
        size = header_length(data)
        if len(data) < size:
            raise FormatError(f"header cut off at {len(data)} of {size} bytes")
        header = bytes(data[:size])
        try:
            fields = json.loads(header[_LENGTH_BYTES:].decode("ascii"))
            metadata, tensor = fields["__metadata__"], fields["output"]
            rows, columns = tensor["shape"]
            start, end = tensor["data_offsets"]
            code = tensor["dtype"]
            dtype = _TORCH_NAME.get(code, "")
            id_bytes = unquote_to_bytes(metadata["mm_hash"])
            namespace_digest = bytes.fromhex(metadata["namespace"])
            about = {name: metadata[name] for name in _ABOUT if isinstance(metadata.get(name), str)}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise FormatError("header damaged") from None
        if any(type(number) is not int for number in (rows, columns, start, end)) or rows < 1 or columns < 1:
            raise FormatError("header damaged")
        if not dtype or start != 0 or end != rows * columns * ITEM_SIZE[dtype]:
            raise FormatError(f"impossible shape {rows} x {columns} of {code!r} in {end} bytes")
        if end > MAX_PAYLOAD:
            raise FormatError(f"impossible payload of {end} bytes")
        if total is not None and size + end != total:
            raise FormatError(f"{total} bytes long instead of {size + end}")
        return cls(rows, columns, dtype, id_bytes, namespace_digest, about, header)


def header_length(first: bytes | memoryview) -> int:
    """Length in bytes of the header whose beginning is ``first``.

    Raises:
        FormatError: not the beginning of an entry of this version.
    """
    if len(first) < _DIGITS.stop:
        raise FormatError(f"only {len(first)} bytes long")
    start = bytes(first[_LENGTH_BYTES : _DIGITS.start])
    if start != _START:
        if start.startswith(_ANY_VERSION):
            raise FormatError(f"another format version than {VERSION}, the one that this release reads")
        raise FormatError(f"not an encoder cache entry of format version {VERSION}")
    size = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    if not _DIGITS.stop <= size <= MAX_HEADER or size % ALIGN:
        raise FormatError(f"impossible header length {size}")
    return size


def read_entry(handle: int, total: int) -> Entry:
    """Read and decode the header of an open file that is ``total`` bytes long.

    Raises:
        FormatError: see :meth:`Entry.decode`.
        OSError: the storage failed.
    """
    data = os.pread(handle, FIRST_READ, 0)
    length = header_length(data)
    if length > len(data):
        data = os.pread(handle, length, 0)
    return Entry.decode(data, total)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; shares, does not copy."""
    import torch

    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _checksum(header: bytes) -> Any:
    # Not at the top: commands that only count entries, and processes without an engine, do without it.
    import xxhash

    check = xxhash.xxh3_128(header[: _DIGITS.start])
    check.update(_NO_DIGITS)
    check.update(header[_DIGITS.stop :])
    return check


def _update(check: Any, payload: memoryview) -> None:
    for start in range(0, payload.nbytes, PIECE):
        check.update(payload[start : start + PIECE])
        # xxhash keeps the interpreter's lock; the model's thread gets it between two pieces.
        time.sleep(0)
