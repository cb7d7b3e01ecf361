#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the docs from a real run: status and matrix as SVG, the memory report as PNG.

python scripts/quickstart.py --keep                  # prints its working folder
python scripts/draw_docs.py FOLDER/reports
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 118


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, help="report folder of a run with the flag on")
    reports = parser.parse_args().reports
    draw(
        "status.svg",
        "vllm-omni-patch status --report-dir reports",
        "status",
        "--report-dir",
        reports,
    )
    draw("matrix.svg", "vllm-omni-patch matrix --patch ec_connector", "matrix", "--patch", "ec_connector")
    command("memory", str(reports), "--png", str(IMAGES / "memory.png"))


def draw(name: str, title: str, *words: object) -> None:
    """Run the command as in a terminal and save its output as ``name``."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    text = re.sub(re.escape(str(Path(sys.prefix).resolve())), "/opt/venv", command(*map(str, words)))
    text = text.replace(str(ROOT), "/opt/vllm-omni-patch").replace(sys.prefix, "/opt/venv")
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title)
    # rich loads a font from the network; use the reader's monospace font instead.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code", "monospace")
    (IMAGES / name).write_text(svg)


def command(*words: str) -> str:
    env = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "VLLM_OMNI_PATCH": "1"}
    program = Path(sys.executable).parent / "vllm-omni-patch"
    return subprocess.run([str(program), *words], env=env, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    main()
