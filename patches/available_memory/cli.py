# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch memory``: the reports of the workers as text, JSON or a picture. Imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .report import picture
from .report.report import as_text

app = typer.Typer(add_completion=False)


@app.command(no_args_is_help=True)
def show(
    report_dir: Annotated[Path, typer.Argument(help="The folder that VLLM_OMNI_PATCH_REPORT_DIR was set to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one HTML file with stacked bars and tables.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw stacked bars into a PNG file (needs the extra 'plots').")
    ] = None,
) -> None:
    """Print the KV cache budget of every worker, and what to set for more room.

    Exit status: 0; 1 when there is no report or a picture cannot be made; 2 for a wrong call.
    """
    try:
        reports, local = picture.load(report_dir), picture.load(report_dir, "model-local-kv")
    except picture.PictureError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if not reports:
        typer.echo(
            f"{report_dir} has no memory-<pid>.json. A worker writes it when it has determined its memory; start vLLM "
            "with VLLM_OMNI_PATCH=available_memory and VLLM_OMNI_PATCH_REPORT_DIR set to this folder.",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps({"memory": reports, "model_local_kv": local}, indent=1))
    else:
        typer.echo("\n\n".join(_texts(reports, local)))
    try:
        if html is not None:
            html.write_text(picture.html_page(reports, local), encoding="utf-8")
        if png is not None:
            picture.png(reports, png)
    except (picture.PictureError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for path in (html, png):
        if path is not None:
            typer.echo(f"wrote {os.fspath(path)}", err=True)


def _texts(reports: list[dict[str, Any]], local: list[dict[str, Any]]) -> list[str]:
    texts = [as_text(data) for data in reports]
    for data in local:
        texts.append("\n".join([f"Model-local KV (pid {data.get('pid')})", *picture.local_kv_lines(data)]))
    return texts
