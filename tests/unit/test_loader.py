# SPDX-License-Identifier: Apache-2.0
"""Stage 2 on a small vLLM: apply, refuse, take back, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_house import STATES, House

LOAD = "vllm.worker:Worker.load"
APPLIED = {LOAD: ["applied", ""]}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture
def probe(house: House) -> House:
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD])
    return house


def test_a_target_is_hooked_when_its_module_is_imported(probe: House) -> None:
    done = probe.run("""
        import vllm
        from vllm_omni_patch import ledger
        def states(): return [e.state for e in ledger.entries() if e.patch == "probe"]
        before = states()
        from vllm.worker import Worker
        show([before, Worker().load("a", size=3), states()])
    """)
    assert done.value == [["pending"], ["ours", ["a", 3]], ["applied"]]
    assert done.err == ""


def test_a_module_that_was_imported_before_is_hooked_at_once(probe: House) -> None:
    done = probe.run(
        """
        import vllm.worker
        stock = vllm.worker.Worker.load
        from vllm_omni_patch import startup
        arm(); startup.activate("plugin")
        show([vllm.worker.Worker().load("a"), vllm.worker.Worker.load is stock])
    """,
        activate=False,
    )
    assert done.value == [["ours", ["a", 1]], False]


def test_the_wrapper_stands_once_however_often_it_is_activated(probe: House) -> None:
    done = probe.run("""
        import vllm.worker, vllm.plugins
        from vllm_omni_patch import startup
        from vllm_omni_patch.loading import wrappers
        for _ in range(3):
            startup.activate()
            startup.plugin()
        vllm.plugins.load_general_plugins()
        show(wrappers.depth(vars(vllm.worker.Worker)["load"], "probe"))
    """)
    assert done.value == 1


def test_reloaded_and_reimported_modules_are_hooked_once_each(probe: House) -> None:
    done = probe.run("""
        import importlib, sys, vllm.worker
        from vllm_omni_patch.loading import wrappers
        first = vllm.worker
        importlib.reload(first)
        depths = [wrappers.depth(vars(first.Worker)["load"], "probe")]
        del sys.modules["vllm.worker"]
        second = importlib.import_module("vllm.worker")
        depths.append(wrappers.depth(vars(second.Worker)["load"], "probe"))
        show([depths, second is first, second.Worker().load("a")])
    """)
    assert done.value == [[1, 1], False, ["ours", ["a", 1]]]


def test_the_real_loader_stays_in_place(probe: House) -> None:
    done = probe.run("""
        import importlib.util, inspect, vllm.worker
        spec = vllm.worker.__spec__
        found = importlib.util.find_spec("vllm.runner")
        show([type(spec.loader).__name__, type(vllm.worker.__loader__).__name__, "exec_module" in vars(spec.loader),
              type(found.loader).__name__, inspect.getsource(vllm.worker).strip()[:4]])
    """)
    assert done.value == ["SourceFileLoader", "SourceFileLoader", False, "SourceFileLoader", "from"]


def test_static_methods_and_inherited_methods_keep_their_nature(house: House) -> None:
    house.write(
        "vllm/worker.py",
        """
        class Base:
            def run(self, step):
                return step
        class Worker(Base):
            @staticmethod
            def twice(x):
                return 2 * x
    """,
    )
    targets = ["vllm.worker:Worker.twice", "vllm.worker:Worker.run"]
    house.patch("probe", 'T("vllm.worker", "Worker.twice"), T("vllm.worker", "Worker.run")', targets)
    done = house.run("""
        from vllm.worker import Base, Worker
        show([Worker.twice(2), Worker().twice(3), Worker().run(1), Base().run(1)])
    """)
    assert done.value == [["ours", 4], ["ours", 6], ["ours", 1], 1]


# -- not applied, and the stock object untouched

UNTOUCHED = """
    from vllm_omni_patch.loading import wrappers
    import vllm.worker as w
    value = vars(w.Worker).get("load")
    untouched = value is None or value is getattr(w, "STOCK", value) and wrappers.ours(value) is None
    show(untouched)
