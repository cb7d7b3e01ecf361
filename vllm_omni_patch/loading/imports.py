# SPDX-License-Identifier: Apache-2.0
"""Post-import hooks: call a function each time a module's code has run. The module keeps its real loader.

wrapt has such hooks too. They forget a module after its first import, so that a reloaded one is unpatched, and with it
the hooks after one that raised; they hand over a module whose code still runs; and before 1.15 they are called under a
lock that two importing threads wait for for good. ``tests/unit/test_imports.py`` shows each case on the wrapt that is
installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class Watch:
    """Callbacks by module name. A callback must not raise; one that does is passed to ``on_error``."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._seen: dict[str, ModuleType] = {}
        self._late: set[str] = set()
        self._lock = threading.RLock()
        self._on_error = on_error

    def add(self, name: str, callback: Callback) -> None:
        """Call ``callback(module)`` after each import or reload of ``name``, and now if it is imported already."""
        with self._lock:
            self._callbacks.setdefault(name, []).append(callback)
            module = sys.modules.get(name)
            known = name in self._seen
            if module is not None and not known:
                self._late.add(name)
        if module is None:
            return
        if known and self._seen[name] is module:
            self._call([callback], module)
        else:
            self.audit()

    def find_spec(
        self, finder: object, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The spec that the finders behind ``finder`` give, with the callbacks tied to its loader; else ``None``."""
        if self._late:
            self.audit()
        if fullname not in self._callbacks:
            return None
        for other in _behind(finder):
            spec: ModuleSpec | None = other.find_spec(fullname, path, target)
            if spec is not None:
                self._tie(spec)
                return spec
        return None

    def _tie(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        try:
            execute = loader.exec_module
            if isinstance(loader, type) or isinstance(vars(loader).get("exec_module"), _Execute):
                return
            loader.exec_module = _Execute(self, loader, execute)
        except Exception:
            # The loader takes no attribute: the audit finds the module once it has been imported.
            self._late.add(spec.name)

    def executed(self, module: ModuleType) -> None:
        """Run the callbacks of a module whose code has just run."""
        name = module.__spec__.name if module.__spec__ else module.__name__
        module = sys.modules.get(name, module)  # some modules put another object in their place
        with self._lock:
            callbacks = list(self._callbacks.get(name, ()))
            self._seen[name] = module
            self._late.discard(name)
        self._call(callbacks, module)

    def audit(self, everything: bool = False) -> list[str]:
        """Run the callbacks of modules that were imported without passing our import hook.

        Args:
            everything: look at every watched module, and not only at those that are known to have been imported late.

        Returns:
            Modules that another finder in front of ours found by itself.
        """
        hidden = []
        with self._lock:
            names = list(self._callbacks if everything else self._late)
        for name in names:
            module = sys.modules.get(name)
            # While a module's code runs, its names are not all there yet.
            if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue
            with self._lock:
                if self._seen.get(name) is module:
                    self._late.discard(name)
                    continue
                if name not in self._late:
                    hidden.append(name)
                self._late.discard(name)
                self._seen[name] = module
                callbacks = list(self._callbacks.get(name, ()))
            self._call(callbacks, module)
        return hidden

    def renew_lock(self) -> None:
        """For a forked child: a lock that no thread of its parent holds."""
        self._lock = threading.RLock()

    def missed(self) -> list[str]:
        """Watched modules that were imported without passing our import hook."""
        with self._lock:
            return [name for name in self._callbacks if sys.modules.get(name) not in (None, self._seen.get(name))]

    def _call(self, callbacks: list[Callback], module: ModuleType) -> None:
        for callback in callbacks:
            try:
                callback(module)
            except Exception as error:
                self._on_error(module.__name__, error)


class _Execute:
    """Stands in for ``exec_module`` on one loader object: the original, then the callbacks."""

    def __init__(self, watch: Watch, loader: Any, original: Callable[[ModuleType], None]) -> None:
        self._watch = watch
        self._loader = loader
        self._original = original

    def __call__(self, module: ModuleType) -> None:
        # A loader object that serves one module goes back to what it was; a shared one (zip files) stays tied.
        if getattr(self._loader, "name", None) == module.__name__:
            vars(self._loader).pop("exec_module", None)
        self._original(module)
        self._watch.executed(module)


def _behind(finder: object) -> list[Any]:
    finders = list(sys.meta_path)
    index = finders.index(finder) if finder in finders else -1
    return [other for other in finders[index + 1 :] if other is not finder and hasattr(other, "find_spec")]
