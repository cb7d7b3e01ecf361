# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch matrix``, which ``scripts/check_patch_matrix.py`` is too.

Exit status: 0 everything that was asked for applies or upstream has it; 1 something will be skipped (with ``--check``:
``matrix.json`` is out of date); 2 wrong usage, or an installation, release or file that cannot be read.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vllm_omni_patch import flags
from vllm_omni_patch.code import installed
from vllm_omni_patch.code.releases import Release, ReleaseError, fetch, open_installed, parse_spec, read_path
from vllm_omni_patch.commands import matrix_print
from vllm_omni_patch.loading import discover
from vllm_omni_patch.matrix import evidence, files
from vllm_omni_patch.matrix.build import questions, rebuild
from vllm_omni_patch.matrix.files import MATRIX
from vllm_omni_patch.matrix.forecast import Forecast, forecast, installed_here, without_effect
from vllm_omni_patch.matrix.rules import state_of
from vllm_omni_patch.matrix.table import MatrixError, Row, Table, ordered
from vllm_omni_patch.matrix.table_text import markdown_table, plain_spans
from vllm_omni_patch.matrix.upgrade import Change, compare
from vllm_omni_patch.patch import Patch, Target

app = typer.Typer(help="Which patch applies on which release, and what will happen here.", add_completion=False)


class Format(str, Enum):
    """How the result is printed."""

    text = "text"
    json = "json"
    markdown = "markdown"


class Stop(Exception):
    """Something cannot be done as asked; the text is for the user, the exit status is 2."""


