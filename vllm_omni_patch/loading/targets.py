# SPDX-License-Identifier: Apache-2.0
"""The targets of this process: which patch holds an attribute, what is installed there, and each target's state.

What goes wrong with a target becomes its state in the ledger and a log line; nothing here raises.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_omni_patch import flags, ledger
from vllm_omni_patch.code import installed
from vllm_omni_patch.ledger import Entry, State
from vllm_omni_patch.matrix import rules
from vllm_omni_patch.patch import Patch, Target

if TYPE_CHECKING:
    from vllm_omni_patch.loading.apply import Installed
    from vllm_omni_patch.matrix.judge import Decision

# ``apply``, ``wrappers`` and wrapt are imported when a target's module is there: most processes that import vLLM never
# come to it.

LEVELS = {"info": logging.INFO, "warning": logging.WARNING}


class Targets:
    """The targets of the patches that were asked for. ``on_first_call`` is called with a target at its first use."""

    def __init__(self, on_first_call: Callable[[Target], None]) -> None:
        self.patches: list[Patch] = []
        self.applied: dict[tuple[str, str], Installed] = {}
        self._on_first_call = on_first_call
        self._owners: dict[tuple[str, str], str] = {}
        self._logged: set[str] = set()

    def enter(self, patch: Patch) -> None:
        """Enter the targets of ``patch`` as pending. An attribute belongs to the first patch that names it."""
        patch = replace(patch, targets=tuple(target for target in patch.targets if self._is_wanted(patch, target)))
        self.patches.append(patch)
        for target in patch.targets:
            first = self._owners.setdefault((target.module, target.qualname), patch.name)
            if first != patch.name:
                self.skip(patch, target, rules.claimed_by(first))
            else:
                self.record(patch, target, "pending")

    def _is_wanted(self, patch: Patch, target: Target) -> bool:
        try:
            return target.is_wanted()
        except flags.FlagError as error:
            self.fail(patch, target, str(error))
            return False

    def holder(self, target: Target) -> str:
        """The name of the patch that holds the target's attribute."""
        return self._owners[(target.module, target.qualname)]

    def is_applied(self, patch: Patch, target: Target) -> bool:
        """Whether the target has been installed in this process, in this or an earlier object of its module."""
        return (patch.name, target.name) in self.applied

    def stands(self, patch: Patch, target: Target, module: ModuleType) -> bool:
        """Whether what we installed is still in ``module``: after a reload that left it there, or at a second look."""
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

    # -- changing a target

    def install(self, patch: Patch, target: Target, module: ModuleType, decision: Decision) -> bool:
        """Install a target that may be applied; returns whether it is."""
        from vllm_omni_patch.loading import apply, wrappers

        try:
            done = apply.install(patch, target, module, on_first_call=lambda: self._on_first_call(target))
        except apply.Refused as refusal:
            self.skip(patch, target, str(refusal))
            return False
        except (Exception, SystemExit) as error:
            self.fail(patch, target, f"{type(error).__name__}: {error}", traceback.format_exc())
            return False
        self.applied[(patch.name, target.name)] = done
        entry = self._entry(patch, target, "applied", verdict=decision.verdict, release=release_of(target) or "")
        entry.foreign = wrappers.foreign(done.hook.original, target.module.partition(".")[0])
        if decision.level == "warning" or decision.like is not None:
            entry.reason = decision.reason
            self.log(LEVELS[decision.level], f"{patch.name}: {target.name}: {decision.reason}")
        ledger.record(entry)
        return True

    def take_out(self, patch: Patch, target: Target, reason: str) -> None:
        """Uninstall a target that cannot stay, or leave one alone that has no state of its own yet."""
        from vllm_omni_patch.loading import apply

        done = self.applied.pop((patch.name, target.name), None)
        left = apply.remove(done) if done is not None else ""
        entry = self.state(patch, target)
        if left:
            self.record(patch, target, "failed", f"{reason}. It could not be uninstalled: {left}")
        elif entry is None or entry.state in ("pending", "applied"):
            self.record(patch, target, "skipped", reason)

    # -- states

    def state(self, patch: Patch, target: Target) -> Entry | None:
        """The target's row in the ledger."""
        return next((e for e in ledger.entries() if (e.patch, e.target) == (patch.name, target.name)), None)

    def stand_aside(self, patch: Patch, target: Target, decision: Decision, quiet: bool = False) -> None:
        """Record that ``decision`` leaves the target as it is, and log it unless ``quiet``."""
        state = rules.state_of(decision.verdict, decision.apply)
        ordinary = decision.verdict == "absent" and target.optional
        reason = decision.reason if state == "native" else _with_consequence(target, decision.reason)
        level = logging.DEBUG if ordinary or quiet else LEVELS[decision.level]
        self.log(level, f"{patch.name}: {target.name} is not hooked. {reason}")
        release = release_of(target) or ""
        ledger.record(self._entry(patch, target, state, reason, verdict=decision.verdict, release=release))

    def skip(self, patch: Patch, target: Target, reason: str) -> None:
        """Record and log that the target cannot be hooked."""
        text = _with_consequence(target, reason)
        self.record(patch, target, "skipped", reason)
        self.log(logging.WARNING, f"{patch.name}: {target.name} is not hooked: {text}")

    def fail(self, patch: Patch, target: Target, reason: str, trace: str = "") -> None:
        """Record and log that judging or installing the target went wrong."""
        self.record(patch, target, "failed", reason, trace)
        text = _with_consequence(target, f"{target.name} failed, vLLM's own code stays: {reason}")
        self.log(logging.ERROR, f"{patch.name}: {text}")

    def record(self, patch: Patch, target: Target, state: State, reason: str = "", trace: str = "") -> None:
        """Set the target's state in the ledger."""
        reason = _with_consequence(target, reason) if state in ("skipped", "failed") else reason
        ledger.record(self._entry(patch, target, state, reason, traceback=trace))

    def _entry(self, patch: Patch, target: Target, state: State, reason: str = "", **more: Any) -> Entry:
        return Entry(patch.name, target.name, state, reason, group=target.group, optional=target.optional, **more)

    def log(self, level: int, text: str) -> None:
        """Log ``text`` once in this process."""
        if text not in self._logged:
            self._logged.add(text)
            ledger.log(level, text)

    # -- looking again

    def inspect(self, missed: list[str]) -> None:
        """Bring the ledger up to date: what was called, who wrapped or replaced a target since it was applied.

        Args:
            missed: watched modules that were imported without passing our import hook.
        """
        for entry in ledger.entries():
            done = self.applied.get((entry.patch, entry.target))
            if entry.state == "pending" and entry.target.partition(":")[0] in missed:
                entry.reason = "imported without passing our import hook; hooked when an engine starts"
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

    def forget_calls(self) -> None:
        """For a forked child: its parent's calls are not its own."""
        for done in self.applied.values():
            done.hook.used = False


def release_of(target: Target) -> str | None:
    """Version of the package that the target is in, as it is here."""
    return installed.running_release(installed.package_of(target.distribution, target.module))


def _with_consequence(target: Target, text: str) -> str:
    return f"{text.rstrip('.')}. So {target.consequence}" if target.consequence else text
