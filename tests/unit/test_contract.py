# SPDX-License-Identifier: Apache-2.0
"""The contract on source text, each kind of break named; and the check of the imported object, which never contradicts
the text it comes from, looks through wrappers and notices replacements."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import textwrap
from types import ModuleType

import pytest
import wrapt
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_patch.code import runtime
from vllm_omni_patch.code.contract import check_source, native_source
from vllm_omni_patch.patch import Contract, Native, Parameter

_numbers = itertools.count()


def load(text: str, folder, helper: str = "") -> ModuleType:
    """Import ``text`` as a module of its own, with a sibling module ``helper_<n>`` where asked for."""
    number = next(_numbers)
    text = textwrap.dedent(text).replace("HELPER", f"helper_{number}")
    if helper:
        _import(f"helper_{number}", textwrap.dedent(helper), folder)
    return _import(f"subject_{number}", text, folder)


def _import(name: str, text: str, folder) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def source_of(module: ModuleType) -> str:
    with open(module.__file__) as file:
        return file.read()


def both(contract: Contract, module: ModuleType, qualname: str) -> list[str]:
    """What the text says. The object must say nothing else of parameters, and nothing at all where the text fits."""
    told = check_source(contract, source_of(module), qualname)
    imported = runtime.check(contract, module, qualname)
    if not told:
        assert imported == []
    elif "parameter" in told[0] and "constructor" not in told[0]:
        assert told[0] in imported
    return told


def params(*names: str, **kinds: str) -> Contract:
    return Contract(parameters=tuple(Parameter(n) for n in names) + tuple(Parameter(n, (k,)) for n, k in kinds.items()))


SUBJECT = """
    from __future__ import annotations
    import contextlib, functools, sys
    from dataclasses import dataclass, field
    from typing import TYPE_CHECKING, overload
    from HELPER import Elsewhere, elsewhere, keeps, loses, loses_deeply

    if TYPE_CHECKING:
        from nowhere import OnlyTyped

    CONSTANT = 1
    a, (b, *rest) = 1, (2, 3)

    class Base:
        declared: int
        shared = 0

        def inherited(self, first, second=None): ...
        def overridden(self, old): ...
        def _set(self, value):
            self.from_base = value

    class Mixin(Elsewhere):
        def overridden(self, mixed): ...

    class Subject(Mixin, Base):
        '''A docstring that names registered_name.'''
        limit: int = 3

        def __init__(self, config, *, rank=0):
            self.config = config
            self.left, self.right = 1, 2
            self.nested.inner = 1
            self.counter += 1
            with open(config) as self.handle:
                pass
            def closure():
                self.from_closure = 1

        def plain(self, scheduler_output, extra=None): ...
        def positional(self, one, /, two): ...
        def keywords(self, *args, key, other=1, **kwargs): ...
        @staticmethod
        def static(first, second): ...
        @classmethod
        def made(cls, first): ...
        @property
        def size(self): return 1
        @size.setter
        def size(self, value): self.from_setter = value
        @functools.cached_property
        def lazy(self): return 1
        @keeps
        def kept(self, scheduler_output): ...
        @keeps
        @staticmethod
        def kept_static(scheduler_output): ...
        @loses
        def lost(self, scheduler_output): ...
        @loses_deeply(1)
        def lost_deeply(self, scheduler_output): ...
        @functools.lru_cache(maxsize=None)
        def cached(self, key): ...
        @contextlib.contextmanager
        def context(self, key): yield
        async def coroutine(self, request): ...
        @overload
        def overloaded(self, x: int) -> int: ...
        @overload
        def overloaded(self, x: str) -> str: ...
        def overloaded(self, x, y=None): ...
        alias = plain
        if sys.version_info >= (3, 0):
            def conditional(self, new): ...
        else:
            def conditional(self, old): ...
        if TYPE_CHECKING:
            def typed_only(self): ...
        class Inner:
            def deep(self, x): ...

    @dataclass
    class Data:
        name: str
        items: list = field(default_factory=list)
        count: int = 0

    def function(a, b=1, *, c): ...
    @keeps
    def kept_function(a): ...
    renamed = function
    Subject.later = 1
    try:
        import surely_not_installed_module
    except ImportError:
        def fallback(a): ...
    for looped in range(2):
        pass
    del looped
    register = ["registered_name"]