@app.callback(invoke_without_command=True)
def matrix(
    release: Annotated[
        list[str] | None,
        typer.Option(help="Judge a release that is not installed, such as vllm==0.33.0. May be repeated."),
    ] = None,
    source: Annotated[
        list[Path] | None, typer.Option(help="Judge a wheel, a source archive or a folder. May be repeated.")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Release to compare with, such as vllm==0.32.0. Default: what is installed.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Print the whole table of matrix.json.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Rebuild matrix.json; each --release is added to the releases it lists.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if --update would change matrix.json.")] = False,
    format: Annotated[Format, typer.Option(help="How to print the result.")] = Format.text,
    patch: Annotated[
        list[str] | None, typer.Option(help="Only this patch. May be repeated. Default: those that are asked for.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the text of fetched releases. Default: in the user's cache folder.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --update or --check: the matrix file.")] = None,
) -> None:
    """Print the verdict for each patch target, and the state that it leads to: applied, native or skipped.

    Without options: this environment, read as text; vLLM is not imported.
    """
    try:
        specs = [parse_spec(text) for text in release or ()]
        found = discover.find()
        patches = _chosen(found, patch or [])
        if update or check:
            if source or everything:
                raise Stop("--update and --check read published releases; leave out --source and --all.")
            status = _update(found, patches if patch else None, specs, cache, output, write=not check)
        elif everything:
            status = _print_table(patches, format)
        elif specs or source:
            status = _judge_releases(patches, specs, source or [], against, cache, format)
        else:
            status = _judge_environment(found, patches, format, named=bool(patch))
    except (Stop, ReleaseError, MatrixError, flags.FlagError) as error:
        print(f"vllm-omni-patch matrix: {error}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


def _chosen(found: Sequence[discover.Found], names: Sequence[str]) -> list[Patch]:
    """The patches that can be judged: those named, or all."""
    known = {one.name: one for one in found}
    for name in names:
        if name not in known:
            raise Stop(discover.unknown_name(name, found))
        one = known[name]
        if one.patch is None:
            raise Stop(f"patch {name} cannot be used: {one.error}")
    for one in found:
        if one.patch is None and not names:
            print(f"patch {one.name} of {one.distribution} is left out: {one.error}", file=sys.stderr)
    return [one.patch for one in found if one.patch is not None and (not names or one.name in names)]


# -- this environment


def _judge_environment(found: Sequence[discover.Found], patches: Sequence[Patch], format: Format, named: bool) -> int:
    asked = list(patches)
    broken = []
    if not named:
        value = str(flags.read(flags.SWITCH))
        choice = discover.choose(value, found)
        if choice.unknown:
            raise Stop(f"{flags.SWITCH.name}={value}: {discover.unknown_name(choice.unknown[0], found)}")
        if choice.names:
            asked = [one for one in patches if one.name in choice.names]
            broken = [one for one in found if one.patch is None and one.name in choice.names]
        else:
            print(f"{flags.SWITCH.name} is off; this is what all patches would do.", file=sys.stderr)
            broken = [one for one in found if one.patch is None]
    open_source, claimed = installed_here(), dict[str, str]()
    found_here = [one for patch in asked for one in forecast(patch, open_source, claimed)]
    if installed.find("vllm") is None:
        raise Stop(
            "no vLLM is installed in this environment, under any distribution name; name a --release or --source."
        )
    matrix_print.forecasts(found_here, format.value)
    return 2 if broken else _status(found_here)


def _status(found: Sequence[Forecast]) -> int:
    idle = without_effect(found)
    for name in idle:
        print(f"{name}: none of its targets is there", file=sys.stderr)
    return 1 if idle or any(one.faulty for one in found) else 0


# -- releases that are not installed


def _judge_releases(
    patches: Sequence[Patch],
    specs: Sequence[tuple[str, str]],
    sources: Sequence[Path],
    against: str,
    cache: Path | None,
    format: Format,
) -> int:
    releases = [one for path in sources for one in read_path(path)]
    targets = [question.target for question in questions(patches)]
    for distribution, number in specs:
        if any(target.distribution == distribution and target.evidence == "static" for target in targets):
            releases.append(fetch(distribution, number, cache))
        elif not any(target.distribution == distribution for target in targets):
            known = ", ".join(sorted({target.distribution for target in targets}))
            raise Stop(f"no patch has a target in {distribution}; distributions with targets: {known}.")
    found: list[Forecast] = []
    changes: list[Change | None] = []
    for release in releases:
        base = _base(release, patches, against, cache)
        claimed: dict[str, str] = {}
        for patch in patches:
            asked = [one for one in questions([patch]) if one.target.distribution == release.distribution]
            own = replace(
                patch,
                targets=tuple(one.target for one in asked if not one.used),
                uses=tuple(one.target for one in asked if one.used),
            )
            listed = files.for_patch(patch).lists(release.distribution, release.release)
            found += forecast(own, partial(_same, release), claimed)
            changes += [compare(question, base, release, listed) if base else None for question in asked]
    documented = [
        _documented(row, target)
        for patch in patches
        for target in patch.targets
        for row in files.for_patch(patch).target_rows(patch.name, target.name)
        if row.evidence == "documented" and (row.distribution, row.release) in specs
    ]
    described = {(one.row.distribution, one.row.release) for one in [*found, *documented]}
    for distribution, number in specs:
        if (distribution, number) not in described:
            raise Stop(f"nothing is known of {distribution} {number}: it cannot be fetched, and no patch describes it.")
    matrix_print.forecasts([*found, *documented], format.value, changes)
    return 1 if any(one.faulty for one in found) else 0


def _same(release: Release, target: Target) -> Release:
    return release


def _documented(row: Row, target: Target) -> Forecast:
    return Forecast(target, row, state_of(row.verdict, row.verdict == "applies"), row.reason)


def _base(release: Release, patches: Sequence[Patch], against: str, cache: Path | None) -> Release | None:
    """What to compare ``release`` with: as asked, else what is installed, else the newest listed release before it."""
    if against:
        distribution, number = parse_spec(against)
        if distribution == release.distribution:
            return fetch(distribution, number, cache)
    here = open_installed(release.distribution)
    if here is not None and here.release != release.release:
        return here
    listed = [number for patch in patches for number in files.for_patch(patch).releases.get(release.distribution, ())]
    try:
        older = [number for number in ordered([*listed, release.release])]
        older = older[: older.index(release.release)]
    except ValueError:
        older = [number for number in ordered(listed) if number != release.release]
    return fetch(release.distribution, older[-1], cache) if older else None


# -- matrix.json


def _update(
    found: Sequence[discover.Found],
    named: list[Patch] | None,
    specs: Sequence[tuple[str, str]],
    cache: Path | None,
    output: Path | None,
    write: bool,
) -> int:
    """Write, or compare, the matrix files of the patches: ours, and those that other packages bring."""
    by_file: dict[Path, list[Patch]] = {}
    for one in found:
        if one.patch is None:
            if named is None and one.distribution == discover.OWN_DISTRIBUTION:
                raise Stop(f"patch {one.name} cannot be used, and its rows would be lost: {one.error}")
            continue
        if named is not None and one.patch not in named:
            continue
        if one.distribution != discover.OWN_DISTRIBUTION and not one.patch.matrix:
            text = f"patch {one.name} of {one.distribution} names no matrix file of its own (Patch.matrix)"
            if named is not None:
                raise Stop(f"{text}; without one its rows have no place.")
            print(f"{text}; left out", file=sys.stderr)
            continue
        if one.distribution != discover.OWN_DISTRIBUTION and named is None:
            continue
        by_file.setdefault(output or (Path(one.patch.matrix) if one.patch.matrix else MATRIX), []).append(one.patch)
    changed = [_update_file(path, patches, named is not None, specs, cache, write) for path, patches in by_file.items()]
    return 1 if any(changed) and not write else 0


def _update_file(
    path: Path, patches: list[Patch], partly: bool, specs: Sequence[tuple[str, str]], cache: Path | None, write: bool
) -> bool:
    """Returns whether the file changes."""
    old = path.read_text("utf-8") if path.exists() else ""
    try:
        known = files.read(path)
    except MatrixError as error:
        if not specs:
            raise Stop(f"{error} To fix: name the releases to list with --release, once for each.") from None
        known = Table()
    releases = {name: list(listed) for name, listed in known.releases.items()}
    for distribution, number in specs:
        releases[distribution] = ordered([*releases.get(distribution, []), number])
    for patch in patches:
        static = [asked.target for asked in questions([patch]) if asked.target.evidence == "static"]
        for name in dict.fromkeys(target.distribution for target in static):
            if not releases.get(name):
                print(
                    f"{patch.name}: no release of {name} is listed; add some with --release {name}==X.Y.Z",
                    file=sys.stderr,
                )
    rebuilt = rebuild(patches, releases, cache, progress=lambda line: print(line, file=sys.stderr))
    _warn_of_idle_targets(rebuilt)
    if partly:
        names = {patch.name for patch in patches}
        kept = Table([row for row in known.rows() if row.patch not in names], releases, digests=known.digests)
        rebuilt = kept.merged(rebuilt)
    new = files.dump(rebuilt)
    if new == old:
        print(f"{path}: up to date, {len(rebuilt.rows())} rows")
        return False
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), "matrix.json", "rebuilt", lineterm="", n=0):
        print(line)
    if write:
        path.write_text(new, "utf-8")
        files.load.cache_clear()
        print(f"{path}: written, {len(rebuilt.rows())} rows")
    return True


