# SPDX-License-Identifier: Apache-2.0
"""What a patch declares: ``Patch``, ``Target``, ``Contract``. Data only; nothing here touches vLLM.

A patch folder's ``__init__`` holds one ``PATCH``. Installers are named as ``"module:function"`` so that declaring a
patch imports none of its code; the loader resolves the name when the target module has been imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from vllm_omni_patch.flags import Flag, Removed, read

Effect = Literal["adds", "reports", "changes"]
ParameterKind = Literal["positional", "positional_or_keyword", "keyword_only", "var_positional", "var_keyword"]
# Of a target in a process: verdicts of the matrix lead to these, see matrix/rules.py.
State = Literal["pending", "applied", "native", "skipped", "failed"]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Parameter:
    """A parameter that a hook binds by name. Any of ``kinds`` is good; an ``optional`` one may be absent."""

    name: str
    kinds: tuple[ParameterKind, ...] = ("positional_or_keyword",)
    optional: bool = False


@dataclass(frozen=True)
class Contract:
    """What a target must look like for its hook to be right; checked on the imported object or on source text.

    ``parameters``: what the callable must accept. A further parameter with a default, ``*args`` or ``**kwargs`` is
    fine; a further *required* one breaks the contract. A method's ``self`` or ``cls`` does not count, named or not;
    for a class it is the constructor's parameters. ``None``: parameters are not looked at.
    ``base_methods``: methods that the target class, or the class that owns the target, defines itself or inherits
    from a class of the same module. ``class_attributes``: names assigned in that class's body or on ``self`` in its
    methods. ``module_attributes``: names that the target's module defines or imports.
    """

    parameters: tuple[Parameter, ...] | None = None
    base_methods: tuple[str, ...] = ()
    class_attributes: tuple[str, ...] = ()
    module_attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Native:
    """Signs that the release already does what the patch brings; any one of them makes the verdict ``native``.

    ``strings`` are string constants in the module's source, such as a name in a registry.
    """

    base_methods: tuple[str, ...] = ()
    module_attributes: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Documented:
    """What a person read in the public source of a release that cannot be fetched."""

    release: str
    verdict: Literal["applies", "native", "absent", "drifted"] = "applies"
    reason: str = ""


@dataclass(frozen=True)
class Target:
    """One attribute that a patch hooks.

    ``install`` names ``function(hook: Hook) -> Undo``. ``verify``, where given, names ``function(hook) -> bool`` that
    reads the effect back; without it the loader checks that the attribute has become the installed wrapper. Targets
    of one ``group`` are applied all together or not at all. ``optional``: a release without the module or attribute
    is ordinary (one of several runners, say), so its absence is not held against the patch. With ``evidence``
    ``documented`` the matrix takes its rows from ``documented``, for a distribution that cannot be fetched.
    ``by_contract``: on a release that the matrix does not list, the contract alone decides; for a hook that passes
    calls through and relies on nothing in the target's code. ``setting``: hooked only where this bool variable is on
    when vLLM is first imported. ``consequence``: what a user misses where it is not hooked, shown with the reason.
    """

    module: str
    qualname: str
    install: str
    distribution: str = "vllm"
    contract: Contract = field(default_factory=Contract)
    native: Native | None = None
    group: str = ""
    verify: str = ""
    optional: bool = False
    evidence: Literal["static", "documented"] = "static"
    note: str = ""
    documented: tuple[Documented, ...] = ()
    by_contract: bool = False
    setting: Flag | None = None
    consequence: str = ""

    @property
    def name(self) -> str:
        """``module:qualified.name``, as the matrix and the ledger write it."""
        return f"{self.module}:{self.qualname}"

    def is_wanted(self) -> bool:
        """Whether ``setting`` is on, or there is none.

        Raises:
            FlagError: it holds a value that it does not accept.
        """
        return self.setting is None or bool(read(self.setting))


@dataclass(frozen=True)
class Patch:
    """A patch: why it exists, what it hooks, when it goes away.

    ``matrix``: path of the matrix file that holds this patch's rows; a patch from another package brings its own,
    written by ``vllm-omni-patch matrix --update --patch NAME``. Empty: the one that comes with this package.
    ``uses``: what the patch calls in other packages without hooking it (``install`` is empty). The matrix judges it by
    its contract like a target; the loader leaves it alone.
    ``removed``: variables that the patch had once; where one is still set, the loader logs what replaced it.
    ``commands``: (name, ``"module:app"``) of Typer apps that become ``vllm-omni-patch NAME``.
    """

    name: str
    summary: str
    why: str
    scope: str
    fragility: str
    remove_when: str
    effect: Effect
    targets: tuple[Target, ...]
    flags: tuple[Flag, ...] = ()
    matrix: str = ""
    uses: tuple[Target, ...] = ()
    removed: tuple[Removed, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()


@dataclass
class Hook:
    """Handed to an installer: the imported module, the object that owns the attribute, and the attribute's value.

    ``owner`` is the module or the class in which ``attribute`` is set. ``original`` is what stood there, as the
    owner holds it (a ``staticmethod`` object, say). ``installed`` is the wrapper that :meth:`wrap` left there.
    ``used`` turns true when a call first reaches what was installed; ``on_first_call`` is called then, once.
    """

    patch: Patch
    target: Target
    module: ModuleType
    owner: Any
    attribute: str
    original: Any
    installed: Any = None
    on_first_call: Callable[[], None] | None = None
    used: bool = False

    def wrap(self, wrapper: Callable[..., Any]) -> Undo:
        """Put ``wrapper(wrapped, instance, args, kwargs)`` around the target with wrapt; returns the undo.

        ``wrapper`` must pass ``*args, **kwargs`` through to ``wrapped`` and bind what it reads by name.
        """
        from vllm_omni_patch.loading import wrappers

        def noting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if not self.used:
                self.note_use()
            return wrapper(wrapped, instance, args, kwargs)

        owner = (self.patch.name, self.target.name)
        self.installed, undo = wrappers.wrap(self.module, self.target.qualname, self.owner, noting, owner)
        return undo

    def note_use(self) -> None:
        """Record that a call reaches what was installed. Only the first call in a process counts; never raises.

        :meth:`wrap` calls it; an installer that puts something else in place calls it itself.
        """
        if self.used:
            return
        self.used = True
        try:
            if self.on_first_call is not None:
                self.on_first_call()
        except Exception:
            return
