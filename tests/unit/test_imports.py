# SPDX-License-Identifier: Apache-2.0
"""Why ``loading/imports.py`` does not use wrapt's post-import hooks: each case runs both, on the wrapt that is here.

``scripts/test_wrapt.sh`` runs this on the oldest and newest releases that setup.cfg admits. A test that fails because
wrapt's column has become right is a reason less to have hooks of our own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from support.fake_house import PLACE

FIRST = """
import faulthandler, importlib, json, pkgutil, sys, threading
faulthandler.dump_traceback_later(20, exit=True)
from vllm_omni_patch.loading.imports import Watch
watch = Watch(print)
class Finder:
    def find_spec(self, name, path=None, target=None):
        return watch.find_spec(self, name, path, target)
finder = Finder()
sys.meta_path.insert(0, finder)
import wrapt
register = {"wrapt": lambda hook, name: wrapt.register_post_import_hook(hook, name), "ours": None}
register["ours"] = lambda hook, name: watch.add(name, hook)
hook = register[sys.argv[1]]
def show(value): print(json.dumps(value))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.txt").write_text("data")
    (package / "worker.py").write_text("import time\ntime.sleep(0.1)\nclass Worker: pass\n")
    (package / "runner.py").write_text("import time\ntime.sleep(0.2)\nclass Runner: pass\n")
    (package / "starter.py").write_text("import start\nstart.start()\nclass Starter: pass\n")
    return tmp_path


def run(folder: Path, hooks: str, code: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(FIRST + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script), hooks],
        env={"PYTHONPATH": f"{folder}:{PLACE}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout.strip() or done.stderr


def both(folder: Path, code: str) -> dict[str, Any]:
    """What the code shows with wrapt's hooks, and with ours."""
    return {hooks: run(folder, hooks, code)[1] for hooks in ("wrapt", "ours")}


RELOAD = """
    seen = []
    hook(lambda module: seen.append(module.__name__), "package.worker")
    import package.worker
    importlib.reload(package.worker)
    del sys.modules["package.worker"]
    importlib.import_module("package.worker")
    show(len(seen))
"""


def test_a_module_that_is_reloaded_or_imported_again_is_forgotten(folder: Path) -> None:
    assert both(folder, RELOAD) == {"wrapt": "1", "ours": "3"}


def test_a_hook_cannot_be_registered_for_the_next_import(folder: Path) -> None:
    """wrapt calls a hook for an imported module at once and keeps nothing, so the callback cannot renew itself."""
    code = """
        seen = []
        def again(module):
            seen.append(module.__name__)
            if len(seen) < 5:
                hook(again, "package.worker")
        hook(again, "package.worker")
        import package.worker
        before = len(seen)
        importlib.reload(package.worker)
        show([before, len(seen)])
    """
    assert run(folder, "wrapt", code)[1] == "[5, 5]"


def test_a_module_whose_code_still_runs_is_handed_over_half_made(folder: Path) -> None:
    """Stage 2 may begin while another thread, or a module that starts an engine, is in the middle of an import."""
    (folder / "start.py").write_text("def start(): pass\n")
    code = """
        seen = []
        import start
        start.start = lambda: hook(lambda module: seen.append(hasattr(module, "Starter")), "package.starter")
        import package.starter, package.worker
        show(seen)
    """
    assert both(folder, code) == {"wrapt": "[false]", "ours": "[true]"}


def test_a_hook_is_lost_when_that_of_another_package_raises(folder: Path) -> None:
    """The import fails, as it must; the next one works, and our hook is not called any more."""
    code = """
        seen = []
        def broken(module):
            raise ValueError("somebody else's hook")
        wrapt.register_post_import_hook(broken, "package.worker")
        hook(seen.append, "package.worker")
        try:
            import package.worker
        except ValueError:
            import package.worker
        show(bool(seen) and seen[-1] is package.worker)
    """
    assert both(folder, code) == {"wrapt": "false", "ours": "true"}


def test_a_look_up_without_an_import_gives_another_loader(folder: Path) -> None:
    code = """
        hook(lambda module: None, "package.worker")
        import importlib.util
        show(type(importlib.util.find_spec("package.worker").loader).__name__)
    """
    assert both(folder, code) == {"wrapt": '"_ImportHookChainedLoader"', "ours": '"SourceFileLoader"'}


OLD = Version(version("wrapt")) < Version("1.15")

THREADS = """
    import time
    def slow(module):
        time.sleep(0.3)
        importlib.import_module("package.runner")
    hook(slow, "package.worker")
    hook(lambda module: None, "package.runner")
    names = ("package.worker", "package.runner")
    threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    show("both imported")
"""


def test_two_threads_import_at_once(folder: Path) -> None:
    """wrapt before 1.15 calls hooks under its own lock, so that two threads wait for each other for good."""
    assert run(folder, "ours", THREADS) == (0, '"both imported"')
    status, shown = run(
        folder,
        "wrapt",
        THREADS.replace("import time", "faulthandler.dump_traceback_later(5, exit=True); import time", 1),
    )
    assert ("Timeout" in shown and status != 0) if OLD else shown == '"both imported"'


def test_the_data_of_a_hooked_package_can_be_read(folder: Path) -> None:
    """wrapt before 1.15 leaves a loader in place that has ``load_module`` and little else."""
    code = """
        hook(lambda module: None, "package")
        import package
        data = pkgutil.get_data("package", "data.txt")
        show(data and data.decode())
    """
    assert both(folder, code) == {"wrapt": "null" if OLD else '"data"', "ours": '"data"'}
