# SPDX-License-Identifier: Apache-2.0
"""What users see: one log block per load, ``model-local-kv-<pid>.json``, gauges, and the figures for the KV budget.

The block has the shape of vLLM-Omni 0.30's, so one search finds both. Nothing here changes a budget.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_omni_patch import ledger, metrics

from .charge import Engine, budget_path, charge, resolve_residency
from .collect import Collection
from .observe.reconcile import Row
from .observe.suspects import Suspect

SCHEMA = 1
FACT = "model_local_kv"
HEADLINE = "Model-local KV (outside the paged manager)"

_STATES = (
    ("charged", "already charged to the KV budget"),
    ("uncharged", "allocated and not charged to the KV budget"),
    ("pending", "pending, allocated while serving"),
    ("unknown", "unknown whether charged"),
)

logger = ledger.logger("model_local_kv")


@dataclass
class Load:
    """One ``load_model`` of one runner. ``status``: ``declared``, ``empty`` (declarers hold nothing), ``none`` (no
    declarer) or ``failed`` (the collection itself raised: ``error``). ``native_report``: vLLM-Omni's own report ran.

    ``dp_rank``: rank among data-parallel engines; ``None`` where the engine is the only one.
    """

    runner: str
    model: str
    where: str
    max_num_seqs: int
    engine: Engine
    collection: Collection = field(default_factory=Collection)
    native_report: bool = False
    dp_rank: int | None = None
    error: str = ""

    @property
    def status(self) -> Literal["declared", "empty", "none", "failed"]:
        """See the class."""
        if self.error:
            return "failed"
        if self.collection.entries or self.collection.failed:
            return "declared"
        return "empty" if self.collection.declarers else "none"

    @property
    def native_lines(self) -> bool:
        """vLLM-Omni's report printed something: it is silent when nothing is declared natively."""
        stock = any(not entry.corrected for entry in self.collection.entries) or bool(self.collection.native)
        return self.native_report and stock

    def rows(self) -> list[dict[str, Any]]:
        """The entries as plain data, each with ``charge`` and ``charge_reason``."""
        path = budget_path(self.engine)
        result = []
        for entry in self.collection.entries:
            row = asdict(entry)
            del row["owner_id"]
            row["residency"] = resolve_residency(entry.residency, entry.scope)
            row["charge"], row["charge_reason"] = charge(row["residency"], path)
            result.append(row)
        return result


def log(load: Load) -> None:
    """Print the block, one line for each of the other outcomes, and a warning per declarer that failed."""
    found = load.collection
    if load.status == "failed":
        logger.warning(
            "%s: the collection failed (%s), so what %s holds is unknown. The load is not affected.",
            HEADLINE,
            load.error,
            load.model,
        )
        return
    if load.status == "none":
        logger.info("%s: none of the %d modules of %s declares any", HEADLINE, found.modules, load.model)
        return
    if load.status == "empty":
        logger.info("%s: %d declarer(s) in %s hold nothing", HEADLINE, found.declarers, load.model)
    rows = load.rows()
    if load.native_lines:
        _log_differences(load)
    elif rows:
        logger.info(
            "%s: %s across %d declaration(s) at max_num_seqs=%d (%s)",
            HEADLINE,
            mib(sum(row["declared_peak"] for row in rows)),
            len(rows),
            load.max_num_seqs,
            load.where,
        )
        for row in rows:
            logger.info("  %s", line(row))
    for state, words in _STATES:
        part = [row["declared_peak"] for row in rows if row["charge"] == state]
        if part:
            logger.info("  %s: %s", words, mib(sum(part)))
    for inert in found.inert:
        logger.info("  %s.%s: nothing held: %s", inert.owner, inert.name, inert.reason)
    for failed in found.failed:
        logger.warning(
            "  %s: model_local_kv_specs() of %s failed (%s), so its bytes are unknown. The load is not affected.",
            failed.owner,
            failed.owner_class,
            failed.reason,
        )


def _log_differences(load: Load) -> None:
    """vLLM-Omni has logged its own lines; log only the figures that differ from them."""
    for row in load.rows():
        stock = load.collection.native.get((row["owner"], row["name"]))
        if row["corrected"] and stock != row["declared_peak"]:
            before = "not in the lines above" if stock is None else f"{mib(stock)} above"
            logger.info("  %s; %s", line(row), before)
    corrected = {entry.owner for entry in load.collection.entries if entry.corrected}
    asked = {(entry.owner, entry.name) for entry in load.collection.entries}
    for (owner, name), stock in load.collection.native.items():
        if (owner, name) not in asked and (owner in corrected or not load.collection.entries):
            logger.info("  %s.%s: %s above, and nothing is held on this path", owner, name, mib(stock))


