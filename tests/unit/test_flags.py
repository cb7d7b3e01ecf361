# SPDX-License-Identifier: Apache-2.0
"""Settings: what each accepts."""

from __future__ import annotations

import json

import pytest

from vllm_omni_patch import flags
from vllm_omni_patch.commands import flags_table
from vllm_omni_patch.flags import Flag, FlagError, Removed, read, removed_in
from vllm_omni_patch.loading import discover


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        (Flag("A", "bool", False, ""), " TRUE ", True),
        (Flag("A", "bool", True, ""), "off", False),
        (Flag("A", "bool", True, ""), "  ", True),
        (Flag("A", "int", 3, "", minimum=0), "12", 12),
        (Flag("A", "float", 1.0, "", maximum=1), "0.25", 0.25),
        (Flag("A", "choice", "", "", choices=("apply", "skip")), "APPLY", "apply"),
    ],
)
def test_values_are_converted(flag: Flag, text: str, value: object) -> None:
    assert read(flag, {"A": text}) == value


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        (Flag("A", "bool", False, ""), "2", "use 1, true, yes, on or 0, false, no, off."),
        (Flag("A", "int", 3, "", minimum=0), "-1", "use a whole number >= 0."),
        (
            Flag("A", "float", 1.0, "", minimum=0, maximum=1, exclusive_minimum=True),
            "0",
            "a finite number > 0 and <= 1",
        ),
        (Flag("A", "float", 1.0, ""), "nan", "a finite number"),
        (Flag("A", "choice", "", "", choices=("apply", "skip")), "x", "use apply, skip."),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(flag: Flag, text: str, words: str) -> None:
    with pytest.raises(FlagError) as told:
        read(flag, {"A": text})
    assert f"A={text!r} is not accepted" in str(told.value)
    assert words in str(told.value)


def test_every_declared_setting_has_our_prefix_or_is_upstreams_and_is_explained() -> None:
    rows = discover.all_flags(discover.find())
    assert len({row.name for row in rows}) == len(rows)
    assert len([row for row in rows if not row.internal]) <= 12, "on the page that users read"
    for row in rows:
        assert row.name == "VLLM_OMNI_PATCH" or row.name.startswith(("VLLM_OMNI_PATCH_", "VLLM_NEURON_", "NEURON_")), (
            row.name
        )
        assert row.type in flags._CONVERT
        assert row.help.endswith(".")


def test_the_table_says_the_same_in_every_format() -> None:
    rows = list(flags.CORE)
    listed = json.loads(flags_table.as_json(rows))
    markdown = flags_table.markdown(rows)
    text = flags_table.text(rows)
    assert [row["name"] for row in listed] == [row.name for row in rows]
    for row in rows:
        assert f"| `{row.name}` | {row.type} |" in markdown
        assert f"{row.name}  [{row.type}]" in text


GONE = Removed("VLLM_OMNI_PATCH_OLD", "Use VLLM_OMNI_PATCH_NEW.")
CHOICE = Flag("VLLM_OMNI_PATCH_KIND", "choice", "a", "", choices=("a", "b"), removed_choices=(("c", "Use b."),))


@pytest.mark.parametrize("value", ["c", " C "])
def test_a_choice_that_is_gone_is_the_default_and_told(value: str) -> None:
    environ = {CHOICE.name: value}
    assert read(CHOICE, environ) == "a"
    assert removed_in([CHOICE], [], environ) == ["VLLM_OMNI_PATCH_KIND=c no longer exists; a is used. Use b."]
    assert removed_in([CHOICE], [], {CHOICE.name: "b"}) == []
    assert CHOICE.accepted() == "a, b"


def test_a_variable_that_is_gone_is_told_where_it_is_set() -> None:
    (line,) = removed_in([CHOICE], [GONE], {GONE.name: "7"})
    assert line == "VLLM_OMNI_PATCH_OLD is set and no longer exists; it is ignored. Use VLLM_OMNI_PATCH_NEW."
    assert removed_in([CHOICE], [GONE], {GONE.name: " "}) == removed_in([CHOICE], [GONE], {}) == []


def test_what_our_patches_removed_is_not_declared_any_more() -> None:
    found = discover.find()
    here, gone = discover.all_flags(found), discover.all_removed(found)
    assert {row.name for row in gone} >= {
        "VLLM_OMNI_PATCH_NEURON_HEADROOM_GIB",
        "VLLM_OMNI_PATCH_NEURON_CALIBRATION",
        "VLLM_OMNI_PATCH_NEURON_UNIQUE_STORAGE",
        "VLLM_OMNI_PATCH_NEURON_LNC1_FAIR_SHARE",
        "VLLM_OMNI_PATCH_NEURON_HOST_REPLICAS",
        "VLLM_OMNI_PATCH_OBSERVE_KV_INTERVAL",
        "VLLM_OMNI_PATCH_CACHE_DIR",
    }
    assert not {row.name for row in gone} & {row.name for row in here}
    assert all(row.instead.endswith(".") for row in gone)
    environ = {row.name: "1" for row in gone} | {"VLLM_OMNI_PATCH_NEURON_POLICY": "headroom"}
    told = removed_in(here, gone, environ)
    assert len(told) == len(gone) + 1
    assert sum("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION" in line for line in told) == 3
