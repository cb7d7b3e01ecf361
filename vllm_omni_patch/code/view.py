# SPDX-License-Identifier: Apache-2.0
"""The code view of a module: names, classes and parameter lists from its syntax tree. Nothing is imported or run.

What counts is what *this* module defines: a class inherits from classes of the same module, and what comes from
elsewhere is not seen, because the text alone cannot tell what it holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from vllm_omni_patch.code.found import Found, Missing, Seen
from vllm_omni_patch.code.scopes import FunctionNode, Scope, bindings, dotted, known_test, parse

# Decorators that make a property, whatever else they do.
PROPERTY_SUFFIX = "property"
ACCESSORS = ("setter", "getter", "deleter")


class CodeView:
    """What a contract may ask of a module's text.

    Args:
        source: the text.

    Raises:
        SyntaxError: it is not Python that this interpreter reads.
    """

    def __init__(self, source: str | bytes) -> None:
        self.tree = parse(source)
        self.scope = bindings(self.tree.body)
        self._bodies: dict[int, Scope] = {}
        self._assigned: dict[int, set[str]] = {}
        self._strings: set[str] | None = None

    def body(self, node: ast.ClassDef) -> Scope:
        """Names that the class's body binds."""
        if id(node) not in self._bodies:
            scope = bindings(node.body)
            # "Class.name = value" in the module's body, after the class.
            for statement in self.tree.body if node in self.scope.get(node.name, ()) else ():
                for target in statement.targets if isinstance(statement, ast.Assign) else ():
                    if isinstance(target, ast.Attribute) and dotted(target.value) == node.name:
                        scope[target.attr] = [statement]
            self._bodies[id(node)] = scope
        return self._bodies[id(node)]

    # -- what a name leads to

    def nodes(self, qualname: str) -> list[tuple[ast.AST, str]]:
        """Definitions of ``qualname`` with the qualified name of the class that holds each (empty: the module).

        Raises:
            Missing: this module does not define it.
        """
        first, *rest = qualname.split(".")
        if first not in self.scope:
            raise Missing(f"{first} is not in the module")
        held: list[tuple[ast.AST, str]] = [(node, "") for node in self._definitions(first, self.scope)]
        path = first
        for part in rest:
            if not _any([node for node, _ in held], ast.ClassDef):
                raise _not_defined(path, [node for node, _ in held])
            found: list[tuple[ast.AST, str]] = []
            for node, _ in held:
                if not isinstance(node, ast.ClassDef):
                    continue
                for base in self.linearise(node):
                    if part in self.body(base):
                        holder = path if base is node else base.name
                        found += [(n, holder) for n in self._definitions(part, self.body(base), self.scope)]
                        break
            if not found:
                raise Missing(f"{path} does not define {part}, nor does a base class of the same module")
            held, path = found, f"{path}.{part}"
        ends = [node for node, _ in held]
        if not _any(ends, ast.ClassDef | FunctionNode) and _any(ends, ast.Import | ast.ImportFrom):
            raise _not_defined(path, ends)
        return held

    def _definitions(self, name: str, *scopes: Scope) -> list[ast.AST]:
        """Nodes behind ``name`` in the first of ``scopes``, with plain aliases (``a = b``) followed."""
        found: list[ast.AST] = []
        seen: set[str] = set()
        waiting = [(name, scopes)]
        while waiting:
            wanted, where = waiting.pop()
            for node in where[0].get(wanted, ()) if where else ():
                value = node.value if isinstance(node, ast.Assign) else None
                target = value.id if isinstance(value, ast.Name) else ""
                scope = next((i for i, s in enumerate(where) if target and target in s), None)
                if scope is None or target in seen or (target == wanted and scope == 0):
                    found.append(node)
                else:
                    seen.add(target)
                    waiting.append((target, where[scope:]))
        return found

    def linearise(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """The class and its bases that stand in this module, in the order in which Python looks names up."""
        order: list[ast.ClassDef] = []
        active: set[int] = set()

        def visit(current: ast.ClassDef) -> None:
            if id(current) in active:
                return
            active.add(id(current))
            order.append(current)
            for base in current.bases:
                for found in self._classes(dotted(base)):
                    if found is not current:
                        visit(found)
            active.discard(id(current))

        visit(node)
        last = {id(entry): index for index, entry in enumerate(order)}
        return [entry for index, entry in enumerate(order) if last[id(entry)] == index]

    def _classes(self, name: str) -> list[ast.ClassDef]:
        first, *rest = name.split(".")
        held = [n for n in self._definitions(first, self.scope) if isinstance(n, ast.ClassDef)] if first else []
        for part in rest:
            held = [n for c in held for n in self._definitions(part, self.body(c)) if isinstance(n, ast.ClassDef)]
        return held

    # -- what a contract asks

    def find(self, qualname: str) -> list[Found]:
        """What ``qualname`` may be: one answer, or several where a condition decides between definitions.

        Raises:
            Missing: this module does not define it.
        """
        owner, _, name = qualname.rpartition(".")
        answers = []
        for node, definer in self.nodes(qualname):
            if isinstance(node, ast.ClassDef):
                answers.append(Found("class", qualname, definer, self._constructor(qualname)))
            elif isinstance(node, FunctionNode):
                if is_property(node):
                    answers.append(Found("property", owner, definer))
                else:
                    answers.append(Found("function", owner, definer, parameters(node, name, in_class=bool(definer))))
            else:
                answers.append(Found("other", owner, definer))
        return answers

    def _constructor(self, qualname: str) -> tuple[Seen, ...] | None:
        try:
            found = self.find(f"{qualname}.__init__")
        except Missing:
            return None
        return found[-1].parameters

    def _owners(self, owner: str) -> list[ast.ClassDef]:
        try:
            held = [node for node, _ in self.nodes(owner)] if owner else []
        except Missing:
            return []
        return [base for node in held if isinstance(node, ast.ClassDef) for base in self.linearise(node)]

    def has_method(self, owner: str, name: str) -> bool:
        """The class ``owner``, or a base of it in this module, defines a method, property or class ``name``."""
        return any(
            is_method(found)
            for node in self._owners(owner)
            if name in self.body(node)
            for found in self._definitions(name, self.body(node), self.scope)
        )

    def has_class_attribute(self, owner: str, name: str) -> bool:
        """As :meth:`has_method`, for anything bound or annotated there, or assigned on ``self`` in a method."""
        return any(
            name in self.body(node) or name in annotated(node) or name in self._assigned_on_self(node)
            for node in self._owners(owner)
        )

    def _assigned_on_self(self, node: ast.ClassDef) -> set[str]:
        if id(node) not in self._assigned:
            self._assigned[id(node)] = assigned_on_self(node)
        return self._assigned[id(node)]

    def has_module_attribute(self, name: str) -> bool:
        """The module defines or imports ``name``."""
        return name in self.scope

    def has_string(self, text: str) -> bool:
        """The module's code holds the string constant ``text``; docstrings do not count."""
        if self._strings is None:
            documentation = {id(node) for node in docstrings(self.tree)}
            self._strings = {
                node.value
                for node in ast.walk(self.tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
            }
        return text in self._strings


def _any(nodes: list[ast.AST], kinds: Any) -> bool:
    return any(isinstance(node, kinds) for node in nodes)


def _not_defined(path: str, nodes: list[ast.AST]) -> Missing:
    if _any(nodes, ast.Import | ast.ImportFrom):
        return Missing(f"{path} is defined in another module and only imported here", elsewhere=True)
    return Missing(f"{path} is not a class here")


def is_method(node: ast.AST) -> bool:
    """A function, a nested class, or ``name = property(...)`` and the like."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        called = dotted(node.value.func).split(".")[-1]
        return called.endswith(PROPERTY_SUFFIX) or called in ("staticmethod", "classmethod", "partialmethod")
    return isinstance(node, ast.ClassDef | FunctionNode)


def is_property(node: FunctionNode) -> bool:
    """The function's decorators make it a property (or a setter of one)."""
    for decorator in node.decorator_list:
        name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
        last = name.split(".")[-1]
        if last.endswith(PROPERTY_SUFFIX) or (last in ACCESSORS and "." in name):
            return True
    return False


def parameters(node: FunctionNode, name: str, in_class: bool) -> tuple[Seen, ...]:
    """Parameters of a function; a method's ``self`` or ``cls`` is left out."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    seen = [
        Seen(a.arg, "positional" if i < len(arguments.posonlyargs) else "positional_or_keyword", i < required)
        for i, a in enumerate(plain)
    ]
    decorators = {dotted(decorator).split(".")[-1] for decorator in node.decorator_list}
    if in_class and "staticmethod" not in decorators:
        seen = seen[1:]
    if arguments.vararg:
        seen.append(Seen(arguments.vararg.arg, "var_positional", False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        seen.append(Seen(argument.arg, "keyword_only", default is None))
    if arguments.kwarg:
        seen.append(Seen(arguments.kwarg.arg, "var_keyword", False))
    return tuple(seen)


def annotated(node: ast.ClassDef) -> set[str]:
    """Names that the class's body annotates, or lists as ``__slots__``."""
    names: set[str] = set()
    for statement in _flat(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Assign) and [dotted(target) for target in statement.targets] == ["__slots__"]:
            slots = [inner for inner in ast.walk(statement.value) if isinstance(inner, ast.Constant)]
            names |= {slot.value for slot in slots if isinstance(slot.value, str)}
    return names


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            test = known_test(statement.test)
            yield from _flat([*(statement.body if test is not False else []), *(statement.orelse if not test else [])])


def assigned_on_self(node: ast.ClassDef) -> set[str]:
    """Names that methods of the class assign as ``self.name``; ``self`` is whatever their first parameter is called."""
    names: set[str] = set()
    for statement in _flat(node.body):
        if not isinstance(statement, FunctionNode):
            continue
        plain = [*statement.args.posonlyargs, *statement.args.args]
        if not plain:
            continue
        changed: set[int] = set()
        for inner in ast.walk(statement):
            if isinstance(inner, ast.AugAssign) or (isinstance(inner, ast.AnnAssign) and inner.value is None):
                changed.add(id(inner.target))
            elif (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == plain[0].arg
                and id(inner) not in changed
            ):
                names.add(inner.attr)
    return names


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """The constants that are docstrings, anywhere in ``tree``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append(value)
    return found
