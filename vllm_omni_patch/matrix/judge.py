# SPDX-License-Identifier: Apache-2.0
"""May this target be hooked in this process? :func:`decide` asks the matrix, then the live object.

The order: upstream has it already; the verdict that the matrix lists for this release; for a release that it does not
list, whether the target's code is that of a listed one. The contract is checked on the live object in every case,
because forks and rebuilt wheels carry a release's number too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from vllm_omni_patch import flags
from vllm_omni_patch.code.contract import check, fingerprint, native
from vllm_omni_patch.code.live import LiveView, source_text
from vllm_omni_patch.code.views import Missing, View
from vllm_omni_patch.matrix.table import Table, for_patch, load
from vllm_omni_patch.matrix.table_text import markdown_table
from vllm_omni_patch.patch import Patch, Target

__all__ = ["Decision", "decide", "decide_view", "live_fingerprint", "load", "markdown_table"]


@dataclass(frozen=True)
class Decision:
    """What to do with one target. ``reason`` is for users; ``level`` says how loudly.

    ``verdict`` is the matrix's, or ``unlisted``. ``like``: the listed release whose code this one has.
    """

    verdict: Literal["applies", "native", "absent", "drifted", "unlisted"]
    apply: bool
    reason: str
    level: Literal["info", "warning"] = "info"
    like: str | None = None


def decide(patch: Patch, target: Target, release: str | None, owner_module: ModuleType) -> Decision:
    """Whether to install ``target`` of ``patch`` in the imported ``owner_module``.

    Args:
        release: version of the target's distribution as it reports it (``vllm.__version__``), with any local or
            development suffix; ``"dev"`` and ``None`` stand for an unknown one.

    Raises:
        FlagError: ``VLLM_OMNI_PATCH_UNLISTED`` holds a value that it does not accept.
    """
    view = LiveView(owner_module)
    return decide_view(patch, target, release, view, lambda: live_fingerprint(owner_module, target.qualname))


def decide_view(
    patch: Patch, target: Target, release: str | None, view: View | None, digest: Callable[[], str]
) -> Decision:
    """:func:`decide` on any view of the target's module: imported, or only read. ``None``: there is no such module.

    Args:
        digest: gives the target's fingerprint, or an empty string; asked only where the release is not listed.

    Raises:
        FlagError: as :func:`decide`.
    """
    unlisted = flags.read(flags.UNLISTED)
    table = for_patch(patch)
    described = f"{target.distribution} {release or 'of unknown version'}"
    upstream = native(target.native, view, target.qualname) if target.native and view else ""
    if upstream:
        return Decision("native", False, f"{described}: {upstream}; the patch stands aside")
    # Rows that a person wrote are for people: numbers of a distribution that cannot be fetched prove nothing about the
    # code that is here (packages of its name on public indexes are empty), so the code alone is asked.
    row = None if target.evidence == "documented" else table.row(patch.name, target.name, release)
    if row is not None and row.verdict in ("absent", "drifted"):
        return Decision(row.verdict, False, f"{described}: {row.reason}", _loudness(target, row.verdict))
    # On a release where it belongs, a missing name is a changed build, not an older one.
    gone: Literal["absent", "drifted"] = "absent" if row is None else "drifted"
    if view is None:
        return Decision(gone, False, f"{described}: there is no module {target.module}", _loudness(target, gone))
    try:
        view.find(target.qualname)
    except Missing as missing:
        return Decision(gone, False, f"{described}: {missing}", _loudness(target, gone))
    problems = check(target.contract, view, target.qualname)
    if problems:
        return Decision("drifted", False, f"{described}: {'; '.join(problems)}", "warning")
    if target.evidence == "documented" and unlisted != "skip":
        return Decision("applies", True, f"{described}: no release of it can be checked; the code here fits")
    if row is None:
        return _decide_unlisted(patch, target, described, digest(), table, unlisted)
    if row.verdict == "native":
        reason = f"{described}: listed as having it ({row.reason}), but this build shows no sign of it"
        return Decision("drifted", False, reason, "warning")
    return Decision("applies", True, f"{described}: listed, and the contract holds")


def _loudness(target: Target, verdict: str) -> Literal["info", "warning"]:
    return "info" if verdict == "absent" and target.optional else "warning"


def _decide_unlisted(
    patch: Patch, target: Target, described: str, digest: str, table: Table, unlisted: str
) -> Decision:
    like = table.same_code(patch.name, target.name, digest)
    if like is not None:
        reason = f"{described} is not listed; the target's code is that of {like.release}, so it is judged as that"
        return Decision("applies", True, reason, "info", like.release)
    if target.by_contract and unlisted != "skip":
        return Decision("applies", True, f"{described} is not listed; for this target its contract is enough")
    newest = table.newest(patch.name, target.name)
    if table.error:
        said = f"{described} cannot be looked up: {table.error}"
    elif newest is None:
        said = f"{described}: the matrix has no row for this target; 'vllm-omni-patch matrix --update' makes them"
    else:
        last = f"the last listed release is {newest.release}"
        said = f"{described} is not listed and its code is that of no listed release ({last})"
    if unlisted == "apply":
        reason = f"{said}; applied because {flags.UNLISTED.name}=apply is set and the contract holds"
        return Decision("unlisted", True, reason, "warning")
    if unlisted == "skip":
        return Decision("unlisted", False, f"{said}; skipped, as {flags.UNLISTED.name}=skip asks")
    way_out = "Or set" if patch.matrix and not table.releases else "Upgrade vllm-omni-patch, or set"
    reason = f"{said.rstrip('.')}; skipped. {way_out} {flags.UNLISTED.name}=apply to hook it all the same"
    return Decision("unlisted", False, reason, "warning")


def live_fingerprint(module: ModuleType, qualname: str) -> str:
    """Fingerprint of ``qualname`` in the file that ``module`` was imported from; empty when that cannot be read."""
    text = source_text(module)
    if text is None:
        return ""
    try:
        return fingerprint(text, qualname)
    except (LookupError, SyntaxError, ValueError, RecursionError):
        return ""
