# SPDX-License-Identifier: Apache-2.0
"""A patch set for stock vLLM, switched on by ``VLLM_OMNI_PATCH``. Importing this package changes nothing.

Every interpreter pays for this module while the flag is set, so there is little in it: the startup file calls
:func:`activate`, which puts a finder into ``sys.meta_path`` that waits for a vLLM package. Stage 2 (``startup.py``) is
known here by name only, as the startup file knows this module.
"""

__version__ = "0.1.0"

FLAG = "VLLM_OMNI_PATCH"
OFF = ("", "0", "false", "no", "off")
ROOTS = ("vllm", "vllm_omni", "vllm_neuron")
STAGE_2 = "vllm_omni_patch.startup"


class Finder:
    """Waits for the first look-up of a vLLM package. Finds nothing itself; later it passes look-ups on to stage 2.

    A tool that stands before it in ``sys.meta_path`` and answers for ``vllm`` hides that look-up, so a look-up of any
    module below it counts too.
    """

    waits_for: tuple[str, ...] = ROOTS
    watch = None  # stage 2's answer to look-ups (imports.Watch), once there is one

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if self.watch is None:
            if fullname.partition(".")[0] not in self.waits_for:
                return None
            begin("startup file")
        return self.watch.find_spec(self, fullname, path, target) if self.watch is not None else None

    def stand_first(self) -> None:
        """Put this finder first as well: a tool in front of it answers for modules that we wait for."""
        import sys

        if self in sys.meta_path and sys.meta_path[0] is not self:
            sys.meta_path.insert(0, self)


# It stays in sys.meta_path for good: taking a finder out makes a concurrent import skip its neighbour.
finder = Finder()


def activate(path: str = "startup file") -> None:
    """Arm the finder when the flag is on; where vLLM is imported already, go on to stage 2. Never raises.

    A virtual environment runs startup files twice; the second call finds the finder in place.

    Args:
        path: the activation path that led here, for the ledger: ``startup file`` or ``plugin``.
    """
    import os
    import sys

    if os.environ.get(FLAG, "").strip().lower() in OFF:
        return
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
    if finder.watch is None and any(name in sys.modules for name in finder.waits_for):
        begin(path)


def begin(path: str) -> None:
    """Go on to stage 2. A half-installed package is one line on stderr and never a failed ``import vllm``."""
    try:
        stage_2 = __import__(STAGE_2, fromlist=["begin"])
    except Exception as error:
        import os
        import sys

        finder.waits_for = ()
        if sys.stderr is not None:
            sys.stderr.write(f"vllm-omni-patch: not active in process {os.getpid()}: {error!r}; reinstall it\n")
        return
    stage_2.begin(path)
