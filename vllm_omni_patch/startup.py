# SPDX-License-Identifier: Apache-2.0
"""Stage 1. Runs at the start of every interpreter while the flag is set, so it imports nothing at module level.

Two roads lead here: the startup file in site-packages, and vLLM's general plugins. Both end in :func:`begin`, which
runs stage 2 (``loader.py``) once, at the first look-up of a vLLM package. On Python 3.15 and later the startup file
names :func:`activate` and cannot look at the flag first: there, with the flag off, this module is imported and
nothing else.
"""

FLAG = "VLLM_OMNI_PATCH"
OFF = ("", "0", "false", "no", "off")
ROOTS = ("vllm", "vllm_omni", "vllm_neuron")
WAIT_S = 10.0  # for another thread that is inside stage 2

_finder = None  # stays in sys.meta_path for good: taking a finder out makes a concurrent import skip its neighbour
_watch = None  # stage 2's answer to look-ups (imports.Watch), once there is one
_lock = None
_busy = 0  # identity of the thread inside stage 2
_begun = False


def activate(road: str = "startup file") -> None:
    """Arm the finder when the flag is on; where vLLM is imported already, go on to stage 2. Never raises.

    A virtual environment runs startup files twice; the second call finds the finder in place.
    """
    global _finder, _lock
    try:
        import os
        import sys

        if os.environ.get(FLAG, "").strip().lower() in OFF:
            return
        if _finder is None:
            import _thread

            _lock = _thread.allocate_lock()
            _finder = Finder()
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if not _begun and any(name in sys.modules for name in ROOTS):
            begin(road)
    except Exception as error:
        complain(error)


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
        from vllm_omni_patch import loader
    except Exception as error:
        complain(error)
        return
    loader.engine_starts("plugin")


class Finder:
    """Waits for the first look-up of a vLLM package. Finds nothing itself; later it passes look-ups on to stage 2.

    A tool that stands before it in ``sys.meta_path`` and answers for ``vllm`` hides that look-up, so a look-up of any
    module below it counts too.
    """

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if _watch is None:
            if fullname.partition(".")[0] not in ROOTS:
                return None
            begin("startup file")
        return _watch.find_spec(self, fullname, path, target) if _watch is not None else None


def begin(road: str) -> None:
    """Run stage 2 once in this process; later calls return at once.

    The flag is read again here: a script may set or clear it until its first import of vLLM.

    Raises:
        ImportError: a patch declaration imported vLLM while it was being read.
    """
    global _busy, _begun, _watch
    if _begun:
        return
    import _thread
    import os

    if _busy == _thread.get_ident():
        raise ImportError("a patch declaration may not import vLLM: name target modules and installers as text")
    if os.environ.get(FLAG, "").strip().lower() in OFF:
        return
    # No wait without an end while import locks are held. Who waits in vain is caught up with by the audit.
    if _lock is None or not _lock.acquire(timeout=WAIT_S):
        return
    try:
        if not _begun:
            _busy = _thread.get_ident()
            from vllm_omni_patch import loader

            _watch = loader.start(road)
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
    import _thread

    _lock, _busy = _thread.allocate_lock(), 0


def stand_first() -> None:
    """Put our finder first as well: a tool in front of it answers for modules that we wait for."""
    import sys

    if _finder is not None and sys.meta_path[0] is not _finder:
        sys.meta_path.insert(0, _finder)


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
