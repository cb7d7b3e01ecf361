# SPDX-License-Identifier: Apache-2.0
"""Settings of the encoder cache: which storage, how large, how patient.

Later sources win: LMCache's own settings (YAML file named by ``LMCACHE_CONFIG_FILE``, then ``LMCACHE_*``), the YAML
file's ``ec_*`` keys and ``ec:`` map in the order of the file, ``LMCACHE_EC_*``, and vLLM's
``ec_connector_extra_config`` (the same keys, with or without ``ec_``). From LMCache's own settings only the size of the
CPU pool is taken: the KV cache's disk, remote and ``extra_config`` stay the KV cache's (encoder cache design,
"Configuration", which wants EC settings best-effort: what is unknown or unreadable is logged and dropped).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from vllm_omni_patch import flags, ledger

GIB = 1 << 30
MIB = 1 << 20
DEFAULT_CPU_GIB = 1.0
DEFAULT_DISK_GIB = 64.0
FILE_PREFIX = "ec_"
ENV_PREFIX = "LMCACHE_EC_"
# Longer waits are cut to this; no lock or thread takes a longer one, also not after a deadline was doubled.
MAX_SECONDS = threading.TIMEOUT_MAX / 4
# What stands between ``://`` and the host. A password may hold any sign; only in ``fs://`` may the path hold an ``@``.
_USERINFO = re.compile(r"(?<=://)(?:(?<!fs://)\S*|[^/\s]*)@")

_log = ledger.logger("ec")


@dataclass(frozen=True)
class Setting:
    """One key: how its value is read, what it means. ``name`` has no prefix (``ec_<name>``, ``LMCACHE_EC_<NAME>``)."""

    name: str
    read: Callable[[Any], Any]
    accepts: str
    help: str


@dataclass(frozen=True)
class ECConfig:
    """What the engine works with. Sizes in bytes, times in seconds.

    ``disk_path`` is ``""`` without a disk tier, ``remote_url`` is ``""`` without a remote tier. ``remote_options`` are
    LMCache settings for the remote tier only. ``unused`` names the keys that were dropped.
    """

    cpu_bytes: int = int(DEFAULT_CPU_GIB * GIB)
    disk_path: str = ""
    disk_bytes: int = int(DEFAULT_DISK_GIB * GIB)
    remote_url: str = ""
    remote_options: Mapping[str, Any] = field(default_factory=dict)
    remote_pool_bytes: int = 256 * MIB
    salt: str = ""
    namespace: str = ""
    lookup_deadline: float = 0.05
    load_deadline: float = 2.0
    store_deadline: float = 10.0
    close_deadline: float = 10.0
    staging_bytes: int = 64 * MIB
    queue_entries: int = 256
    fsync: bool = False
    touch_seconds: float = 10.0
    retry_seconds: float = 5.0
    stats_seconds: float = 60.0
    shm_path: str = "/dev/shm"
    unused: tuple[str, ...] = ()

    @property
    def has_remote(self) -> bool:
        """Whether entries also go to a server or a shared folder."""
        return bool(self.remote_url or self.remote_options.get("remote_storage_plugins"))

    @property
    def staging(self) -> int:
        """Bytes of the staging buffer: at most ``staging_bytes`` and at most half of the CPU pool, out of which it
        is taken."""
        return min(self.staging_bytes, self.cpu_bytes // 2)

    def describe(self) -> str:
        """One line for the log: where entries go and how much of each place they may take."""
        places = []
        if self.disk_path:
            places.append(f"disk {self.disk_path} (at most {self.disk_bytes / GIB:.4g} GiB, all processes together)")
        else:
            places.append(f"shared CPU memory (at most {self.cpu_bytes / GIB:.4g} GiB, staging included)")
        if self.has_remote:
            remote = self.remote_url or ", ".join(self.remote_options["remote_storage_plugins"])
            places.append(f"remote {without_userinfo(remote)}")
        return " and ".join(places)


def without_userinfo(text: str) -> str:
    """``text`` for a log or a message: URLs in it lose their user name and password."""
    return _USERINFO.sub("", text) if "@" in text else text


def load_ec_config(
    extra: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ECConfig:
    """Merge all sources into an :class:`ECConfig`. ``extra`` is vLLM's ``ec_connector_extra_config``.

    Never raises for what a user wrote: a key that is unknown, or whose value is not accepted, is logged and dropped.
    """
    env = os.environ if environ is None else environ
    document = _read_yaml(env.get("LMCACHE_CONFIG_FILE", ""))
    merged: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in _base_settings(document, env):
        _take(merged, dropped, key, value)
    for source, name, value in _ec_settings(document, env, extra or {}):
        if name in _SETTINGS:
            _take(merged, dropped, source, value, name)
        elif name in REMOTE_OPTIONS:
            _take_remote(merged, dropped, source, name, value)
        elif _lmcache_knows(name):
            _log.info("EC setting %s is one of LMCache's that has no effect on the encoder cache.", source)
        else:
            dropped.append(source)
            _log.warning("Unknown EC setting %s is ignored.%s", source, _suggest(name))
    return _build(merged, tuple(dropped))


def known_settings() -> tuple[Setting, ...]:
    """Every key of ours, for the documentation and the message about an unknown one."""
    return tuple(_SETTINGS.values())


def _build(merged: Mapping[str, Any], dropped: tuple[str, ...]) -> ECConfig:
    values = dict(merged)
    if not values.pop("local_cpu", True):
        _log.info("local_cpu cannot be switched off for the encoder cache: without a disk it is the only place.")
    cpu = values.pop("max_local_cpu_size", 0)
    disk = values.pop("max_local_disk_size", 0)
    for name in ("remote_pool_bytes", "shm_path"):
        if not values.get(name):
            values.pop(name, None)
    plain = {f.name for f in fields(ECConfig)}
    return ECConfig(
        cpu_bytes=cpu or int(DEFAULT_CPU_GIB * GIB),
        disk_path=values.pop("local_disk", ""),
        disk_bytes=disk or int(DEFAULT_DISK_GIB * GIB),
        unused=dropped,
        **{key: value for key, value in values.items() if key in plain},
    )


def _take(merged: dict[str, Any], dropped: list[str], source: str, value: Any, name: str = "") -> None:
    setting = _SETTINGS[name or source.rpartition(":")[2]]
    try:
        merged[_FIELD.get(setting.name, setting.name)] = setting.read(value)
    except _NOT_ACCEPTED:
        dropped.append(source)
        _log.warning("EC setting %s=%s is not accepted and ignored; use %s.", source, _shown(value), setting.accepts)


def _take_remote(merged: dict[str, Any], dropped: list[str], source: str, name: str, value: Any) -> None:
    options = merged.setdefault("remote_options", {})
    try:
        options[name] = REMOTE_OPTIONS[name](value)
    except _NOT_ACCEPTED:
        dropped.append(source)
        # Without the value: these may hold passwords.
        _log.warning("The value of EC setting %s is not accepted and ignored; see LMCache's page on it.", source)


def _base_settings(document: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """LMCache's own settings that hold for the encoder cache too, where the user wrote them."""
    for key, value in document.items():
        if key.lower() == "max_local_cpu_size":
            yield "max_local_cpu_size", value
    if env.get("LMCACHE_MAX_LOCAL_CPU_SIZE", "").strip():
        yield "max_local_cpu_size", env["LMCACHE_MAX_LOCAL_CPU_SIZE"]


