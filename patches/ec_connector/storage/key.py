# SPDX-License-Identifier: Apache-2.0
"""The key of an entry: made from an item's ``mm_hash`` and from all that decides the value of its output.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

# Encoder outputs are the same on every tensor-parallel rank, so all ranks share one logical rank
# (encoder cache design, "Cache Key").
KEY_WORLD_SIZE = 1
KEY_WORKER_ID = 0
# Longer ids are declined. Four bytes for each of 10,000 characters fit, and a header stays far below one page cache
# read-ahead window.
MAX_ID_BYTES = 48 * 1024

_SCOPED = re.compile(
    # An adapter's name may stand before the id. Then what vLLM puts there when it hashes no content: its renderer's
    # request counter (0.28 and later), or the request id of the server's routes or of LLM() (before).
    r"^(?:[^:]*:)?(?:renderer\d+-mm-\d+|(?:chatcmpl|cmpl|resp|embd|pool|score|classify|tokenize|rerank|generate)-.+"
    r"|\d+(?:[-_][0-9a-f]{1,32})?)-[a-z][a-z_]*-\d+$",
    re.DOTALL,
)


def is_request_scoped(identifier: str, request_id: str | None = None) -> bool:
    """Whether ``identifier`` names a place in a request instead of a content.

    With the processor cache and prefix caching both off, vLLM numbers the items (``renderer0-mm-1-image-0``; before
    0.28 ``<request id>-image-0``). The numbers start again in the next process, so an output stored under such an id
    would be served to a stranger. ``request_id``, where the caller knows it, also catches ids made from request ids of
    any other form.
    """
    if request_id and identifier.startswith(f"{request_id}-"):
        return True
    return _SCOPED.match(identifier) is not None


def encode_id(mm_hash: str) -> bytes:
    """``mm_hash`` as bytes, for any text a client may send (lone surrogates too)."""
    return mm_hash.encode("utf-8", "surrogatepass")


def stable_u64(mm_hash: str) -> int:
    """The 64-bit projection of an id that the key's ``chunk_hash`` holds (encoder cache design, "Cache Key").

    It names an entry. It does not prove one: every entry carries the whole id, and readers compare that.
    """
    return int.from_bytes(hashlib.sha256(encode_id(mm_hash)).digest()[:8], "big")


@dataclass(frozen=True)
class Key:
    """Address of an entry: where it lies (``path``) and what it must say about itself.

    ``namespace_digest`` (32 bytes) stands for model, weights, encoder configuration, vLLM version, key dtype, salt and
    generation. ``shared`` is false in a generation of one run, whose entries mean nothing to other hosts.
    """

    id_bytes: bytes
    chunk_hash: int
    dtype: str
    namespace_digest: bytes
    shared: bool = True

    @property
    def namespace(self) -> str:
        """Half of the namespace digest, in hexadecimal: the same for all entries that one deployment may load."""
        return self.namespace_digest.hex()[:32]

    @property
    def name(self) -> str:
        """The entry's name within its namespace: hashes and a dtype only, whatever the id holds."""
        return f"{self.chunk_hash:016x}@{KEY_WORLD_SIZE}@{KEY_WORKER_ID}@{self.dtype}.ec"

    @property
    def shard(self) -> int:
        """The first byte of the hash: which of 256 folders has the entry's file."""
        return self.chunk_hash >> 56

    @property
    def file(self) -> str:
        """The name of the entry's file."""
        return f"{self.namespace}@{self.name}"

    @cached_property
    def path(self) -> str:
        """The entry's file below the root of a :class:`~.folder.Folder`."""
        return f"{self.shard:02x}/{self.file}"
