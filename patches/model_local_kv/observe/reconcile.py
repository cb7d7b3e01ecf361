# SPDX-License-Identifier: Apache-2.0
"""Compare what is declared with what was seen. Pure: entries and peaks in, rows out.

Caches of one owner with one ``(kv_heads, head_dim)`` are one group: a retained cache and its working copy cannot be
told apart from outside, so their declarations are compared together. The dtype is left out of the match on purpose: a
declaration with the wrong dtype is a wrong declaration, not another cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..collect import Entry
from ..specs import Residency
from .observer import Origin, Peak

Status = Literal["matched", "over-declared", "under-declared", "never seen", "not observable", "undeclared"]


@dataclass(frozen=True)
class Group:
    """Whose a cache is. ``names`` are the declarations it belongs to; none for an undeclared one."""

    owner: str
    names: tuple[str, ...] = ()
    site: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the comparison. Bytes; ``None`` where nothing is declared or known.

    ``observed_peak`` is in bytes of storage, ``observed_view`` in bytes of the tensors themselves. ``live`` is what is
    alive now. What could not be measured is ``None``, with every row that is "not observable"; where ``unmeasured``
    caches could not be measured and others could, the figures are those of the others, and ``text`` says so. ``text``
    says in words what the status means here.
    """

    owner: str
    names: tuple[str, ...]
    status: Status
    declared_peak: int | None
    storage_peak: int | None
    bytes_per_row: int | None
    observed_peak: int | None
    observed_view: int | None
    observed_row: int | None
    observed_row_storage: int | None
    rows_declared: int | None
    rows_seen: int | None
    live: int | None
    created: int
    unmeasured: int
    sites: tuple[str, ...]
    text: str


class Assignment:
    """Sorts caches to declarations: the grouper of an :class:`Observer`, once the model is known.

    A cache belongs to the declaration whose owner made it, or whose owner is above the module that made it. Where only
    a module above an owner is known to have made it (a thinker that makes the cache of its encoder), it belongs to the
    one owner below with the same ``(kv_heads, head_dim)``. Two such owners, or none, and it is undeclared: never a
    guess.
    """

    def __init__(self, entries: Sequence[Entry], paths: dict[int, str], root: str = "") -> None:
        self._paths = paths
        self._root = root
        self._sets: dict[tuple[str, tuple[int, int]], list[Entry]] = {}
        self._owner_of: dict[int, str] = {}
        for entry in entries:
            self._sets.setdefault((entry.owner, (entry.kv_heads, entry.head_dim)), []).append(entry)
            self._owner_of[entry.owner_id] = entry.owner
        # What lives in captured graphs has no Python object, so what is seen is of the others.
        self._unseen: list[tuple[str, list[Entry]]] = []
        for key, held in self._sets.items():
            visible = [entry for entry in held if not _in_graphs(entry)]
            if visible and len(visible) < len(held):
                self._sets[key] = visible
                self._unseen.append((key[0], [entry for entry in held if _in_graphs(entry)]))

    def __call__(self, origin: Origin, geometry: tuple[int, int]) -> Group:
        named = [path for key, _ in origin.owners if (path := self._owner_of.get(key) or self._paths.get(key))]
        if named:
            # The nearest maker only: the callers further out run everything, so what they call proves nothing.
            return self.at(named[0], geometry) or Group(named[0], site=origin.site)
        return Group(origin.classes[0] if origin.classes else origin.site, site=origin.site)

    def at(self, path: str, geometry: tuple[int, int]) -> Group | None:
        """The declarations for a cache of ``geometry`` made at ``path``; ``None`` when there are none."""
        # An empty cache has no shape yet. It adds no bytes, only to the count of caches that were made here.
        same = [owner for owner, shape in self._sets if geometry in (shape, (0, 0))]
        above = [owner for owner in same if self._covers(owner, path)]
        below = [owner for owner in same if self._covers(path, owner)]
        owner: str | None
        owner = max(above, key=self._depth) if above else below[0] if len(set(below)) == 1 else None
        if owner is None:
            return None
        shape = next(shape for known, shape in self._sets if known == owner and geometry in (shape, (0, 0)))
        return Group(owner, tuple(entry.name for entry in self._sets[(owner, shape)]))

    def _covers(self, owner: str, path: str) -> bool:
        """``owner`` is ``path`` or above it. The root goes by its class name, which is no prefix of the others."""
        return path == owner or owner == self._root or path.startswith(f"{owner}.")

    def _depth(self, owner: str) -> int:
        return 0 if owner == self._root else owner.count(".") + 1

    def declared(self) -> list[tuple[str, list[Entry]]]:
        """Owner and entries of each group of declarations."""
        return [(owner, entries) for (owner, _), entries in self._sets.items()] + self._unseen