"""


def refuse(house: House, **env: str) -> list[str]:
    """(state, reason) of ``Worker.load`` in a process where it must stay what it was."""
    done = house.run(UNTOUCHED, STATES, **env)
    states = done.value
    assert done.shown[0] is True
    return states[LOAD]


def worker(body: str) -> str:
    return f"class Worker:\n    {body}\nSTOCK = vars(Worker).get('load')\n"


def test_a_further_required_argument_is_refused(house: House) -> None:
    house.write("vllm/worker.py", worker("def load(self, name, device): return name"))
    house.patch("probe", 'T("vllm.worker", "Worker.load", contract=Contract(parameters=(Parameter("name"),)))', [LOAD])
    state, reason = refuse(house)
    assert state == "skipped"
    assert "device" in reason


def test_a_class_that_moved_is_refused(probe: House) -> None:
    probe.write("vllm/moved.py", "class Worker:\n    def load(self, name): return name\n")
    probe.write("vllm/worker.py", "from vllm.moved import Worker\nSTOCK = vars(Worker)['load']\n")
    state, reason = refuse(probe)
    assert state == "skipped"
    assert "another module" in reason


def test_a_module_without_the_class_is_refused(probe: House) -> None:
    probe.write("vllm/worker.py", "class Worker:\n    pass\n")
    state, reason = refuse(probe)
    assert state == "skipped"
    assert "load" in reason


def test_a_vendor_that_has_it_already_is_native(house: House) -> None:
    house.write("vllm/worker.py", worker("def load(self, name): return name\n    def _own(self): pass"))
    house.patch(
        "probe", 'T("vllm.worker", "Worker.load", native=Native(base_methods=("_own",), reason="has it"))', [LOAD]
    )
    state, reason = refuse(house)
    assert state == "native"
    assert "has it" in reason


@pytest.mark.parametrize(
    ("setattr_body", "state", "reason"),
    [("pass", "skipped", "the hook had no effect"), ("raise TypeError('frozen')", "failed", "TypeError: frozen")],
)
def test_an_attribute_that_cannot_be_set_stays(probe: House, setattr_body: str, state: str, reason: str) -> None:
    probe.write(
        "vllm/worker.py",
        f"""
        class Meta(type):
            def __setattr__(cls, name, value):
                {setattr_body}
        class Worker(metaclass=Meta):
            def load(self, name): return name
        STOCK = vars(Worker)["load"]
    """,
    )
    found = refuse(probe)
    assert found[0] == state
    assert reason in found[1]


def test_an_unlisted_release_is_refused_and_can_be_forced(probe: House) -> None:
    probe.write("vllm/version.py", "__version__ = '7.1.0.dev3+gabc'\n")
    state, reason = refuse(probe, VLLM_OMNI_PATCH_UNLISTED="skip")
    assert state == "skipped"
    state, reason = refuse(probe)
    assert state == "skipped"
    assert "7.1.0.dev3+gabc" in reason
    assert "7.0.0" in reason
    assert "VLLM_OMNI_PATCH_UNLISTED=apply" in reason
    done = probe.run("import vllm.worker", STATES, VLLM_OMNI_PATCH_UNLISTED="apply")
    assert done.value[LOAD][0] == "applied"


def test_a_bad_setting_fails_the_target_and_nothing_else(probe: House) -> None:
    state, reason = refuse(probe, VLLM_OMNI_PATCH_UNLISTED="perhaps")
    assert state == "failed"
    assert "VLLM_OMNI_PATCH_UNLISTED='perhaps' is not accepted; use apply, skip" in reason


def test_an_installer_that_raises_is_undone(house: House) -> None:
    house.write("vllm/worker.py", worker("def load(self, name): return name"))
    house.patch("probe", 'T("vllm.worker", "Worker.load", install="broken")', [LOAD])
    state, reason = refuse(house)
    assert (state, reason) == ("failed", "RuntimeError: the installer broke")


def test_an_installer_that_does_nothing_is_not_called_applied(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load", install="idle")', [LOAD])
    assert refuse(house)[0] == "skipped"


def test_a_verify_that_says_no_uninstalls_the_hook(house: House) -> None:
    house.write("vllm/worker.py", worker("def load(self, name): return name"))
    house.patch("probe", 'T("vllm.worker", "Worker.load", verify="probe.hooks:no")', [LOAD])
    assert refuse(house)[0] == "skipped"


def test_an_import_that_fails_keeps_its_own_error_and_is_hooked_when_it_works(probe: House) -> None:
    done = probe.run("""
        import pathlib, sys
        path = pathlib.Path(sys.path[1]) / "vllm/worker.py"
        good = path.read_text()
        path.write_text("raise ValueError('broken module')")
        try:
            import vllm.worker
        except ValueError as error:
            first = str(error)
        path.write_text(good)
        import importlib; importlib.invalidate_caches()
        import vllm.worker
        show([first, vllm.worker.Worker().load("a")])
    """)
    assert done.value == ["broken module", ["ours", ["a", 1]]]


# -- several patches, and other patchers


def test_the_second_patch_on_an_attribute_is_skipped_and_names_the_first(probe: House) -> None:
    probe.patch("second", 'T("vllm.worker", "Worker.load"), T("vllm.worker", "helper")', [LOAD, "vllm.worker:helper"])
    done = probe.run(
        """
        import vllm.worker
        from vllm_omni_patch import ledger
        show([[e.patch, e.target, e.state, e.reason] for e in ledger.entries() if e.patch != "loader"])
    """,
        flag="probe,second",
    )
    assert done.value == [
        ["probe", LOAD, "applied", ""],
        ["second", LOAD, "skipped", "patch 'probe' claims this attribute first; two patches cannot share one"],
        ["second", "vllm.worker:helper", "applied", ""],
    ]


def test_a_required_module_that_is_not_there_is_logged_when_an_engine_starts(probe: House) -> None:
    gone = "vllm.wroker:Worker.load"
    probe.patch("second", 'T("vllm.wroker", "Worker.load"), T("vllm.gone", "f", optional=True)')
    done = probe.run("import vllm.plugins; vllm.plugins.load_general_plugins()", STATES, flag="probe,second")
    assert done.value[gone][0] == "skipped"
    assert "there is no module vllm.wroker" in done.value[gone][1]
    assert f"second: {gone} is not hooked. vllm 7.0.0: there is no module vllm.wroker" in done.err
    assert done.value["vllm.gone:f"][0] == "pending"
    assert "vllm.gone" not in done.err


def test_an_installer_that_forgets_the_undo_has_failed(probe: House) -> None:
    probe.patch("second", 'T("vllm.worker", "helper", install="forgetful")', ["vllm.worker:helper"])
    done = probe.run("import vllm.worker", STATES, "show(vllm.worker.helper(1))", flag="second")
    states, value = done.shown
    assert states["vllm.worker:helper"][0] == "failed"
    assert "second.hooks:forgetful returned None and not the undo" in states["vllm.worker:helper"][1]
    assert value == 2


def test_two_names_for_one_class_are_one_attribute(probe: House) -> None:
    probe.write("vllm/worker.py", "class Worker:\n    def load(self, name): return name\nAlias = Worker\n")
    alias = "vllm.worker:Alias.load"
    probe.patch("second", 'T("vllm.worker", "Alias.load")', [alias])
    done = probe.run("import vllm.worker", STATES, flag="probe,second")
    assert done.value[LOAD][0] == "applied"
    assert done.value[alias] == [
        "skipped",
        f"patch 'probe' already holds {LOAD}; two patches cannot share an attribute",
    ]


@pytest.fixture
def traced(probe: House) -> House:
    """With a package that wraps functions, as tracers do."""
    probe.write(
        "tracer.py",
        """
        import functools
        seen = []
        def trace(original):
            @functools.wraps(original)
            def traced(*args, **kwargs):
                seen.append(1)
                return original(*args, **kwargs)
            return traced
        def load(self, name):
            return "theirs"
        """,
    )
    return probe


def test_a_foreign_wrapper_is_left_in_place_and_listed(traced: House) -> None:
    done = traced.run(
        """
    import tracer, vllm.worker as w
    w.Worker.load = tracer.trace(w.Worker.load)
    from vllm_omni_patch import ledger, startup
    arm(); startup.activate("plugin")
    result = w.Worker().load("a")
    entry, = [e for e in ledger.entries() if e.patch != "loader"]
    show([result, tracer.seen, entry.state, entry.foreign])
    """,
        activate=False,
    )
    assert done.value == [["ours", ["a", 1]], [1], "applied", ["wrapped by tracer:traced"]]


def test_a_wrapper_that_comes_after_ours_is_listed(traced: House) -> None:
    done = traced.run(
        """
    import tracer, vllm.worker as w
    w.Worker.load = tracer.trace(w.Worker.load)
    from vllm_omni_patch import ledger
    ledger.snapshot()
    entry, = [e for e in ledger.entries() if e.patch != "loader"]
    show([w.Worker().load("a"), entry.state, entry.foreign])
    """,
    )
    assert done.value == [["ours", ["a", 1]], "applied", ["wrapped by tracer:traced"]]


def test_a_later_replacement_is_no_longer_called_applied(traced: House) -> None:
    done = traced.run(
        """
    import tracer, vllm.worker as w
    w.Worker.load = tracer.load
    """,
        STATES,
    )
    assert done.value[LOAD] == ["failed", "replaced after it was applied: replaced by tracer:load"]


def test_where_the_original_is_still_reached_is_listed(house: House) -> None:
    helper = "vllm.worker:helper"
    house.patch("probe", 'T("vllm.worker", "helper"), T("vllm.worker", "Worker.load")', [LOAD, helper])
    done = house.run(
        """
        import vllm.user
        class Special(vllm.worker.Worker):
            def load(self, name): return name
        from vllm_omni_patch import ledger, startup
        arm(); startup.activate("plugin")
        ledger.snapshot()
        show({e.target: [e.state, e.partial] for e in ledger.entries() if e.patch != "loader"})
    """,
        activate=False,
    )
    assert done.value == {
        helper: ["applied", ["vllm.user imported it by name before"]],
        LOAD: ["applied", ["__main__.Special overrides it"]],
    }


# -- groups

BOTH = 'T("vllm.worker", "Worker.load", group="g"), T("vllm.runner", "Runner.execute", group="g"{0})'
EXECUTE = "vllm.runner:Runner.execute"
RUN = "vllm.other:Base.run"


def test_a_group_whose_other_member_has_drifted_is_not_begun(house: House) -> None:
    contract = ', contract=Contract(parameters=(Parameter("missing"),))'
    house.patch("probe", BOTH.format(contract), [LOAD, EXECUTE])
    done = house.run("import vllm.worker; show(vllm.worker.Worker().load('a'))\nimport vllm.runner", STATES)
    assert done.shown[0] == ["a", 1]
    states = done.value
    assert states[EXECUTE][0] == "skipped"
    assert "missing" in states[EXECUTE][1]
    assert states[LOAD][0] == "skipped"
    assert "group 'g'" in states[LOAD][1]


def test_a_group_whose_later_member_fails_is_uninstalled(house: House) -> None:
    house.patch("probe", BOTH.format(', install="broken"'), [LOAD, EXECUTE])
    done = house.run(
        """
        import vllm.worker, vllm.runner
        show([vllm.worker.Worker().load("a"), vllm.runner.Runner().execute(1)])
    """,
        STATES,
    )
    assert done.shown[0] == [["a", 1], [1]]
    assert done.value[EXECUTE] == ["failed", "RuntimeError: the installer broke"]
    assert done.value[LOAD][0] == "skipped"


def test_each_member_of_a_group_is_judged_once_as_text_or_imported(house: House) -> None:
    """The first module brings the verdict on the others' text; each is judged on its objects when it is imported."""
    house.patch("probe", BOTH.format("") + ', T("vllm.other", "Base.run", group="g")', [LOAD, EXECUTE, RUN])
    done = house.run(
        """
        import vllm.plugins
        from vllm_omni_patch.matrix import forecast, judge
        seen = []
        def noting(kind, decide):
            def noted(patch, target, *rest):
                if patch.name == "probe":
                    seen.append([kind, target.name])
                return decide(patch, target, *rest)
            return noted
        forecast.decide, judge.decide = noting("text", forecast.decide), noting("imported", judge.decide)
        import vllm.worker, vllm.runner
        show(seen)
    """,
        STATES,
    )
    assert {state for state, _ in done.value.values()} == {"applied"}
    assert done.shown[0] == [
        ["imported", RUN],
        ["text", LOAD],
        ["text", EXECUTE],
        ["imported", LOAD],
        ["imported", EXECUTE],
    ]


