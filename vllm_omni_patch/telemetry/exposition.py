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

from vllm_omni_patch.telemetry import log_lines, reading, states
from vllm_omni_patch.telemetry.number_file import Key, Kind
from vllm_omni_patch.telemetry.reading import Process

PREFIX = "vllm_omni_patch_"

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
    """Reads the numbers of every process at each scrape. Never raises: a scrape without our numbers beats none."""

    def __init__(self, on_scrape: Callable[[], None] | None = None) -> None:
        self._on_scrape = on_scrape

    def describe(self) -> list[Any]:
        """Nothing: a registry would otherwise ask for all numbers to learn their names."""
        return []

    def collect(self) -> Iterator[Any]:
        try:
            if self._on_scrape is not None:
                self._on_scrape()
            states.update()
            return iter(list(families(reading.all_processes())))
        except Exception as error:
            log_lines.logger("metrics").debug("could not read the numbers of all processes: %s", error)
            return iter(())


def families(processes: list[Process]) -> Iterator[Any]:
    """``prometheus_client`` metric families for the processes of one engine."""
    from prometheus_client.core import Metric

    about: dict[str, tuple[Kind, str]] = {}
    for process in processes:
        for (name, _), number in process.numbers.items():
            about.setdefault(name, (number.kind, number.help))
    samples = sorted({**_sums(processes), **_gauges(processes), **_states(processes)}.items())
    for name, (kind, text) in sorted(about.items()):
        family = Metric(PREFIX + (name.removesuffix("_total") if kind == "counter" else name), text, kind)
        for (of, labels), value in samples:
            if of == name:
                family.add_sample(PREFIX + name, dict(labels), value)
        yield family


def _sums(processes: list[Process]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for process in processes:
        for key, number in process.numbers.items():
            if number.kind == "counter":
                sums[key] = sums.get(key, 0.0) + number.value
    return sums


def _gauges(processes: list[Process]) -> dict[Key, float]:
    """Gauges that living processes know, told apart where several know the same one."""
    known: dict[Key, dict[tuple[str, str], float]] = {}
    for process in processes:
        for key, number in process.numbers.items():
            if process.alive and number.kind == "gauge" and key[0] != states.NAME and not math.isnan(number.value):
                known.setdefault(key, {})[(process.host, str(process.pid))] = number.value
    gauges: dict[Key, float] = {}
    for (name, labels), by_process in known.items():
        hosts = {host for host, _ in by_process}
        for (host, pid), value in by_process.items():
            where = (("host", host),) if len(hosts) > 1 else ()
            more = (("pid", pid), *where) if len(by_process) > 1 else ()
            gauges[(name, (*labels, *more))] = value
    return gauges


def _states(processes: list[Process]) -> dict[Key, float]:
    """Each state of a target that some living process reports, once.

    ``pending`` is left out where another process has settled the target: that process just never imports it.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for process in processes:
        for (name, labels), number in process.numbers.items():
            if process.alive and name == states.NAME and not math.isnan(number.value):
                by_name = dict(labels)
                patch, target, state, version = (by_name.get(label, "") for label in states.LABELS)
                found.setdefault((patch, target), {}).setdefault(state, version)
    return {
        (states.NAME, states.labels(patch, target, state, version)): 1.0
        for (patch, target), by_state in found.items()
        for state, version in by_state.items()
        if state != "pending" or len(by_state) == 1
    }
