# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's Model Runner V2 on a machine without a GPU: a Triton back end named ``cpu``, beside the interpreter.

vLLM has a CPU flavour of the V2 runner and lacks only a driver that Triton accepts. With ``TRITON_INTERPRET=1`` Triton
runs kernels as Python code and asks the driver for little more than its device. :func:`environment` lays the back end
as a package of its own on ``PYTHONPATH``; no file of vLLM or Triton is changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys

BACKEND = {
    "__init__.py": "",
    "compiler.py": '''
from triton.backends.compiler import BaseBackend

class CPUBackend(BaseBackend):
    """Compiles nothing: the interpreter runs each kernel."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        pass

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
''',
    "driver.py": '''
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

class CPUDriver(DriverBase):
    """The host as a device with one stream."""

    def __init__(self):
        pass

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        return "void*"

    def get_current_target(self):
        return GPUTarget("cpu", "host", 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self):
        return torch.empty(1)

    def clear_cache(self, cache):
        pass
''',
}


def place() -> str:
    """The folder that holds Triton: ``TRITON_PLACE``, or ``triton`` beside this interpreter; ``""`` without one.

    It is kept out of the environment's own packages, because vLLM behaves otherwise where Triton can be imported.
    """
    folder = os.environ.get("TRITON_PLACE") or os.path.join(sys.prefix, "triton-for-tests")
    return folder if os.path.isdir(os.path.join(folder, "triton")) else ""


def environment(folder: str) -> dict[str, str]:
    """Variables with which vLLM in this environment runs V2. Writes the back end below ``folder``.

    Raises:
        RuntimeError: there is no Triton here.
    """
    triton = place()
    if not triton:
        raise RuntimeError("there is no Triton for the V2 runner; scripts/test.sh lays it beside the environment")
    if importlib.util.find_spec("triton"):
        raise RuntimeError("Triton is installed in the environment itself; uninstall it, other tests run without")
    site = os.path.join(folder, "triton-cpu")
    package, about = os.path.join(site, "triton_cpu_backend"), os.path.join(site, "triton_cpu_backend-1.0.dist-info")
    for path in (package, about):
        os.makedirs(path, exist_ok=True)
    for name, text in BACKEND.items():
        _write(os.path.join(package, name), text)
    _write(os.path.join(about, "METADATA"), "Metadata-Version: 2.1\nName: triton-cpu-backend\nVersion: 1.0\n")
    _write(os.path.join(about, "entry_points.txt"), "[triton.backends]\ncpu = triton_cpu_backend\n")
    return {
        "PYTHONPATH": os.pathsep.join([site, triton]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.lstrip("\n"))
