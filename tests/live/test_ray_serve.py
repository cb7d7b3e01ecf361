# SPDX-License-Identifier: Apache-2.0
"""The example of Ray Serve LLM as it is, on a real cluster: the flag reaches its replica, which stores in redis."""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from test_ec_backends import need, redis
from test_ec_server import IMAGES, wait_for

from support import ray_cluster, tiny_model
from support.engine_process import environment, free_port, picture

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_serve"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.path.isdir(os.path.join(ray_cluster.place(), "grpc_reflection")),
        reason="no Ray Serve (scripts/test.sh -m slow lays it beside the environment)",
    ),
]
# The example, with a tiny model's options, and a port that is free.
DRIVER = """
    import sys, time, urllib.request
    import ray
    ray.init()
    from ray import serve
    from ray.serve.llm import build_openai_app
    import serve_vision  # the import alone would start a cluster

    serve.start(http_options={"port": int(sys.argv[1])})
    serve_vision.vision.engine_kwargs.update(
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32", enforce_eager=True,
        enable_prefix_caching=False,
    )
    serve.run(build_openai_app({"llm_configs": [serve_vision.vision]}))
    for body in sys.stdin:
        request = urllib.request.Request(
            f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", data=body.encode(),
            headers={"Content-Type": "application/json"},
        )
        print("ANSWER", urllib.request.urlopen(request, timeout=60).status, flush=True)
    serve.shutdown()
"""


def test_the_example_stores_what_it_encodes(tmp_path: Path) -> None:
    need("redis")
    known = ray_cluster.variables(str(tmp_path))
    known["PYTHONPATH"] += os.pathsep + str(EXAMPLE)
    model, port = tiny_model.make(str(tmp_path / "model")), free_port()
    with redis(port), ray_cluster.Cluster(str(tmp_path), environment(None, known)) as cluster:
        here = {"RAY_ADDRESS": cluster.address, "MODEL": model, "REDIS": f"redis://127.0.0.1:{port}"}
        bodies = []
        for seed in IMAGES:
            content = [picture(seed), {"type": "text", "text": "What is it?"}]
            bodies.append({"model": "vision", "messages": [{"role": "user", "content": content}], "max_tokens": 2})
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DRIVER), str(free_port())],
            input="".join(json.dumps(body) + "\n" for body in bodies),
            env=environment(None, {**known, **here}),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.stdout.count("ANSWER 200") == len(bodies), done.stdout[-3000:] + done.stderr[-3000:]
        wait_for(lambda: stored(cluster.folder) == len(IMAGES), 30)
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"DBSIZE\r\n")
            assert int(client.recv(100).strip(b":\r\n")) >= len(IMAGES)


def stored(folder: str) -> int:
    """How many outputs the replica's worker says it has stored. It says so once a minute and when it ends."""
    found = [0]
    for path in glob.glob(f"{folder}/**/logs/worker-*", recursive=True):
        with open(path, errors="replace") as file:
            lines = re.findall(r"Encoder cache \(worker\): \d+ hits, \d+ misses, (\d+) stored", file.read())
        found += map(int, lines)
    return max(found)
