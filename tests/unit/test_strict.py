# SPDX-License-Identifier: Apache-2.0
"""Strict mode stops the engine from vLLM's plugin loading, with the list; never from an import."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_house import House

LOAD = "vllm.worker:Worker.load"
START = """
import vllm, vllm.plugins
try:
    vllm.plugins.load_general_plugins()
    show("")
except Exception as error:
    show(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def start(house: House, flag: str = "probe", code: str = "", **env: str) -> str:
    return str(house.run(code, START, flag=flag, VLLM_OMNI_PATCH_STRICT="1", **env).value)


def test_nothing_is_wrong_where_everything_will_apply(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load"), T("vllm.absent", "X", optional=True)', [LOAD])
    assert start(house) == ""
    assert start(house, code="import vllm.worker") == ""


def test_a_target_is_judged_before_its_module_is_imported(house: House) -> None:
    contract = 'Contract(parameters=(Parameter("other"),))'
    house.patch("probe", f'T("vllm.worker", "Worker.load", contract={contract})', [LOAD])
    message = start(house)
    assert message.startswith(
        "RuntimeError: VLLM_OMNI_PATCH_STRICT is set, and VLLM_OMNI_PATCH asks for 1 target or patch that is not"
    )
    assert f"probe: {LOAD}: vllm 7.0.0: Worker.load has no parameter other" in message
    assert "To fix:" in message
    assert "unset VLLM_OMNI_PATCH_STRICT" in message


def test_the_import_itself_never_raises(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load", install="broken")', [LOAD])
    done = house.run("import vllm.worker; show(vllm.worker.Worker().load('a'))", START, VLLM_OMNI_PATCH_STRICT="1")
    assert done.shown[0] == ["a", 1]
    assert "RuntimeError: the installer broke" in done.value


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("nope", "no patch is called 'nope'"),
        ("probe,ghost", "ghost: its declaration ghost:PATCH cannot be imported"),
        ("probe,second", f"second: {LOAD}: patch 'probe' claims this attribute first; two patches cannot share one"),
    ],
)
def test_what_cannot_be_applied_at_all_is_listed(house: House, flag: str, words: str) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    house.patch("second", 'T("vllm.worker", "Worker.load")', [LOAD])
    house.distribution("ghost-dist", "1.0", {"vllm_omni_patch.patches": {"ghost": "ghost:PATCH"}})
    assert words in start(house, flag)


def test_what_upstream_has_is_no_fault_and_an_unlisted_release_is(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load", native=Native(base_methods=("twice",)))', [LOAD])
    assert start(house) == ""
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    house.write("vllm/version.py", "__version__ = 'dev'\n")
    assert "vllm dev is not listed" in start(house)
    assert start(house, VLLM_OMNI_PATCH_UNLISTED="apply") == ""


def test_a_patch_without_any_target_here_is_listed(house: House) -> None:
    house.patch("probe", 'T("elsewhere.worker", "Worker.load", distribution="elsewhere", optional=True)')
    assert "probe: none of its targets is in the installed packages" in start(house)


def test_a_second_attempt_is_stopped_too(house: House) -> None:
    done = house.run(START, START, flag="nope", VLLM_OMNI_PATCH_STRICT="1")
    assert done.status == 0
    assert len(done.shown) == 2
    assert all("no patch is called 'nope'" in message for message in done.shown)


def test_it_stops_also_where_vllm_filters_our_plugin_out(house: House) -> None:
    assert "no patch is called 'nope'" in start(house, "nope", VLLM_PLUGINS="other")


def test_a_value_that_is_no_answer_stops_too(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    done = house.run(START, VLLM_OMNI_PATCH_STRICT="perhaps")
    assert done.value.startswith("FlagError: VLLM_OMNI_PATCH_STRICT='perhaps' is not accepted; use 1, true")


def test_without_strict_the_engine_starts(house: House) -> None:
    assert house.run(START, flag="nope").value == ""
