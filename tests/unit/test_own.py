# SPDX-License-Identifier: Apache-2.0
"""What the loader itself changes: judged, read back, undone and shown like any patch, and no more than that."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_status import ENGINE, log, status
from test_strict import start

from support.fake_house import OWN_STATES, ROOT, STATES, House
from vllm_omni_patch import flags, ledger
from vllm_omni_patch.loading import apply, loader, own, own_hooks
from vllm_omni_patch.telemetry import exposition, log_lines

ENVS = "vllm.envs:environment_variables"
LOG = "vllm.logger:configure_logging"
PLUGINS = "vllm.plugins:load_general_plugins"
REGISTRY = "vllm.v1.metrics.prometheus:get_prometheus_registry"
MULTIPROCESS = "prometheus_client.multiprocess:MultiProcessCollector.__init__"
LOAD = "vllm.worker:Worker.load"
IMPORTS = "import vllm.envs, vllm.logger, vllm.plugins, vllm.v1.metrics.prometheus"
LOGGER = "def configure_logging(config=None):\n    return config\n"


@pytest.fixture
def house(tmp_path: Path) -> House:
    pytest.importorskip("prometheus_client")
    house = House(tmp_path)
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    house.write("vllm/logger.py", LOGGER)
    return house


def install(name: str, module: types.ModuleType) -> apply.Installed:
    target = next(one for one in own.PATCH.targets if one.name == name)
    return apply.install(own.PATCH, target, module, lambda: None)


def module(**names: Any) -> types.ModuleType:
    made = types.ModuleType("vllm.a_module")
    vars(made).update(names)
    return made


# -- applied


@pytest.mark.parametrize("flag", ["1", "probe", "loader", "nope"])
def test_it_is_on_whenever_the_flag_is(house: House, flag: str) -> None:
    done = house.run(IMPORTS, OWN_STATES, flag=flag)
    assert {target: state for target, (state, _) in done.value.items()} == {
        name: "applied" for name in (ENVS, LOG, PLUGINS, REGISTRY, MULTIPROCESS)
    }
    assert ("no patch is called" in done.err) == (flag == "nope")


def test_with_the_flag_off_everything_is_vllms(house: House) -> None:
    done = house.run(
        IMPORTS,
        """
        import prometheus_client as p
        init = p.multiprocess.MultiProcessCollector.__init__
        ours = [m for m in sys.modules if m.startswith("vllm_omni_patch.")]
        show([type(vllm.envs.environment_variables).__name__, type(vllm.plugins.load_general_plugins).__name__,
              type(vllm.logger.configure_logging).__name__, type(init).__name__, ours,
              [type(c).__module__ for c in p.REGISTRY._collector_to_names if "omni" in type(c).__module__]])
    """,
        flag=None,
    )
    assert done.value == ["dict", "function", "function", "function", [], []]


def test_both_activation_paths_and_a_reload_apply_it_once(house: House) -> None:
    done = house.run(
        IMPORTS,
        """
        import importlib, vllm_omni_patch
        from vllm_omni_patch import startup
        from vllm_omni_patch.loading import wrappers
        startup.activate("plugin"); vllm.plugins.load_general_plugins()
        importlib.reload(vllm.envs); importlib.reload(vllm.logger); importlib.reload(vllm.v1.metrics.prometheus)
        import prometheus_client as p
        depth = lambda value: wrappers.depth(value, "loader")
        show(["VLLM_OMNI_PATCH" in vllm.envs.environment_variables, depth(vllm.logger.configure_logging),
              depth(vllm.plugins.load_general_plugins), depth(p.multiprocess.MultiProcessCollector.__init__),
              sum("omni" in type(c).__module__ for c in p.REGISTRY._collector_to_names)])
    """,
        OWN_STATES,
    )
    assert done.shown[0] == [True, 1, 1, 1, 1]
    assert {state for state, _ in done.value.values()} == {"applied"}


def test_a_bare_import_of_vllm_is_not_judged(house: House) -> None:
    """It brings ``vllm.envs`` and ``vllm.logger``; what is hooked there waits for the first sign of an engine."""
    done = house.run(
        "import vllm, vllm.envs, vllm.logger",
        """
        ours = ("wrapt", "vllm_omni_patch.matrix.judge", "vllm_omni_patch.loading.apply")
        held = [name for name in ours if name in sys.modules]
        before = [type(vllm.envs.environment_variables).__name__, type(vllm.logger.configure_logging).__name__, held]
        import vllm.plugins
        show([before, "VLLM_OMNI_PATCH" in vllm.envs.environment_variables])
    """,
        OWN_STATES,
    )
    assert done.shown[0] == [["dict", "function", []], True]
    assert (done.value[ENVS][0], done.value[LOG][0]) == ("applied", "applied")


def test_it_is_no_part_of_what_the_line_counts(house: House) -> None:
    done = house.run("import vllm.worker, vllm.envs", ENGINE, "show(1)")
    (line,) = log(done)
    assert line.endswith(": 1 applied (probe 1)")


# -- our names in vLLM's table


def envs(**more: Callable[[], str]) -> types.ModuleType:
    return module(environment_variables={"VLLM_A": lambda: "a", "VLLM_B": lambda: "b", **more})


def test_our_names_are_known_and_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = envs()
    stock = one.environment_variables
    before = dict(stock)
    monkeypatch.setenv("VLLM_OMNI_PATCH", "1")
    done = install(ENVS, one)
    table = one.environment_variables
    names = {flag.name for flag in flags.CORE}
    assert names <= set(table)  # how Ray executors list what they copy
    assert all(name in table for name in names)
    assert table["VLLM_OMNI_PATCH"]() == "1"
    assert {key: getter() for key, getter in table.items()} == {"VLLM_A": "a", "VLLM_B": "b"}
    assert list(table.items()) == list(before.items())
    assert len(table.values()) == len(before)
    table["VLLM_THEIRS"] = before["VLLM_A"]  # another plugin's
    assert apply.remove(done) == ""
    assert one.environment_variables is stock
    assert stock == {**before, "VLLM_THEIRS": before["VLLM_A"]}


def test_a_name_that_vllm_has_itself_stays_vllms() -> None:
    one = envs(VLLM_OMNI_PATCH=lambda: "theirs")
    install(ENVS, one)
    assert one.environment_variables["VLLM_OMNI_PATCH"]() == "theirs"
    assert "VLLM_OMNI_PATCH" in dict(one.environment_variables.items())


def test_a_table_that_somebody_replaced_is_left() -> None:
    one = envs()
    done = install(ENVS, one)
    one.environment_variables = {}
    assert "was replaced by somebody else" in apply.remove(done)
    assert one.environment_variables == {}


# -- refused, with what is missing then


@pytest.mark.parametrize(
    ("path", "text", "name", "words"),
    [
        (
            "vllm/envs.py",
            "environment_variables = []\n",
            ENVS,
            "is list, not a dict. So vLLM calls our variables unknown",
        ),
        ("vllm/envs.py", "", ENVS, "environment_variables is not in the module. So vLLM calls our variables unknown"),
        (
            "vllm/plugins.py",
            "def load_general_plugins(group): return group\n",
            PLUGINS,
            "a further required parameter group; it is load_general_plugins(group) here. So where VLLM_PLUGINS leaves",
        ),
        (
            "vllm/v1/metrics/prometheus.py",
            "def get_prometheus_registry(): return None\n",
            REGISTRY,
            "the module has no REGISTRY. So our numbers are not on /metrics",
        ),
    ],
)
def test_what_has_drifted_is_refused_and_says_what_is_missing(
    house: House, path: str, text: str, name: str, words: str
) -> None:
    house.write(path, text)
    done = house.run(IMPORTS, OWN_STATES, "import vllm.worker; show(vllm.worker.Worker().load('a'))")
    states, answer = done.shown
    assert states[name][0] == "skipped"
    assert words in states[name][1]
    assert [line for line in done.err.splitlines() if words in line] == done.err.splitlines()
    assert {state for target, (state, _) in states.items() if target != name} <= {"applied", "pending"}
    assert answer == ["ours", ["a", 1]], "the patches work without it"


def test_another_registry_than_expected_is_refused_and_left_clean(house: House) -> None:
    house.write(
        "vllm/v1/metrics/prometheus.py",
        """
        from prometheus_client import REGISTRY, CollectorRegistry
        OTHER = CollectorRegistry()
        def get_prometheus_registry():
            return OTHER
    """,
    )
    done = house.run(
        "import vllm.v1.metrics.prometheus as served",
        OWN_STATES,
        "show([type(c).__name__ for r in (served.REGISTRY, served.OTHER) for c in r._collector_to_names "
        "if 'omni' in type(c).__module__])",
    )
    states, left = done.shown
    assert states[REGISTRY][0] == "skipped"
    assert "had no effect" in states[REGISTRY][1] and "our numbers are not on /metrics" in states[REGISTRY][1]
    assert left == []


def test_an_unknown_release_is_judged_by_the_contract_unless_that_is_not_wanted(house: House) -> None:
    house.write("vllm/version.py", "__version__ = '7.1.0.dev3+gabc'\n")
    assert {state for state, _ in house.run(IMPORTS, OWN_STATES).value.values()} == {"applied"}
    states = house.run(IMPORTS, OWN_STATES, VLLM_OMNI_PATCH_UNLISTED="skip").value
    assert states.pop(MULTIPROCESS)[0] == "applied"  # its release is listed
    assert {state for state, _ in states.values()} == {"skipped"}
    reason = states[ENVS][1]
    assert "skipped because VLLM_OMNI_PATCH_UNLISTED=skip is set. So vLLM calls our variables unknown" in reason


def test_a_listed_row_without_it_is_quiet_where_that_is_ordinary(house: House) -> None:
    """Up to 0.30 vLLM sets up its log at import and has no ``configure_logging``."""
    house.write("vllm/logger.py", "")
    done = house.run(IMPORTS, OWN_STATES)
    assert done.value[LOG][0] == "skipped"
    assert done.err == ""


def test_another_patch_cannot_have_its_attributes(house: House) -> None:
    house.patch("second", 'T("vllm.plugins", "load_general_plugins")', [PLUGINS])
    done = house.run(IMPORTS, STATES, OWN_STATES, flag="second")
    theirs, ours = done.shown
    assert theirs[PLUGINS][0] == "skipped"
    assert "patch 'loader' claims this attribute first" in theirs[PLUGINS][1]
    assert ours[PLUGINS][0] == "applied"


def test_strict_mode_lists_it(house: House) -> None:
    assert start(house) == ""
    house.write("vllm/envs.py", "")
    told = start(house)
    assert f"loader: {ENVS}: vllm 7.0.0: environment_variables is not in the module" in told


# -- exceptions in our own code


def test_a_log_is_set_up_though_our_lines_cannot_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    one = module(configure_logging=lambda config: f"set up by {config}")
    stock = one.configure_logging
    done = install(LOG, one)
    monkeypatch.setattr(log_lines, "release", lambda: 1 / 0)
    assert one.configure_logging("a file") == "set up by a file"
    assert apply.remove(done) == ""
    assert one.configure_logging is stock


def test_plugins_are_loaded_though_our_log_line_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    one = module(load_general_plugins=lambda: "loaded")
    stock = one.load_general_plugins
    done = install(PLUGINS, one)
    monkeypatch.setattr(loader, "_loader", types.SimpleNamespace(catch_up=lambda: 1 / 0))
    monkeypatch.setattr(loader, "_engine_pid", 0)
    assert one.load_general_plugins() == "loaded"
    assert apply.remove(done) == ""
    assert one.load_general_plugins is stock


def test_a_registry_is_served_though_ours_cannot_go_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client import multiprocess

    stock = multiprocess.MultiProcessCollector.__init__
    done = install(MULTIPROCESS, multiprocess)
    logged: list[str] = []
    monkeypatch.setattr(ledger, "log", lambda level, text, name="": logged.append(text))
    monkeypatch.setattr(exposition, "Collector", lambda *_: 1 / 0)
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    assert [type(one).__name__ for one in registry._collector_to_names] == ["MultiProcessCollector"]
    assert logged == ["our metrics are missing from /metrics: division by zero"]
    monkeypatch.undo()
    other = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(path=str(tmp_path), registry=other)
    multiprocess.MultiProcessCollector(None, path=str(tmp_path))
    assert sorted(type(one).__name__ for one in other._collector_to_names) == ["Collector", "MultiProcessCollector"]
    assert apply.remove(done) == ""
    assert multiprocess.MultiProcessCollector.__init__ is stock


def test_a_registry_gives_ours_back(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = prometheus.CollectorRegistry()
    one = module(REGISTRY=registry, get_prometheus_registry=lambda: registry)
    done = install(REGISTRY, one)
    assert own_hooks.serves(done.hook)
    assert [type(each).__name__ for each in registry._collector_to_names] == ["Collector"]
    assert apply.remove(done) == ""
    assert list(registry._collector_to_names) == []


# -- shown


def test_status_has_its_rows(house: House) -> None:
    found = status(house)
    rows = {row["target"]: row for row in found["targets"] if row["patch"] == "loader"}
    assert [rows[name]["would_be"] for name in (ENVS, PLUGINS, REGISTRY, LOG)] == ["applied"] * 4
    assert all(row["asked"] for row in rows.values())
    assert not any(row["asked"] for row in status(house, flag=None)["targets"])


# -- a target that a setting asks for

WITH_SETTING = (
    'T("vllm.worker", "Worker.load"), T("vllm.worker", "helper", '
    'setting=Flag("VLLM_OMNI_PATCH_PROBE_HELPS", "bool", False, "h"), consequence="nobody helps")'
)
HELPER = "vllm.worker:helper"


@pytest.mark.parametrize(
    ("value", "state"),
    [("", None), ("0", None), ("1", ["applied", ""]), ("maybe", ["failed", "is not accepted; use 1, true"])],
)
def test_a_setting_switches_a_target(house: House, value: str, state: list[str] | None) -> None:
    house.patch("probe", WITH_SETTING, [LOAD, HELPER])
    done = house.run("import vllm.worker", STATES, "show(vllm.worker.helper(1))", VLLM_OMNI_PATCH_PROBE_HELPS=value)
    states, answer = done.shown
    assert states[LOAD] == ["applied", ""]
    assert (HELPER in states) == (state is not None)
    if state is not None:
        assert states[HELPER][0] == state[0] and state[1] in states[HELPER][1]
    assert ("So nobody helps" in done.err) == (value == "maybe")
    assert answer == (["ours", 2] if value == "1" else 2)
    rows = {row["target"]: row for row in status(house, VLLM_OMNI_PATCH_PROBE_HELPS=value)["targets"]}
    assert rows[HELPER]["asked"] is (value in ("1", "maybe"))
    if value in ("", "0"):
        assert rows[HELPER]["reason"] == "only with VLLM_OMNI_PATCH_PROBE_HELPS=1"
        assert json.dumps(rows[HELPER])


# -- nothing else

FOREIGN = {
    "vllm_omni_patch/loading/wrappers.py": "wraps a target and puts it back",
    "vllm_omni_patch/loading/known_flags.py": "target vllm.envs:environment_variables",
    "patches/ec_connector/storage/remote.py": "an object of our own",
    "patches/model_local_kv/observe/observer.py": "target transformers.cache_utils:Cache",
    "patches/model_local_kv/families/attach.py": "the classes that are targets",
    "patches/available_memory/swap.py": "swapped(): during a call to a target, and undone",
}


@pytest.mark.skipif(not (ROOT / "patches").is_dir(), reason="not in a checkout")
def test_every_place_that_sets_an_attribute_by_name_is_accounted_for() -> None:
    """Whatever changes an object of another package is a target, or undone before the target's call returns."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("vllm_omni_patch", "patches")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(
            r"\b(setattr|delattr|wrap_function_wrapper|wrap_object|patch_function_wrapper)\(", path.read_text()
        )
    }
    assert found == set(FOREIGN)
