# SPDX-License-Identifier: Apache-2.0
"""A small package called ``vllm``, patches for it, and processes that import them. What is tested is the loader.

The packages stand in a folder on ``PYTHONPATH``, before any vLLM that the environment may have, with the metadata
that makes their entry points visible.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import vllm_omni_patch

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path(vllm_omni_patch.__file__).resolve().parent.parent  # where the package is: a checkout, or site-packages
RELEASE = "7.0.0"

VLLM = {
    "vllm/__init__.py": "from .version import __version__\n",
    "vllm/version.py": f"__version__ = {RELEASE!r}\n",
    "vllm/envs.py": "environment_variables = {'VLLM_HOME': lambda: 'here'}\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/metrics/__init__.py": "",
    "vllm/v1/metrics/prometheus.py": """
        import os
        from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
        def get_prometheus_registry():
            if os.getenv("PROMETHEUS_MULTIPROC_DIR") is not None:
                registry = CollectorRegistry()
                multiprocess.MultiProcessCollector(registry)
                return registry
            return REGISTRY
    """,
    "vllm/plugins.py": """
        import os
        plugins_loaded = False
        def load_general_plugins():
            global plugins_loaded
            if plugins_loaded:
                return
            plugins_loaded = True
            from importlib.metadata import entry_points
            allowed = os.environ.get("VLLM_PLUGINS")
            for point in {p.name: p for p in entry_points(group="vllm.general_plugins")}.values():
                if allowed is None or point.name in allowed.split(","):
                    try:
                        function = point.load()
                    except Exception:
                        continue
                    function()
    """,
    "vllm/worker.py": """
        from vllm.other import Base
        class Worker(Base):
            def load(self, name, *, size=1):
                return (name, size)
            @staticmethod
            def twice(x):
                return 2 * x
        def helper(x):
            return x + 1
    """,
    "vllm/other.py": """
        class Base:
            def run(self, step):
                return step
    """,
    "vllm/user.py": "from vllm.worker import helper\n",
    "vllm/runner.py": """
        class Runner:
            def execute(self, batch):
                return [batch]
    """,
}

HOOKS = """
    import vllm_omni_patch.ledger as ledger
    calls = []
    def install(hook):
        def wrapper(wrapped, instance, args, kwargs):
            calls.append(hook.target.qualname)
            return ("ours", wrapped(*args, **kwargs))
        return hook.wrap(wrapper)
    def broken(hook):
        hook.wrap(lambda wrapped, instance, args, kwargs: None)
        raise RuntimeError("the installer broke")
    def idle(hook):
        return lambda: None
    def no(hook):
        return False
    def forgetful(hook):
        install(hook)
