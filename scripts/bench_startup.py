#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the package at interpreter start and at ``import vllm``: CPU time of fresh processes, side by side.

    python scripts/bench_startup.py [--python PATH] [--rounds N] [--vllm-rounds N] [--json]

Every case runs once in each round, in shuffled order, so other load on the machine affects all of them equally.
CPU time is user plus system time of the process and of the children that it waited for (``wait4``).
The figures are medians, and medians of the difference to the reference case of the same round.

Cases: a bare interpreter (the same environment without this package), installed with the flag off, flag on and no vLLM,
``import vllm`` with the flag off and with every patch on, and autowrapt off and on if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAG = "VLLM_OMNI_PATCH"
STARTUP_FILE = "vllm_omni_patch.pth"
BARE, OURS, PEER = "bare", "ours", "autowrapt"  # the virtual environments, by what of the two they hold


@dataclass(frozen=True)
class Case:
    """One way to start Python. ``against``: the case that it is compared with."""

    name: str
    code: str
    env: tuple[tuple[str, str], ...] = ()
    against: str = ""
    place: str = OURS


CASES = (
    Case("bare interpreter", "pass", place=BARE),
    Case("installed, flag off", "pass", against="bare interpreter"),
    Case("flag on, no vLLM", "pass", ((FLAG, "1"),), against="bare interpreter"),
)
VLLM = (
    Case("import vllm, flag off", "import vllm"),
    Case("import vllm, flag on", "import vllm", ((FLAG, "1"),), against="import vllm, flag off"),
)
AUTOWRAPT = (
    Case("autowrapt, off", "pass", against="bare interpreter", place=PEER),
    Case("autowrapt, on", "pass", (("AUTOWRAPT_BOOTSTRAP", "autowrapt.examples"),), "bare interpreter", PEER),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", default=sys.executable, help="the Python to measure; this package must be installed there"
    )
    parser.add_argument("--rounds", type=int, default=40, help="fresh processes for each case without vLLM (>= 40)")
    parser.add_argument(
        "--vllm-rounds", type=int, default=40, help="the same for the cases that import vLLM; 0 for none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    python = options.python
    if not has(python, "vllm_omni_patch"):
        sys.exit(f"{python} does not have vllm_omni_patch; install it there first.")
    plain = CASES + (AUTOWRAPT if has(python, "autowrapt") else ())
    heavy = VLLM if options.vllm_rounds and has(python, "vllm") else ()
    with tempfile.TemporaryDirectory() as folder:
        pythons = environments(python, Path(folder))
        measured = {**measure(plain, options.rounds, pythons), **measure(heavy, options.vllm_rounds, pythons)}
    rows = [row(case, measured) for case in plain + heavy]
    print(json.dumps(rows, indent=1) if options.json else table(rows, python))


def has(python: str, module: str) -> bool:
    """The module can be found by ``python``; nothing is imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], env=environment(()), check=False).returncode == 0


def environment(extra: tuple[tuple[str, str], ...]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith((FLAG, "AUTOWRAPT"))}
    return {**kept, "OMP_NUM_THREADS": "1", **dict(extra)}


def environments(python: str, folder: Path) -> dict[str, str]:
    """Virtual environments that hold what ``python``'s holds: bare of this package and autowrapt, or with one of them.

    This package is there as a regular install lays it down. An editable install costs more at every start: setuptools'
    own finder for it imports ``pathlib`` and more, whatever the package is.
    """
    source, ours, patches = ask(python, WHERE)
    made = {}
    for place in (BARE, OURS, PEER):
        subprocess.run([python, "-m", "venv", "--without-pip", folder / place], check=True)
        made[place] = str(folder / place / "bin/python")
        target = Path(ask(made[place], WHERE_SITE)[0])
        for path in Path(source).iterdir():
            ours_too = path.name == STARTUP_FILE or ("vllm_omni_patch" in path.name and "info" not in path.suffix)
            if not ours_too and (place == PEER or "autowrapt" not in path.name):
                (target / path.name).symlink_to(path)
    target = Path(ask(made[OURS], WHERE_SITE)[0])
    shutil.copy(Path(source) / STARTUP_FILE, target)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ours, target / "vllm_omni_patch", ignore=ignore, dirs_exist_ok=True)
    shutil.copytree(patches, target / "vllm_omni_patch" / "patches", ignore=ignore, dirs_exist_ok=True)
    subprocess.run([made[OURS], "-m", "compileall", "-q", target / "vllm_omni_patch"], check=True)  # as pip does
    return made


def ask(python: str, code: str) -> list[str]:
    """What ``code`` prints as a JSON list."""
    done = subprocess.run([python, "-c", code], env=environment(()), check=True, capture_output=True, text=True)
    return [str(part) for part in json.loads(done.stdout)]


WHERE_SITE = "import json, sysconfig; print(json.dumps([sysconfig.get_path('purelib')]))"
WHERE = (
    "import json, sysconfig, vllm_omni_patch as a, vllm_omni_patch.patches as b; "
    "print(json.dumps([sysconfig.get_path('purelib'), a.__path__[0], b.__path__[0]]))"
)


def measure(cases: tuple[Case, ...], rounds: int, pythons: dict[str, str]) -> dict[str, list[float]]:
    """CPU milliseconds of each case, one figure a round."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    order = random.Random(0)
    for index in range(-1, rounds if cases else -1):  # the first round only warms the disk cache
        for case in order.sample(cases, len(cases)):  # shuffled: a short process pays for a long one before it
            spent = cpu_ms(pythons[case.place], case)
            if index >= 0:
                found[case.name].append(spent)
    return found


def cpu_ms(python: str, case: Case) -> float:
    """User plus system time of one process, in milliseconds."""
    process = subprocess.Popen([python, "-c", case.code], env=environment(case.env), stderr=subprocess.PIPE)
    error = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.stderr:
        process.stderr.close()
    if process.returncode:
        sys.exit(f"the case {case.name!r} failed:\n{error.decode(errors='replace')[-2000:]}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def row(case: Case, measured: dict[str, list[float]]) -> dict[str, float | int | str]:
    """The figures of one case; with ``against``, the differences round by round and the ratio of the medians."""
    own = measured[case.name]
    shown: dict[str, float | int | str] = {
        "case": case.name,
        "processes": len(own),
        "median_ms": statistics.median(own),
    }
    if case.against:
        other = measured[case.against]
        shown["against"] = case.against
        shown["difference_ms"] = statistics.median(a - b for a, b in zip(own, other, strict=True))
        shown["ratio"] = statistics.median(own) / statistics.median(other)
    return shown


def table(rows: list[dict[str, float | int | str]], python: str) -> str:
    lines = [f"CPU time of fresh processes, {python}", ""]
    lines.append(f"{'case':26} {'processes':>9} {'median ms':>10} {'difference ms':>14} {'ratio':>7}  against")
    for shown in rows:
        line = f"{shown['case']:26} {shown['processes']:9} {shown['median_ms']:10.2f}"
        if "against" in shown:
            line += f" {shown['difference_ms']:+14.2f} {shown['ratio']:7.4f}  {shown['against']}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
