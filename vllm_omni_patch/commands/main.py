# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch``: ``status``, ``flags``, ``matrix`` and the commands that patches bring.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

MATRIX = "vllm_omni_patch.commands.matrix:app"


class _Group(typer.core.TyperGroup):
    """Finds ``matrix`` and the commands that patches bring. One is imported when it is named or listed by help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_elsewhere()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        reference = None if command is not None else _elsewhere().get(cmd_name)
        if reference is None:
            return command
        module, _, name = reference.partition(":")
        try:
            command = typer.main.get_command(getattr(importlib.import_module(module), name))
        except Exception as error:
            if ctx is not None and cmd_name in sys.argv[1:2]:
                typer.echo(f"vllm-omni-patch {cmd_name} cannot be loaded: {type(error).__name__}: {error}", err=True)
                raise typer.Exit(2) from None
            return None
        command.name = cmd_name
        return command


@lru_cache(maxsize=1)
def _elsewhere() -> dict[str, str]:
    from vllm_omni_patch.loading import discover

    return {"matrix": MATRIX, **{k: v for k, v in discover.commands(discover.find()).items() if k != "matrix"}}


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    help="What vllm-omni-patch does, would do, and did, to the vLLM that is installed here.",
)


class Format(str, Enum):
    """How ``flags`` prints its table."""

    text = "text"
    markdown = "markdown"
    json = "json"


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    report_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with the ledgers of a running engine. Default: VLLM_OMNI_PATCH_REPORT_DIR."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every target, with what is proved of it and why.")
    ] = False,
) -> None:
    """Show what this environment would do or, from the ledgers, what every process of an engine did.

    A line for each patch and process; targets that were asked for and are not applied are named with the reason.

    Exit status: 0; 1 when something failed, cannot be loaded or cannot be reached, or processes differ; 2 for a wrong
    call. A target that is skipped does not count here: 'vllm-omni-patch matrix' exits 1 for one.
    """
    from vllm_omni_patch.commands import status as facts
    from vllm_omni_patch.commands import status_text

    if report_dir is not None and not report_dir.is_dir():
        typer.echo(f"{report_dir} is not a folder. Name the one that VLLM_OMNI_PATCH_REPORT_DIR was set to.", err=True)
        raise typer.Exit(2)
    found = facts.gather(str(report_dir) if report_dir is not None else None)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        status_text.show(found, verbose=verbose)
    raise typer.Exit(1 if found["problems"] or found["mismatches"] else 0)


@app.command("flags")
def list_flags(
    output: Annotated[Format, typer.Option("--format", help="text, markdown or json.")] = Format.text,
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that this package sets itself or only reads.")
    ] = False,
) -> None:
    """List the environment variables with type, default, accepted values and meaning."""
    from vllm_omni_patch.commands import flags_table
    from vllm_omni_patch.loading import discover

    rows = [flag for flag in discover.all_flags(discover.find()) if everything or not flag.internal]
    typer.echo({"text": flags_table.text, "markdown": flags_table.markdown, "json": flags_table.as_json}[output](rows))


def main() -> None:
    """The ``vllm-omni-patch`` command."""
    app()


if __name__ == "__main__":
    main()
