# SPDX-License-Identifier: Apache-2.0
"""The keys of the encoder cache's settings: how a value is read, what it means, and which keys are gone."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

GIB = 1 << 30
# Longer waits are cut to this; no lock or thread takes a longer one, also not after a deadline was doubled.
MAX_SECONDS = threading.TIMEOUT_MAX / 4
# A lookup is a round trip with a few hundred bytes, a load tens of MiB; a store makes a connection where there is none.
LOADS_PER_LOOKUP = 10
STORES_PER_LOAD = 5


@dataclass(frozen=True)
class Setting:
    """One key: how its value is read, what it means. ``name`` has no prefix (``ec_<name>``, ``LMCACHE_EC_<NAME>``).

    ``attribute`` is the field of ``ECConfig`` that takes the value, in bytes or seconds; without one the value goes
    into ``remote_options`` under its name.
    """

    name: str
    attribute: str
    read: Callable[[Any], Any]
    accepts: str
    default: str
    help: str


def _unquote(value: Any) -> str:
    text = str(value).strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _milliseconds(value: Any) -> float:
    """Seconds, from at least one millisecond."""
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(_unquote(value))
    if not math.isfinite(number) or number < 1:
        raise ValueError(value)
    return min(number / 1000, MAX_SECONDS)


def _gib(value: Any) -> int:
    """Bytes of a size in GiB; 0, negative and empty mean the default, as LMCache reads them."""
    if isinstance(value, bool):
        raise ValueError(value)
    text = "" if value is None else _unquote(value)
    size = (float(text) if text else 0.0) * GIB
    if not abs(size) < sys.maxsize:
        raise ValueError(value)
    return max(0, int(size))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple, dict, bool)):
        raise ValueError(value)
    return "" if value is None else _unquote(value)


def _path(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    text = _text(value)
    if text.startswith("file://"):
        text = "/" + text[len("file://") :].partition("/")[2]
    if b"\0" in os.fsencode(text):
        raise ValueError(value)
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def _url(value: Any) -> str:
    text = _text(value)
    if "\0" in text:
        raise ValueError(value)
    urlsplit(text)
    return text


def _names(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [_text(item) for item in value]
    return [name for name in (part.strip() for part in _text(value).split(",")) if name]


def _map(value: Any) -> dict[str, Any]:
    loaded = json.loads(value) if isinstance(value, str) else value
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ValueError(value)
    return dict(loaded)


# What a reader raises for a value that it does not take: also a number too large, a map nested too deep.
NOT_ACCEPTED = (TypeError, ValueError, OverflowError, RecursionError)
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "max_local_cpu_size",
            "cpu_bytes",
            _gib,
            "a number of GiB",
            "1 (GiB), or LMCache's `max_local_cpu_size` where you set it",
            "host memory for staging and the CPU tier together, per engine and host; each worker has a staging buffer. "
            "On top come what the scheduler has loaded for its workers and a worker's buffer for an LMCache server, "
            "each up to a quarter of this size",
        ),
        Setting("local_disk", "disk_path", _path, "one path", "unset", "folder of the disk tier"),
        Setting(
            "max_local_disk_size",
            "disk_bytes",
            _gib,
            "a number of GiB",
            "64 (GiB)",
            "limit of that folder over all processes that use it",
        ),
        Setting(
            "remote_url",
            "remote_url",
            _url,
            "a URL such as redis://host:port, fs://host:0/path, lm://host:port",
            "unset",
            "`redis://`, `lm://`, `fs://`, or any other URL of LMCache",
        ),
        Setting(
            "remote_storage_plugins",
            "",
            _names,
            "names separated by commas",
            "unset",
            "LMCache's storage plugins for the remote tier",
        ),
        Setting(
            "extra_config", "", _map, "a map; JSON in a variable", "unset", "LMCache's settings for the remote tier"
        ),
        Setting(
            "lookup_deadline_ms",
            "lookup_deadline",
            _milliseconds,
            "a number >= 1",
            "50",
            f"longest wait of the scheduler for a remote. A load may take {LOADS_PER_LOOKUP} times as long, at least "
            f"2 s; a store, for which nobody waits, {STORES_PER_LOAD} times as long as a load",
        ),
        Setting(
            "salt", "salt", _text, "text", "empty", "mixed into the key: tenants or deployments that must not share"
        ),
        Setting(
            "namespace",
            "namespace",
            _text,
            "text",
            "empty",
            "stands for the weights and the processor files, for hosts with other file times. You vouch that equal "
            "text means equal weights",
        ),
        Setting(
            "shm_path", "shm_path", _path, "one path", "`/dev/shm`", "where the processes of an engine share memory"
        ),
    )
}
_OF_CPU_SIZE = "Its size follows from ec_max_local_cpu_size."
_OF_LOOKUP = "It follows from ec_lookup_deadline_ms."
# Keys of earlier versions: name -> what to use instead.
REMOVED: dict[str, str] = {
    "local_cpu": "CPU memory is always used; ec_max_local_cpu_size is its size.",
    "remote_pool_size": _OF_CPU_SIZE,
    "remote_serde": "Entries are stored as they are, so that their checksums hold.",
    "load_deadline_ms": _OF_LOOKUP,
    "store_deadline_ms": _OF_LOOKUP,
    "close_deadline_ms": "What is queued at shutdown is written within 10 s or dropped.",
    "staging_size_mib": _OF_CPU_SIZE,
    "queue_entries": "256 outputs may wait, in a buffer whose size follows from ec_max_local_cpu_size.",
    "fsync": "An entry that a power cut has torn is found by its checksum and encoded again.",
    "touch_seconds": "A hit renews an entry's age at most every 10 s.",
    "retry_seconds": "A tier that failed is tried again after 5 s, then at growing intervals of up to a minute.",
    "stats_seconds": "The line is logged at most once a minute, and only after something happened.",
}
