# SPDX-License-Identifier: Apache-2.0
"""Stage 2: pick the patches that are asked for, and hook each target when its module has been imported.

Runs at the first look-up of a vLLM package. Nothing here raises into an import: what goes wrong becomes a state in
the ledger. Only :func:`engine_starts`, which vLLM calls from its plugin loading, may raise, in strict mode.

Groups. Targets of a group may live in modules that are imported at different times. When the first of them turns up,
the others are judged ahead on the text of their modules; if one of them would not apply, none is hooked. Should a
later one fail all the same, those before it are taken out again.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_omni_patch import __version__, flags, ledger, startup
from vllm_omni_patch.code import installed
from vllm_omni_patch.ledger import OWN, Entry, State
from vllm_omni_patch.loading import announce, discover
from vllm_omni_patch.loading.imports import Watch
from vllm_omni_patch.patch import Patch, Target
from vllm_omni_patch.telemetry import lifetime, run_folder, states

if TYPE_CHECKING:
    from vllm_omni_patch.loading.apply import Installed
    from vllm_omni_patch.matrix.judge import Decision

# What is needed only once a target's module is there (apply, layers, matrix, wrapt) is imported then: most processes
# that import vLLM never come to it.

LEVELS = {"info": logging.INFO, "warning": logging.WARNING}
# A bare ``import vllm`` brings these; whoever configures an engine imports the other before vLLM asks any of them. So
# the loader's own targets there are judged then, and helpers that only import vLLM do not pay for it.
EARLY = ("vllm.envs", "vllm.logger")
ENGINE_SIGN = "vllm.plugins"


class Loader:
    """One process's patches. ``road``: which of the two roads began stage 2."""

    def __init__(self, road: str) -> None:
        self.road = road
        self.watch = Watch(self._hook_failed)
        self.found = discover.find()
        self.patches: list[Patch] = []
        self.applied: dict[tuple[str, str], Installed] = {}
        self._owners: dict[tuple[str, str], str] = {}
        self._groups_off: dict[tuple[str, str], str] = {}
        self._said: set[str] = set()

    # -- what is asked for

    def begin(self) -> None:
        """Read the flag, enter every asked-for target as pending, and watch for its module."""
        value = str(flags.read(flags.SWITCH))
        choice = discover.choose(value, self.found)
        ledger.describe_process(package=__version__, road=self.road, flag=value, patches=list(choice.names))
        ledger.inspect_with(self.inspect)
        for name in choice.unknown:
            self._settle_patch(name, discover.unknown_name(name, self.found))
        for one in self.found:
            if one.name not in choice.names:
                continue
            if one.patch is None:
                self._settle_patch(one.name, one.error, one.traceback)
            else:
                self._enter(one.patch)
        self.watch.add("vllm", _note_version)
        self.watch.add("vllm.logger", lambda module: ledger.release_lines())
        # Only now: a module that is imported already is hooked at once, and groups need to know all their members.
        for name in dict.fromkeys(target.module for patch in self.patches for target in patch.targets):
            self.watch.add(name, partial(self.on_import, name))
        self._warn_if_late()
        self._warn_of_removed()
        lifetime.start()
        ledger.save()

    def _warn_if_late(self) -> None:
        late = sorted({done.target.module for done in self.applied.values() if done.patch.name != OWN})
        if self.road != "plugin" or not late:
            return
        # On Ray the variables always arrive after the worker's interpreter has started.
        level = logging.INFO if ledger.role() == "ray worker" else logging.WARNING
        self._say(
            level,
            f"{flags.SWITCH.name} was not set yet when vLLM was imported in process {os.getpid()}, or no startup file "
            f"was read; hooked after their import: {', '.join(late)}. Code that copied a function from them by name "
            f"keeps the original ('vllm-omni-patch status' shows where). Set {flags.SWITCH.name} before Python starts.",
        )

    def _warn_of_removed(self) -> None:
        """Say what replaced a setting that is still set and is gone: once for an engine, in its first process."""
        if run_folder.is_multiprocessing_child() or ledger.role() in ("model inspection", "ray worker"):
            return
        for line in flags.removed_in(discover.all_flags(self.found), discover.all_removed(self.found)):
            self._say(logging.WARNING, line)

    def _enter(self, patch: Patch) -> None:
        patch = replace(patch, targets=tuple(target for target in patch.targets if self._is_wanted(patch, target)))
        self.patches.append(patch)
        for target in patch.targets:
            first = self._owners.setdefault((target.module, target.qualname), patch.name)
            if first != patch.name:
                self._record(patch, target, "skipped", discover.claimed_by(first), warn=True)
            else:
                self._record(patch, target, "pending")

    def _is_wanted(self, patch: Patch, target: Target) -> bool:
        try:
            return target.is_wanted()
        except flags.FlagError as error:
            self._record(patch, target, "failed", str(error))
            self._say(logging.ERROR, f"{patch.name}: {_with_consequence(target, f'{target.name} failed: {error}')}")
            return False

    def _settle_patch(self, name: str, reason: str, trace: str = "") -> None:
        ledger.record(Entry(name, "", "failed", reason, trace))
        ledger.say(logging.ERROR, f"{flags.SWITCH.name}: patch {name} is not applied: {reason}")

    def _hook_failed(self, module: str, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        ledger.say(logging.WARNING, f"the loader's work on {module} failed ({error}); vLLM goes on without it")
        ledger.say(logging.DEBUG, trace)

    # -- a module has been imported

    def on_import(self, name: str, module: ModuleType) -> None:
        """Hook every pending target of a module that has just been imported or reloaded."""
        for patch in self.patches:
            if patch.name == OWN and name in EARLY and ENGINE_SIGN not in sys.modules:
                continue
            mine = [t for t in patch.targets if t.module == name and self._owners[(name, t.qualname)] == patch.name]
            for group in dict.fromkeys(target.group for target in mine):
                members = [target for target in mine if target.group == group]
                if group:
                    self._hook_group(patch, group, members, module)
                    continue
                for target in members:
                    self._hook(patch, target, module)
            if mine and patch.name != OWN:
                states.update()
                announce.when_settled()
        if name == ENGINE_SIGN:
            for early in EARLY:
                if early in sys.modules:
                    self.on_import(early, sys.modules[early])
        ledger.save()

    def _hook(self, patch: Patch, target: Target, module: ModuleType) -> bool:
        """Judge and install one target; returns whether it is applied now."""
        from vllm_omni_patch.loading import apply
        from vllm_omni_patch.matrix import judge

        try:
            if self._stands(patch, target, module):
                return True
            release = self._release(target)
            decision = judge.decide(patch, target, release, module)
            if decision.apply:
                self._install(patch, target, module, release, decision)
            else:
                self._stand_aside(patch, target, release, decision)
            return decision.apply
        except apply.Refused as refusal:
            self._record(patch, target, "skipped", str(refusal), warn=True)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            self._record(patch, target, "failed", reason, traceback.format_exc())
            text = _with_consequence(target, f"{target.name} failed, vLLM's own code stays: {reason}")
            self._say(logging.ERROR, f"{patch.name}: {text}")
        return False

    def _stands(self, patch: Patch, target: Target, module: ModuleType) -> bool:
        """A reload that left our wrapper in place, or a second look at the same module."""
        from vllm_omni_patch.loading import apply, wrappers

        done = self.applied.get((patch.name, target.name))
        if done is None or done.hook.module is not module:
            return False
        try:
            owner, attribute, value = apply.locate(module, target.qualname)
        except LookupError:
            return False
        if owner is not done.hook.owner or attribute != done.hook.attribute:
            return False
        return value is done.left if not done.is_wrapper else wrappers.depth(value, patch.name) > 0

    def _stand_aside(self, patch: Patch, target: Target, release: str | None, decision: Decision) -> None:
        quiet = decision.verdict == "absent" and target.optional
        level = logging.DEBUG if quiet else LEVELS[decision.level]
        state: State = "native" if decision.verdict == "native" else "skipped"
        reason = decision.reason if state == "native" else _with_consequence(target, decision.reason)
        self._say(level, f"{patch.name}: {target.name} is not hooked. {reason}")
        found = self._entry(patch, target, state, reason, verdict=decision.verdict, release=release or "")
        ledger.record(found)

    def _install(
        self, patch: Patch, target: Target, module: ModuleType, release: str | None, decision: Decision
    ) -> None:
        from vllm_omni_patch.loading import apply, wrappers

        done = apply.install(patch, target, module, on_first_call=partial(self._first_call, target))
        self.applied[(patch.name, target.name)] = done
        entry = self._entry(patch, target, "applied", verdict=decision.verdict, release=release or "")
        entry.foreign = wrappers.foreign(done.hook.original, target.module.partition(".")[0])
        if decision.level == "warning" or decision.like is not None:
            entry.reason = decision.reason
            self._say(LEVELS[decision.level], f"{patch.name}: {target.name}: {decision.reason}")
        ledger.record(entry)

    def _release(self, target: Target) -> str | None:
        return installed.live_release(installed.package_of(target.distribution, target.module))

    def give_up_absent(self) -> None:
        """Say of targets that wait for a module which is not there that it will never come. For required targets: that
        an optional one is absent is ordinary."""
        from vllm_omni_patch.matrix import forecast

        try:
            for patch in self.patches:
                for target in patch.targets:
                    entry = self._state(patch, target)
                    package = installed.package_of(target.distribution, target.module)
                    if entry is None or entry.state != "pending" or target.optional or not installed.is_here(package):
                        continue
                    if forecast.module_file(target.module) is None:
                        release = self._release(target)
                        decision = forecast.decide(patch, target, release)
                        self._stand_aside(patch, target, release, decision)
                        if target.group:
                            self._group_is_off(patch, target.group, f"{target.name}: {decision.reason}")
        finally:
            forecast.forget()

    # -- groups

    def _hook_group(self, patch: Patch, group: str, members: list[Target], module: ModuleType) -> None:
        key = (patch.name, group)
        reason = self._groups_off.get(key) or self._group_obstacle(patch, group, members, module)
        if reason:
            self._group_is_off(patch, group, reason)
            return
        for target in members:
            if self._hook(patch, target, module):
                continue
            entry = self._state(patch, target)
            if entry is not None and entry.verdict == "absent" and target.optional:
                continue
            self._group_is_off(patch, group, f"{target.name}: {entry.reason if entry else 'not applied'}")
            return

    def _group_obstacle(self, patch: Patch, group: str, present: list[Target], module: ModuleType) -> str:
        """Why not all members of a group can be hooked; empty when they can, as far as can be seen now."""
        from vllm_omni_patch.matrix import forecast, judge

        for target in patch.targets:
            if target.group != group or (patch.name, target.name) in self.applied:
                continue
            if self._owners[(target.module, target.qualname)] != patch.name:
                return f"{target.name} is held by patch {self._owners[(target.module, target.qualname)]!r}"
            if target in present:
                decision = judge.decide(patch, target, self._release(target), module)
            else:
                decision = forecast.decide(patch, target, self._release(target))
            if not decision.apply and not (decision.verdict == "absent" and target.optional):
                state: State = "native" if decision.verdict == "native" else "skipped"
                ledger.record(self._entry(patch, target, state, decision.reason, verdict=decision.verdict))
                return f"{target.name}: {decision.reason}"
        return ""

    def _group_is_off(self, patch: Patch, group: str, reason: str) -> None:
        """Take out what a group has applied so far, and say of each member why it is not on."""
        from vllm_omni_patch.loading import apply

        self._groups_off[(patch.name, group)] = reason
        text = f"all targets of group {group!r} or none, and one cannot be applied: {reason}"
        for target in patch.targets:
            if target.group != group:
                continue
            done = self.applied.pop((patch.name, target.name), None)
            left = apply.remove(done) if done is not None else ""
            entry = self._state(patch, target)
            if left:
                self._record(patch, target, "failed", f"{text}. It could not be taken out again: {left}")
            elif entry is None or entry.state in ("pending", "applied"):
                self._record(patch, target, "skipped", text)
        self._say(logging.WARNING, f"{patch.name}: {text}")

    # -- states

    def _state(self, patch: Patch, target: Target) -> Entry | None:
        return next((e for e in ledger.entries() if (e.patch, e.target) == (patch.name, target.name)), None)

    def _entry(self, patch: Patch, target: Target, state: State, reason: str = "", **more: Any) -> Entry:
        return Entry(patch.name, target.name, state, reason, group=target.group, optional=target.optional, **more)

    def _record(
        self, patch: Patch, target: Target, state: State, reason: str = "", trace: str = "", warn: bool = False
    ) -> None:
        reason = _with_consequence(target, reason) if state in ("skipped", "failed") else reason
        ledger.record(self._entry(patch, target, state, reason, traceback=trace))
        if warn:
            self._say(logging.WARNING, f"{patch.name}: {target.name} is not hooked: {reason}")

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            ledger.say(level, text)

    def inspect(self) -> None:
        """Look again: what was called, who wrapped or replaced a target since, where the original is still in use."""
        missed = self.watch.missed()
        for entry in ledger.entries():
            done = self.applied.get((entry.patch, entry.target))
            if entry.state == "pending" and entry.target.partition(":")[0] in missed:
                entry.reason = "its module is imported and was not shown to us; it is hooked when an engine starts"
            elif entry.state == "applied" and done is not None:
                entry.called = done.hook.used
                if done.is_wrapper:
                    self._inspect(entry, done)

    def _inspect(self, entry: Entry, done: Installed) -> None:
        from vllm_omni_patch.loading import wrappers

        current, owner, attribute = done.current(), done.hook.owner, done.hook.attribute
        entry.foreign = wrappers.foreign(current, done.target.module.partition(".")[0])
        entry.partial = wrappers.overrides(owner, attribute) + wrappers.copies(done.hook.original, owner, attribute)
        if wrappers.depth(current, entry.patch) == 0:
            by = "; ".join(entry.foreign) or "our wrapper is gone"
            entry.state, entry.reason = "failed", f"replaced after it was applied: {by}"

    # -- moments

    def catch_up(self) -> None:
        """Hook modules that came in without passing our finder, and stand first from now on if there were any."""
        if self.watch.audit(everything=True):
            startup.stand_first()

    def _first_call(self, target: Target) -> None:
        announce.at_first_call(target.name)
        ledger.save()


def start(road: str) -> Watch:
    """Begin stage 2 in this process; returns what answers look-ups from now on. Called once, by ``startup.begin``."""
    global _loader
    os.register_at_fork(after_in_child=_after_fork)
    _loader = Loader(road)
    _loader.begin()
    return _loader.watch


def _after_fork() -> None:
    """Another thread may have held these locks; it does not exist in the child."""
    startup.renew_lock()
    if _loader is not None:
        _loader.watch.renew_lock()
        for done in _loader.applied.values():
            done.hook.used = False  # the parent's calls are not ours


def current() -> Loader | None:
    """This process's loader, once stage 2 has begun."""
    return _loader


def engine_starts(road: str) -> None:
    """An engine, or a part of one, starts in this process: vLLM has just loaded its plugins. Once per process.

    Catches up on modules that were imported behind our back, logs this process's line, and in strict mode stops.

    Raises:
        RuntimeError: strict mode, and something that was asked for is not applied.
        FlagError: ``VLLM_OMNI_PATCH_STRICT`` holds a value that it does not accept.
    """
    global _engine_pid
    if _loader is None or _engine_pid == os.getpid():
        return
    _engine_pid = os.getpid()
    try:
        _loader.catch_up()
        _loader.give_up_absent()
        ledger.describe_process(engine_road=road)
        announce.at_engine_start()
        ledger.save()
        states.update()
    except Exception as error:
        ledger.say(logging.WARNING, f"the account of what is patched failed: {type(error).__name__}: {error}")
    if flags.read(flags.STRICT):
        from vllm_omni_patch.loading import strict

        try:
            strict.check(_loader.patches)
        except Exception:
            _engine_pid = 0  # a second attempt in this process is stopped as well
            raise


def _note_version(module: ModuleType) -> None:
    ledger.describe_process(vllm_version=installed.live_release("vllm") or "unknown")


def _with_consequence(target: Target, text: str) -> str:
    return f"{text.rstrip('.')}. So {target.consequence}" if target.consequence else text


_loader: Loader | None = None
_engine_pid = 0
