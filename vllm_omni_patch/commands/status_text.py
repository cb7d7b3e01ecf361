# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch status`` for people: the account of ``status.py`` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLOURS = {"applied": "green", "native": "cyan", "pending": "dim", "skipped": "yellow", "failed": "bold red"}
WIDE = 160  # where the output goes to a file or a pipe, which has no width


def show(found: dict[str, Any], console: Console | None = None, brief: bool = False) -> None:
    """Print the account; ``brief``: one row for each patch."""
    out = console or Console(soft_wrap=False)
    if not out.is_terminal and console is None:
        out = Console(width=WIDE)
    _environment(out, found)
    if found["processes"]:
        (_processes_in_brief if brief else _processes)(out, found["processes"])
    else:
        (_would_be_in_brief if brief else _would_be)(out, found["targets"])
    for title, style, lines in (
        ("differences between processes", "bold red", found["mismatches"]),
        ("problems", "bold red", found["problems"]),
    ):
        if lines:
            out.print(f"[{style}]{title}[/]")
            for line in lines:
                out.print(f"  - {escape(line)}", highlight=False)


def _environment(out: Console, found: dict[str, Any]) -> None:
    package, flag, roads = found["package"], found["flag"], found["roads"]
    rows = [
        ("vllm-omni-patch", f"{package['version']}, Python {package['python']}, {package['location']}"),
        (
            flag["name"],
            f"{flag['value']!r}: " + (f"on, {', '.join(flag['patches']) or 'no known patch'}" if flag["on"] else "off"),
        ),
        ("startup file", _startup(roads)),
        ("plugin entry point", _plugin(roads)),
    ]
    for name, one in found["installed"].items():
        text = "not installed"
        if one is not None:
            text = f"{one['release'] or 'unknown release'} ({one['distribution'] or 'no metadata'}), {one['location']}"
        rows.append((name, text))
    table = Table.grid(padding=(0, 2))
    for left, right in rows:
        table.add_row(f"[bold]{escape(left)}[/]", escape(right))
    out.print(table)
    out.print()


def _startup(roads: dict[str, Any]) -> str:
    read = [one["path"] for one in roads["startup_files"] if one["read"]]
    other = [one["path"] for one in roads["startup_files"] if not one["read"]]
    if read:
        return f"read from {', '.join(read)}"
    return f"not read: {', '.join(other)} is in no site folder" if other else "missing"


def _plugin(roads: dict[str, Any]) -> str:
    if not roads["entry_point"]:
        return "not visible"
    if roads["filtered"]:
        return f"visible, and filtered out by VLLM_PLUGINS={roads['vllm_plugins']!r}"
    return "visible"


def _would_be(out: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="what this environment would do", title_justify="left", expand=False)
    for column in ("patch", "target", "release", "would be", "evidence", "reason"):
        table.add_column(column, overflow="fold")
    for row in sorted(rows, key=lambda row: not row["asked"]):  # what was asked for comes first
        if row["distribution"] and row["release"] is None and row["would_be"] == "skipped":
            continue  # a package that is not here; the JSON has them
        state = row["would_be"] if row["asked"] else f"{row['would_be']} (if asked for)"
        table.add_row(
            row["patch"],
            escape(row["target"].replace(":", ":\n") or "the patch as a whole"),
            f"{row['distribution']} {row['release'] or ''}".strip(),
            f"[{COLOURS.get(row['would_be'], 'white')}]{state}[/]",
            _proof(row),
            escape(row["reason"]),
        )
    out.print(table)
    gone = sorted({row["distribution"] for row in rows if row["release"] is None and row["would_be"] == "skipped"})
    if gone:
        out.print(f"Targets of packages that are not installed are left out: {', '.join(gone)}.", highlight=False)


def _proof(row: dict[str, Any]) -> str:
    """``live (cpu)``; nothing for a target that does not apply."""
    devices = f" ({', '.join(row['devices'])})" if row.get("devices") else ""
    return f"{row.get('evidence') or ''}{devices}"