"""


class House:
    """A folder of packages. ``run`` starts an interpreter in which they can be imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "house"
        self.reports = folder / "reports"
        self.folder.mkdir(parents=True)
        for path, text in VLLM.items():
            self.write(path, text)
        self.distribution("vllm-fake", RELEASE, {}, packages=["vllm"])
        self.distribution(
            "vllm-omni-patch-plugin-view",
            "1.0",
            {"vllm.general_plugins": {"vllm_omni_patch": "vllm_omni_patch.startup:plugin"}},
        )

    def write(self, path: str, text: str) -> Path:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text))
        return target

    def distribution(
        self, name: str, release: str, groups: dict[str, dict[str, str]], packages: list[str] | None = None
    ) -> None:
        """Metadata of an installed distribution with entry points."""
        info = f"{name.replace('-', '_')}-{release}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        self.write(f"{info}/entry_points.txt", "\n".join(lines) + "\n")
        self.write(f"{info}/top_level.txt", "\n".join(packages or []) + "\n")

    def patch(self, name: str, targets: str, listed: list[str] | None = None, extra: str = "") -> None:
        """A package ``name`` with a patch of that name. ``targets``: source of the tuple's members.

        ``listed``: target names that its matrix gives as ``applies`` on ``RELEASE``.
        """
        self.write(
            f"{name}/__init__.py",
            f"""
            import os
            from vllm_omni_patch.flags import Flag
            from vllm_omni_patch.patch import Contract, Native, Parameter, Patch, Target
            def T(module, qualname, install="install", **more):
                more.setdefault("contract", Contract())
                return Target(module=module, qualname=qualname, install="{name}.hooks:" + install, **more)
            PATCH = Patch(
                name="{name}", summary="s", why="w", scope="s", fragility="f", remove_when="r", effect="reports",
                targets=({targets},), matrix=os.path.join(os.path.dirname(__file__), "matrix.json"),
                flags=(Flag("VLLM_OMNI_PATCH_{name.upper()}_SIZE", "int", 1, "size"),),
            )
            {extra}
            """,
        )
        self.write(f"{name}/hooks.py", HOOKS)
        self.matrix(name, {target: {"verdict": "applies"} for target in listed or []})
        points = {"vllm_omni_patch.patches": {name: f"{name}:PATCH"}}
        self.distribution(f"{name}-dist", "1.0", points, packages=[name])

    def matrix(self, name: str, rows: dict[str, dict[str, Any]]) -> None:
        """The matrix file of patch ``name``: one row for each target, on ``RELEASE``."""
        targets = {
            target: {"distribution": "vllm", "ranges": [{"from": RELEASE, **row}]} for target, row in rows.items()
        }
        data = {"format": 1, "releases": {"vllm": [RELEASE]}, "patches": {name: targets}}
        self.write(f"{name}/matrix.json", json.dumps(data))

    def environment(self, flag: str | None, **env: str) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        keep.update(PYTHONPATH=f"{self.folder}{os.pathsep}{PLACE}", PYTHONDONTWRITEBYTECODE="1", **env)
        if flag is not None:
            keep["VLLM_OMNI_PATCH"] = flag
        return keep

    def run(
        self, *code: str, flag: str | None = "probe", activate: bool = True, options: tuple[str, ...] = (), **env: str
    ) -> Outcome:
        """Run pieces of ``code`` in a fresh interpreter; ``activate`` does what a startup file does first.

        Without ``activate`` the interpreter starts with the flag off, and ``arm()`` sets it later: the environment
        that runs the tests may have the startup file itself.
        ``code`` may call ``show(x)``: the last value shown is ``Outcome.value``.
        """
        head = ["import json, sys", "def show(x): print('SHOW ' + json.dumps(x), flush=True)"]
        if activate:
            # A virtual environment runs startup files twice.
            head += ["import vllm_omni_patch", "vllm_omni_patch.activate()", "vllm_omni_patch.activate()"]
        else:
            head += ["import os", f"def arm(): os.environ['VLLM_OMNI_PATCH'] = {flag!r}"]
        text = "\n".join([*head, *(textwrap.dedent(piece) for piece in code)])
        script = self.folder / "script.py"
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, *options, str(script)],
            env=self.environment(flag if activate else None, **env),
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Outcome(done)

    def ledgers(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.reports.glob("ledger-*.json"))]


class Outcome:
    """What a process left: status, output, and what it showed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def shown(self) -> list[Any]:
        return [json.loads(line[5:]) for line in self.out.splitlines() if line.startswith("SHOW ")]

    @property
    def value(self) -> Any:
        if self.status or not self.shown:
            raise RuntimeError(f"exit {self.status}\n{self.out}\n{self.err}")
        return self.shown[-1]


def gone(folder: str) -> None:
    """Wait until ``folder`` is removed."""
    deadline = time.monotonic() + 60
    while os.path.exists(folder):
        assert time.monotonic() < deadline, f"{folder} is left"
        time.sleep(0.02)


# Code for the processes: the states of all targets, as {target: [state, reason]}; apart, of those of the loader itself.
STATES = """
from vllm_omni_patch import ledger
ledger.snapshot()
show({e.target: [e.state, e.reason] for e in ledger.entries() if e.patch not in ("ghost", "loader")})
"""
OWN_STATES = """
from vllm_omni_patch import ledger
ledger.snapshot()
show({e.target: [e.state, e.reason] for e in ledger.entries() if e.patch == "loader"})
"""