# -- patches from other packages


def test_a_patch_that_cannot_be_imported_is_one_row_and_one_line(probe: House) -> None:
    probe.write("ghost/__init__.py", "import nothing_of_this_name\n")
    probe.distribution("ghost-dist", "1.0", {"vllm_omni_patch.patches": {"ghost": "ghost:PATCH"}})
    done = probe.run(
        """
        import vllm.worker
        from vllm_omni_patch import ledger
        show([[e.patch, e.target, e.state, bool(e.traceback)] for e in ledger.entries() if e.patch != "loader"])
    """,
        flag="probe,ghost",
    )
    assert sorted(done.value) == [["ghost", "", "failed", True], ["probe", LOAD, "applied", False]]
    assert [line for line in done.err.splitlines() if "ghost" in line] == done.err.splitlines()
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("PATCH = 7", "int, not vllm_omni_patch.patch.Patch"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import vllm", "must not import vLLM"),
    ],
)
def test_nonsense_in_a_declaration_ends_nothing(probe: House, source: str, words: str) -> None:
    probe.write("ghost/__init__.py", source + "\n")
    probe.distribution("ghost-dist", "1.0", {"vllm_omni_patch.patches": {"ghost": "ghost:PATCH"}})
    done = probe.run(
        """
        import vllm.worker
        from vllm_omni_patch import ledger
        show([vllm.worker.Worker().load("a"), [e.reason for e in ledger.entries() if e.patch == "ghost"]])
    """,
        flag="probe,ghost",
    )
    result, (reason,) = done.value
    assert result == ["ours", ["a", 1]]
    assert words in reason