def _warn_of_idle_targets(rebuilt: Table) -> None:
    """A target that applies nowhere is most often a name that is spelt wrong, or a contract that asks too much."""
    for patch, target in rebuilt.targets():
        rows = [row for row in rebuilt.rows() if (row.patch, row.target) == (patch, target)]
        if rows and all(row.verdict in ("absent", "drifted") for row in rows):
            last = f"{rows[-1].distribution} {rows[-1].release}: {rows[-1].verdict}, {rows[-1].reason}"
            print(f"warning: {patch}: {target} applies on none of the listed releases ({last})", file=sys.stderr)


def _print_table(patches: Sequence[Patch], format: Format) -> int:
    tables = {patch.name: evidence.for_patch(patch) for patch in patches}
    for one in tables.values():
        if one.error:
            raise Stop(one.error)
    rows = [row for name, one in tables.items() for row in one.rows() if row.patch == name]
    if format is Format.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return 0
    held = Table(rows, {name: listed for one in tables.values() for name, listed in one.releases.items()})
    if format is Format.markdown:
        print(markdown_table(held), end="")
        return 0
    lines = []
    for patch, target in held.targets():
        for releases, verdict, reason in plain_spans(held, patch, target):
            lines.append((patch, target, releases, verdict, reason))
    matrix_print.grid(("patch", "target", "releases", "verdict", "reason"), lines)
    return 0


def main() -> None:
    """Run the command on its own, as ``scripts/check_patch_matrix.py`` does."""
    app()
