# SPDX-License-Identifier: Apache-2.0
"""Does a target still look as its patch needs it to? Asked of source text, which is not imported."""

from __future__ import annotations

from vllm_omni_patch.code.found import Found, Missing, Seen, signature
from vllm_omni_patch.code.view import CodeView
from vllm_omni_patch.patch import Contract, Native, Parameter


def check_source(contract: Contract, source: str | CodeView, qualname: str) -> list[str]:
    """What ``qualname`` lacks in its module, one sentence each; an empty list means that the contract holds.

    See :class:`~vllm_omni_patch.patch.Contract` for what is asked.

    Raises:
        SyntaxError: the text is not Python that this interpreter reads.
    """
    view = _view(source)
    try:
        found = view.find(qualname)
    except Missing as missing:
        return [str(missing)]
    # Where a condition chooses between definitions, one that fits is enough: the object decides when it is imported.
    answers = [check_parameters(contract, candidate, qualname) for candidate in found]
    problems = min(answers, key=len)
    owner = found[0].owner
    if (contract.base_methods or contract.class_attributes) and not owner:
        problems.append(f"{qualname} belongs to no class, and the contract asks for methods or attributes of one")
        return problems + _missing_names(contract, view)
    for name in contract.base_methods:
        if not view.has_method(owner, name):
            problems.append(f"{owner} has no method {name}")
    for name in contract.class_attributes:
        if not view.has_class_attribute(owner, name):
            problems.append(f"{owner} does not set {name}")
    return problems + _missing_names(contract, view)


def _missing_names(contract: Contract, view: CodeView) -> list[str]:
    return [f"the module has no {name}" for name in contract.module_attributes if not view.has_module_attribute(name)]


def check_parameters(contract: Contract, found: Found, qualname: str) -> list[str]:
    """What the parameters of ``found`` lack, one sentence each."""
    if contract.parameters is None:
        return []
    if found.kind == "class" and found.parameters is None:
        return [f"{qualname} has no constructor of its own to compare"]
    if found.parameters is None:
        what = "a property" if found.kind == "property" else "not a plain function or class"
        return [f"{qualname} is {what}, and the contract asks for parameters"]
    seen = {parameter.name: parameter for parameter in found.parameters}
    # What a method is bound to is no parameter of it; a contract may name it anyway.
    bound = ("self", "cls") if found.definer or found.kind == "class" else ()
    asked = [wanted for wanted in contract.parameters if wanted.name not in bound]
    problems = [_check_parameter(wanted, seen.get(wanted.name), qualname) for wanted in asked]
    named = {wanted.name for wanted in asked}
    for parameter in found.parameters:
        if parameter.required and parameter.name not in named:
            problems.append(f"{qualname} has a further required parameter {parameter.name}")
    listed = [problem for problem in problems if problem]
    if listed:
        listed[-1] += f"; it is {qualname.rpartition('.')[2]}{signature(found.parameters)} here"
    return listed


def _check_parameter(wanted: Parameter, seen: Seen | None, qualname: str) -> str:
    if seen is None:
        return "" if wanted.optional else f"{qualname} has no parameter {wanted.name}"
    if seen.kind not in wanted.kinds:
        return f"parameter {wanted.name} of {qualname} is {seen.kind}, not {' or '.join(wanted.kinds)}"
    return ""


def native_source(signs: Native | None, source: str | CodeView, qualname: str) -> str:
    """Why the module already does what the patch brings; empty when it does not.

    Raises:
        SyntaxError: as :func:`check_source`.
    """
    if signs is None:
        return ""
    view = _view(source)
    try:
        owner = view.find(qualname)[0].owner
    except Missing:
        owner = qualname.rpartition(".")[0]
    for name in signs.base_methods:
        if owner and view.has_method(owner, name):
            return native_reason(signs, f"{owner} has {name}")
    for name in signs.module_attributes:
        if view.has_module_attribute(name):
            return native_reason(signs, f"the module has {name}")
    for text in signs.strings:
        if view.has_string(text):
            return native_reason(signs, f"the module names {text!r}")
    return ""


def native_reason(signs: Native, sign: str) -> str:
    """The reason of a ``native`` verdict, with the ``sign`` that was found."""
    return f"{signs.reason} ({sign})" if signs.reason else f"upstream has it: {sign}"


def _view(source: str | CodeView) -> CodeView:
    return source if isinstance(source, CodeView) else CodeView(source)