COMMANDS = """
            from dataclasses import replace
            PATCH = replace(PATCH, commands=(
                ("greet", "probe.cli:app"), ("gone", "probe.none:app"),
                ("ec", "probe.cli:app"), ("flags", "probe.cli:app"),
            ))
"""


def test_a_patch_brings_its_commands(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD], extra=COMMANDS)
    house.write("probe/cli.py", "import typer\napp = typer.Typer()\n@app.command()\ndef greet():\n    print('hello')\n")
    done = house.run(
        """
        import subprocess
        def call(*words):
            command = [sys.executable, "-m", "vllm_omni_patch.commands.main", *words]
            done = subprocess.run(command, capture_output=True, text=True)
            return [done.returncode, done.stdout + done.stderr]
        show([call("greet"), call("gone"), call("ec", "--help"), call("flags"), call("--help")])
    """
    )
    greet, gone, ec, flags, helped = done.value
    assert greet == [0, "hello\n"]
    assert gone[0] == 2
    assert "vllm-omni-patch gone cannot be loaded: ModuleNotFoundError: No module named 'probe.none'" in gone[1]
    assert "stats" in ec[1], "a patch of this package has the name"
    assert "VLLM_OMNI_PATCH_PROBE_SIZE" in flags[1]
    assert "greet" in helped[1] and "matrix" in helped[1] and "gone" not in helped[1]


