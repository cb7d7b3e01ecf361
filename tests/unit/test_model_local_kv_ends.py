# SPDX-License-Identifier: Apache-2.0
"""What is in the report of a process that ends soon after it began, and what is not known in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cache_utils = pytest.importorskip("transformers.cache_utils")

from support.local_kv_runners import Base, Decoder
from vllm_omni_patch import flags
from vllm_omni_patch.patches.model_local_kv import hooks, watch

pytest_plugins = ["support.local_kv_runners"]
pytestmark = pytest.mark.usefixtures("process")

ROW = 2 * 256 * 1024 * 2


class Maker(Decoder):
    """Declares one row of 1 MiB per sequence, and makes a cache of one."""

    def forward(self) -> Any:
        cache = cache_utils.DynamicCache()
        new = torch.zeros(1, 1, 256, 1024, dtype=torch.float16)
        cache.update(new, new, 0)
        return cache


class Runner(Base):
    def load_model(self, *args: Any, **kwargs: Any) -> str:
        self.model = torch.nn.ModuleDict({"decoder": Maker("request")})
        return "loaded"


def load() -> Runner:
    """A runner whose load was reported."""
    runner = Runner()
    if not hooks.WATCH.observing:
        hooks.WATCH.follow(cache_utils.Cache)
    runner.load_model()
    hooks.report_load(runner)
    return runner


def serve(how: str) -> None:
    """A process's life: it loads, makes one cache, loses its model, and ends."""
    runner = load()
    kept = runner.model["decoder"]()
    del runner
    if how == "raises":
        raise SystemExit(3)
    del kept


CODE = """
import multiprocessing, sys
sys.path[:0] = {paths!r}
import test_model_local_kv_ends as ends
if __name__ == "__main__":
    how, method = sys.argv[1:]
    if method:
        child = multiprocessing.get_context(method).Process(target=ends.serve, args=(how,))
        child.start()
        child.join()
    else:
        ends.serve(how)
"""


@pytest.mark.parametrize(("how", "method"), [("ends", ""), ("raises", "fork")])
def test_a_process_that_ends_at_once_leaves_what_it_held(how: str, method: str, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(CODE.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])]))
    env = {**os.environ, flags.REPORT_DIR.name: str(tmp_path / "reports")}
    done = subprocess.run([sys.executable, str(script), how, method], env=env, capture_output=True, text=True)
    (file,) = (tmp_path / "reports").glob("model-local-kv-*.json")
    data = json.loads(file.read_text())
    (row,) = data["observed"]
    assert (row["status"], row["observed_peak"], row["rows_seen"]) == ("matched", ROW, 1), done.stderr
    assert [entry["name"] for one in data["loads"] for entry in one["entries"]] == ["request"]


def test_a_peak_that_rises_too_soon_for_a_write_is_written_when_one_is_due(
    process: watch.Watch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(flags.REPORT_DIR.name, str(tmp_path))
    now = 1000.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    runner = load()
    observer = process._observer
    assert observer is not None
    observer._stopped = True  # this test makes the rounds
    observer._risen = False

    def written() -> Any:
        (file,) = tmp_path.glob("model-local-kv-*.json")
        return json.loads(file.read_text())["observed"][0]["observed_peak"]

    kept = runner.model["decoder"]()
    observer.sample()
    assert observer._risen and written() == 0
    process._walk_at = now + 1000.0
    process._round(True)
    assert written() == 0, "written a moment ago"
    now += 1.0
    process._round(False)
    assert written() == ROW, "a second later it is, though nothing rose since"
    del kept


def test_the_walks_begin_soon_and_become_rare(
    process: watch.Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    runner = load()
    pauses = []
    for _ in range(8):
        pauses.append(process._walk_at - now)
        now = process._walk_at
        process._round(False)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert runner.model is not None


def test_what_could_not_be_followed_is_counted_and_said_once(
    process: watch.Watch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = load()
    assert process.refresh()["observation"]["failures"] == 0

    def broken(*args: Any) -> Any:
        raise TypeError("ours")

    monkeypatch.setattr(process._observer, "_origin", broken)
    with caplog.at_level("WARNING", "vllm.omni_patch.model_local_kv"):
        kept = [runner.model["decoder"]() for _ in range(3)]
        assert [process.refresh()["observation"]["failures"] for _ in range(2)] == [3, 3]
    assert [record.getMessage() for record in caplog.records if "TypeError: ours" in record.getMessage()] == [
        "Model-local KV: a cache could not be followed (TypeError: ours), so the report may be incomplete. Serving is "
        "not affected; 'failures' in the report counts these errors."
    ]
    del kept


def test_refresh_takes_the_worker_that_vllm_hands_it(
    process: watch.Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = pytest.importorskip("vllm.v1.serial_utils")
    runner = load()
    document = utils.run_method(object(), watch.refresh, (), {})
    assert document["loads"] and document["loads"] == watch.refresh()["loads"]
    assert runner.model is not None
