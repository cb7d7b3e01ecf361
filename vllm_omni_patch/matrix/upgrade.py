# SPDX-License-Identifier: Apache-2.0
"""What an upgrade changes for a target: a diff of what its hook stands on, between two releases read as text."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_patch.code.found import Missing, signature
from vllm_omni_patch.code.releases import Release
from vllm_omni_patch.code.scopes import FunctionNode
from vllm_omni_patch.code.view import CodeView, annotated
from vllm_omni_patch.matrix.build import Question, row_of
from vllm_omni_patch.matrix.table import Row

# A class has many methods that no hook cares about; a longer list of them would hide the ones that matter.
_MOST_NAMES = 8

Matters = Literal["no", "yes", "better"]


@dataclass(frozen=True)
class Change:
    """One target between two releases.

    ``matters``: ``no`` (the hook does what it did), ``yes`` (it will not be installed any more, or ``listed`` is false
    and its code is new), ``better`` (it was not installed before and will be). ``details`` are the differences, one
    line each; empty where the code is the same.
    """

    before: Row
    after: Row
    matters: Matters
    why: str
    details: list[str] = field(default_factory=list)

    @property
    def same_code(self) -> bool:
        """Both releases have the target, with the same code."""
        return bool(self.after.fingerprint) and self.before.fingerprint == self.after.fingerprint

    def as_json(self) -> dict[str, Any]:
        """``upgrade`` of a target in ``vllm-omni-patch matrix --format json``."""
        return {
            "from": self.before.release,
            "verdict_before": self.before.verdict,
            "same_code": self.same_code,
            "matters": self.matters,
            "why": self.why,
            "differences": self.details,
        }


def compare(question: Question, old: Release, new: Release, listed: bool) -> Change:
    """What happens to one target on the way from ``old`` to ``new``.

    Args:
        listed: the matrix lists ``new``, so that unknown code is no reason to skip it.
    """
    before, after = row_of(question, old), row_of(question, new)
    details = differences(question, old, new)
    served = ("applies", "native")
    if after.verdict not in served and before.verdict in served:
        return Change(before, after, "yes", f"{after.verdict}: {after.reason}", details)
    if after.verdict in served and before.verdict not in served:
        return Change(before, after, "better", f"{after.verdict} now", details)
    if after.verdict == "native" and before.verdict == "applies":
        return Change(before, after, "no", f"upstream takes over: {after.reason}", details)
    if after.verdict != "applies":
        return Change(before, after, "no", f"{after.verdict} as before", details)
    if before.fingerprint == after.fingerprint:
        return Change(before, after, "no", "the code is the same", details)
    if listed or question.used:
        return Change(before, after, "no", "the code changed; the contract holds", details)
    why = "the code changed and the contract holds; skipped until the matrix lists the release"
    return Change(before, after, "yes", why, details)


def differences(question: Question, old: Release, new: Release) -> list[str]:
    """Parameter lists, methods, class attributes and module names that differ, one line each."""
    target = question.target
    try:
        texts = old.text(target.module), new.text(target.module)
        if texts[0] is None or texts[1] is None:
            return [] if texts[0] is texts[1] else [f"module {target.module}: {'new' if texts[1] else 'gone'}"]
        one, other = texts[0].view, texts[1].view
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = _parameters(target.qualname, one, other)
    contract, signs = target.contract, target.native
    owner = _owner(one, target.qualname) or _owner(other, target.qualname)
    for name in (*contract.base_methods, *(signs.base_methods if signs else ())):
        if owner:
            lines += _parameters(f"{owner}.{name}", one, other)
    for name in contract.class_attributes:
        lines += _presence(
            f"{owner}.{name}", one.has_class_attribute(owner, name), other.has_class_attribute(owner, name)
        )
    for name in (*contract.module_attributes, *(signs.module_attributes if signs else ())):
        lines += _presence(name, one.has_module_attribute(name), other.has_module_attribute(name))
    lines += _bases(owner, one, other) if owner else []
    if owner == target.qualname:
        lines += _members(owner, one, other)
    return list(dict.fromkeys(lines))


def _presence(name: str, before: bool, after: bool) -> list[str]:
    return [] if before == after else [f"{'- ' if before else '+ '}{name}"]


def _parameters(qualname: str, one: CodeView, other: CodeView) -> list[str]:
    before, after = _signature(qualname, one), _signature(qualname, other)
    if before == after:
        return []
    return [f"{sign} {qualname}{text}" for sign, text in (("-", before), ("+", after)) if text is not None]


def _signature(qualname: str, view: CodeView) -> str | None:
    try:
        found = view.find(qualname)[-1]
    except Missing:
        return None
    if found.kind == "function" and found.parameters is not None:
        return signature(found.parameters)
    return "" if found.kind == "class" else f" ({found.kind})"


def _owner(view: CodeView, qualname: str) -> str:
    try:
        return view.find(qualname)[0].owner
    except Missing:
        return ""


def _class(view: CodeView, qualname: str) -> ast.ClassDef | None:
    try:
        return next((node for node, _ in view.nodes(qualname) if isinstance(node, ast.ClassDef)), None)
    except Missing:
        return None


def _bases(owner: str, one: CodeView, other: CodeView) -> list[str]:
    before, after = _class(one, owner), _class(other, owner)
    if before is None or after is None:
        return []
    texts = [f"({', '.join(ast.unparse(base) for base in node.bases)})" for node in (before, after)]
    return [] if texts[0] == texts[1] else [f"- class {owner}{texts[0]}", f"+ class {owner}{texts[1]}"]


def _members(owner: str, one: CodeView, other: CodeView) -> list[str]:
    """Methods and attributes of a class that is itself the target."""
    before, after = _class(one, owner), _class(other, owner)
    if before is None or after is None:
        return []
    sets = [set(view.body(node)) | annotated(node) for view, node in ((one, before), (other, after))]
    lines = [f"- {owner}.{name}" for name in sorted(sets[0] - sets[1])]
    lines += [f"+ {owner}.{name}" for name in sorted(sets[1] - sets[0])]
    for name in sorted(sets[0] & sets[1]):
        if any(isinstance(node, FunctionNode) for node in one.body(before).get(name, ())):
            lines += _parameters(f"{owner}.{name}", one, other)
    if len(lines) > _MOST_NAMES:
        lines = [*lines[:_MOST_NAMES], f"  … and {len(lines) - _MOST_NAMES} more in {owner}"]
    return lines
