# SPDX-License-Identifier: Apache-2.0
"""Stage 1. Runs at the start of every interpreter while the flag is set, so it imports nothing at module level."""


def activate() -> None:
    """Arm the finder when the flag is on."""


def plugin() -> None:
    """The ``vllm.general_plugins`` road into the same function."""
