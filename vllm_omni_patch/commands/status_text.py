# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch status`` for people: a line per patch and process, or every target with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

COLOURS = {"applied": "green", "native": "cyan", "pending": "dim", "skipped": "yellow", "failed": "bold red"}
PIPE = 120  # columns where the output goes to a file or a pipe, which has no width
WORDS = {"pending": "not imported here", "native": "native in this release"}


def show(found: dict[str, Any], console: Console | None = None, verbose: bool = False) -> None:
    """Print what :func:`.status.gather` returned. ``verbose``: every target."""
    out = console or Console(highlight=False)
    if console is None and not out.is_terminal and "COLUMNS" not in os.environ:
        out = Console(highlight=False, width=PIPE)
    _environment(out, found, verbose)
    out.print()
    if found["processes"]:
        (_processes_verbose if verbose else _processes)(out, found["processes"])
    else:
        (_targets_verbose if verbose else _targets)(out, found["targets"])
    _list(out, "differences between processes", found["mismatches"])
    _list(out, "problems", found["problems"])
    if not verbose:
        out.print("\n--verbose lists every target.", style="dim")


# -- this environment


def _environment(out: Console, found: dict[str, Any], verbose: bool) -> None:
    package, flag, paths = found["package"], found["flag"], found["activation_paths"]
    here = {name: one for name, one in found["installed"].items() if one is not None}
    asked = f"on: {', '.join(flag['patches']) or 'no known patch'}" if flag["on"] else "off"
    rows = [
        ("vllm-omni-patch", f"{package['version']}, Python {package['python']}, {package['location']}"),
        (flag["name"], f"{flag['value']!r}, {asked}" if flag["value"] else asked),
        ("startup file", _startup(paths)),
        ("plugin entry point", _plugin(paths)),
    ]
    for name, one in here.items():
        where = f", {one['location']}" if verbose else ""
        rows.append((name, f"{one['release'] or 'unknown release'} ({one['distribution'] or 'no metadata'}){where}"))
    if len(here) < len(found["installed"]):
        rows.append(("not installed", ", ".join(name for name in found["installed"] if name not in here)))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(f"[bold]{escape(left)}[/]", escape(right))
    out.print(table)


def _startup(paths: dict[str, Any]) -> str:
    read = [one["path"] for one in paths["startup_files"] if one["read"]]
    other = [one["path"] for one in paths["startup_files"] if not one["read"]]
    if read:
        return f"read from {', '.join(read)}"
    return f"not read: {', '.join(other)} is in no site folder" if other else "missing"


def _plugin(paths: dict[str, Any]) -> str:
    if not paths["entry_point"]:
        return "not visible"
    return f"excluded by VLLM_PLUGINS={paths['vllm_plugins']!r}" if paths["filtered"] else "visible"


