# SPDX-License-Identifier: Apache-2.0
"""Run the tests that use transformers caches on several releases of transformers, with the installed torch.

    python scripts/check_transformers.py [--releases 4.56.2 4.57.6 ...] [--folder .cache/transformers]

Each release is installed once into its own folder (``pip install --target``), which comes before site-packages through
``PYTHONPATH``. Prints one line per release. The exit status is the number of releases on which a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("4.56.2", "4.57.6", "5.5.4", "5.14.1", "5.19.0")
TESTS = tuple(f"tests/unit/test_model_local_kv_{part}.py" for part in ("specs", "observe", "reconcile", "hooks"))


def install(release: str, folder: Path) -> Path:
    """The folder that holds ``release`` with its dependencies; installed on the first call.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    target = folder / release
    done = target / "installed"
    if not done.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-warn-conflicts",
            "--target",
            str(target),
            f"transformers=={release}",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done.touch()
    return target


def run(release: str, target: Path) -> bool:
    """Run the tests on ``release`` and print the summary; whether all passed."""
    env = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    found = subprocess.run(version, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if found != release:
        raise RuntimeError(f"PYTHONPATH has transformers {found}, not {release}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = re.findall(r"^.*\b(?:passed|failed|error|errors|skipped)\b.*$", done.stdout, re.MULTILINE)
    print(f"transformers {release}: {summary[-1] if summary else done.stdout[-500:] + done.stderr[-500:]}", flush=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
    return done.returncode == 0


def main() -> int:
    """Check every release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", nargs="+", default=RELEASES)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "transformers")
    options = parser.parse_args()
    return sum(not run(release, install(release, options.folder)) for release in options.releases)


if __name__ == "__main__":
    raise SystemExit(main())
