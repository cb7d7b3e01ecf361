# SPDX-License-Identifier: Apache-2.0
"""From the armed finder (``__init__.py``) to stage 2 (``loader.py``), once in a process.

Two roads lead here: the startup file in site-packages, whose finder has met the first look-up of a vLLM package, and
vLLM's general plugins. With the flag off vLLM loads the plugin all the same, so little is imported at module level.
"""

import _thread

from vllm_omni_patch import FLAG, OFF, activate, finder

WAIT_S = 10.0  # for another thread that is inside stage 2

_lock = _thread.allocate_lock()
_busy = 0  # identity of the thread inside stage 2
_begun = False


def plugin() -> None:
    """Entry point in ``vllm.general_plugins``: the same road, for processes that the startup file did not reach.

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


def begin(road: str) -> None:
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
        raise ImportError("a patch declaration may not import vLLM: name target modules and installers as text")
    if os.environ.get(FLAG, "").strip().lower() in OFF:
        return
    # No wait without an end while import locks are held. Who waits in vain is caught up with by the audit.
    if not _lock.acquire(timeout=WAIT_S):
        return
    try:
        if not _begun:
            _busy = _thread.get_ident()
            from vllm_omni_patch.loading import loader

            finder.watch = loader.start(road)  # type: ignore[assignment]
    except Exception as error:
        complain(error)
    finally:
        # After a failure too: half of stage 2 must not run again at every look-up.
        _busy = 0
        _begun = True
        _lock.release()


def renew_lock() -> None:
    """For a forked child: a lock that no thread of its parent holds."""
    global _lock, _busy
    _lock, _busy = _thread.allocate_lock(), 0


def stand_first() -> None:
    """Put our finder first as well: a tool in front of it answers for modules that we wait for."""
    import sys

    if finder in sys.meta_path and sys.meta_path[0] is not finder:
        sys.meta_path.insert(0, finder)


def complain(error: BaseException) -> None:
    """One line on stderr: our own code broke, nothing is patched, and the interpreter goes on."""
    import os
    import sys

    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "unknown place"
    if sys.stderr is not None:
        text = f"vllm-omni-patch: not active in process {os.getpid()}: {type(error).__name__}: {error} ({place})\n"
        sys.stderr.write(text)
