# SPDX-License-Identifier: Apache-2.0
"""Whose weights a model has: what vLLM's loaders opened, and what the processes of one engine say of it to each other.

Where weights lie is the business of vLLM and the hub's library (cache folders, revisions, offline mode, other hubs); a
hook on the loaders tells what they returned. Nothing here looks for a model by its name. Imports neither vLLM nor
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_omni_patch import ledger

if TYPE_CHECKING:
    from vllm_omni_patch.patches.ec_connector.config import ECConfig
    from vllm_omni_patch.patches.ec_connector.identity import ModelIdentity

_log = ledger.logger("ec")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX_SUFFIX = ".index.json"
# What is read of a weight file: stripes spread evenly from its first byte to its last. A checkpoint replaced by one of
# the same size and time differs in some tensor. Files of up to a MiB are read whole.
_STRIPES = 64
_STRIPE = 16 * 1024
# Files that say how an image becomes pixels. vLLM's content hash leaves them out, as it does ``mm_processor_kwargs`` of
# the configuration; those of a request are in it.
_PROCESSOR_SUFFIX = "processor_config.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A snapshot in the hub's cache, as it comes back from the library that made it, and what was opened in it.
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(/.*)?$")


class Opened:
    """What one process opened to load its model.

    ``weights`` is its text for :class:`Claims`: ``""`` while nothing was opened, or when something was that cannot be
    told from others.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = getattr(vllm_config, "model_config", None)
        self._source = str(getattr(model, "model", "") or "")
        self._tokenizer = str(getattr(model, "tokenizer", "") or "")
        self._commit = resolved_commit(model)
        draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
        self._draft = str(getattr(draft, "model", "") or "")
        self._texts: set[str] = set()

    @property
    def weights(self) -> str:
        """Digests of all that was opened, in one text."""
        return "" if "" in self._texts else "+".join(sorted(self._texts))

    def add(self, source: str, result: Any) -> None:
        """Take in what a loader's ``_prepare_weights`` returned for ``source``, a model's id or path.

        A draft model has no part in encoder outputs, and not every rank loads it. A model has further sources where
        its parts are kept in other repositories (Ultravox).
        """
        if source == self._draft and source != self._source:
            return
        try:
            text = weights_identity(place(result), self._tokenizer)
        except Exception as error:
            _log.debug("what %.200r was loaded from cannot be described: %s", source, error)
            text = ""
        if source == self._source and not os.path.exists(source) and not self._agrees(text):
            text = ""
        self._texts.add(text)

    def _agrees(self, text: str) -> bool:
        """Weights of the commit that configuration and processors are of; a hub's branch may move while we start."""
        commit = text.removeprefix("commit:")
        if commit == text:
            return True  # described by its files
        if commit[:40] == self._commit:
            return True
        _log.warning(
            "Encoder cache: the weights of %r are those of commit %s; the configuration's commit is %s. Entries serve "
            "this run only. Start again, or pin --revision to a commit.",
            self._source,
            commit[:40],
            self._commit or "unknown",
        )
        return False


def resolved_commit(model_config: Any) -> str:
    """The commit that a model's configuration was read from; ``""`` where vLLM does not know it.

    vLLM 0.28 and later resolve a revision once, for configuration, processors and weights (huggingface_hub's
    ``ResolvedRevision``); before, transformers noted the commit in the configuration.
    """
    revision = getattr(model_config, "revision", None)
    noted = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    for commit in (getattr(revision, "resolved", None), revision, noted):
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            return str(commit)
    return ""


