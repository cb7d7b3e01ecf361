# SPDX-License-Identifier: Apache-2.0
"""Settings: what each accepts."""

from __future__ import annotations

import json

import pytest

from vllm_omni_patch import discover, flags, flags_text
from vllm_omni_patch.flags import Flag, FlagError, read


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
    for row in rows:
        assert row.name == "VLLM_OMNI_PATCH" or row.name.startswith(("VLLM_OMNI_PATCH_", "VLLM_NEURON_", "NEURON_")), (
            row.name
        )
        assert row.type in flags._CONVERT
        assert row.help.endswith(".")


def test_the_table_says_the_same_in_every_format() -> None:
    rows = list(flags.CORE)
    listed = json.loads(flags_text.as_json(rows))
    markdown = flags_text.markdown(rows)
    text = flags_text.text(rows)
    assert [row["name"] for row in listed] == [row.name for row in rows]
    for row in rows:
        assert f"| `{row.name}` | {row.type} |" in markdown
        assert f"{row.name}  [{row.type}]" in text
