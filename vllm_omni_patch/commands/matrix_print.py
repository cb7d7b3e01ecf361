# SPDX-License-Identifier: Apache-2.0
"""How ``vllm-omni-patch matrix`` prints what it found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from vllm_omni_patch.matrix.forecast import Forecast
from vllm_omni_patch.matrix.upgrade import Change

_HEADINGS = ("patch", "target", "release", "verdict", "contract", "evidence", "state")
_COLOURS = {
    "applied": "green",
    "applies": "green",
    "ok": "green",
    "skipped": "red",
    "drifted": "red",
    "unlisted": "red",
    "broken": "red",
    "native": "cyan",
}
_MATTERS = {"yes": "MATTERS", "no": "does not matter", "better": "better"}


def forecasts(found: Sequence[Forecast], format: str, changes: Sequence[Change | None] = ()) -> None:
    """Print ``found`` as ``text``, ``json`` (a list of objects) or ``markdown``.

    Args:
        changes: what an upgrade changes for each of ``found``, as far as they go.
    """
    if format == "json":
        shown = [one.as_json() for one in found]
        for entry, change in zip(shown, changes, strict=False):
            entry |= {"upgrade": change.as_json()} if change else {}
        print(json.dumps(shown, indent=1))
        return
    here = [one for one in found if one.installed]
    lines = [_line(one) for one in here]
    if format == "markdown":
        print(f"| {' | '.join(_HEADINGS)} |\n|{'---|' * len(_HEADINGS)}")
        for line in lines:
            print(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |")
    else:
        grid(_HEADINGS, lines)
    paragraphs = [_not_installed(found), _reasons(here), *_upgrades(changes)]
    for title, items in paragraphs:
        if items:
            print(f"\n{'### ' if format == 'markdown' else ''}{title}")
            bullet = "- " if format == "markdown" else "  "
            for item in items:
                print(("\n" if format == "markdown" and item is items[0] else "") + bullet + item)


def _line(one: Forecast) -> tuple[str, ...]:
    row = one.row
    release = f"{row.distribution} {row.release}".strip()
    return (row.patch, row.target, release, row.verdict, row.contract, row.proof, one.state or "used")


def _not_installed(found: Sequence[Forecast]) -> tuple[str, list[str]]:
    counts = Counter(one.row.distribution for one in found if not one.installed)
    return "Not installed", [f"{name} ({_targets(count)})" for name, count in counts.items()]


def _targets(count: int) -> str:
    return f"{count} target{'' if count == 1 else 's'}"


def _reasons(found: Sequence[Forecast]) -> tuple[str, list[str]]:
    by_reason: dict[str, list[str]] = {}
    for one in found:
        if one.row.verdict != "applies" or one.state == "skipped" or (one.state and not one.listed):
            by_reason.setdefault(one.reason, []).append(f"{one.row.patch} {one.row.target}")
    items = []
    for reason, targets in by_reason.items():
        if len(targets) == 1:
            items.append(f"{targets[0]}: {reason}")
        else:
            items += [f"{reason}:", *(f"    {target}" for target in targets)]
    return "Why", items


def _upgrades(changes: Sequence[Change | None]) -> list[tuple[str, list[str]]]:
    paragraphs: dict[str, list[str]] = {}
    same: Counter[str] = Counter()
    for change in changes:
        if change is None:
            continue
        row = change.after
        title = f"Upgrade of {row.distribution} from {change.before.release} to {row.release}"
        items = paragraphs.setdefault(title, [])
        if change.same_code or (change.before.verdict == row.verdict == "absent"):
            same[title] += 1
        else:
            items.append(f"{row.patch} {row.target}: {_MATTERS[change.matters]}: {change.why}")
            items += [f"    {line}" for line in change.details]
    for title, count in same.items():
        paragraphs[title].append(f"{_targets(count)} as before")
    return list(paragraphs.items())


def grid(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table: folded to the terminal, or one line per row where the output is a file or a pipe."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        widths = [max(len(row[i]) for row in [headings, *lines]) for i in range(len(headings))]
        for row in [headings, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    for line in lines:
        cells = []
        for heading, cell in zip(headings, line, strict=True):
            module, colon, qualname = cell.partition(":")
            if heading == "target" and colon:
                cells.append(f"{escape(qualname)}\n[dim]{escape(module)}[/]")
            else:
                cells.append(f"[{_COLOURS[cell]}]{cell}[/]" if cell in _COLOURS else escape(cell))
        table.add_row(*cells)
    console.print(table)
