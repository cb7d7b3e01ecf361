# SPDX-License-Identifier: Apache-2.0
"""From the armed finder (``__init__.py``) to stage 2 (``loading/loader.py``), once in a process.

Two activation paths lead here: the startup file in site-packages, whose finder has met the first look-up of a vLLM
package, and vLLM's general plugins. vLLM loads the plugin with the flag off too, so little is imported at module level.
"""

import _thread

from vllm_omni_patch import FLAG, OFF, activate, finder

WAIT_S = 10.0  # for another thread that is inside stage 2

_lock = _thread.allocate_lock()
_busy = 0  # identity of the thread inside stage 2
_begun = False


def plugin() -> None:
    """Entry point in ``vllm.general_plugins``, for processes that the startup file did not reach.

    With the flag off it returns without importing anything. This is where strict mode stops the engine.

    Raises:
        RuntimeError: strict mode, and something that was asked for is not applied.
    """
    import os

    if os.environ.get(FLAG, "").strip().lower() in OFF:
        return
    activate("plugin")
    try:
        from vllm_omni_patch.loading import loader
    except Exception as error:
        complain(error)
        return
    loader.engine_starts("plugin")


def begin(path: str) -> None:
    """Run stage 2 once in this process; later calls return at once.

    The flag is read again here: a script may set or clear it until its first import of vLLM.

    Raises:
        ImportError: a patch declaration imported vLLM while it was being read.
    """
    global _busy, _begun
    if _begun:
        return
    import os

    if _busy == _thread.get_ident():
        raise ImportError("a patch declaration must not import vLLM; name target modules and installers as strings")
    if os.environ.get(FLAG, "").strip().lower() in OFF:
        return
    # The caller holds import locks, so the wait has a limit. The audit hooks what a caller imports that gave up.
    if not _lock.acquire(timeout=WAIT_S):
        return
    try:
        if not _begun:
            _busy = _thread.get_ident()
            os.register_at_fork(after_in_child=_after_fork)
            from vllm_omni_patch.loading import loader

            finder.watch = loader.start(path)  # type: ignore[assignment]
    except Exception as error:
        complain(error)
    finally:
        # After a failure too: half of stage 2 must not run again at every look-up.
        _busy = 0
        _begun = True
        _lock.release()


def _after_fork() -> None:
    """A child needs a lock that no thread of its parent holds."""
    global _lock, _busy
    _lock, _busy = _thread.allocate_lock(), 0


def complain(error: BaseException) -> None:
    """Print one line on stderr: our own code failed, nothing is patched, and the interpreter continues."""
    import os
    import sys

    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "unknown place"
    if sys.stderr is not None:
        text = f"vllm-omni-patch: not active in process {os.getpid()}: {type(error).__name__}: {error} ({place})\n"
        sys.stderr.write(text)
