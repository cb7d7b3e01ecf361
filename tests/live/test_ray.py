# SPDX-License-Identifier: Apache-2.0
"""Workers on Ray, two nodes on one machine: patched alike, their numbers on one page, and mismatches named.

The flag reaches them from the driver, from the nodes' environment, or from a ``runtime_env``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, IMAGES, OURS, counted, counters, entries, wait_for

from support import ray_cluster, tiny_model
from support.engine_process import Server, environment, left_over

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ray_cluster.place(), reason="no Ray (scripts/test.sh -m slow lays it beside the environment)"
    ),
]


def status(reports: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllm_omni_patch.commands.main", "status", "--json", "--report-dir", str(reports)]
    return json.loads(subprocess.run(command, env=environment("1"), capture_output=True, text=True, timeout=60).stdout)


def called(process: dict[str, Any]) -> set[str]:
    return {entry["target"] for entry in process["entries"] if entry["state"] == "applied" and entry["called"]}


# The node's flag, ranks, and whether it is the second of vLLM's two Ray executors. With more than one rank the first
# one refuses every encoder-cache connector itself.
@pytest.mark.parametrize(
    ("nodes", "ranks", "second"), [(None, 2, True), ("1", 2, True), (None, 1, False), ("1", 1, False)]
)
def test_workers_are_patched_and_counted(tmp_path: Path, nodes: str | None, ranks: int, second: bool) -> None:
    known, reports, disk = ray_cluster.variables(str(tmp_path)), tmp_path / "reports", tmp_path / "disk"
    with ray_cluster.Cluster(str(tmp_path), environment(nodes, known)) as cluster:
        env = {
            **known,
            "RAY_ADDRESS": cluster.address,
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": str(int(second)),
            "VLLM_OMNI_PATCH_REPORT_DIR": str(reports),
            "LMCACHE_EC_LOCAL_DISK": str(disk),
        }
        more = ["--distributed-executor-backend", "ray", "--tensor-parallel-size", str(ranks)]
        model = tiny_model.make(str(tmp_path / "model"))
        with Server(model, str(tmp_path), ec=OURS, flag="1", env=env, arguments=[*ARGUMENTS, *more]) as server:
            first = {seed: server.image(seed) for seed in IMAGES}
            assert all(answer.ok for answer in first.values()), server.log()[-3000:]
            wait_for(lambda: len(entries(disk)) == len(IMAGES))
            for seed in IMAGES:
                assert server.image(seed).same(first[seed], 1e-4)
            assert counted(server, "hits", 1) >= 1 and counted(server, "stored", len(IMAGES)) == len(IMAGES)
            assert counters(server).get("fallbacks", 0) == 0
            page = server.get("/metrics")
            for rank in range(ranks):
                assert f'vllm_omni_patch_memory_weights_bytes{{rank="{rank}"}}' in page
            facts = status(reports)
            folders = server.group.shared_folders() | cluster.group.shared_folders()
            assert server.stop() == {}
        workers = [one for one in facts["processes"] if one["role"] == "ray worker"]
        assert facts["mismatches"] == [] and len(workers) == ranks
        assert len({one["process"]["run"] for one in facts["processes"]}) == 1
        assert len({one["ppid"] for one in workers}) == ranks, "each node's raylet has started one"
        for one in workers:
            assert any(target.endswith("determine_available_memory") for target in called(one))
            assert one["process"]["activation_path"] == ("startup file" if nodes else "plugin")
        assert left_over(folders) == []


def test_a_node_that_is_not_patched_is_named(tmp_path: Path) -> None:
    """The second executor leaves what a node has set for itself."""
    known, reports = ray_cluster.variables(str(tmp_path)), tmp_path / "reports"
    with ray_cluster.Cluster(str(tmp_path), environment("0", known)) as cluster:
        env = {
            **known,
            "RAY_ADDRESS": cluster.address,
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
            "VLLM_OMNI_PATCH_REPORT_DIR": str(reports),
        }
        more = ["--distributed-executor-backend", "ray"]
        model = tiny_model.make(str(tmp_path / "model"))
        with Server(model, str(tmp_path), flag="available_memory", env=env, arguments=[*ARGUMENTS, *more]) as server:
            assert server.image(1).ok
            (told,) = status(reports)["mismatches"]
    assert "no Ray worker of this engine has written a ledger here" in told


def test_an_engine_inside_an_actor(tmp_path: Path) -> None:
    """As Ray Serve runs it: the flag in a ``runtime_env``, and the engine's driver is itself a Ray worker."""
    known, reports = ray_cluster.variables(str(tmp_path)), tmp_path / "reports"
    model = tiny_model.make(str(tmp_path / "model"))
    script = textwrap.dedent(f"""
        import ray
        given = {{"VLLM_OMNI_PATCH": "1", "VLLM_OMNI_PATCH_REPORT_DIR": {str(reports)!r}}}
        ray.init(runtime_env={{"env_vars": given}})

        @ray.remote
        def serve():
            from prometheus_client import generate_latest
            from vllm import LLM
            import vllm.v1.metrics.prometheus as served
            engine = LLM({model!r}, max_model_len=256, max_num_seqs=4, dtype="float32", enforce_eager=True,
                         tensor_parallel_size=2, distributed_executor_backend="ray")
            engine.generate("What is it?", use_tqdm=False)
            page = generate_latest(served.get_prometheus_registry()).decode()
            engine.llm_engine.engine_core.shutdown()
            return page

        print(ray.get(serve.remote()))
    """)
    with ray_cluster.Cluster(str(tmp_path), environment(None, known)) as cluster:
        env = environment(None, {**known, "RAY_ADDRESS": cluster.address})
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(2):
        assert f'vllm_omni_patch_memory_weights_bytes{{rank="{rank}"}}' in done.stdout
    facts = status(reports)
    assert facts["mismatches"] == []
    assert [one["role"] for one in facts["processes"]].count("ray worker") == 3
