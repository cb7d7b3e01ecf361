# SPDX-License-Identifier: Apache-2.0
"""The judge: may this target be hooked? Asked by the loader, strict mode, ``status`` and ``matrix``.

:func:`read` gives the verdict of source text alone; ``matrix.json`` is made of that. :func:`decide_text` adds what the
matrix lists, and the user's choice for releases that it does not list. :func:`decide` checks the imported object too.

A source file with the digest of a listed release's file has that release's verdict and is not read. Any other is:
forks and rebuilt wheels carry a release's number too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal

from vllm_omni_patch import flags
from vllm_omni_patch.code import runtime, text
from vllm_omni_patch.code.contract import check_source, native_source
from vllm_omni_patch.code.fingerprint import fingerprint
from vllm_omni_patch.code.found import Missing
from vllm_omni_patch.code.text import ModuleText
from vllm_omni_patch.matrix import rules
from vllm_omni_patch.matrix.files import for_patch
from vllm_omni_patch.matrix.table import Row, Table, Verdict
from vllm_omni_patch.patch import Patch, Target


@dataclass(frozen=True)
class Reading:
    """The verdict of one module's text alone. ``fingerprint``: of the target's code, empty where there is none."""

    verdict: Verdict
    reason: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do with one target. ``reason`` is for users; ``level`` is that of its log line.

    ``like``: the listed release whose code an unlisted one has.
    ``fingerprint``: of the target's code here.
    """

    verdict: Verdict
    apply: bool
    reason: str
    level: Literal["info", "warning"] = "info"
    like: str | None = None
    fingerprint: str = ""


def read(target: Target, module: ModuleText | None) -> Reading:
    """The verdict for one target on the text of its module; ``None``: there is no such module.

    ``native``: a sign of it is in the module. ``absent``: the module or the name is not there. ``drifted``: it is
    there and not as the contract asks, or only imported from elsewhere. ``applies``: the contract holds.
    """
    if module is None:
        return Reading("absent", f"there is no module {target.module}")
    try:
        view = module.view
    except (SyntaxError, RecursionError, ValueError) as error:
        return Reading("drifted", f"{target.module} cannot be read as Python: {error}")
    upstream = native_source(target.native, view, target.qualname)
    try:
        digest = fingerprint(view, target.qualname)
    except Missing as missing:
        if upstream:
            return Reading("native", upstream)
        # A name that is here and comes from elsewhere has moved: there is something to hook, and not here.
        return Reading("drifted" if missing.elsewhere else "absent", str(missing))
    if upstream:
        return Reading("native", upstream, digest)
    problems = check_source(target.contract, view, target.qualname)
    return Reading("drifted", "; ".join(problems), digest) if problems else Reading("applies", "", digest)


def decide(patch: Patch, target: Target, release: str | None, module: ModuleType) -> Decision:
    """Whether to install ``target`` of ``patch`` in the imported ``module``.

    Args:
        release: version of the target's distribution as it reports it (``vllm.__version__``), with any local or
            development suffix; ``"dev"`` and ``None`` stand for an unknown one.

    Raises:
        FlagError: ``VLLM_OMNI_PATCH_UNLISTED`` holds a value that it does not accept.
    """
    decision = decide_text(patch, target, release, text.of_module(module))
    if not decision.apply:
        return decision
    described = _described(target, release)
    if upstream := runtime.native(target.native, module, target.qualname):
        reason = f"{described}: {upstream}; the patch stands aside"
        return replace(decision, verdict="native", apply=False, reason=reason, level="info")
    if problems := runtime.check(target.contract, module, target.qualname):
        reason = f"{described}: {'; '.join(problems)}"
        return replace(decision, verdict="drifted", apply=False, reason=reason, level="warning")
    return decision


