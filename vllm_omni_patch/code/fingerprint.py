# SPDX-License-Identifier: Apache-2.0
"""A hash of a definition's syntax tree that no Python version, comment, docstring or layout changes.

``ast.dump`` will not do: its text differs between Python releases (new fields, omitted empty lists), and a matrix
made on one of them is read on another.
"""

from __future__ import annotations

import ast
import hashlib

from vllm_omni_patch.code.scopes import FunctionNode
from vllm_omni_patch.code.view import CodeView

# ctx follows from the position; kind is the "u" of u"text"; type_comment is a comment.
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
LENGTH = 16


def fingerprint(source: str | CodeView, qualname: str) -> str:
    """16 hexadecimal digits for the code of ``qualname`` in ``source``.

    Where a condition chooses between definitions, all of them count.

    Raises:
        Missing: the module does not define it (a ``LookupError``).
        SyntaxError: the text is not Python that this interpreter reads.
    """
    view = source if isinstance(source, CodeView) else CodeView(source)
    digest = hashlib.sha256()
    for node, _ in view.nodes(qualname):
        for piece in _pieces(node):
            digest.update(piece.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:LENGTH]


def _pieces(value: object) -> list[str]:
    """The text that is hashed: node types, their filled fields, constants in ASCII."""
    out: list[str] = []
    _write(value, out)
    return out


def _write(value: object, out: list[str]) -> None:
    if isinstance(value, ast.JoinedStr):
        out.append("JoinedStr(")
        for part in _joined(value):
            _write(part, out)
            out.append(",")
        out.append(")")
    elif isinstance(value, ast.AST):
        out.append(f"{type(value).__name__}(")
        for field in value._fields:
            inner = getattr(value, field, None)
            if field == "body" and isinstance(value, ast.Module | ast.ClassDef | FunctionNode):
                inner = _without_docstring(value.body)
            # A constant's None is a value; everywhere else empty means absent, which newer Pythons leave out.
            if field in _IGNORED or (inner in (None, []) and not isinstance(value, ast.Constant)):
                continue
            out.append(f"{field}=")
            _write(inner, out)
            out.append(",")
        out.append(")")
    elif isinstance(value, list):
        out.append("[")
        for part in value:
            _write(part, out)
            out.append(",")
        out.append("]")
    elif isinstance(value, int) and not isinstance(value, bool):
        out.append(hex(value))
    else:
        out.append(ascii(value))


def _joined(node: ast.JoinedStr) -> list[ast.AST]:
    """Parts of an f-string with neighbouring text joined and empty text dropped, as the parser does only lately."""
    parts: list[ast.AST] = []
    for part in node.values:
        text = part.value if isinstance(part, ast.Constant) else None
        last = parts[-1] if parts else None
        if isinstance(text, str) and isinstance(last, ast.Constant):
            parts[-1] = ast.Constant(str(last.value) + text)
        elif text != "":
            parts.append(part)
    return parts


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
