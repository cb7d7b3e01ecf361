# SPDX-License-Identifier: Apache-2.0
"""vLLM's own example proxy for a disaggregated encoder, unmodified, and what a tiny Qwen2-VL needs to be served.

``python tests/support/epd_proxy.py`` lays both beside the environment, in ``proxy-for-tests``: the proxy out of vLLM's
source archive, and torchvision, which vLLM would otherwise behave differently with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.engine_process import Group, Server, environment, free_port

RELEASE, TORCHVISION = "0.32.0", "0.28.0"
FOLDER = Path(sys.prefix) / "proxy-for-tests"
SCRIPT = FOLDER / "disagg_epd_proxy.py"


def is_there() -> bool:
    return SCRIPT.exists() and (FOLDER / "torchvision").exists()


def lay() -> None:
    """Fetch both through pip.

    pip runs the archive's set-up script to learn its needs, without installing any, and may fail there: the proxy lies
    in the unpacked archive all the same.

    Raises:
        RuntimeError: the archive has no proxy, or pip did not find it; the text ends with pip's.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    vision = [*pip, "install", "--no-deps", "--upgrade", "--target", str(FOLDER), f"torchvision=={TORCHVISION}"]
    subprocess.run(vision, check=True)
    # It describes operators that a build for another device does not register here.
    (FOLDER / "torchvision" / "_meta_registrations.py").write_text("")
    with tempfile.TemporaryDirectory() as scratch:
        archive = [*pip, "download", "--no-deps", "--no-clean", "--no-build-isolation", "--no-binary", "vllm"]
        archive += ["--dest", scratch, f"vllm=={RELEASE}"]
        done = subprocess.run(archive, env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True)
        found = sorted(Path(scratch).rglob(SCRIPT.name))
        if not found:
            raise RuntimeError(f"vLLM {RELEASE}'s source archive gave no {SCRIPT.name}: {done.stderr[-2000:]}")
        shutil.copy(found[0], SCRIPT)


class Proxy(Server):
    """The proxy on a free port, with a server's ways to ask it."""

    def __init__(self, folder: str, producers: Sequence[Server], consumers: Sequence[Server], *more: str) -> None:
        self.port, self.model = free_port(), producers[0].model
        command = [sys.executable, str(SCRIPT), "--host", "127.0.0.1", "--port", str(self.port), *more]
        for option, servers in (("--encode-servers-urls", producers), ("--decode-servers-urls", consumers)):
            command += [option, ",".join(f"http://127.0.0.1:{one.port}" for one in servers)]
        self.group = Group(command, environment(None), os.path.join(folder, f"proxy-{self.port}.log"))
        self.wait(60)


if __name__ == "__main__":
    lay()
    print(FOLDER)
