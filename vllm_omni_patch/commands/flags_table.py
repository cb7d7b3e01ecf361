# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables, for people and for machines. The docs pages are made from :func:`markdown`.

Rows that are ``internal`` stand on a page of their own; here the caller chooses what to show.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from vllm_omni_patch.flags import Flag


def text(rows: Sequence[Flag]) -> str:
    """One paragraph for each variable."""
    parts = []
    for flag in rows:
        head = f"{flag.name}  [{flag.type}]  default: {default(flag)}"
        body = textwrap.fill(
            f"{flag.help} Accepts: {flag.accepted()}.", 100, initial_indent="    ", subsequent_indent="    "
        )
        parts.append(f"{head}\n{body}")
    return "\n".join(parts)


def markdown(rows: Sequence[Flag]) -> str:
    """A table with one row for each variable."""
    lines = ["| variable | type | default | accepts | what it does |", "|---|---|---|---|---|"]
    for flag in rows:
        cells = [f"`{flag.name}`", flag.type, default(flag), flag.accepted(), flag.help]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def as_json(rows: Sequence[Flag]) -> str:
    """A list of objects with name, type, default, accepts, help and internal."""
    return json.dumps(
        [
            {
                **{"name": f.name, "type": f.type, "default": f.default, "accepts": f.accepted(), "help": f.help},
                "internal": f.internal,
            }
            for f in rows
        ],
        indent=1,
        default=str,
    )


def default(flag: Flag) -> str:
    """The default as a user would type it."""
    if flag.default in ("", None):
        return "unset"
    return str(int(flag.default)) if isinstance(flag.default, bool) else str(flag.default)
