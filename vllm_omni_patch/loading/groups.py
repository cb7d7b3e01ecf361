# SPDX-License-Identifier: Apache-2.0
"""Groups in a running process: the members of a group are applied all together or not at all.

They may live in modules that are imported at different times. When the first of them is imported, the others are judged
on the text of their modules; if one would not be applied, none is. If a later one fails nevertheless, those before it
are uninstalled.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from vllm_omni_patch.code import installed
from vllm_omni_patch.loading.targets import Targets, release_of
from vllm_omni_patch.matrix import rules
from vllm_omni_patch.patch import Patch, Target

if TYPE_CHECKING:
    from vllm_omni_patch.matrix.judge import Decision


class Groups:
    """Hooks the targets of a module, groups as a whole."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._off: dict[tuple[str, str], str] = {}
        self._begun: set[tuple[str, str]] = set()

    def hook(self, patch: Patch, group: str, members: Sequence[Target], module: ModuleType) -> None:
        """Judge each of ``members``, all in ``module``, and install those that may be applied.

        Args:
            group: the group that all of ``members`` are in; empty for targets that stand for themselves.
        """
        key = (patch.name, group)
        if key in self._off:
            self.turn_off(patch, group, self._off[key])
            return
        new = [one for one in members if not self._targets.stands(patch, one, module)]
        judged = [(one, self._judge(patch, one, module)) for one in new]
        if group and (why := self._obstacle(patch, group, judged)):
            self.turn_off(patch, group, why)
            return
        self._begun.add(key)
        for target, decision in judged:
            if decision is None:
                continue
            if not decision.apply:
                self._targets.stand_aside(patch, target, decision)
            elif not self._targets.install(patch, target, module, decision) and group:
                entry = self._targets.state(patch, target)
                self.turn_off(patch, group, rules.explained(group, target.name, entry.reason if entry else ""))
                return

    def _judge(self, patch: Patch, target: Target, module: ModuleType | None) -> Decision | None:
        """The verdict on the imported module, or on its text; ``None``, and a failed target, where judging raises."""
        from vllm_omni_patch.matrix import forecast, judge

        try:
            if module is None:
                return forecast.decide(patch, target, release_of(target))
            return judge.decide(patch, target, release_of(target), module)
        except Exception as error:
            self._targets.fail(patch, target, f"{type(error).__name__}: {error}", traceback.format_exc())
            return None

    def _obstacle(self, patch: Patch, group: str, judged: list[tuple[Target, Decision | None]]) -> str:
        """Why the group cannot be applied; empty when it can, as far as can be seen now."""
        here = [target for target, _ in judged]
        mine = [target for target in patch.targets if target.group == group]
        for target in mine:
            holder = self._targets.holder(target)
            if holder != patch.name:
                return rules.explained(group, target.name, rules.claimed_by(holder))
        if (patch.name, group) not in self._begun:
            away = [t for t in mine if t not in here and not self._targets.is_applied(patch, t)]
            judged = judged + [(target, self._judge(patch, target, None)) for target in away]
        for target, decision in judged:
            if decision is None:
                entry = self._targets.state(patch, target)
                return rules.explained(group, target.name, entry.reason if entry else "")
            if rules.keeps_off(target, decision.apply, decision.verdict):
                self._targets.stand_aside(patch, target, decision, quiet=True)
                return rules.explained(group, target.name, decision.reason)
        return ""

    def turn_off(self, patch: Patch, group: str, why: str) -> None:
        """Uninstall what a group has applied so far, and record of each member why it is not applied."""
        self._off[(patch.name, group)] = why
        for target in patch.targets:
            if target.group == group:
                self._targets.take_out(patch, target, why)
        self._targets.log(logging.WARNING, f"{patch.name}: {why}")

    def give_up_absent(self, patch: Patch, target: Target) -> None:
        """Skip a target, and its group, if its package is installed and its module is not in it."""
        from vllm_omni_patch.code import text

        package = installed.package_of(target.distribution, target.module)
        if not installed.is_here(package) or text.module_file(target.module) is not None:
            return
        decision = self._judge(patch, target, None)
        if decision is None:
            return
        self._targets.stand_aside(patch, target, decision)
        if target.group:
            self.turn_off(patch, target.group, rules.explained(target.group, target.name, decision.reason))