REMOVED = """
            from dataclasses import replace
            from vllm_omni_patch.flags import Removed
            PATCH = replace(PATCH, removed=(Removed("VLLM_OMNI_PATCH_PROBE_OLD", "Use VLLM_OMNI_PATCH_PROBE_SIZE."),))
"""


def test_a_setting_that_is_gone_is_one_warning_of_the_first_process(house: House) -> None:
    house.patch("probe", 'T("vllm.worker", "Worker.load")', [LOAD], extra=REMOVED)
    done = house.run(
        """
        import multiprocessing
        def work(queue):
            import vllm.envs, vllm.plugins, vllm.worker
            queue.put("VLLM_OMNI_PATCH_PROBE_OLD" in vllm.envs.environment_variables)
        if __name__ == "__main__":
            import vllm.envs, vllm.plugins
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,), name="Worker-1")
            child.start()
            # vLLM does not call it unknown, in any process.
            show(["VLLM_OMNI_PATCH_PROBE_OLD" in vllm.envs.environment_variables, queue.get(timeout=60)])
            child.join()
    """,
        VLLM_OMNI_PATCH_PROBE_OLD="7",
    )
    assert done.value == [True, True]
    lines = [line for line in done.err.splitlines() if "PROBE_OLD" in line]
    assert len(lines) == 1 and "it is ignored. Use VLLM_OMNI_PATCH_PROBE_SIZE." in lines[0], done.err
    assert not house.run("import vllm.worker").err


def test_a_broken_patch_that_nobody_asked_for_is_not_mentioned(probe: House) -> None:
    probe.write("ghost/__init__.py", "raise RuntimeError\n")
    probe.distribution("ghost-dist", "1.0", {"vllm_omni_patch.patches": {"ghost": "ghost:PATCH"}})
    done = probe.run("import vllm.worker", STATES)
    assert done.value == APPLIED
    assert done.err == ""