"""

HELPER = """
    import functools
    import wrapt

    class Elsewhere:
        def far(self, x): ...

    def elsewhere(a): ...

    def keeps(function):
        if isinstance(function, staticmethod):
            return wrapt.FunctionWrapper(function, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper

    def loses(function):
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper

    def loses_deeply(option):
        def decorate(function):
            inner = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
            def wrapper(*args, **kwargs):
                return inner(*args, **kwargs)
            return wrapper
        return decorate
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> ModuleType:
    return load(SUBJECT, tmp_path_factory.mktemp("subject"), HELPER)


@pytest.mark.parametrize(
    ("qualname", "contract"),
    [
        ("Subject.plain", params("scheduler_output")),
        ("Subject.plain", params("scheduler_output", "extra")),
        ("Subject.positional", params("two", one="positional")),
        ("Subject.keywords", params(args="var_positional", key="keyword_only", kwargs="var_keyword")),
        ("Subject.static", params("first", "second")),
        ("Subject.made", params("first")),
        ("Subject.kept", params("scheduler_output")),
        ("Subject.kept_static", params("scheduler_output")),
        ("Subject.lost", params("scheduler_output")),
        ("Subject.lost_deeply", params("scheduler_output")),
        ("Subject.cached", params("key")),
        ("Subject.context", params("key")),
        ("Subject.coroutine", params("request")),
        ("Subject.overloaded", params("x", "y")),
        ("Subject.alias", params("scheduler_output")),
        ("Subject.conditional", params("new")),
        ("Subject.inherited", params("first")),
        ("Subject.overridden", params("mixed")),
        ("Subject.Inner.deep", params("x")),
        ("Subject", params("config", rank="keyword_only")),
        ("Subject", params("self", "config")),
        ("function", params("a", c="keyword_only")),
        ("kept_function", params("a")),
        ("renamed", params("a", "b", c="keyword_only")),
        ("fallback", params("a")),
        ("Subject.size", Contract()),
        ("Subject.lazy", Contract()),
        ("Data", Contract()),
        ("Subject.plain", Contract(parameters=(Parameter("scheduler_output"), Parameter("later", optional=True)))),
        (
            "Subject.plain",
            Contract(base_methods=("plain", "inherited", "static", "size", "alias", "Inner", "conditional")),
        ),
        (
            "Subject",
            Contract(
                class_attributes=(
                    *("declared", "shared", "limit", "config", "left", "right", "handle", "from_closure"),
                    *("from_setter", "from_base", "plain", "later"),
                )
            ),
        ),
        ("Data", Contract(class_attributes=("name", "items", "count"))),
        ("Subject.plain", Contract(module_attributes=("CONSTANT", "a", "b", "rest", "functools", "elsewhere", "Data"))),
    ],
)
def test_it_holds(subject, qualname, contract):
    assert both(contract, subject, qualname) == []


@pytest.mark.parametrize(
    ("qualname", "contract", "said"),
    [
        ("Nothing.plain", Contract(), "Nothing is not in the module"),
        ("Subject.nothing", Contract(), "Subject does not define nothing, nor does a base class of the same module"),
        ("Subject.far", Contract(), "Subject does not define far"),
        ("Subject.typed_only", Contract(), "Subject does not define typed_only"),
        ("OnlyTyped", Contract(), "OnlyTyped is not in the module"),
        ("looped", Contract(), "looped is not in the module"),
        ("Elsewhere", Contract(), "Elsewhere is defined in another module and only imported here"),
        ("Elsewhere.far", Contract(), "Elsewhere is defined in another module and only imported here"),
        ("elsewhere", Contract(), "elsewhere is defined in another module and only imported here"),
        ("functools", Contract(), "functools is defined in another module and only imported here"),
        ("function.inner", Contract(), "function is not a class here"),
        ("CONSTANT.inner", Contract(), "CONSTANT is not a class here"),
        ("Subject.plain", params("scheduler_output", "gone"), "gone; it is plain(scheduler_output, extra=...) here"),
        ("Subject.plain", params(), "has a further required parameter scheduler_output"),
        ("Subject.keywords", params(), "has a further required parameter key"),
        ("Subject.plain", params(scheduler_output="keyword_only"), "is positional_or_keyword, not keyword_only"),
        ("Subject.positional", params("one", "two"), "not positional_or_keyword; it is positional(one, /, two)"),
        ("Subject.static", params("second"), "further required parameter first"),
        ("Subject.size", params(), "Subject.size is a property"),
        ("Subject.lazy", params(), "Subject.lazy is a property"),
        ("CONSTANT", params(), "CONSTANT is not a plain function or class"),
        ("Data", params(), "Data has no constructor of its own"),
        ("Subject.plain", Contract(base_methods=("gone",)), "Subject has no method gone"),
        ("Subject.plain", Contract(base_methods=("far",)), "Subject has no method far"),
        ("Subject.plain", Contract(base_methods=("limit",)), "Subject has no method limit"),
        ("Subject", Contract(class_attributes=("inner",)), "Subject does not set inner"),
        ("Subject", Contract(class_attributes=("counter",)), "Subject does not set counter"),
        ("function", Contract(base_methods=("x",)), "function belongs to no class"),
        ("Subject.plain", Contract(module_attributes=("OnlyTyped",)), "the module has no OnlyTyped"),
        ("Subject.plain", Contract(module_attributes=("looped",)), "the module has no looped"),
    ],
)  # fmt: skip
def test_it_is_broken(subject, qualname, contract, said):
    problems = both(contract, subject, qualname)
    assert len(problems) == 1
    assert said in problems[0]


def test_all_problems_are_told_at_once(subject):
    contract = Contract(
        parameters=(Parameter("gone"),), base_methods=("m",), class_attributes=("c",), module_attributes=("g",)
    )
    assert len(both(contract, subject, "Subject.plain")) == 5


@pytest.mark.parametrize(
    "qualname", ["Subject.plain", "Subject.static", "Subject.made", "Subject.inherited", "function"]
)
def test_other_packages_wrappers_are_looked_through(tmp_path, qualname):
    module = load(SUBJECT, tmp_path, HELPER)
    owner_name, _, name = qualname.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    wanted = {
        "plain": ("scheduler_output",),
        "static": ("first", "second"),
        "made": ("first",),
        "inherited": ("first",),
    }
    contract = params(*wanted[name]) if name in wanted else params("a", c="keyword_only")

    def passing(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, qualname, passing)
    wrapt.wrap_function_wrapper(module, qualname, passing)
    assert both(contract, module, qualname) == []
    if name in ("plain", "function"):
        function = getattr(owner, name)

        @functools.wraps(function)
        def traced(*args, **kwargs):
            return function(*args, **kwargs)

        setattr(owner, name, traced)
        assert both(contract, module, qualname) == []


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        (lambda m: setattr(m.Subject, "plain", lambda self, other: None), "no parameter scheduler_output"),
        (lambda m: setattr(m.Subject, "plain", lambda *args, **kwargs: None), "no parameter scheduler_output"),
        (lambda m: setattr(m.Subject, "plain", property(lambda self: 1)), "is a property"),
        (lambda m: setattr(m.Subject, "plain", object()), "not a plain function or class"),
        (lambda m: delattr(m.Subject, "plain"), "does not define plain"),
        (lambda m: delattr(m.Base, "inherited"), "has no method inherited"),
        (lambda m: delattr(m, "CONSTANT"), "the module has no CONSTANT"),
        (lambda m: setattr(m, "Subject", m.Elsewhere), "Subject is defined in another module (helper_"),
        (lambda m: delattr(m, "Subject"), "Subject is not in the module"),
        (lambda m: setattr(m, "Subject", m.function), "Subject is not a class here"),
    ],
)
def test_what_has_been_replaced_since_is_noticed(tmp_path, replace, said):
    module = load(SUBJECT, tmp_path, HELPER)
    contract = Contract((Parameter("scheduler_output"),), base_methods=("inherited",), module_attributes=("CONSTANT",))
    assert both(contract, module, "Subject.plain") == []
    replace(module)
    assert said in "; ".join(runtime.check(contract, module, "Subject.plain"))