def _targets(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = _table("what this environment would do", "patch", "asked for", "targets")
    missed = []
    for patch, mine in _here(rows).items():
        asked = [row for row in mine if row["asked"]]
        table.add_row(patch, "yes" if asked else "no", _counts(asked or mine))
        missed += [f"{patch}: {_name(row)}: {row['reason']}" for row in asked if _is_missed(row)]
    out.print(table)
    _list(out, "not applied", missed)


def _targets_verbose(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    for patch, mine in _here(rows).items():
        asked = any(row["asked"] for row in mine)
        _heading(out, patch, "" if asked else "not asked for")
        for row in mine:
            devices = f" ({', '.join(row['devices'])})" if row["devices"] else ""
            proof = f", {row['evidence']}{devices}" if row["evidence"] else ""
            off = ", not asked for" if asked and not row["asked"] else ""
            _one(out, row, row["would_be"], proof + off, [row["reason"]])
    gone = sorted({row["distribution"] for row in rows if row["target"] and row["release"] is None})
    if gone:
        out.print(f"\nTargets of packages that are not installed are left out: {', '.join(gone)}.")


def _here(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of what is installed, by patch, with what would become of them as their state."""
    here: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["release"] is not None or not row["target"]:
            here.setdefault(row["patch"], []).append({**row, "state": row["would_be"]})
    return here


# -- the processes of an engine


def _processes(out: Console, processes: Sequence[dict[str, Any]]) -> None:
    table = _table("what each process did", "process", "vLLM", "patch", "targets")
    missed: dict[str, list[str]] = {}
    for one in processes:
        head = [_who(one), one["process"].get("vllm_version", "?")]
        for patch in dict.fromkeys(entry["patch"] for entry in one["entries"]):
            mine = [entry for entry in one["entries"] if entry["patch"] == patch]
            table.add_row(*head, patch, _counts(mine))
            head = ["", ""]
            for entry in filter(_is_missed, mine):
                text = f"{patch}: {_name(entry)}: {entry['reason']}"
                missed.setdefault(text, []).append(f"{one['role']} {one['pid']}")
    out.print(table)
    _list(out, "not applied", [f"{text.rstrip('.')} (in {', '.join(who)})" for text, who in missed.items()])


def _processes_verbose(out: Console, processes: Sequence[dict[str, Any]]) -> None:
    for one in processes:
        about = one["process"]
        _heading(out, _who(one), f"vLLM {about.get('vllm_version', '?')}, by {about.get('activation_path', '?')}")
        for entry in one["entries"]:
            if entry["state"] == "pending":
                continue
            what = ", partially effective" if entry["state"] == "applied" and entry.get("partial") else ""
            what += ", called" if entry.get("called") else ""
            notes = [entry["reason"], *entry.get("foreign", ()), *entry.get("partial", ())]
            _one(out, entry, entry["state"], what, notes, f"{entry['patch']}: ")
        waiting = sum(entry["state"] == "pending" for entry in one["entries"])
        if waiting:
            out.print(f"  [dim]{waiting} not imported here[/]")


def _who(process: dict[str, Any]) -> str:
    alive = {True: "", False: " (ended)", None: f" on {process['host']}"}[process["alive"]]
    return f"{process['role']} {process['pid']}{alive}"


# -- pieces


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"[bold]{title}[/]", title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _heading(out: Console, title: str, more: str) -> None:
    out.print(f"[bold]{escape(title)}[/]{f' [dim]{escape(more)}[/]' if more else ''}", soft_wrap=True)


def _one(out: Console, row: dict[str, Any], state: str, more: str, notes: Iterable[str], before: str = "") -> None:
    """One target: its name on a line that the terminal may wrap, and what there is to know below it."""
    out.print(f"  {escape(before + _name(row))}", soft_wrap=True)
    text = "; ".join(filter(None, notes))
    shown = f"[{COLOURS[state]}]{WORDS.get(state, state)}[/]{escape(more)}"
    out.print(Padding(f"{shown}. {escape(text)}" if text else shown, (0, 0, 0, 6)))


def _name(row: dict[str, Any]) -> str:
    return str(row["target"]) or "the patch as a whole"


def _is_ordinary(row: dict[str, Any]) -> bool:
    """Another runner, another release: a target that a patch can do without is not worth a line."""
    return row["state"] == "skipped" and bool(row.get("optional")) and row.get("verdict") == "absent"


def _is_missed(row: dict[str, Any]) -> bool:
    """One that failed is among the problems."""
    return row["state"] == "skipped" and not _is_ordinary(row)


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    """``"5 applied, 2 not imported here"``."""
    parts = []
    for state, colour in COLOURS.items():
        number = sum(row["state"] == state and not _is_ordinary(row) for row in rows)
        if number:
            parts.append(f"[{colour}]{number} {WORDS.get(state, state)}[/]")
    ordinary = sum(map(_is_ordinary, rows))
    return ", ".join(parts + ([f"[dim]{ordinary} not in this release[/]"] if ordinary else []))


def _list(out: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        out.print(f"\n[bold red]{title}[/]")
        for line in lines:
            table = Table.grid(padding=(0, 1))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            table.add_row("  -", escape(line))
            out.print(table)
