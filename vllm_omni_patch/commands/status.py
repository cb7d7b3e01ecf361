# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-omni-patch status`` shows: this environment, and from the ledgers the processes of an engine.

Reads metadata and text. Neither vLLM nor torch is imported, and the flag may be on or off.
"""

from __future__ import annotations

import json
import os
import site
import sys
from dataclasses import asdict
from typing import Any

import vllm_omni_patch
from vllm_omni_patch import flags
from vllm_omni_patch.code import installed
from vllm_omni_patch.commands import judge, outlook
from vllm_omni_patch.loading import discover
from vllm_omni_patch.telemetry import processes

PACKAGES = ("vllm", "vllm_omni", "vllm_neuron", "lmcache")
STARTUP_FILE = "vllm_omni_patch.pth"
PLUGIN = "vllm_omni_patch"


def gather(report_dir: str | None = None) -> dict[str, Any]:
    """Everything that ``status`` shows, as plain data.

    ``targets``: what would happen to each target here; ``processes``: the ledgers in ``report_dir`` (default: the
    folder in ``VLLM_OMNI_PATCH_REPORT_DIR``); ``mismatches``: where processes of one engine differ; ``problems``:
    what keeps asked-for patches from working.
    """
    found = discover.find()
    value = os.environ.get(flags.SWITCH.name, "")
    choice = discover.choose(value, found)
    here = {name: installed.find(name) for name in PACKAGES}
    written = ledgers(report_dir or _report_dir())
    facts = {
        "package": {
            "version": vllm_omni_patch.__version__,
            "location": os.path.dirname(os.path.abspath(vllm_omni_patch.__file__)),
            "python": sys.version.split()[0],
            "copies": copies(),
        },
        "flag": {
            "name": flags.SWITCH.name,
            "value": value,
            "on": bool(choice.names or choice.unknown),
            "patches": list(choice.names),
            "unknown": list(choice.unknown),
        },
        "activation_paths": activation_paths(),
        "installed": {name: package.as_json() if package else None for name, package in here.items()},
        "targets": [asdict(row) for row in outlook.targets(found, choice)],
        "processes": written,
        "mismatches": judge.mismatches(written),
    }
    return {**facts, "problems": judge.problems(facts, choice, found)}


def activation_paths() -> dict[str, Any]:
    """The two ways in: the startup file that Python reads, and the plugin entry point that vLLM sees."""
    from importlib.metadata import entry_points

    read = {os.path.realpath(folder) for folder in _site_folders()}
    reads = sys.version_info < (3, 18)  # from there on Python ignores such a line in a .pth file (PEP 829)
    files = []
    for folder in dict.fromkeys(os.path.abspath(p or ".") for p in [*sys.path, *_site_folders()]):
        path = os.path.join(folder, STARTUP_FILE)
        if os.path.isfile(path):
            files.append({"path": path, "read": reads and os.path.realpath(folder) in read})
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        "startup_files": files,
        "startup": any(one["read"] for one in files),
        "entry_point": bool(points),
        "vllm_plugins": allowed,
        "filtered": allowed is not None and PLUGIN not in allowed.split(","),
    }


def copies() -> list[dict[str, str]]:
    """Installed copies of this package; more than one means that an old one is left somewhere on the path."""
    from importlib import metadata

    found: dict[str, str] = {}
    for one in metadata.distributions(name=discover.OWN_DISTRIBUTION):
        found.setdefault(os.path.realpath(str(one.locate_file(""))), one.version)
    return [{"location": where, "version": version} for where, version in found.items()]


def ledgers(folder: str) -> list[dict[str, Any]]:
    """The ledgers in a report folder, oldest process first. A file that cannot be read is left out."""
    found = []
    for name in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else []:
        if not (name.startswith("ledger-") and name.endswith(".json")):
            continue
        try:
            with open(os.path.join(folder, name)) as file:
                one = json.load(file)
            one = {"role": "?", "host": "", "process": {}, **one, "file": name}
            one["alive"] = processes.is_alive(str(one["host"]), int(one["pid"]), int(one.get("born", 0)))
            found.append({**one, "entries": list(one["entries"])})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda one: (one.get("started", 0), one["pid"]))


def _report_dir() -> str:
    try:
        return str(flags.read(flags.REPORT_DIR))
    except flags.FlagError:
        return ""


def _site_folders() -> list[str]:
    folders = site.getsitepackages()
    return [*folders, site.getusersitepackages()] if site.ENABLE_USER_SITE else folders