def test_a_replacement_that_fits_is_no_break(tmp_path):
    module = load(SUBJECT, tmp_path, HELPER)
    module.Subject.plain = lambda self, scheduler_output, *rest: None
    assert runtime.check(params("scheduler_output"), module, "Subject.plain") == []
    # A function of the module is known by where it was defined.
    module.function = lambda a, b=1, *, c: None
    assert "defined in another module (test_contract)" in runtime.check(params("a"), module, "function")[0]


def test_of_two_definitions_behind_a_condition_the_object_tells_which(tmp_path):
    module = load(
        """
        import os
        if os.environ.get("SURELY_NOT_SET"):
            def chosen(old, older): ...
        else:
            def chosen(new): ...
        """,
        tmp_path,
    )
    assert both(params("new"), module, "chosen") == []
    assert check_source(params("neither"), source_of(module), "chosen")
    assert check_source(params("old", "older"), source_of(module), "chosen") == []
    assert runtime.check(params("old", "older"), module, "chosen")


def test_native_signs(subject):
    text = source_of(subject)
    for qualname in ("Subject.plain", "Subject.not_there", "function"):
        for signs in (
            Native(module_attributes=("CONSTANT",)),
            Native(base_methods=("not_there",)),
            Native(module_attributes=("NOT_THERE",)),
        ):
            assert runtime.native(signs, subject, qualname) == native_source(signs, text, qualname)
    assert "Subject has inherited" in native_source(Native(base_methods=("inherited",)), text, "Subject.plain")
    assert "Subject has inherited" in runtime.native(Native(base_methods=("inherited",)), subject, "Subject.plain")
    assert "has CONSTANT" in native_source(Native(module_attributes=("CONSTANT",)), text, "Subject.plain")
    assert "'registered_name'" in native_source(Native(strings=("registered_name",)), text, "Subject.plain")
    # Docstrings do not count, nor do parts of a string, nor what a class inherits from another module.
    assert native_source(Native(strings=("A docstring that names registered_name.",)), text, "Subject.plain") == ""
    assert native_source(Native(strings=("registered",)), text, "Subject.plain") == ""
    assert runtime.native(Native(base_methods=("far",)), subject, "Subject.plain") == ""
    assert native_source(None, text, "Subject.plain") == runtime.native(None, subject, "Subject.plain") == ""
    told = native_source(Native(strings=("registered_name",), reason="it is built in"), text, "Subject")
    assert told.startswith("it is built in (")


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


