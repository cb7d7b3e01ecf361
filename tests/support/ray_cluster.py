# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, and what vLLM on the CPU needs to run its workers there.

Ray lies beside the environment (``RAY_PLACE``, or ``ray-for-tests`` beside the interpreter), because vLLM imports it
wherever it can. vLLM's CPU platform only lacks the name of a Ray resource; a platform plugin, laid on ``PYTHONPATH``,
is that platform with the name set. No file of vLLM is changed. ``python tests/support/ray_cluster.py`` is the cluster
itself, and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class Platform(CpuPlatform):
    ray_device_key = "GPU"
"""


def place() -> str:
    """The folder that holds Ray; ``""`` without one."""
    folder = os.environ.get("RAY_PLACE") or os.path.join(sys.prefix, "ray-for-tests")
    return folder if os.path.isdir(os.path.join(folder, "ray")) else ""


def variables(folder: str) -> dict[str, str]:
    """Variables of nodes and drivers. Writes the platform plugin below ``folder``."""
    site = os.path.join(folder, "ray-platform")
    os.makedirs(os.path.join(site, "ray_platform-1.0.dist-info"), exist_ok=True)
    files = {
        "ray_platform.py": PLATFORM,
        "ray_platform_name.py": 'def name():\n    return "ray_platform.Platform"\n',
        "ray_platform-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: ray-platform\nVersion: 1.0\n",
        "ray_platform-1.0.dist-info/entry_points.txt": "[vllm.platform_plugins]\nray_cpu = ray_platform_name:name\n",
    }
    for name, text in files.items():
        with open(os.path.join(site, name), "w", encoding="utf-8") as file:
            file.write(text.lstrip("\n"))
    return {
        "PYTHONPATH": os.pathsep.join([site, place()]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }


class Cluster:
    """Two nodes with one made-up GPU each, whose processes have the variables ``env``. Use it in a ``with``."""

    def __init__(self, folder: str, env: Mapping[str, str], name: str = "cluster") -> None:
        from support.engine_process import Group

        self.folder = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets must be short
        ready = os.path.join(self.folder, "ready")
        command = [sys.executable, os.path.abspath(__file__), ready]
        env = {**env, "RAY_TMPDIR": self.folder}
        self.group = Group(command, env, os.path.join(folder, f"{name}.log"), stdin=True)
        if self.group.process.stdout is None or not self.group.process.stdout.readline():
            raise RuntimeError(f"the Ray cluster has not started:\n{self.group.log()[-4000:]}")
        with open(ready, encoding="utf-8") as file:
            self.address: str = json.load(file)["address"]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self.group.process.stdin is not None:
            self.group.process.stdin.close()
        self.group.reap(30)
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(ready: str) -> None:
    from ray.cluster_utils import Cluster as Nodes

    common: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
    nodes = Nodes()
    nodes.add_node(**common)
    # vLLM's first Ray executor wants an address of its own for each node.
    nodes.add_node(env_vars={"VLLM_HOST_IP": "127.0.0.2"}, **common)
    nodes.wait_for_nodes()
    with open(ready, "w", encoding="utf-8") as file:
        json.dump({"address": nodes.address}, file)
    print("ready", flush=True)
    sys.stdin.read()
    nodes.shutdown()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
