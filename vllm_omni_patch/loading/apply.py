# SPDX-License-Identifier: Apache-2.0
"""Install one target in an imported module, read it back, and uninstall it when that fails."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_omni_patch.loading import wrappers
from vllm_omni_patch.patch import Hook, Patch, Target, Undo


class Refused(Exception):
    """The target cannot be hooked and stays as it is. ``str()`` is the reason, for users."""


@dataclass
class Installed:
    """A target that was read back as applied."""

    patch: Patch
    target: Target
    hook: Hook
    undo: Undo
    left: Any = None  # what stood at the target afterwards

    @property
    def is_wrapper(self) -> bool:
        """The installer used ``hook.wrap``, so calls go through us."""
        return self.hook.installed is not None

    def current(self) -> Any:
        """What stands at the target now."""
        return vars(self.hook.owner).get(self.hook.attribute)


def locate(module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    """(owner, attribute, value): where ``qualname`` is set, and what stands there, unbound.

    A method that the named class inherits is owned by the named class, so that its base is left alone.

    Raises:
        LookupError: the name leads nowhere.
    """
    owner: Any = module
    parts = qualname.split(".")
    for index, part in enumerate(parts):
        holders = inspect.getmro(owner) if inspect.isclass(owner) else (owner,)
        holder = next((one for one in holders if part in vars(one)), None)
        if holder is None:
            raise LookupError(f"{'.'.join(parts[: index + 1])} is not in {module.__name__}")
        value = vars(holder)[part]
        if index == len(parts) - 1:
            return owner, part, value
        owner = value
    raise LookupError("an empty name leads nowhere")


def install(patch: Patch, target: Target, module: ModuleType, on_first_call: Callable[[], None]) -> Installed:
    """Run the installer of ``target`` and read its effect back.

    Raises:
        Refused: another patch holds the attribute, or the installer had no effect. Nothing is left behind.
        Exception: whatever the installer raised; what it did is undone.
    """
    owner, attribute, original = locate(module, target.qualname)
    holder = wrappers.ours(original)
    if holder is not None:
        raise Refused(f"patch {holder[0]!r} already holds {holder[1]}; two patches cannot share an attribute")
    hook = Hook(patch, target, module, owner, attribute, original, on_first_call=on_first_call)
    before = wrappers.held(owner, attribute)
    installer = resolve(target.install)
    verify = resolve(target.verify) if target.verify else None
    try:
        undo = installer(hook)
    except BaseException:
        _take_back(hook, None, before)
        raise
    if not callable(undo):
        _take_back(hook, None, before)
        raise TypeError(
            f"{target.install} returned {undo!r} and not the undo; what it did was undone. End it with "
            "'return hook.wrap(...)', or return a function that undoes what it did"
        )
    done = Installed(patch, target, hook, undo)
    try:
        effective = bool(verify(hook)) if verify is not None else _took_effect(done)
    except BaseException:
        _take_back(hook, done.undo, before)
        raise
    if not effective:
        _take_back(hook, done.undo, before)
        raise Refused(
            f"the hook had no effect: {target.name} is not what was installed "
            "(a metaclass, a descriptor or another package keeps its own value)"
        )
    done.left = done.current()
    return done


def resolve(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{name} is {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def _took_effect(done: Installed) -> bool:
    current = done.current()
    if done.is_wrapper:
        return current is done.hook.installed and wrappers.ours(current) == (done.patch.name, done.target.name)
    return current is not done.hook.original


def _take_back(hook: Hook, undo: Undo | None, before: Any) -> None:
    """Take back what an installer did. The attribute itself is put back even if the installer cannot undo."""
    if undo is not None:
        try:
            undo()
        except Exception:
            pass
    wrappers.put_back(hook.owner, hook.attribute, before)


def remove(done: Installed) -> str:
    """Undo an applied target; returns what could not be undone, empty when all is as it was."""
    try:
        done.undo()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
