# SPDX-License-Identifier: Apache-2.0
"""The observation beside the loads: off it touches nothing, on it tells declared from undeclared caches."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.local_kv_runners import MIB, fresh, model, module
from vllm_omni_patch import flags
from vllm_omni_patch.loading import apply
from vllm_omni_patch.patches.model_local_kv import PATCH, watch
from vllm_omni_patch.patches.model_local_kv.observe import observer
from vllm_omni_patch.patches.model_local_kv.uses import CACHE

pytest_plugins = ["support.local_kv_runners"]
pytestmark = pytest.mark.usefixtures("process")


def test_off_touches_no_transformers_class(install: Any, process: watch.Watch) -> None:
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    cls().load_model()
    assert not process.observing
    assert process.refresh()["observed"] is None
    assert process.refresh()["suspects"] is None


def test_on_declared_and_undeclared_caches_are_told_apart(
    install: Any, lines: Any, process: watch.Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    monkeypatch.setenv(flags.REPORT_DIR.name, str(tmp_path))

    class Maker(torch.nn.Module):
        def forward(self, heads: int) -> Any:
            cache = cache_utils.DynamicCache()
            new = torch.zeros(1, heads, 256, 1024, dtype=torch.float16)
            cache.update(new, new, 0)
            return cache

    def load(self: Any) -> Any:
        self.model = model()
        self.model["decoder"].inner = Maker()
        self.model["extra"] = Maker()
        self.model["ring"] = torch.nn.Identity()
        self.model["ring"]._k_cache = torch.zeros(2, 2, 3, 4)

    cls = fresh(load_model=load)
    install(module(Runner=cls), "Runner.load_model")
    done = apply.install(PATCH, CACHE, cache_utils, lambda: None)
    runner = cls()
    runner.load_model()
    assert process.observing
    kept = [runner.model["decoder"].inner(1), runner.model["extra"](2)]
    data = process.refresh()
    rows = {(row["owner"], row["status"]): row for row in data["observed"]}
    assert set(rows) == {("decoder", "matched"), ("extra", "undeclared")}
    assert rows[("extra", "undeclared")]["observed_peak"] == 2 * MIB
    assert [(one["owner"], one["attribute"]) for one in data["suspects"]] == [("ring", "_k_cache")]
    text = "\n".join(lines())
    assert "Model-local KV undeclared: extra: 2.00 MiB so far" in text
    assert "Model-local KV suspected: ring._k_cache" in text
    (file,) = tmp_path.glob("model-local-kv-*.json")
    assert json.loads(file.read_text())["observed"] == json.loads(json.dumps(data["observed"]))
    del kept
    gc.collect()
    assert process.refresh()["observed"][0]["observed_peak"] == MIB, "a peak stays"
    apply.remove(done)
    assert not process.observing
    assert "__del__" not in vars(cache_utils.Cache)


def test_caches_that_come_after_the_load_are_told_apart_too(install: Any, process: watch.Watch) -> None:
    """transformers may be imported when the first request needs it."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cls = fresh()
    install(module(Runner=cls), "Runner.load_model")
    runner = cls()
    runner.load_model()
    assert process.rows() == []
    done = apply.install(PATCH, CACHE, cache_utils, lambda: None)
    assert [(row.owner, row.status) for row in process.rows()] == [("decoder", "never seen")]
    apply.remove(done)


@pytest.mark.parametrize(
    ("body", "words"),
    [({"__new__": lambda cls: None}, "has its own __new__"), ({"__del__": lambda self: None}, "has its own __del__")],
)
def test_a_cache_class_that_makes_its_instances_itself_is_refused(
    process: watch.Watch, body: dict[str, Any], words: str
) -> None:
    where = module(Cache=type("Cache", (), dict(body)))
    before = dict(vars(where.Cache))
    with pytest.raises(RuntimeError, match=words):
        apply.install(PATCH, CACHE, where, lambda: None)
    assert dict(vars(where.Cache)) == before
    assert not process.observing


def test_a_reloaded_cache_class_is_followed_and_the_old_one_let_go(process: watch.Watch) -> None:
    where = module(Cache=type("Cache", (), {}))
    old = where.Cache
    apply.install(PATCH, CACHE, where, lambda: None)
    assert observer.follows_class(old)
    where.Cache = type("Cache", (), {})
    done = apply.install(PATCH, CACHE, where, lambda: None)
    assert (observer.follows_class(old), observer.follows_class(where.Cache)) == (False, True)
    apply.remove(done)
    assert not observer.follows_class(where.Cache)


def test_a_cache_lives_though_our_code_breaks(process: watch.Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    where = module(Cache=type("Cache", (), {}))
    done = apply.install(PATCH, CACHE, where, lambda: None)
    monkeypatch.setattr(observer.Observer, "_origin", lambda *_: 1 / 0)
    assert type(where.Cache()) is where.Cache
    apply.remove(done)
