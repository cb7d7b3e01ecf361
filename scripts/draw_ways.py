#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the four pictures of docs/architecture.md: the steps of each way, and the module that holds each step.

python scripts/draw_ways.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
LOADER, EC, MEMORY = "vllm_omni_patch", "patches/ec_connector", "patches/available_memory"
# name of the picture: (title, [(what happens, module)])
WAYS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "target": (
        "A target: from its declaration to a patched function",
        [
            ("The patch declares the target", "patches/*/__init__.py"),
            ("The .pth file arms the finder for vllm", f"{LOADER}/__init__.py"),
            ("vllm is imported: stage 2 starts, once", f"{LOADER}/startup.py"),
            ("Pick the patches of VLLM_OMNI_PATCH", f"{LOADER}/loading/discover.py"),
            ("Wait until the target's module is imported", f"{LOADER}/loading/imports.py"),
            ("Verdict: matrix row, source file, signature", f"{LOADER}/matrix/judge.py"),
            ("State: one target, its group, its attribute", f"{LOADER}/matrix/rules.py"),
            ("Install the wrapper and read it back", f"{LOADER}/loading/apply.py"),
            ("Record the state", f"{LOADER}/ledger.py"),
        ],
    ),
    "put_get": (
        "An encoder output: from put to get",
        [
            ("put: vLLM hands over an output", f"{EC}/vllm/worker.py"),
            ("Make the key from the mm_hash", f"{EC}/cache/engine.py"),
            ("Copy to the staging buffer (model thread)", f"{EC}/cache/staging.py"),
            ("Checksum and write (writer thread)", f"{EC}/cache/writer.py"),
            ("Entry in a CPU or disk tier", f"{EC}/storage/files.py"),
            ("Entry on a server or a shared folder", f"{EC}/storage/remote.py"),
            ("lookup: the scheduler asks for an item", f"{EC}/vllm/scheduler.py"),
            ("Ask the tiers in order", f"{EC}/cache/tiers.py"),
            ("get: the worker loads promised items", f"{EC}/vllm/worker.py"),
            ("Read into memory and verify the checksum", f"{EC}/storage/entry.py"),
            ("Load failed: encode in the same step", f"{EC}/vllm/recompute.py"),
        ],
    ),
    "budget": (
        "A KV cache budget: from vLLM's number to the report",
        [
            ("Wrap determine_available_memory", f"{MEMORY}/hooks.py"),
            ("The same, on Neuron", f"{MEMORY}/neuron/hooks.py"),
            ("Watch vLLM's profiling run", f"{MEMORY}/gpu/profiling.py"),
            ("Decide, with the process policy", f"{MEMORY}/gpu/budget.py"),
            ("Decide, on Neuron", f"{MEMORY}/neuron/kv_budget.py"),
            ("Collect every figure and its source", f"{MEMORY}/explain.py"),
            ("One BudgetReport", f"{MEMORY}/report/report.py"),
            ("Log table, memory-<pid>.json, gauges", f"{MEMORY}/report/output.py"),
            ("vllm-omni-patch memory", f"{MEMORY}/cli.py"),
        ],
    ),
    "number": (
        "A number: from a patch to /metrics",
        [
            ("A patch calls add() or set_gauge()", f"{LOADER}/metrics.py"),
            ("Numbers of this process", f"{LOADER}/telemetry/numbers.py"),
            ("One file for each process", f"{LOADER}/telemetry/number_file.py"),
            ("in the engine's run folder", f"{LOADER}/telemetry/run_folder.py"),
            ("The API server reads all files", f"{LOADER}/telemetry/reading.py"),
            ("Sum counters, list gauges: /metrics", f"{LOADER}/telemetry/exposition.py"),
        ],
    ),
}
WIDTH, ROW, GAP, TOP = 760, 34, 14, 40


def main() -> None:
    for name, (title, steps) in WAYS.items():
        (IMAGES / f"way_{name}.svg").write_text(svg(title, steps))


def svg(title: str, steps: list[tuple[str, str]]) -> str:
    """One box for each step, from top to bottom, with the module in its right half."""
    height = TOP + len(steps) * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (what, module) in enumerate(steps):
        y = TOP + number * (ROW + GAP)
        if number:
            parts.append(f'<path d="M180 {y - GAP}v{GAP - 5}m-4 -1l4 6l4 -6z" stroke="#557" fill="#557"/>')
        parts += [
            f'<rect x="8" y="{y}" width="744" height="{ROW}" rx="5" fill="#eef1fb" stroke="#88a"/>',
            f'<text x="20" y="{y + 22}">{escape(what)}</text>',
            f'<text x="380" y="{y + 22}" font-family="monospace" font-size="13">{escape(module)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
