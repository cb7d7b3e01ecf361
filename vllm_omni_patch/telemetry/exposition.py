# SPDX-License-Identifier: Apache-2.0
"""The collector that shows the numbers of all processes of an engine on vLLM's ``/metrics``.

Counters are summed over processes, those that have ended included, so that a sum never falls. Where processes do the
same thing, as the ranks of an engine do, one of them counts it. A gauge is shown as it is; where several living
processes have set it with the same labels, each is shown with its process id in a further label ``pid`` (and, on
several hosts, ``host``), also where the values are equal: two engines that hold as much each hold twice that together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni_patch import ledger, metrics
from vllm_omni_patch.metrics import PREFIX, Key

INFO_HELP = "State of each target of each asked-for patch: pending, applied, native, skipped or failed."

_registries: weakref.WeakKeyDictionary[Any, Collector] = weakref.WeakKeyDictionary()


def register(registry: Any, on_scrape: Callable[[], None] | None = None) -> None:
    """Put one collector of ours on a ``CollectorRegistry``, once. ``on_scrape`` is called whenever it is read."""
    if registry not in _registries:
        collector = Collector(on_scrape)
        registry.register(collector)
        _registries[registry] = collector


def unregister(registry: Any) -> None:
    """Take our collector from a registry."""
    collector = _registries.pop(registry, None)
    if collector is not None:
        registry.unregister(collector)


class Collector:
    """Reads every process's snapshot at each scrape. Never raises: a scrape without our numbers beats none."""

    def __init__(self, on_scrape: Callable[[], None] | None = None) -> None:
        self._on_scrape = on_scrape

    def describe(self) -> list[Any]:
        """Nothing: a registry would otherwise ask for all numbers to learn their names."""
        return []

    def collect(self) -> Iterator[Any]:
        try:
            if self._on_scrape is not None:
                self._on_scrape()
            found = list(families(metrics.read_snapshots()))
        except Exception as error:
            ledger.logger("metrics").debug("could not read the numbers of all processes: %s", error)
            return iter(())
        return iter(found)


def families(snapshots: list[dict[str, Any]]) -> Iterator[Any]:
    """``prometheus_client`` metric families for the snapshots of one engine's processes."""
    from prometheus_client.core import Metric

    kinds: dict[str, tuple[str, str]] = {}
    for one in snapshots:
        for name, (kind, text) in one["families"].items():
            kinds.setdefault(name, (kind, text))
    sums, gauges = _merge(snapshots, kinds)
    for name, (kind, text) in sorted(kinds.items()):
        family = Metric(PREFIX + (name.removesuffix("_total") if kind == "counter" else name), text, kind)
        for (of, pairs), value in sorted((sums if kind == "counter" else gauges).items()):
            if of == name:
                family.add_sample(PREFIX + name, dict(pairs), value)
        yield family
    info = Metric(f"{PREFIX}info", INFO_HELP, "gauge")
    for labels in states(snapshots):
        info.add_sample(f"{PREFIX}info", labels, 1.0)
    yield info


def _merge(
    snapshots: list[dict[str, Any]], kinds: dict[str, tuple[str, str]]
) -> tuple[dict[Key, float], dict[Key, float]]:
    sums: dict[Key, float] = {}
    seen: dict[Key, dict[tuple[str, str], float]] = {}
    for one in snapshots:
        alive = metrics.is_alive(one)
        for name, pairs, value in one["values"]:
            key = (name, tuple((str(k), str(v)) for k, v in pairs))
            if kinds[name][0] == "counter":
                sums[key] = sums.get(key, 0.0) + value
            elif alive and not math.isnan(value):
                seen.setdefault(key, {})[(one["host"], str(one["pid"]))] = value
    gauges: dict[Key, float] = {}
    for (name, labels), by_process in seen.items():
        hosts = {host for host, _ in by_process}
        for (host, pid), value in by_process.items():
            where = (("host", host),) if len(hosts) > 1 else ()
            more = (("pid", pid), *where) if len(by_process) > 1 else ()
            gauges[(name, (*labels, *more))] = value
    return sums, gauges


def states(snapshots: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Labels of ``vllm_omni_patch_info``, one row per target and state that some living process reports.

    ``pending`` is left out where another process has settled the target: that process just never imports it.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for one in snapshots:
        if metrics.is_alive(one):
            for patch, target, state in one["states"]:
                found.setdefault((patch, target), {}).setdefault(state, one["vllm_version"])
    rows = []
    for (patch, target), by_state in sorted(found.items()):
        for state, version in sorted(by_state.items()):
            if state != "pending" or len(by_state) == 1:
                rows.append({"patch": patch, "target": target, "state": state, "vllm_version": version})
    return rows