def place(result: Any) -> str:
    """The folder or file in what a loader's ``_prepare_weights`` returns; ``""`` where there is none on this host.

    Loaders return a path, a list of files, or a tuple that begins with one of them.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, (list, tuple)):
        folders = {os.path.dirname(str(file)) for file in first}
        first = folders.pop() if len(folders) == 1 else ""
    path = os.fspath(first) if isinstance(first, (str, os.PathLike)) else ""
    return path if os.path.exists(path) else ""


def in_advance(vllm_config: Any) -> str:
    """Weights that the configuration alone tells: a folder or file on this host, or a model of the hub at one commit.

    For a scheduler on a host without workers. A branch is only known where it was opened.
    """
    model = getattr(vllm_config, "model_config", None)
    source = str(getattr(model, "model_weights", "") or getattr(model, "model", "") or "")
    if os.path.exists(source):
        return weights_identity(source, str(getattr(model, "tokenizer", "") or ""))
    revision = getattr(model, "revision", None)
    commit = getattr(revision, "resolved", None) or revision or ""
    return f"commit:{commit}" if _COMMIT.fullmatch(commit) and "://" not in source else ""


# What this process calls a model -> a name that does not depend on the road to it.
_NAMES: dict[str, str] = {}


def remember_name(vllm_config: Any) -> None:
    """Have :func:`name_of` answer for the model of an engine that has our connector."""
    model = getattr(vllm_config, "model_config", None)
    commit = resolved_commit(model)
    name = in_advance(vllm_config) or (f"commit:{commit}" if commit else "")
    if name:
        _NAMES[str(getattr(model, "model", ""))] = name


def name_of(model_id: Any) -> Any:
    """A name for a model in content hashes, the same for its id, its snapshot's path and links; else ``model_id``."""
    return _NAMES.get(model_id, model_id) if isinstance(model_id, str) else model_id


class Claims:
    """What each process of an engine on one host says its weights are: one small file each, in the shared folder.

    Every worker writes before it serves, so that whoever reads at the first request sees them all. Ranks that opened
    different weights, and schedulers, find out here.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "weights")
        self._name = os.urandom(8).hex()
        self._mine: str | None = None

    def write(self, weights: str) -> None:
        """Say, or correct, what this process has; ``""`` is "cannot be told". Never raises."""
        self._mine = weights
        path = os.path.join(self._folder, self._name)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(f"{path}.new", flags, 0o600), "w", encoding="utf-8") as file:
                file.write(weights)
            os.rename(f"{path}.new", path)
        except OSError as error:
            _log.debug("could not tell the other processes of this engine whose weights are loaded: %s", error)

    def any(self) -> bool:
        """Whether any process has said something."""
        return bool(self._read())

    def agreed(self) -> str:
        """What all say; ``""`` when nobody knows, or two differ."""
        said = self._read()
        return said.pop() if len(said) == 1 else ""

    def _read(self) -> set[str]:
        said = set() if self._mine is None else {self._mine}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                if not name.endswith(".new"):
                    said.add(_text_of(os.path.join(self._folder, name)))
        return said


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def settle(identity: ModelIdentity, claims: Claims) -> ModelIdentity:
    """``identity`` with the weights that all processes agree on, asked when the first item comes."""
    settled = replace(identity, weights=claims.agreed() or identity.weights)
    if settled.weights_unknown and not settled.run_unknown:
        _log.warning(
            "Encoder cache: the weights of %r cannot be told from others (vLLM's loaders opened no file or downloaded "
            "snapshot on this host, or not every process the same one), so entries serve this run only. Set "
            "ec_namespace to a text that changes with the weights to keep them over restarts.",
            identity.name,
        )
    return settled


def within_run(config: ECConfig, identity: ModelIdentity) -> ECConfig:
    """``config``, without what outlives the run where the run could not be told from others; says so once."""
    if config.namespace or not identity.run_unknown:
        return config
    if config.disk_path or config.has_remote:
        _log.warning(
            "Encoder cache: neither the weights of %r nor this run can be told from others, so disk and remote are "
            "not used. Set ec_namespace to a text that changes with the weights, or engine_id in --ec-transfer-config.",
            identity.name,
        )
    return replace(config, disk_path="", remote_url="", remote_options={})


def weights_identity(path: str, tokenizer: str = "") -> str:
    """Digest of the weights in the folder or file ``path``; ``""`` when there are none.

    A snapshot of the hub is named by its commit, which is the same on every host, and by what of it was opened. Another
    folder is described by its weight files and by the settings of its image, video and sound processors; a single file
    with the vision side's files beside it, and the processors of the ``tokenizer`` folder. The road to them (links,
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