def reconcile(assignment: Assignment, peaks: dict[Group, Peak]) -> list[Row]:
    """One row per group of declarations, then one per undeclared group, the largest first."""
    rows = []
    for owner, entries in assignment.declared():
        names = tuple(entry.name for entry in entries)
        rows.append(_declared(owner, names, entries, peaks.get(Group(owner, names), Peak())))
    undeclared = [_undeclared(group, peak) for group, peak in peaks.items() if not group.names]
    return rows + sorted((row for row in undeclared if row is not None), key=lambda row: -(row.observed_peak or 0))


def _declared(owner: str, names: tuple[str, ...], entries: list[Entry], peak: Peak) -> Row:
    declared = sum(entry.declared_peak for entry in entries)
    storage = _total([entry.storage_peak for entry in entries])
    per_row = max(entry.bytes_per_row for entry in entries)
    row_limit = max([per_row, *(entry.storage_per_row or 0 for entry in entries)])
    rows = sum(entry.rows for entry in entries)
    status, text = _judge(entries, peak, declared, storage, per_row, row_limit)
    return Row(
        owner=owner,
        names=names,
        status=status,
        declared_peak=declared,
        storage_peak=storage,
        bytes_per_row=per_row,
        rows_declared=rows,
        text=text,
        **_observed(peak, known=status != "not observable"),
    )


def _observed(peak: Peak, known: bool) -> dict[str, Any]:
    """The columns of a row that were seen; ``None`` for each figure that was not measured."""
    row = known and (bool(peak.row_bytes) or not peak.storage_bytes)
    return {
        "observed_peak": peak.storage_bytes if known else None,
        "observed_view": peak.view_bytes if known else None,
        "observed_row": peak.row_bytes if row else None,
        "observed_row_storage": peak.row_storage_bytes if row else None,
        "rows_seen": peak.rows if known and not peak.rowless else None,
        "live": peak.live_bytes if known else None,
        "created": peak.created,
        "unmeasured": peak.unmeasured,
        "sites": tuple(sorted(peak.sites)),
    }


def _in_graphs(entry: Entry) -> bool:
    return entry.residency == Residency.GRAPH_POOL.value


def _seen(peak: Peak) -> bool:
    return bool(peak.storage_bytes or peak.row_bytes)


def _judge(
    entries: list[Entry], peak: Peak, declared: int, storage: int | None, per_row: int, row_limit: int
) -> tuple[Status, str]:
    kinds = ", ".join(sorted(peak.kinds))
    if not _seen(peak):
        if all(map(_in_graphs, entries)):
            return "not observable", "its tensors live inside captured graphs and have no Python object"
        if peak.unmeasured:
            return "not observable", f"{kinds} has a layout that cannot be measured"
        if peak.created:
            return "never seen", f"{peak.created} caches were created and held nothing so far"
        return "never seen", "no cache was created so far; if this path has had traffic, the cache is unused"
    limit = declared if storage is None else max(storage, declared)
    if peak.storage_bytes > limit:
        return "under-declared", f"{peak.storage_bytes} bytes were alive at once, {limit} are declared at most"
    if peak.row_storage_bytes > row_limit:
        return "under-declared", f"a row pinned {peak.row_storage_bytes} bytes of storage, {row_limit} are declared"
    if peak.unmeasured:
        at_least = f"{peak.storage_bytes} bytes were alive at once, and more in {peak.unmeasured} caches"
        return "not observable", f"{at_least} with a layout that cannot be measured ({kinds})"
    if not peak.row_bytes:
        return "matched", f"tensors of {peak.storage_bytes} bytes, within the {limit} that are declared"
    if peak.row_bytes < per_row:
        return "over-declared", f"no row filled more than {peak.row_bytes} of {per_row} bytes so far"
    rows = "how many rows were alive is not known" if peak.rowless else f"{peak.rows} rows were alive at once"
    return "matched", f"a full row is {per_row} bytes; {rows}"


def _undeclared(group: Group, peak: Peak) -> Row | None:
    """``None`` for a group that never held anything."""
    if not _seen(peak) and not peak.unmeasured:
        return None
    kinds = ", ".join(sorted(peak.kinds)) or "cache"
    blind = f"; {peak.unmeasured} of them at once had a layout that cannot be measured" if peak.unmeasured else ""
    return Row(
        owner=group.owner,
        names=(),
        status="undeclared",
        declared_peak=None,
        storage_peak=None,
        bytes_per_row=None,
        rows_declared=None,
        text=f"{kinds} made at {group.site}{blind}",
        **_observed(peak, known=_seen(peak)),
    )


def _total(parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
