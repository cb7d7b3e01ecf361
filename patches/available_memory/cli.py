# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch memory``: the reports of the workers as text, JSON or a picture. Imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .report import picture
from .report.report import BudgetReport
from .report.text import as_text, local_kv_text

app = typer.Typer(add_completion=False)


@app.command(no_args_is_help=True)
def show(
    report_dir: Annotated[Path, typer.Argument(help="The folder that VLLM_OMNI_PATCH_REPORT_DIR was set to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw stacked bars into a PNG file (needs the extra 'plots').")
    ] = None,
) -> None:
    """Print the KV cache budget of every worker, and what to set for more room.

    Exit status: 0; 1 when there is no report or the picture cannot be drawn; 2 for a wrong call.
    """
    if not report_dir.is_dir():
        typer.echo(f"{report_dir} is not a folder. Use the value of VLLM_OMNI_PATCH_REPORT_DIR.", err=True)
        raise typer.Exit(2)
    reports, local = _reports(report_dir), _documents(report_dir, "model-local-kv")
    if not reports:
        typer.echo(
            f"{report_dir} has no memory-<pid>.json. A worker writes it after it has sized its KV cache; start vLLM "
            "with VLLM_OMNI_PATCH=available_memory and VLLM_OMNI_PATCH_REPORT_DIR set to this folder.",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
        memory = [report.to_json() for report in reports]
        typer.echo(json.dumps({"memory": memory, "model_local_kv": [data for _, data in local]}, indent=1))
    else:
        typer.echo("\n\n".join([as_text(report) for report in reports] + [local_kv_text(data) for _, data in local]))
    if png is None:
        return
    try:
        picture.png(reports, png)
    except (picture.PictureError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {os.fspath(png)}", err=True)


def _reports(folder: Path) -> list[BudgetReport]:
    """The budgets by DP rank, rank and PID; one line on stderr for a file that is not a report of this version."""
    found = []
    for path, data in _documents(folder, "memory"):
        try:
            found.append(BudgetReport.from_json(data))
        except ValueError as error:
            typer.echo(f"{path} is left out: {error}.", err=True)
    return sorted(found, key=lambda one: (*(-1 if n is None else n for n in (one.dp_rank, one.rank)), one.pid))


def _documents(folder: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """The ``<name>-<pid>.json`` files of ``folder`` that hold a JSON object."""
    found = []
    for path in sorted(folder.glob(f"{name}-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            found.append((path, data))
    return found
