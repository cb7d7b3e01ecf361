# SPDX-License-Identifier: Apache-2.0
"""Settings: sources, precedence, defaults, and what a mistake leads to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_patch.patches.ec_connector.config import (
    GIB,
    MIB,
    ECConfig,
    load_ec_config,
    without_userinfo,
)
from vllm_omni_patch.patches.ec_connector.settings import REMOVED, SETTINGS


def load(env: dict[str, str] | None = None, extra: dict[str, Any] | None = None, yaml: str = "", at: Any = None):
    env = dict(env or {})
    if yaml:
        path = Path(at) / "lmcache.yaml"
        path.write_text(yaml)
        env["LMCACHE_CONFIG_FILE"] = str(path)
    return load_ec_config(extra, env)


def test_defaults_really_apply() -> None:
    found = load()
    assert found == ECConfig()
    assert found.cpu_bytes == GIB and found.disk_path == "" and not found.has_remote
    assert load({"LMCACHE_EC_LOCAL_DISK": "/x"}).disk_bytes == 64 * GIB


def test_the_kv_cache_s_storage_is_not_shared(tmp_path: Path) -> None:
    env = {
        "LMCACHE_LOCAL_DISK": "/kv",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "7",
        "LMCACHE_REMOTE_URL": "redis://kv:1",
        "LMCACHE_EXTRA_CONFIG": '{"save_chunk_meta": false}',
    }
    yaml = "local_disk: /kv\nmax_local_disk_size: 7\nremote_url: redis://kv:1\nextra_config: {a: 1}\n"
    for found in (load(env), load(env, yaml=yaml, at=tmp_path)):
        assert found == ECConfig()


def test_size_of_the_base_pool_holds_unless_ec_says_otherwise(tmp_path: Path) -> None:
    assert load({"LMCACHE_MAX_LOCAL_CPU_SIZE": "5"}).cpu_bytes == 5 * GIB
    assert load(yaml="max_local_cpu_size: 3\n", at=tmp_path).cpu_bytes == 3 * GIB
    both = load({"LMCACHE_MAX_LOCAL_CPU_SIZE": "5", "LMCACHE_EC_MAX_LOCAL_CPU_SIZE": "0.5"})
    assert both.cpu_bytes == GIB // 2
    assert load({"LMCACHE_MAX_LOCAL_CPU_SIZE": "0"}).cpu_bytes == GIB
    assert load({"LMCACHE_EC_MAX_LOCAL_CPU_SIZE": "-1"}).cpu_bytes == GIB


def test_precedence(tmp_path: Path) -> None:
    yaml = "ec:\n  salt: nested\nec_salt: flat\n"
    assert load(yaml=yaml, at=tmp_path).salt == "flat"
    assert load(yaml="ec_salt: flat\nec:\n  salt: nested\n", at=tmp_path).salt == "nested"
    env = {"LMCACHE_EC_SALT": "env"}
    assert load(env, yaml=yaml, at=tmp_path).salt == "env"
    assert load(env, {"ec_salt": "extra"}, yaml, tmp_path).salt == "extra"
    assert load(env, {"salt": "short"}).salt == "short"
    assert load(env, {"ec": {"salt": "map"}}).salt == "map"


def test_values_are_read_the_same_from_every_source(tmp_path: Path) -> None:
    for found in (
        load({"LMCACHE_EC_SALT": "7", "LMCACHE_EC_MAX_LOCAL_CPU_SIZE": "'8'", "LMCACHE_EC_LOOKUP_DEADLINE_MS": "20"}),
        load(yaml="ec_salt: 7\nEC_MAX_LOCAL_CPU_SIZE: 8\nec: {lookup_deadline_ms: 20}\n", at=tmp_path),
        load(extra={"ec_salt": 7, "ec_max_local_cpu_size": 8, "lookup_deadline_ms": 20.0}),
    ):
        assert (found.salt, found.cpu_bytes, found.lookup_deadline) == ("7", 8 * GIB, 0.02)


def test_paths() -> None:
    assert load({"LMCACHE_EC_LOCAL_DISK": "file:///a/b/"}).disk_path == "/a/b"
    assert load({"LMCACHE_EC_LOCAL_DISK": "file://host/a"}).disk_path == "/a"
    assert load(extra={"ec_local_disk": ["/one"]}).disk_path == "/one"
    assert load({"LMCACHE_EC_LOCAL_DISK": "/x"}, {"ec_local_disk": None}).disk_path == ""
    assert load({"LMCACHE_EC_LOCAL_DISK": ""}).disk_path == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_local_cpu_size", "4GB"),
        ("max_local_cpu_size", "nan"),
        ("max_local_cpu_size", True),
        ("lookup_deadline_ms", "0"),
        ("lookup_deadline_ms", "inf"),
        ("local_disk", ["/a", "/b"]),
        ("salt", {"a": 1}),
    ],
)
def test_a_value_that_is_not_accepted_is_named_and_dropped(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load(extra={f"ec_{name}": value})
    assert found == ECConfig(unused=(f"ec_connector_extra_config.ec_{name}",))
    assert name in caplog.text and repr(value) in caplog.text and "use " in caplog.text


@pytest.mark.parametrize("name", REMOVED)
def test_a_key_that_is_gone_is_one_warning_that_names_what_replaced_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load({f"LMCACHE_EC_{name.upper()}": "1"})
    (record,) = caplog.records
    assert found == ECConfig(unused=(f"LMCACHE_EC_{name.upper()}",))
    assert "no longer exists" in record.getMessage() and record.getMessage().endswith(REMOVED[name])
    assert REMOVED[name].endswith(".") and name not in SETTINGS


def test_an_unknown_key_is_named_with_the_closest_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load({"LMCACHE_EC_LOCAL_DSK": "/x"}, {"ec_nothing_like_it": 1})
    assert found.disk_path == "" and len(found.unused) == 2
    assert "LMCACHE_EC_LOCAL_DSK" in caplog.text and "ec_local_disk" in caplog.text
    assert "ec_nothing_like_it" in caplog.text


@pytest.mark.parametrize("yaml", ["- a\n- b\n", "a: [unclosed\n", "ec: 7\n"])
def test_a_broken_file_is_said_and_survived(yaml: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        assert load(yaml=yaml, at=tmp_path) == ECConfig()
    assert caplog.records
    caplog.clear()
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        assert load({"LMCACHE_CONFIG_FILE": str(tmp_path / "absent.yaml")}) == ECConfig()
    assert "absent.yaml" in caplog.text


def test_valid_keys_draw_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = {f"ec_{name}": "1" for name in SETTINGS}
    values["ec_extra_config"] = {"a": 1}
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load(extra=values)
    assert not caplog.records and found.unused == ()
    assert found.remote_options == {"extra_config": {"a": 1}, "remote_storage_plugins": ["1"]}
    assert len(SETTINGS) <= 13, "keys that a user has to know of"


def test_every_setting_reaches_the_config() -> None:
    """A key that is read and then lost would be a setting without effect."""
    plain = ECConfig()
    samples = {"local_disk": "/somewhere", "remote_url": "redis://h:1", "extra_config": '{"a": 1}'}
    for setting in SETTINGS.values():
        value = samples.get(setting.name, "3")
        extra = {f"ec_{setting.name}": value, "ec_local_disk": "/somewhere"}
        changed = load(extra=extra)
        reference = plain if setting.name == "local_disk" else load(extra={"ec_local_disk": "/somewhere"})
        assert changed != reference, setting.name
        assert setting.help and setting.accepts


def test_staging_is_taken_out_of_the_pool() -> None:
    assert ECConfig(cpu_bytes=8 * MIB).staging == 4 * MIB
    assert ECConfig().staging == 64 * MIB
    assert ECConfig(cpu_bytes=2 * GIB).staging == 128 * MIB
    assert ECConfig(cpu_bytes=64 * GIB).staging == 256 * MIB
    assert "1 GiB" in ECConfig().describe()


def test_remote_options_are_read_from_text_too() -> None:
    env = {"LMCACHE_EC_REMOTE_STORAGE_PLUGINS": "fs.one, mine", "LMCACHE_EC_EXTRA_CONFIG": '{"a": {"b": 1}}'}
    found = load(env)
    assert found.remote_options == {"remote_storage_plugins": ["fs.one", "mine"], "extra_config": {"a": {"b": 1}}}
    assert found.has_remote and "fs.one, mine" in found.describe()
    assert load({"LMCACHE_EC_EXTRA_CONFIG": "[1]"}).unused == ("LMCACHE_EC_EXTRA_CONFIG",)
    assert not load({"LMCACHE_EC_EXTRA_CONFIG": "{}"}).has_remote


def test_settings_of_lmcache_without_effect_draw_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lmcache")
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load({"LMCACHE_EC_CHUNK_SIZE": "1024"})
    assert found == ECConfig() and not caplog.records


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_local_cpu_size", 1e300),
        ("max_local_disk_size", 10**400),
        ("max_local_disk_size", 1e290),
        ("lookup_deadline_ms", "1e305x"),
        ("extra_config", "[" * 100_000),
        ("salt", nested(100_000)),
        ("remote_url", "fs://[x"),
        ("remote_url", "redis://[::1"),
        ("remote_url", "fs://h/a\0b"),
        ("local_disk", "a\0b"),
        ("local_disk", "\ud800"),
        ("shm_path", "a\0b"),
    ],
    ids=lambda value: f"{value!r:.20}" if isinstance(value, (str, int, float)) else "nested",
)
def test_values_beyond_all_bounds_are_dropped_too(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        found = load(extra={name: value})
    assert found.unused == (f"ec_connector_extra_config.{name}",)
    assert load() == ECConfig(**{**vars(found), "unused": (), "remote_options": {}})
    assert name in caplog.text and len(caplog.text) < 1000


def test_times_are_cut_to_what_a_wait_takes() -> None:
    import threading

    found = load(extra={"lookup_deadline_ms": 1e300})
    for seconds in (found.lookup_deadline, found.load_deadline, found.store_deadline):
        assert seconds * 1.5 <= threading.TIMEOUT_MAX


@pytest.mark.parametrize(("asked", "load_s", "store_s"), [(10, 2.0, 10.0), (50, 2.0, 10.0), (500, 5.0, 25.0)])
def test_the_other_deadlines_follow_from_that_of_a_lookup(asked: float, load_s: float, store_s: float) -> None:
    found = load(extra={"lookup_deadline_ms": asked})
    assert (found.lookup_deadline, found.load_deadline, found.store_deadline) == (asked / 1000, load_s, store_s)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:S@host:1", "redis://host:1"),
        ("redis://user:S@host:1/0?x=1", "redis://host:1/0?x=1"),
        ("redis://u:S/S@S@host:1", "redis://host:1"),
        ("cannot reach redis://u:S@h now; me@home", "cannot reach redis://h now; me@home"),
        ("fs://u:S@host:0/a@b/c", "fs://host:0/a@b/c"),
        ("fs://host:0/a@b", "fs://host:0/a@b"),
        ("lm://host:1", "lm://host:1"),
    ],
)
def test_no_password_is_shown(text: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    assert without_userinfo(text) == shown
    assert ECConfig(remote_url=text).describe().endswith(f"remote {shown}")
    with caplog.at_level(logging.WARNING, "vllm.omni_patch.ec"):
        load(extra={"remote_url": [text], "extra_config": [text], "ec": text})
    assert len(caplog.records) == 3 and "S@" not in caplog.text
