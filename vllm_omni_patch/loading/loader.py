# SPDX-License-Identifier: Apache-2.0
"""Stage 2: pick the patches that are asked for, and hook each target when its module has been imported.

Runs at the first look-up of a vLLM package. Nothing here raises into an import: what goes wrong becomes a state in
the ledger. Only :func:`engine_starts`, which vLLM calls from its plugin loading, may raise, in strict mode.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from functools import partial
from types import ModuleType

from vllm_omni_patch import __version__, finder, flags, ledger
from vllm_omni_patch.code import installed
from vllm_omni_patch.ledger import Entry
from vllm_omni_patch.loading import announce, discover, own
from vllm_omni_patch.loading.groups import Groups
from vllm_omni_patch.loading.imports import Watch
from vllm_omni_patch.loading.targets import Targets
from vllm_omni_patch.patch import Target
from vllm_omni_patch.telemetry import lifetime, log_lines, processes, run_folder, states

# A bare ``import vllm`` brings these; whoever configures an engine imports the other before vLLM asks any of them. So
# the loader's own targets there are judged then, and helpers that only import vLLM do not pay for it.
EARLY = ("vllm.envs", "vllm.logger")
ENGINE_SIGN = "vllm.plugins"


class Loader:
    """One process's patches. ``path``: the activation path that began stage 2."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.watch = Watch(_hook_failed)
        self.targets = Targets(_first_call)
        self.groups = Groups(self.targets)

    def begin(self) -> None:
        """Read the flag, enter every asked-for target as pending, and watch for its module."""
        value = str(flags.read(flags.SWITCH))
        found = discover.find()
        choice = discover.choose(value, found)
        ledger.describe_process(package=__version__, activation_path=self.path, flag=value, patches=list(choice.names))
        ledger.inspect_with(lambda: self.targets.inspect(self.watch.missed()))
        for name in choice.unknown:
            _patch_failed(name, discover.unknown_name(name, found))
        for one in found:
            if one.name not in choice.names:
                continue
            if one.patch is None:
                _patch_failed(one.name, one.error, one.traceback)
            else:
                self.targets.enter(one.patch)
        self.watch.add("vllm", _note_version)
        self.watch.add("vllm.logger", lambda module: log_lines.release())
        # Only now: a module that is imported already is hooked at once, and groups need to know all their members.
        for name in dict.fromkeys(target.module for patch in self.targets.patches for target in patch.targets):
            self.watch.add(name, partial(self.on_import, name))
        self._warn_if_late()
        self._warn_of_removed()
        lifetime.start()
        ledger.save()

    def _warn_if_late(self) -> None:
        late = sorted({one.target.module for one in self.targets.applied.values() if one.patch.name != own.NAME})
        if self.path != "plugin" or not late:
            return
        # On Ray the variables always arrive after the worker's interpreter has started.
        level = logging.INFO if processes.role() == "ray worker" else logging.WARNING
        self.targets.log(
            level,
            f"{flags.SWITCH.name} was not set yet when vLLM was imported in process {os.getpid()}, or no startup file "
            f"was read. Hooked after their import: {', '.join(late)}. Code that copied a function from them by name "
            f"keeps the original ('vllm-omni-patch status --verbose' shows where). To fix: set {flags.SWITCH.name} "
            "before Python starts.",
        )

    def _warn_of_removed(self) -> None:
        """Log what replaced a setting that is still set and is gone: once for an engine, in its first process."""
        if run_folder.is_multiprocessing_child() or processes.role() in ("model inspection", "ray worker"):
            return
        found = discover.find()
        for line in flags.removed_in(discover.all_flags(found), discover.all_removed(found)):
            self.targets.log(logging.WARNING, line)

    def on_import(self, name: str, module: ModuleType) -> None:
        """Hook every target of a module that has just been imported or reloaded."""
        for patch in self.targets.patches:
            if patch.name == own.NAME and name in EARLY and ENGINE_SIGN not in sys.modules:
                continue
            mine = [one for one in patch.targets if one.module == name and self.targets.holder(one) == patch.name]
            for group in dict.fromkeys(target.group for target in mine):
                self.groups.hook(patch, group, [target for target in mine if target.group == group], module)
            if mine:
                _forget_text()
            if mine and patch.name != own.NAME:
                states.update()
                announce.when_settled()
        if name == ENGINE_SIGN:
            for early in EARLY:
                if early in sys.modules:
                    self.on_import(early, sys.modules[early])
        ledger.save()

    def catch_up(self) -> None:
        """Hook modules that were imported without passing our finder; it stands first from now on if there were any."""
        if self.watch.audit(everything=True):
            finder.stand_first()

    def give_up_absent(self) -> None:
        """Skip pending required targets whose module does not exist. An absent optional target is ordinary."""
        for patch in self.targets.patches:
            for target in patch.targets:
                entry = self.targets.state(patch, target)
                if entry is not None and entry.state == "pending" and not target.optional:
                    self.groups.give_up_absent(patch, target)


def start(path: str) -> Watch:
    """Begin stage 2 in this process; returns what answers look-ups from now on. Called once, by ``startup.begin``."""
    global _loader
    os.register_at_fork(after_in_child=_after_fork)
    _loader = Loader(path)
    _loader.begin()
    return _loader.watch


def _after_fork() -> None:
    """Another thread may have held the watch's lock; it does not exist in the child."""
    if _loader is not None:
        _loader.watch.renew_lock()
        _loader.targets.forget_calls()


def engine_starts(path: str) -> None:
    """An engine, or a part of one, starts in this process: vLLM has just loaded its plugins. Once per process.

    Hooks modules that were imported without passing our finder, logs this process's line, and in strict mode stops.

    Raises:
        RuntimeError: strict mode, and something that was asked for is not applied.
        FlagError: ``VLLM_OMNI_PATCH_STRICT`` holds a value that it does not accept.
    """
    global _engine_pid
    if _loader is None or _engine_pid == os.getpid():
        return
    _engine_pid = os.getpid()
    lifetime.engine_starts()
    try:
        _loader.catch_up()
        _loader.give_up_absent()
        ledger.describe_process(engine_activation_path=path)
        announce.at_engine_start()
        ledger.save()
        states.update()
    except Exception as error:
        ledger.log(logging.WARNING, f"could not log what is patched: {type(error).__name__}: {error}")
    if flags.read(flags.STRICT):
        from vllm_omni_patch.loading import strict

        try:
            strict.check(_loader.targets.patches)
        except Exception:
            _engine_pid = 0  # a second attempt in this process is stopped as well
            raise


def _forget_text() -> None:
    """Release what was read to judge a module: a syntax tree takes tens of MiB."""
    from vllm_omni_patch.code import text

    text.forget()


def _first_call(target: Target) -> None:
    announce.at_first_call(target.name)
    ledger.save()


def _note_version(module: ModuleType) -> None:
    ledger.describe_process(vllm_version=installed.running_release("vllm") or "unknown")


def _patch_failed(name: str, reason: str, trace: str = "") -> None:
    ledger.record(Entry(name, "", "failed", reason, trace))
    ledger.log(logging.ERROR, f"{flags.SWITCH.name}: patch {name} is not applied: {reason}")


def _hook_failed(module: str, error: Exception) -> None:
    ledger.log(logging.WARNING, f"could not hook {module} ({type(error).__name__}: {error}); vLLM's own code stays")
    ledger.log(logging.DEBUG, "".join(traceback.format_exception(error)))


_loader: Loader | None = None
_engine_pid = 0
