# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines behind two API servers: one page that says what the deployment did."""

from __future__ import annotations

import collections
import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_server import ARGUMENTS, OURS, counted, counters, entries, wait_for

from support import tiny_model
from support.engine_process import Server, picture

pytestmark = pytest.mark.slow


def ask(server: Server, seed: int, rank: int) -> str:
    """The tokens that engine ``rank`` answers with, chosen by vLLM's own header."""
    content = [picture(seed), {"type": "text", "text": "What is it?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def test_every_number_is_what_the_deployment_did(tmp_path: Path) -> None:
    reports, disk = tmp_path / "reports", tmp_path / "disk"
    more = ["--data-parallel-size", "2", "--api-server-count", "2"]
    env = {"VLLM_OMNI_PATCH_REPORT_DIR": str(reports), "LMCACHE_EC_LOCAL_DISK": str(disk)}
    with Server(
        tiny_model.make(str(tmp_path / "model")), str(tmp_path), ec=OURS, flag="1", env=env,
        arguments=[*ARGUMENTS, *more], serve=True,
    ) as server:  # fmt: skip
        first = ask(server, 1, 0)
        wait_for(lambda: len(entries(disk)) == 1)
        assert ask(server, 1, 1) == first, server.log()[-3000:]
        assert counted(server, "hits", 1) == 1, "one engine loads what the other has stored"
        assert counted(server, "stored", 1) == 1
        seen = counters(server)
        assert [counters(server) for _ in range(8)] == [seen] * 8, "either API server shows the same"
        page = server.get("/metrics").splitlines()
        samples = [line.rsplit(" ", 1)[0] for line in page if line.startswith("vllm_omni_patch_memory_")]
        assert server.stop() == {}
    written = [json.loads(path.read_text()) for path in sorted(reports.glob("memory-*.json"))]
    assert sorted(one["dp_rank"] for one in written) == [0, 1]
    by_name: dict[str, list[str]] = collections.defaultdict(list)
    for sample in samples:
        name, labels = sample.split("{")
        by_name[name].append("{" + labels)
    assert by_name and all(
        sorted(one) == ['{dp_rank="0",rank="0"}', '{dp_rank="1",rank="0"}'] for one in by_name.values()
    ), samples
    loads = [load for path in reports.glob("model-local-kv-*.json") for load in json.loads(path.read_text())["loads"]]
    assert sorted(load["dp_rank"] for load in loads) == [0, 1]
