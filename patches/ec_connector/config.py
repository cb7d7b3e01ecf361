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
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_patch import ledger

from .settings import GIB as GIB
from .settings import LOADS_PER_LOOKUP, NOT_ACCEPTED, REMOVED, SETTINGS, STORES_PER_LOAD
from .settings import MAX_SECONDS as MAX_SECONDS

MIB = 1 << 20
FILE_PREFIX = "ec_"
ENV_PREFIX = "LMCACHE_EC_"
# What stands between ``://`` and the host. A password may hold any sign; only in ``fs://`` may the path hold an ``@``.
_USERINFO = re.compile(r"(?<=://)(?:(?<!fs://)\S*|[^/\s]*)@")

_log = ledger.logger("ec")


@dataclass(frozen=True)
class ECConfig:
    """What the engine works with. Sizes in bytes, times in seconds.

    ``disk_path`` is ``""`` without a disk tier, ``remote_url`` is ``""`` without a remote tier. ``remote_options`` are
    LMCache settings for the remote tier only. ``unused`` names the keys that were dropped. A field that no key in
    ``SETTINGS`` names has one value that serves; it is a field so that another one can be tried.
    """

    cpu_bytes: int = GIB
    disk_path: str = ""
    disk_bytes: int = 64 * GIB
    remote_url: str = ""
    remote_options: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    namespace: str = ""
    lookup_deadline: float = 0.05
    load_deadline: float = 2.0
    store_deadline: float = 10.0
    close_deadline: float = 10.0
    staging_bytes: int = 0
    queue_entries: int = 256
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
        """Bytes of the staging buffer, out of the CPU size: a sixteenth of it from 64 to 256 MiB, and at most half."""
        wanted = self.staging_bytes or min(max(64 * MIB, self.cpu_bytes // 16), 256 * MIB)
        return min(wanted, self.cpu_bytes // 2)

    @property
    def memory_bytes(self) -> int:
        """Bytes of fetched outputs that the scheduler's process holds for the workers: a quarter of the CPU size, on
        top of it."""
        return self.cpu_bytes // 4

    @property
    def remote_pool_bytes(self) -> int:
        """Bytes of a worker's buffer for a remote that LMCache reaches: a quarter of the CPU size."""
        return self.cpu_bytes // 4

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

    Never raises for what a user wrote: a key that is unknown or no longer exists, or whose value is not accepted, is
    logged and dropped.
    """
    env = os.environ if environ is None else environ
    document = _read_yaml(env.get("LMCACHE_CONFIG_FILE", ""))
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    dropped: list[str] = []
    for source, name, value in (*_base_settings(document, env), *_ec_settings(document, env, extra or {})):
        setting = SETTINGS.get(name)
        if setting is None:
            if _explain(source, name):
                dropped.append(source)
            continue
        try:
            read = setting.read(value)
        except NOT_ACCEPTED:
            dropped.append(source)
            # LMCache's own may hold passwords anywhere.
            shown = f"={_shown(value)}" if setting.attribute else ""
            _log.warning("EC setting %s%s is not accepted and is ignored; use %s.", source, shown, setting.accepts)
            continue
        if setting.attribute:
            values[setting.attribute] = read
        else:
            options[name] = read
    return _build(values, options, tuple(dropped))


def _build(values: Mapping[str, Any], options: Mapping[str, Any], dropped: tuple[str, ...]) -> ECConfig:
    """Nothing and 0 stand for the default; the other deadlines follow from the one that can be set."""
    config = ECConfig(**{key: value for key, value in values.items() if value}, remote_options=options, unused=dropped)
    load = max(config.load_deadline, LOADS_PER_LOOKUP * config.lookup_deadline)
    store = STORES_PER_LOAD * load
    return replace(config, load_deadline=min(load, MAX_SECONDS), store_deadline=min(store, MAX_SECONDS))


def _explain(source: str, name: str) -> bool:
    """Log why a key that is not in ``SETTINGS`` has no effect; True where the user should take it out."""
    if name in REMOVED:
        _log.warning("EC setting %s no longer exists and is ignored. %s", source, REMOVED[name])
        return True
    if _lmcache_knows(name):
        _log.info("EC setting %s is one of LMCache's that has no effect on the encoder cache.", source)
        return False
    close = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.6)
    hint = f"Did you mean ec_{close[0]}?" if close else "See the encoder cache page for the known ones."
    _log.warning("Unknown EC setting %s is ignored. %s", source, hint)
    return True


def _base_settings(document: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """LMCache's own settings that hold for the encoder cache too, where the user wrote them."""
    for key, value in document.items():
        if key.lower() == "max_local_cpu_size":
            yield key, "max_local_cpu_size", value
    if env.get("LMCACHE_MAX_LOCAL_CPU_SIZE", "").strip():
        yield "LMCACHE_MAX_LOCAL_CPU_SIZE", "max_local_cpu_size", env["LMCACHE_MAX_LOCAL_CPU_SIZE"]


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


def _shown(value: Any) -> str:
    """``value`` in a message: of a length to read, without passwords."""
    try:
        return without_userinfo(repr(value))[:200]
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
