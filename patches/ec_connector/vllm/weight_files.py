# SPDX-License-Identifier: Apache-2.0
"""A digest of the weight files in a folder, or the commit of a snapshot. Imports neither vLLM nor torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX_SUFFIX = ".index.json"
# What is read of a weight file: stripes spread evenly from its first byte to its last. A checkpoint replaced by one of
# the same size and time differs in some tensor. Files of up to a MiB are read whole.
_STRIPES = 64
_STRIPE = 16 * 1024
# Settings of how an image becomes pixels. vLLM's content hash leaves them out, as it does ``mm_processor_kwargs`` of
# the configuration; those of a request are in it.
_PROCESSOR_SUFFIX = "processor_config.json"
# A snapshot in the hub's cache, as it comes back from the library that made it, and what was opened in it.
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(/.*)?$")


def weights_identity(path: str, tokenizer: str = "") -> str:
    """Digest of the weights in the folder or file ``path``; ``""`` when there are none.

    A snapshot of the hub is named by its commit, which is the same on every host, and by what of it was opened. Another
    folder is described by its weight files and by the settings of its image, video and sound processors; a single file
    with the vision side's files beside it, and the processors of the ``tokenizer`` folder. The path to them (links,
    mount points) plays no part.
    """
    if os.path.isfile(path):
        # Not the target of a link: in the hub's cache all files lie in one folder, and nothing else of this model.
        folder = os.path.dirname(os.path.abspath(path))
        real = os.path.join(os.path.realpath(folder), os.path.basename(path))
    elif os.path.isdir(path):
        folder = real = os.path.realpath(path)
    else:
        return ""
    snapshot = _SNAPSHOT.search(real)
    if snapshot:
        return f"commit:{snapshot[1]}{snapshot[2] or ''}"
    if real == folder:
        named = [(os.path.relpath(file, real), file) for file in _weight_files(real)]
    else:
        named = [("", path), *((os.path.basename(file), file) for file in _beside(folder, path))]
    return _describe(named, folder, tokenizer)


def _describe(weights: Iterable[tuple[str, str]], folder: str, tokenizer: str) -> str:
    """``files:<number of weight files>:<digest>``; ``""`` without weight files. ``weights``: (name, path)."""
    digest = hashlib.sha256()
    count = 0
    for name, path in sorted(weights):
        digest.update(f"{name}\0".encode("utf-8", "surrogateescape"))
        try:
            digest.update(_describe_file(path))
        except OSError as error:
            digest.update(f"unreadable:{error.errno}".encode())
        # An index names weights and holds none.
        count += not path.endswith(_INDEX_SUFFIX)
    if not count:
        return ""
    places = (folder, tokenizer) if os.path.isdir(tokenizer) else (folder,)
    for real in dict.fromkeys(os.path.realpath(one) for one in places):
        for name in _listed(real, _PROCESSOR_SUFFIX):
            digest.update(f"{name}\0".encode("utf-8", "surrogateescape"))
            with contextlib.suppress(OSError):
                digest.update(content_of(os.path.join(real, name)))
    return f"files:{count}:{digest.hexdigest()}"


def content_of(path: str) -> bytes:
    """Digest of a small file.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).digest()


def _listed(folder: str, suffix: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    return []


def _beside(folder: str, path: str) -> list[str]:
    """Files with the vision side of the model in the file ``path``."""
    names = [name for name in _listed(folder, ".gguf") if "mmproj" in name.lower()]
    return [os.path.join(folder, name) for name in names if name != os.path.basename(path)]


def _weight_files(folder: str) -> Iterable[str]:
    for directory, subfolders, files in os.walk(folder):
        # Sub-models (diffusers layouts) lie one or two levels down; anything deeper is not a checkpoint.
        if os.path.relpath(directory, folder).count(os.sep) >= 2:
            subfolders.clear()
        subfolders.sort()
        for file in files:
            if file.endswith(_WEIGHT_SUFFIXES) or file.endswith(_INDEX_SUFFIX):
                yield os.path.join(directory, file)


def _describe_file(path: str) -> bytes:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(f"{status.st_size}:{status.st_mtime_ns}:".encode())
        for start in _stripes(status.st_size):
            digest.update(os.pread(file.fileno(), _STRIPE, start))
    return digest.digest()


def _stripes(size: int) -> Iterable[int]:
    """Where the stripes of a file of ``size`` bytes begin; in a small file they touch and cover all of it."""
    if size <= _STRIPES * _STRIPE:
        return range(0, size, _STRIPE)
    return [index * (size - _STRIPE) // (_STRIPES - 1) for index in range(_STRIPES)]