def decide_text(patch: Patch, target: Target, release: str | None, module: ModuleText | None) -> Decision:
    """:func:`decide` on the text of the target's module; ``None``: there is no such module.

    Raises:
        FlagError: as :func:`decide`.
    """
    unlisted = flags.read(flags.UNLISTED)
    table = for_patch(patch)
    # Rows that a person wrote are for people: numbers of a distribution that cannot be fetched prove nothing about the
    # code that is here (packages of its name on public indexes are empty), so the code alone is asked.
    row = None if target.evidence == "documented" else table.row(patch.name, target.name, release)
    found = _reading(patch, target, release, module, table, row)
    decision = _decide(patch, target, release, found, table, row, unlisted)
    return replace(decision, fingerprint=found.fingerprint)


def _reading(
    patch: Patch, target: Target, release: str | None, module: ModuleText | None, table: Table, row: Row | None
) -> Reading:
    if module is not None and module.data is None:
        return Reading(row.verdict, row.reason) if row is not None else Reading("applies")
    known = table.known(patch.name, target, release, module.digest) if module is not None else None
    return Reading(known.verdict, known.reason, known.fingerprint) if known is not None else read(target, module)


def _decide(
    patch: Patch, target: Target, release: str | None, found: Reading, table: Table, row: Row | None, unlisted: str
) -> Decision:
    described = _described(target, release)
    if found.verdict == "native":
        return Decision("native", False, f"{described}: {found.reason}; the patch stands aside")
    if row is not None and row.verdict in ("absent", "drifted"):
        return _skipped(target, row.verdict, f"{described}: {row.reason}")
    if found.verdict == "absent":
        # On a release where it belongs, a missing name is a changed build, not an older one.
        return _skipped(target, "absent" if row is None else "drifted", f"{described}: {found.reason}")
    if found.verdict == "drifted":
        return _skipped(target, "drifted", f"{described}: {found.reason}")
    if target.evidence == "documented" and unlisted != "skip":
        return Decision("applies", True, f"{described}: no release of it can be fetched; the code here fits")
    if row is None:
        return _decide_unlisted(patch, target, described, found.fingerprint, table, unlisted)
    if row.verdict == "native":
        reason = f"{described}: listed as having it ({row.reason}), but this build shows no sign of it"
        return _skipped(target, "drifted", reason)
    return Decision("applies", True, f"{described}: listed, and the contract holds")


def _skipped(target: Target, verdict: Verdict, reason: str) -> Decision:
    return Decision(verdict, False, reason, "info" if rules.is_ordinary(target, verdict) else "warning")


def _described(target: Target, release: str | None) -> str:
    return f"{target.distribution} {release or 'of unknown version'}"


def _decide_unlisted(
    patch: Patch, target: Target, described: str, digest: str, table: Table, unlisted: str
) -> Decision:
    like = table.same_code(patch.name, target.name, digest)
    if like is not None:
        reason = f"{described} is not listed; the target's code is that of {like.release}, so it is treated the same"
        return Decision("applies", True, reason, "info", like.release)
    if target.by_contract and unlisted != "skip":
        return Decision("applies", True, f"{described} is not listed; for this target its contract is enough")
    newest = table.newest(patch.name, target.name)
    if table.error:
        why = f"{described} cannot be looked up: {table.error}"
    elif newest is None:
        why = f"{described}: the matrix has no row for this target; 'vllm-omni-patch matrix --update' writes them"
    else:
        last = f"the last listed release is {newest.release}"
        why = f"{described} is not listed and its code is that of no listed release ({last})"
    if unlisted == "apply":
        reason = f"{why}; applied because {flags.UNLISTED.name}=apply is set and the contract holds"
        return Decision("unlisted", True, reason, "warning")
    if unlisted == "skip":
        return Decision("unlisted", False, f"{why}; skipped because {flags.UNLISTED.name}=skip is set")
    to_fix = "Or set" if patch.matrix and not table.releases else "To fix: upgrade vllm-omni-patch, or set"
    reason = f"{why.rstrip('.')}; skipped. {to_fix} {flags.UNLISTED.name}=apply to hook it anyway"
    return Decision("unlisted", False, reason, "warning")
