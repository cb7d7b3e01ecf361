# SPDX-License-Identifier: Apache-2.0
"""Where the processes of one engine differ in what is patched, from their ledgers.

Processes belong together when they share a run folder: the first one makes it, and its children inherit the name. A
target that one process has applied and another never imported (``pending``) is no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# What every process of an engine should agree on, and how it is called in a sentence.
COMMON = {
    "package": "version of vllm-omni-patch",
    "vllm_version": "version of vLLM",
    "flag": "value of VLLM_OMNI_PATCH",
    "patches": "list of asked-for patches",
}


def find(processes: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each difference; empty when all agree."""
    told: list[str] = []
    for run in dict.fromkeys(one["process"].get("run", "") for one in processes):
        together = [one for one in processes if one["process"].get("run", "") == run]
        told += _facts(together)
        told += _states(together)
    return told


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
