# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-omni-patch status`` knows: this environment, and from the ledgers the processes of an engine.

Reads metadata and text. Neither vLLM nor torch is imported, and the flag may be on or off.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Sequence
from typing import Any

from vllm_omni_patch import __version__, flags
from vllm_omni_patch.code import installed
from vllm_omni_patch.commands import mismatches
from vllm_omni_patch.loading import discover
from vllm_omni_patch.loading.discover import Choice, Found
from vllm_omni_patch.matrix import forecast
from vllm_omni_patch.patch import Patch, Target
from vllm_omni_patch.telemetry import processes

PACKAGES = ("vllm", "vllm_omni", "vllm_neuron", "lmcache")
STARTUP_FILES = ("vllm_omni_patch.pth", "vllm_omni_patch.start")
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
    accounts = ledgers(report_dir or _report_dir())
    about = {
        "package": {
            "version": __version__,
            "location": os.path.dirname(os.path.abspath(__file__)),
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
        "roads": roads(),
        "installed": {name: package.as_json() if package else None for name, package in here.items()},
        "targets": _targets(found, choice),
        "processes": accounts,
        "mismatches": mismatches.find(accounts),
    }
    forecast.forget()
    return {**about, "problems": _problems(about, choice, found)}


def _report_dir() -> str:
    try:
        return str(flags.read(flags.REPORT_DIR))
    except flags.FlagError:
        return ""


# -- this environment


def _targets(found: Sequence[Found], choice: Choice) -> list[dict[str, Any]]:
    """Every target; a group that lacks one because another patch has it is off, as in the loader."""
    by_patch = [(one, _rows(one, one.name in choice.names)) for one in found]
    rows = _claimed([row for _, rows in by_patch for row in rows])
    for one, mine in by_patch:
        if one.patch is not None:
            _by_groups(one.patch.targets, mine)
    return rows


def _rows(one: Found, asked: bool) -> list[dict[str, Any]]:
    if one.patch is None:
        return [_row(one.name, "", asked, "failed", "failed", one.error, one.distribution, None)]
    return [_target_row(one.patch, target, asked) for target in one.patch.targets]


def _by_groups(targets: Sequence[Target], rows: list[dict[str, Any]]) -> None:
    """All targets of a group or none."""
    off: dict[str, str] = {}
    for target, row in zip(targets, rows, strict=True):
        if target.group and row["would_be"] != "applied" and not (target.optional and row["verdict"] == "absent"):
            off.setdefault(target.group, f"{target.name}: {row['reason']}")
    for target, row in zip(targets, rows, strict=True):
        if target.group in off and row["would_be"] == "applied":
            reason = f"all targets of group {target.group!r} or none, and one cannot be applied: {off[target.group]}"
            row.update(would_be="skipped", reason=reason)


def _claimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first patch that is asked for and names an attribute has it; the loader goes through them in this order."""
    owners: dict[str, str] = {}
    for row in rows:
        if not row["asked"] or not row["target"]:
            continue
        first = owners.setdefault(row["target"], row["patch"])
        if first != row["patch"] and row["would_be"] == "applied":
            row.update(would_be="skipped", reason=discover.claimed_by(first))
    return rows


def _target_row(patch: Patch, target: Target, asked: bool) -> dict[str, Any]:
    package = installed.package_of(target.distribution, target.module)
    found = installed.find(package) if package not in _cache else _cache[package]
    _cache[package] = found
    if found is None:
        reason = f"{target.distribution} is not installed"
        return _row(patch.name, target.name, asked, "absent", "skipped", reason, target.distribution, None)
    try:
        wanted = target.is_wanted()
        decision = forecast.decide(patch, target, found.release)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return _row(patch.name, target.name, asked, "unknown", "skipped", reason, target.distribution, found.release)
    would = "applied" if decision.apply else "native" if decision.verdict == "native" else "skipped"
    reason = decision.reason if wanted or target.setting is None else f"only with {target.setting.name}=1"
    row = _row(
        patch.name,
        target.name,
        asked and wanted,
        decision.verdict,
        would,
        reason,
        target.distribution,
        found.release,
    )
    proof = forecast.evidence(patch, target, found.release) if decision.verdict == "applies" else None
    proved = {"evidence": proof.evidence if proof else None, "devices": list(proof.devices) if proof else []}
    return {**row, **proved, "like": decision.like, "optional": target.optional}


_cache: dict[str, installed.Package | None] = {}


def _row(
    patch: str, target: str, asked: bool, verdict: str, would: str, reason: str, distribution: str, release: str | None
) -> dict[str, Any]:
    return {
        "patch": patch,
        "target": target,
        "asked": asked,
        "distribution": distribution,
        "release": release,
        "verdict": verdict,
        "would_be": would,
        "reason": reason,
    }


def roads() -> dict[str, Any]:
    """The two ways in: startup files that Python reads, and the plugin entry point that vLLM sees."""
    from importlib.metadata import entry_points

    read = {os.path.realpath(folder) for folder in _site_folders()}
    files = []
    for folder in dict.fromkeys(os.path.abspath(p or ".") for p in [*sys.path, *_site_folders()]):
        for name in STARTUP_FILES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                used = os.path.realpath(folder) in read and name.endswith(_suffix())
                files.append({"path": path, "read": used})
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        "startup_files": files,
        "startup": any(one["read"] for one in files),
        "entry_point": bool(points),
        "vllm_plugins": allowed,
        "filtered": allowed is not None and PLUGIN not in allowed.split(","),
    }


def _suffix() -> str:
    return ".start" if sys.version_info >= (3, 15) else ".pth"


def _site_folders() -> list[str]:
    folders = site.getsitepackages()
    return [*folders, site.getusersitepackages()] if site.ENABLE_USER_SITE else folders


def copies() -> list[dict[str, str]]:
    """Installed copies of this package; more than one means that an old one is left somewhere on the path."""
    from importlib import metadata

    found: dict[str, str] = {}
    for one in metadata.distributions(name=discover.OWN_DISTRIBUTION):
        found.setdefault(os.path.realpath(str(one.locate_file(""))), one.version)
    return [{"location": where, "version": version} for where, version in found.items()]


def _problems(about: dict[str, Any], choice: Choice, found: Sequence[Found]) -> list[str]:
    told = [f"{flags.SWITCH.name}: {discover.unknown_name(name, found)}" for name in choice.unknown]
    told += [f"patch {one.name}: {one.error}" for one in found if one.name in choice.names and one.patch is None]
    ways = about["roads"]
    plugin = ways["entry_point"] and not ways["filtered"]
    if about["flag"]["on"] and not ways["startup"] and not plugin:
        why = "is filtered out by VLLM_PLUGINS" if ways["filtered"] else "is not visible"
        told.append(
            f"neither road is open: no startup file is read from site-packages, and the plugin entry point {why}. "
            "Reinstall with pip into the environment of vLLM, or add vllm_omni_patch to VLLM_PLUGINS."
        )
    if about["flag"]["on"] and about["installed"]["vllm"] is None:
        told.append("vLLM is not installed in this environment; install this package beside it.")
    # The same release twice is an editable install and its own build folder.
    if len({one["version"] for one in about["package"]["copies"]}) > 1:
        where = ", ".join(f"{one['version']} in {one['location']}" for one in about["package"]["copies"])
        told.append(f"several copies are installed ({where}); the first one on the path is used. Remove the others.")
    for process in about["processes"]:
        for entry in process["entries"]:
            if entry["state"] == "failed":
                what = entry["target"] or "the patch as a whole"
                told.append(
                    f"process {process['pid']} ({process['role']}): {entry['patch']}: {what} failed: {entry['reason']}"
                )
    return told


# -- ledgers


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
