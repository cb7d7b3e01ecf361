# SPDX-License-Identifier: Apache-2.0
"""Which names a piece of code binds, from its syntax tree. Conditions that the text decides are decided."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Scope = dict[str, list[ast.AST]]


def parse(text: str | bytes) -> ast.Module:
    """Syntax tree of ``text``, without the warnings that its string literals may cause.

    Raises:
        SyntaxError: the text is not Python, or newer Python than this interpreter reads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def bindings(body: Iterable[ast.stmt]) -> Scope:
    """Names that running ``body`` binds, each with the nodes that may have bound it last.

    A later binding replaces an earlier one. Where a condition decides, every outcome is kept, except that a test
    known from the text (``TYPE_CHECKING``, ``sys.version_info``, a constant) is decided.
    """
    scope: Scope = {}
    for statement in body:
        _bind(statement, scope)
    return scope


def _bind(statement: ast.stmt, scope: Scope) -> None:
    if isinstance(statement, FunctionNode | ast.ClassDef):
        scope[statement.name] = [statement]
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            if alias.name != "*":
                name = alias.asname or (alias.name.split(".")[0] if isinstance(statement, ast.Import) else alias.name)
                scope[name] = [statement]
    elif isinstance(statement, ast.If):
        test = known_test(statement.test)
        outcomes = ((True, statement.body), (False, statement.orelse))
        _bind_branches([branch for outcome, branch in outcomes if test in (None, outcome)], scope)
    elif isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
        done = [*statement.body, *statement.orelse]  # type: ignore[attr-defined]
        _bind_branches([done, *(h.body for h in statement.handlers)], scope)  # type: ignore[attr-defined]
        for inner in statement.finalbody:  # type: ignore[attr-defined]
            _bind(inner, scope)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            _bind_target(item.optional_vars, statement, scope)
        for inner in statement.body:
            _bind(inner, scope)
    elif isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        if not isinstance(statement, ast.While):
            _bind_target(statement.target, statement, scope)
        _bind_branches([[*statement.body, *statement.orelse], statement.orelse], scope)
    elif isinstance(statement, ast.Match):
        _bind_branches([case.body for case in statement.cases] + [[]], scope)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            _bind_target(target, statement, scope)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        _bind_target(statement.target, statement, scope)
    elif type(statement).__name__ == "TypeAlias":
        _bind_target(statement.name, statement, scope)  # type: ignore[attr-defined]
    elif isinstance(statement, ast.Delete):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                scope.pop(target.id, None)


def _bind_branches(branches: list[list[ast.stmt]], scope: Scope) -> None:
    outcomes: list[Scope] = []
    for branch in branches:
        outcome = dict(scope)
        for statement in branch:
            _bind(statement, outcome)
        outcomes.append(outcome)
    names = {name for outcome in outcomes for name in outcome}
    for name in names:
        nodes: dict[int, ast.AST] = {}
        for outcome in outcomes:
            nodes.update((id(node), node) for node in outcome.get(name, ()))
        scope[name] = list(nodes.values())
    for name in set(scope) - names:
        del scope[name]


def _bind_target(target: ast.expr | None, statement: ast.stmt, scope: Scope) -> None:
    if isinstance(target, ast.Name):
        scope[target.id] = [statement]
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            _bind_target(element, statement, scope)
    elif isinstance(target, ast.Starred):
        _bind_target(target.value, statement, scope)


def known_test(test: ast.expr) -> bool | None:
    """Outcome of a condition that text alone decides; ``None`` for any other."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.Name | ast.Attribute) and dotted(test).split(".")[-1] == "TYPE_CHECKING":
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = known_test(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and dotted(test.left) == "sys.version_info":
        return _compare_version(test.ops[0], test.comparators[0])
    return None


def _compare_version(operator: ast.cmpop, bound: ast.expr) -> bool | None:
    try:
        version = tuple(ast.literal_eval(bound))
    except (ValueError, TypeError):
        return None
    here = tuple(sys.version_info)
    if isinstance(operator, ast.GtE):
        return here >= version
    if isinstance(operator, ast.Gt):
        return here > version
    if isinstance(operator, ast.Lt):
        return here < version
    if isinstance(operator, ast.LtE):
        return here <= version
    return None


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a name or a chain of attributes; empty for anything else. A subscript stands for its value."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return ""