def _processes(out: Console, processes: list[dict[str, Any]]) -> None:
    table = Table(title="what each process did", title_justify="left")
    for column in ("process", "road", "vLLM", "patch", "target", "state", "notes"):
        table.add_column(column, overflow="fold")
    for one in processes:
        about = one["process"]
        alive = {True: "", False: " (ended)", None: f" on {one['host']}"}[one["alive"]]
        head = [f"{one['role']} {one['pid']}{alive}", about.get("road", "?"), about.get("vllm_version", "?")]
        rows = [entry for entry in one["entries"] if entry["state"] != "pending"]
        waiting = len(one["entries"]) - len(rows)
        for entry in rows:
            table.add_row(
                *head, entry["patch"], escape(entry["target"].replace(":", ":\n")), _state(entry), _notes(entry)
            )
            head = ["", "", ""]
        if waiting:
            table.add_row(*head, "", "", f"[dim]{waiting} not imported here[/]", "")
        table.add_section()
    out.print(table)


def _would_be_in_brief(out: Console, rows: list[dict[str, Any]]) -> None:
    here = [{**row, "state": row["would_be"]} for row in rows if row["release"] is not None or not row["distribution"]]
    table = Table(title="what this environment would do", title_justify="left")
    for column in ("patch", "asked for", "targets", "notes"):
        table.add_column(column, overflow="fold")
    for patch in dict.fromkeys(row["patch"] for row in here):
        mine = [row for row in here if row["patch"] == patch]
        table.add_row(patch, "yes" if mine[0]["asked"] else "no", *_counts(mine))
    out.print(table)


def _processes_in_brief(out: Console, processes: list[dict[str, Any]]) -> None:
    table = Table(title="what each process did", title_justify="left")
    for column in ("process", "vLLM", "patch", "targets", "notes"):
        table.add_column(column, overflow="fold")
    for one in processes:
        alive = {True: "", False: " (ended)", None: f" on {one['host']}"}[one["alive"]]
        head = [f"{one['role']} {one['pid']}{alive}", one["process"].get("vllm_version", "?")]
        for patch in dict.fromkeys(entry["patch"] for entry in one["entries"]):
            mine = [entry for entry in one["entries"] if entry["patch"] == patch]
            table.add_row(*head, patch, *_counts(mine))
            head = ["", ""]
        table.add_section()
    out.print(table)


def _counts(entries: list[dict[str, Any]]) -> tuple[str, str]:
    """``"5 applied, 2 not imported here"``, and what is to be said of single targets."""
    words = {"pending": "not imported here"}
    parts, notes = [], []
    for state, colour in COLOURS.items():
        mine = [entry for entry in entries if entry["state"] == state]
        # Another runner, another release: a target that a patch can do without is not worth a line.
        plain = [e for e in mine if not (state == "skipped" and e.get("optional") and e.get("verdict") == "absent")]
        if plain:
            parts.append(f"[{colour}]{len(plain)} {words.get(state, state)}[/]")
        if len(plain) < len(mine):
            parts.append(f"[dim]{len(mine) - len(plain)} not in this release[/]")
        if state in ("skipped", "failed"):
            notes += [escape(f"{entry['target'].partition(':')[2]}: {entry['reason']}") for entry in plain]
    return ", ".join(parts), "; ".join(notes)


def _state(entry: dict[str, Any]) -> str:
    text = entry["state"]
    if text == "applied" and entry.get("partial"):
        text = "applied, partially effective"
    if entry.get("called"):
        text += ", called"
    return f"[{COLOURS.get(entry['state'], 'white')}]{text}[/]"


def _notes(entry: dict[str, Any]) -> str:
    return escape(
        "; ".join(part for part in (entry["reason"], *entry.get("foreign", ()), *entry.get("partial", ())) if part)
    )