@st.composite
def functions(draw) -> str:
    """The text of a parameter list."""
    names = draw(st.lists(NAMES, unique=True, max_size=5))
    cuts = sorted(draw(st.tuples(st.integers(0, len(names)), st.integers(0, len(names)))))
    positional, plain, keyword = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    first_default = draw(st.integers(0, cuts[1]))
    parts = [n if i < first_default else f"{n}=None" for i, n in enumerate(positional + plain)]
    if positional:
        parts.insert(len(positional), "/")
    if draw(st.booleans()):
        parts.append("*args")
    elif keyword:
        parts.append("*")
    parts += [n if draw(st.booleans()) else f"{n}=None" for n in keyword]
    if draw(st.booleans()):
        parts.append("**kwargs")
    return ", ".join(parts)


KINDS = ["positional", "positional_or_keyword", "keyword_only", "var_positional", "var_keyword"]
PARAMETERS = st.builds(
    Parameter,
    st.sampled_from(["a", "b", "c", "d", "e", "args", "kwargs"]),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True).map(tuple),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    text=functions(),
    wanted=st.lists(PARAMETERS, max_size=4, unique_by=lambda p: p.name).map(tuple),
    decorator=st.sampled_from(["", "@staticmethod", "@classmethod", "@keeps", "@loses", "@property"]),
)
def test_text_and_object_agree_on_any_signature(tmp_path_factory, text, wanted, decorator):
    first = "" if decorator == "@staticmethod" else "self, "
    body = f"""
from HELPER import keeps, loses
class Owner:
    {decorator or "pass"}
    def method({(first + text).rstrip(", ")}): ...
def function({text}): ...
"""
    module = load(body, tmp_path_factory.mktemp("any"), HELPER)
    contract = Contract(parameters=wanted)
    on_method = both(contract, module, "Owner.method")
    on_function = both(contract, module, "function")
    if decorator not in ("@property", "@classmethod"):
        assert bool(on_method) == bool(on_function)
