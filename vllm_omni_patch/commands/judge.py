# SPDX-License-Identifier: Apache-2.0
"""What is wrong, judged from what ``status`` has gathered: problems, and processes of one engine that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_omni_patch import flags
from vllm_omni_patch.loading import discover
from vllm_omni_patch.loading.discover import Choice, Found

# What every process of an engine should agree on, and how it is called in a sentence.
COMMON = {
    "package": "version of vllm-omni-patch",
    "vllm_version": "version of vLLM",
    "flag": "value of VLLM_OMNI_PATCH",
    "patches": "list of asked-for patches",
}


def problems(facts: dict[str, Any], choice: Choice, found: Sequence[Found]) -> list[str]:
    """What keeps asked-for patches from working, a sentence each. ``facts``: as :func:`.status.gather` returns them."""
    names = [f"{flags.SWITCH.name}: {discover.unknown_name(name, found)}" for name in choice.unknown]
    names += [f"patch {one.name}: {one.error}" for one in found if one.name in choice.names and one.patch is None]
    return [*names, *_installation(facts), *_failures(facts["processes"])]


def _installation(facts: dict[str, Any]) -> list[str]:
    told, on, paths = [], facts["flag"]["on"], facts["activation_paths"]
    if on and not paths["startup"] and (paths["filtered"] or not paths["entry_point"]):
        why = "is excluded by VLLM_PLUGINS" if paths["filtered"] else "is not visible"
        told.append(
            "No activation path is open: no startup file is read from site-packages, and the plugin entry point "
            f"{why}. To fix: reinstall with pip into the environment of vLLM, or add vllm_omni_patch to VLLM_PLUGINS."
        )
    if on and facts["installed"]["vllm"] is None:
        told.append("vLLM is not installed in this environment. To fix: install this package beside it.")
    # The same release twice is an editable install and its own build folder.
    copies = facts["package"]["copies"]
    if len({one["version"] for one in copies}) > 1:
        where = ", ".join(f"{one['version']} in {one['location']}" for one in copies)
        told.append(f"Several copies are installed ({where}); the first one on the path is used. Remove the others.")
    return told


def _failures(processes: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"process {one['pid']} ({one['role']}): {entry['patch']}: {entry['target'] or 'the patch as a whole'} failed: "
        f"{entry['reason']}"
        for one in processes
        for entry in one["entries"]
        if entry["state"] == "failed"
    ]


def mismatches(processes: Sequence[dict[str, Any]]) -> list[str]:
    """Where processes of one engine differ in what is patched, a sentence each; empty when all agree.

    Processes belong together when they share a run folder: the first one makes it, and its children inherit the name. A
    target that one process has applied and another never imported (``pending``) is no difference.
    """
    told: list[str] = []
    for run in dict.fromkeys(one["process"].get("run", "") for one in processes):
        together = [one for one in processes if one["process"].get("run", "") == run]
        told += _facts(together)
        told += _states(together)
        told += _numbers(together)
        told += _missing(together)
    return told


def _numbers(together: list[dict[str, Any]]) -> list[str]:
    """Ray workers whose numbers do not come to the page of their engine."""
    workers = [one for one in together if one["role"] == "ray worker"]
    far = [one for one in workers if one["process"].get("run") and one["process"].get("run_reachable") is False]
    told = []
    if far:
        told.append(
            f"numbers of {_who(far)} are not on /metrics: the run folder of this engine is on another host. To fix: "
            f"set {flags.RUN_DIR.name} on all nodes to a new folder on a file system that they share."
        )
    if workers and len(workers) == len(together) and not any(_drives(one) for one in workers):
        told.append(
            f"{_who(workers)}: no engine shares the run folder, so these numbers are on no /metrics. To fix: do not "
            f"set {flags.RUN_DIR.name} in the environment of Ray's nodes, and start the engine with "
            f"{flags.SWITCH.name} set."
        )
    return told


def _missing(together: list[dict[str, Any]]) -> list[str]:
    """Workers of an engine that have written no ledger here."""
    to_fix = (
        "they have not started yet, are not patched, or write elsewhere. To fix: install the same release on every "
        f"node, set {flags.SWITCH.name} to no other value there, and let {flags.REPORT_DIR.name} name a folder that "
        "all nodes share."
    )
    engines = [one for one in together if one["role"] == "engine core" and one["process"].get("ray")]
    if engines and not any(one["role"] == "ray worker" for one in together):
        return [f"{_who(engines)}: no Ray worker of this engine has written a ledger here; {to_fix}"]
    sizes = [one["process"]["world_size"] for one in together if "world_size" in one["process"]]
    ranks = {one["process"].get("rank") for one in together}
    missing = [str(rank) for rank in range(max(sizes, default=0)) if rank not in ranks]
    # Only where one says that it is a worker on Ray: elsewhere all inherit one environment.
    if missing and any(one["role"] == "ray worker" for one in together):
        return [f"rank {', '.join(missing)} of {max(sizes)} has written no ledger here; {to_fix}"]
    return []


def _drives(one: dict[str, Any]) -> bool:
    """Whether this process made its run folder: Ray Serve configures the engine inside a worker."""
    return f"-{one['pid']}-" in one["process"]["run"]


def _facts(processes: list[dict[str, Any]]) -> list[str]:
    told = []
    for key, words in COMMON.items():
        by_value: dict[str, list[dict[str, Any]]] = {}
        for one in processes:
            value = one["process"].get(key)
            if value is not None:
                by_value.setdefault(_plain(value), []).append(one)
        if len(by_value) > 1:
            parts = [f"{value!r} in {_who(ones)}" for value, ones in by_value.items()]
            told.append(f"the {words} differs: {'; '.join(parts)}")
    return told


def _states(processes: list[dict[str, Any]]) -> list[str]:
    told = []
    by_target: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for one in processes:
        for entry in one["entries"]:
            if entry["state"] != "pending":
                states = by_target.setdefault((entry["patch"], entry["target"]), {})
                states.setdefault(entry["state"], []).append(one)
    for (patch, target), states in by_target.items():
        if len(states) > 1:
            parts = [f"{state} in {_who(ones)}" for state, ones in states.items()]
            told.append(f"{patch}: {target or 'the patch as a whole'} is {', and '.join(parts)}")
    return told


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _who(processes: Iterable[dict[str, Any]]) -> str:
    return ", ".join(f"{one['role']} {one['pid']}" for one in processes)