def line(row: dict[str, Any]) -> str:
    """One entry in one line."""
    driver = row["row_driver"]
    if driver == "fixed":
        driver = f"fixed({row['rows']}; {row['rows_reason']})"
    storage = ""
    if row["storage_peak"] is not None and row["storage_peak"] != row["declared_peak"]:
        storage = f", storage up to {mib(row['storage_peak'])}"
    return (
        f"{row['owner']}.{row['name']}: {mib(row['declared_peak'])} ({row['rows']} rows from {driver} x "
        f"{mib(row['bytes_per_row'])}/row, scope={row['scope']}, {row['positions']} positions from "
        f"{row['capacity_source']}{storage}; {row['charge']}: {row['charge_reason']})"
    )


def figures(loads: Sequence[Load]) -> dict[str, Any]:
    """What other patches read under the fact ``model_local_kv``. Bytes; ``None`` where the sum would be a floor.

    ``declared_bytes``: all of it; ``None`` when a declarer failed. ``resident_bytes``: in place when the budget is
    made, charged or not; ``uncharged_bytes`` is the part of it that no term of the budget contains. ``pending_bytes``:
    allocated later. ``pending_storage_bytes``: the same with what views can pin. The last four are ``None`` also when
    an entry's state is unknown; ``unknown_bytes`` are the bytes of such entries.
    """
    rows = [row for load in loads for row in load.rows()]
    failed = sum(len(load.collection.failed) + bool(load.error) for load in loads)
    unknown = sum(row["declared_peak"] for row in rows if row["charge"] == "unknown")
    pending = [row for row in rows if row["charge"] == "pending"]
    complete = not unknown and not failed

    def in_state(*states: str) -> int | None:
        return sum(row["declared_peak"] for row in rows if row["charge"] in states) if complete else None

    return {
        "declared_bytes": None if failed else sum(row["declared_peak"] for row in rows),
        "resident_bytes": in_state("charged", "uncharged"),
        "uncharged_bytes": in_state("uncharged"),
        "pending_bytes": in_state("pending"),
        "pending_storage_bytes": (
            sum(max(row["declared_peak"], row["storage_peak"] or 0) for row in pending) if complete else None
        ),
        "unknown_bytes": unknown,
        "failed": failed,
        "entries": rows,
    }


def gauges(loads: Sequence[Load], observed: Sequence[Row] = ()) -> None:
    """Set ``model_local_kv_bytes``. A figure that is not known has no sample."""
    help = "Attention KV outside the paged manager, in bytes."
    engine: dict[str, object] = {}
    for load in loads:
        engine = {} if load.dp_rank is None else {"dp_rank": load.dp_rank}
        for entry in load.collection.entries:
            sizes = {
                "per_row": entry.bytes_per_row,
                "declared_peak": entry.declared_peak,
                "storage_peak": entry.storage_peak,
            }
            for kind, value in sizes.items():
                if value is not None:
                    labels = {"owner": entry.owner, "name": entry.name, "kind": kind, **engine}
                    metrics.set_gauge("model_local_kv_bytes", help, value, **labels)
    for row in observed:
        metrics.set_gauge(
            "model_local_kv_bytes",
            help,
            row.observed_peak,
            owner=row.owner,
            name="+".join(row.names) or "undeclared",
            kind="observed_peak",
            **engine,
        )


def document(
    loads: Sequence[Load],
    observed: Sequence[Row] | None = None,
    suspects: Sequence[Suspect] | None = None,
    cost: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The JSON report. ``observed`` and ``suspects`` are ``null`` when nothing was looked at, which is not "none"."""
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "time": time.time(),
        "loads": [_load(load) for load in loads],
        "figures": {key: value for key, value in figures(loads).items() if key != "entries"},
        "observed": None if observed is None else [asdict(row) for row in observed],
        "suspects": None if suspects is None else [_suspect(suspect) for suspect in suspects],
        "observation": cost,
    }


def _load(load: Load) -> dict[str, Any]:
    return {
        "runner": load.runner,
        "model": load.model,
        "where": load.where,
        "dp_rank": load.dp_rank,
        "status": load.status,
        "error": load.error,
        "max_num_seqs": load.max_num_seqs,
        "budget_path": budget_path(load.engine),
        "native_report": load.native_report,
        "modules": None if load.error else load.collection.modules,
        "declarers": None if load.error else load.collection.declarers,
        "entries": load.rows(),
        "inert": [asdict(inert) for inert in load.collection.inert],
        "failed": [asdict(failed) for failed in load.collection.failed],
    }


def _suspect(suspect: Suspect) -> dict[str, Any]:
    row = asdict(suspect)
    del row["storages"]
    return {**row, "storage_bytes": suspect.storage_bytes}


def mib(size: int | None) -> str:
    """Bytes as MiB with two decimals."""
    if size is None:
        return "an unknown size"
    return f"{size / (1 << 20):.2f} MiB"
