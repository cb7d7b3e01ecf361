# SPDX-License-Identifier: Apache-2.0
"""Which budget path a release takes, and what it has charged by then."""

from __future__ import annotations

import pytest

from vllm_omni_patch.patches.model_local_kv.charge import Engine, budget_path, charge, resolve_residency


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        (Engine((0, 26), device="cuda"), "legacy"),
        (Engine((0, 27), device="cuda"), "consumed"),
        (Engine((0, 14), (0, 14), "cuda"), "legacy"),
        (Engine((0, 16), (0, 16), "cuda"), "process"),
        (Engine((0, 28), (0, 28), "cuda"), "process"),
        (Engine((0, 30), (0, 30), "cuda"), "legacy"),
        (Engine((0, 31), (0, 31), "cuda"), "unknown"),
        (Engine((0, 19), device="cpu"), "fixed"),
        (Engine((0, 20), device="cpu"), "rss"),
        (Engine((0, 32), device="cpu", kv_size_given=True), "fixed"),
        (Engine((0, 32), device="cuda", kv_size_given=True), "fixed"),
        (Engine((0, 30), (0, 30), "npu"), "unknown"),
        (Engine((0, 32), device="xpu"), "unknown"),
        (Engine(None, device="cuda"), "unknown"),
        (Engine(None, device="cpu"), "unknown"),
    ],
)
def test_path_of_a_release(engine: Engine, path: str) -> None:
    assert budget_path(engine) == path


@pytest.mark.parametrize(
    ("residency", "path", "state"),
    [
        ("at_load", "legacy", "charged"),
        ("at_load", "consumed", "charged"),
        ("at_load", "process", "charged"),
        ("at_load", "rss", "charged"),
        ("at_load", "fixed", "uncharged"),
        ("at_load", "unknown", "unknown"),
        ("graph_pool", "legacy", "uncharged"),
        ("graph_pool", "consumed", "charged"),
        ("graph_pool", "process", "unknown"),
        ("graph_pool", "fixed", "uncharged"),
        ("profiled", "legacy", "charged"),
        ("profiled", "rss", "pending"),
        ("profiled", "fixed", "pending"),
        ("later", "legacy", "pending"),
        ("later", "unknown", "pending"),
        ("unknown", "legacy", "unknown"),
        ("something new", "legacy", "unknown"),
    ],
)
def test_state_of_an_entry(residency: str, path: str, state: str) -> None:
    found, reason = charge(residency, path)  # type: ignore[arg-type]
    assert found == state
    assert reason


def test_a_scope_settles_the_residency_only_where_it_is_certain() -> None:
    assert resolve_residency("unknown", "request") == "later"
    assert resolve_residency("unknown", "session") == "later"
    assert resolve_residency("unknown", "invocation") == "unknown"
    assert resolve_residency("unknown", "model") == "unknown"
    assert resolve_residency("at_load", "request") == "at_load"
