# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch memory calibrate LOG...``: from a failed start to the next cap fraction, in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vllm_omni_patch.patches.available_memory import calibrate as calibration
from vllm_omni_patch.patches.available_memory.budget import GIB
from vllm_omni_patch.patches.available_memory.calibrate import Attempt, CalibrationError, Key, Row
from vllm_omni_patch.patches.available_memory.flags import CALIBRATION
from vllm_omni_patch.patches.available_memory.neuron_logs import read_attempts

DEFAULT_FILE = Path("neuron-calibration.json")


def calibrate(
    logs: Annotated[list[Path], typer.Argument(help="Serving and compiler logs of the starts to learn from.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The calibration file; rows for other models are kept.")
    ] = DEFAULT_FILE,
    margin_mib: Annotated[
        int, typer.Option(help="MiB to stay below what the compiler's figures allow.", min=0)
    ] = calibration.DEFAULT_MARGIN >> 20,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    kv_bytes: Annotated[
        int, typer.Option(help="KV bytes that were tried; with the options below, for logs without our record line.")
    ] = 0,
    total_budget: Annotated[int, typer.Option(help="HBM bytes x gpu_memory_utilization of that start.")] = 0,
    architecture: Annotated[str, typer.Option(help="First name under 'architectures' in the model's config.")] = "",
    quantization: Annotated[str, typer.Option(help="The model's quantization.")] = "none",
    tensor_parallel_size: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    lnc: Annotated[int, typer.Option(help="Physical cores per logical core.", min=1, max=2)] = 2,
    target: Annotated[str, typer.Option(help="Platform family: trn1, trn2 or trn3.")] = "",
    compiler: Annotated[str, typer.Option(help="Version of neuronx-cc.")] = calibration.UNKNOWN,
) -> None:
    """Read NCC_EVRF009, NCC_EOOM00x and nrt_tensor_allocate failures, and write the cap fraction to try next.

    A start that finished is kept as known to serve. Nothing is tried here: start the engine with the file named in
    VLLM_OMNI_PATCH_NEURON_CALIBRATION, and give this command the next log.
    """
    try:
        told = _told(
            kv_bytes, total_budget, Key(architecture, quantization, tensor_parallel_size, lnc, target, compiler)
        )
        attempts = calibration.merge([attempt for log in logs for attempt in read_attempts(log.name, _text(log), told)])
        rows = calibration.load(str(output))[0] if output.exists() else []
        changed = _learn(attempts, rows, margin_mib << 20)
    except CalibrationError as error:
        typer.echo(f"No cap was written: {error}", err=True)
        raise typer.Exit(1) from None
    for row in changed.values():
        rows = calibration.with_row(rows, row)
        typer.echo(f"{row.key}\n  cap {row.cap:g}, at most {row.kv_bytes} bytes of KV\n  because {row.why}")
        for line in row.evidence:
            typer.echo(f"  {line}")
    if dry_run:
        typer.echo("Nothing was written (--dry-run).")
        return
    try:
        calibration.save(str(output), rows)
    except OSError as error:
        typer.echo(f"{output} cannot be written: {error.strerror or error}.", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"Written to {output}. Start the engine with {CALIBRATION.name}={os.path.abspath(output)}")


def _told(kv_bytes: int, total_budget: int, key: Key) -> Attempt | None:
    if not kv_bytes and not total_budget:
        return None
    if not (kv_bytes and total_budget and key.architecture and key.target):
        raise CalibrationError(
            "A start that is told by hand needs --kv-bytes, --total-budget, --architecture and --target together."
        )
    return Attempt(key, kv_bytes, total_budget, "unknown", minimum=GIB)


def _text(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError as error:
        raise CalibrationError(f"{log} cannot be read: {error.strerror or error}.") from error


def _learn(attempts: list[Attempt], rows: list[Row], margin: int) -> dict[Key, Row]:
    """The new row of every key that the attempts tell something about.

    Raises:
        CalibrationError: they tell nothing, or an attempt cannot be mended by a cap.
    """
    if not attempts:
        raise CalibrationError("the logs hold no 'Neuron KV budget record' line; was available_memory on?")
    telling = [attempt for attempt in attempts if attempt.outcome != "unknown"] or attempts[-1:]
    current = {row.key: row for row in rows}
    changed: dict[Key, Row] = {}
    for attempt in telling:
        current[attempt.key] = calibration.next_row(attempt, current.get(attempt.key), margin)
        changed[attempt.key] = current[attempt.key]
    return changed