def _ec_settings(
    document: Mapping[str, Any], env: Mapping[str, str], extra: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """(name as the user wrote it, name without prefix, value), weakest source first."""
    for key, value in document.items():
        lower = key.lower()
        if lower == "ec":
            yield from _nested(f"{key}.", value)
        elif lower.startswith(FILE_PREFIX):
            yield key, lower[len(FILE_PREFIX) :], value
    for key, value in env.items():
        if key.startswith(ENV_PREFIX):
            yield key, key[len(ENV_PREFIX) :].lower(), value
    for key, value in extra.items():
        lower = str(key).lower()
        if lower == "ec":
            yield from _nested("ec_connector_extra_config.ec.", value)
        else:
            yield f"ec_connector_extra_config.{key}", lower.removeprefix(FILE_PREFIX), value


def _nested(prefix: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(value, Mapping):
        _log.warning("%s should be a map of EC settings, not %s; ignored.", prefix.rstrip("."), _shown(value))
        return
    for key, inner in value.items():
        yield f"{prefix}{key}", str(key).lower().removeprefix(FILE_PREFIX), inner


def _read_yaml(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        import yaml

        with open(path, encoding="utf-8") as file:
            loaded = yaml.safe_load(file)
    except Exception as error:
        _log.warning("Cannot read LMCACHE_CONFIG_FILE=%s (%s); its EC settings are not used.", path, error)
        return {}
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        _log.warning("LMCACHE_CONFIG_FILE=%s is not a map of settings; not used.", path)
        return {}
    return {str(key): value for key, value in loaded.items()}


def _lmcache_knows(name: str) -> bool:
    try:
        from lmcache.v1.config import _CONFIG_ALIASES, _CONFIG_DEFINITIONS
    except Exception:
        return False
    return name in _CONFIG_DEFINITIONS or name in _CONFIG_ALIASES


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, [*_SETTINGS, *REMOTE_OPTIONS], n=1, cutoff=0.6)
    return f" Did you mean ec_{close[0]}?" if close else " See the encoder cache page for the known ones."


def _shown(value: Any) -> str:
    """``value`` in a message: of a length to read, without passwords."""
    try:
        return without_userinfo(repr(value))[:200]
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _unquote(value: Any) -> str:
    text = str(value).strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _number(scale: float, low: float, whole: bool) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(value)
        number = float(_unquote(value))
        if not math.isfinite(number) or number < low:
            raise ValueError(value)
        scaled = number * scale
        return _whole(scaled) if whole else min(scaled, MAX_SECONDS)

    return read


def _whole(number: float) -> int:
    if abs(number) >= sys.maxsize:
        raise ValueError(number)
    return int(number)


def _size(scale: float) -> Callable[[Any], int]:
    """A size; 0, negative and empty mean the default, as LMCache reads them."""

    def read(value: Any) -> int:
        if isinstance(value, bool):
            raise ValueError(value)
        text = _unquote(value) if value is not None else ""
        number = float(text) if text else 0.0
        if not math.isfinite(number):
            raise ValueError(value)
        return max(0, _whole(number * scale))

    return read


def _bool(value: Any) -> bool:
    text = _unquote(value).lower()
    if text in flags.TRUE:
        return True
    if text in flags.FALSE:
        return False
    raise ValueError(value)


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
_NOT_ACCEPTED = (TypeError, ValueError, OverflowError, RecursionError)
_GIB = "a number of GiB"
_SECONDS = "a number of seconds >= 0"
_SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("local_cpu", _bool, "true or false", "Accepted for LMCache's sake; always on."),
        Setting("max_local_cpu_size", _size(GIB), _GIB, "Host memory: staging and, without a disk, the entries."),
        Setting("local_disk", _path, "one path", "Folder of the disk tier. Unset: no disk tier."),
        Setting("max_local_disk_size", _size(GIB), _GIB, "Limit of that folder, over all processes that use it."),
        Setting("remote_url", _url, "a URL such as redis://host:port, fs://host:0/path, lm://host:port", "Remote."),
        Setting("remote_pool_size", _size(GIB), _GIB, "Buffer through which a worker reads and writes the remote."),
        Setting("salt", _text, "text", "Mixed into the key: a tenant or a deployment of its own."),
        Setting("namespace", _text, "text", "Stands for model name, revision and weights: equal text, equal weights."),
        Setting("lookup_deadline_ms", _number(1e-3, 1, False), "a number >= 1", "Longest remote lookup."),
        Setting("load_deadline_ms", _number(1e-3, 1, False), "a number >= 1", "Longest remote load."),
        Setting("store_deadline_ms", _number(1e-3, 1, False), "a number >= 1", "Longest remote store."),
        Setting("close_deadline_ms", _number(1e-3, 0, False), "a number >= 0", "Longest drain at shutdown."),
        Setting("staging_size_mib", _number(MIB, 1, True), "a number of MiB >= 1", "Buffer for outputs on their way."),
        Setting("queue_entries", _number(1, 1, True), "a whole number >= 1", "Outputs waiting to be stored."),
        Setting("fsync", _bool, "true or false", "Sync each entry before it is published."),
        Setting("touch_seconds", _number(1, 0, False), _SECONDS, "A hit renews an entry's age at most this often."),
        Setting("retry_seconds", _number(1, 0, False), _SECONDS, "Pause of stores after a storage error."),
        Setting("stats_seconds", _number(1, 0, False), _SECONDS, "Interval of the log line; 0: none."),
        Setting("shm_path", _path, "one path", "Where processes of one engine share memory. Default /dev/shm."),
    )
}
# Settings whose field has another name because a unit was turned into bytes or seconds.
_FIELD = {
    "remote_pool_size": "remote_pool_bytes",
    "lookup_deadline_ms": "lookup_deadline",
    "load_deadline_ms": "load_deadline",
    "store_deadline_ms": "store_deadline",
    "close_deadline_ms": "close_deadline",
    "staging_size_mib": "staging_bytes",
}
# LMCache settings that are handed to it for the remote tier.
REMOTE_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "remote_serde": _text,
    "remote_storage_plugins": _names,
    "extra_config": _map,
}
