# SPDX-License-Identifier: Apache-2.0
"""The fingerprint: changed by code and by nothing else, and the same on every Python."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_omni_patch
from vllm_omni_patch.code.fingerprint import fingerprint
from vllm_omni_patch.code.found import Missing

ROOT = Path(vllm_omni_patch.__file__).resolve().parent.parent

CODE = """
import functools
from typing import Generic, TypeVar

T = TypeVar("T")

@functools.total_ordering
class Owner(Generic[T], metaclass=type):
    limit: int = 3
    empty: "str"

    async def method(self, a, /, b: int = -1, *args: T, c, d=..., **kwargs) -> "Owner[T]":
        total = 0x10 + 1_000.5 + 2j + (not b) + ~a
        text = "caf\\u00e9 \\U0001f600" "joined" + u"old" + rb"\\x00".decode()
        f"{a!r:>{b}} and {c=} {{}} {a:} " "tail" f"{d}"
        async with a as x, b as (y, z):
            async for i in x:
                yield i, *y, [*z], {**kwargs}, {*args}
        return

    def other(self):
        global T
        match self:
            case {"k": [1, *rest], **more} if rest:
                pass
            case Owner(limit=3) | None as found:
                del found
        while (n := self.limit) > 0:
            continue
        else:
            raise ValueError from None
        try:
            assert n, "no"
        except (KeyError, ValueError) as error:
            lambda x, *, y=1: x if y else [j async for j in x if j][1:2, ..., ::3]
        finally:
            nonlocal_name = {1: 2, "x": None, True: False}
        with (open("a") as g, open("b")):
            x[0], self.y = self.y, x[0]
            x @= 1
            x: int
            self.z: "int" = 10**40
            print(*[], **{}, end="")

def function(): "only a docstring"
"""


def test_layout_comments_and_docstrings_do_not_count():
    one = "class A:\n    def f(self, x):\n        return x + 1\n"
    other = """# a comment
'Module docstring.'
import os


class A:
    'Class.'

    def f(
        self,
        x,
    ):
        'What it does.'
        return (x +   1)  # here
"""
    assert fingerprint(one, "A.f") == fingerprint(other, "A.f")
    assert fingerprint(one, "A") == fingerprint(other, "A")


@pytest.mark.parametrize(
    "change",
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("self, x", "self, y"),
        ("self, x", "self, x=None"),
        ("self, x", "self, *, x"),
        ("self, x", "self, x, /"),
        ("x + 1", "x + 1.0"),
        ("x + 1", "x + True"),
        ("return", "yield"),
        ("    def", "    @staticmethod\n    def"),
        ("    def", "    async def"),
        ("def f", "def f"),
    ],
)
def test_code_counts(change):
    text = "class A:\n    def f(self, x):\n        return x + 1\n"
    assert (fingerprint(text, "A.f") == fingerprint(text.replace(*change), "A.f")) == (change[0] == change[1])


def test_none_and_empty_text_are_values_where_they_are_written():
    texts = [
        "def f(): return None",
        "def f(): return",
        "def f(): return ''",
        "def f(): return []",
        "def f(): return ()",
    ]
    assert len({fingerprint(text, "f") for text in texts}) == len(texts)


def test_what_is_not_there_is_said():
    with pytest.raises(Missing, match="B is not in the module"):
        fingerprint("class A: pass", "B")
    with pytest.raises(SyntaxError):
        fingerprint("class A(:", "A")


def test_both_definitions_behind_a_condition_count():
    text = "import os\nif os.name == {!r}:\n    def f(): return 1\nelse:\n    def f(): return {}\n"
    assert fingerprint(text.format("x", 2), "f") != fingerprint(text.format("x", 3), "f")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_two_strings_have_one_fingerprint_only_if_equal(one, other):
    texts = [f"def f(): return {text!a}" for text in (one, other)]
    assert (fingerprint(texts[0], "f") == fingerprint(texts[1], "f")) == (one == other)


# -- other Pythons

# Fingerprints of a text that uses much of the grammar.
PROBE = """
import json, sys
from vllm_omni_patch.code.fingerprint import fingerprint
text = sys.stdin.read()
names = ["Owner", "Owner.method", "Owner.other", "function"]
print(json.dumps({"version": sys.version_info[:2], "fingerprints": [fingerprint(text, name) for name in names]}))
"""


def interpreters() -> dict[str, str]:
    """Python executables by minor version, from PATH and from pyenv's folder."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for minor in range(10, 16):
        on_path = shutil.which(f"python3.{minor}")
        beside = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3.{minor}")))
        for candidate in [*beside, *([on_path] if on_path else [])]:
            found.setdefault(f"3.{minor}", candidate)
    return found


@pytest.fixture(scope="module")
def here() -> dict:
    return probe(sys.executable)


def probe(python: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "VLLM_OMNI_PATCH": ""}
    done = subprocess.run([python, "-c", PROBE], input=CODE, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_python_gives_the_same_answer(version, here):
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"there is no python{version} on this machine")
    there = probe(python)
    assert ".".join(map(str, there["version"])) == version
    assert there["fingerprints"] == here["fingerprints"]


def test_the_probe_text_uses_what_the_versions_disagree_on():
    assert re.search(r'u"old"', CODE) and "{c=}" in CODE and "-> " in CODE
