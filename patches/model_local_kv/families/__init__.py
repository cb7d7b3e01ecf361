# SPDX-License-Identifier: Apache-2.0
"""One module per model family. A module is ``families/<name>.py`` and is listed in :data:`FAMILIES`.

It holds ``TARGETS: tuple[Target, ...]``, one per owner class: ``module`` is the module to wait for, ``qualname`` the
owner class, ``distribution="vllm-omni"``, ``optional=True``; ``install`` names a function that takes the ``Hook``,
adds ``specs.METHOD`` to the class ``hook.original`` and returns the undo; ``verify`` names one that reads it back. The
modules are imported before torch, so whatever is heavy is imported inside functions.

Where a release declares natively, ``specs.METHOD`` is left alone and a differing declaration goes under
``specs.CORRECTED``.
"""

from __future__ import annotations

FAMILIES: tuple[str, ...] = ()
"""Names of the modules of this package that declare targets, in the order in which they are registered."""
