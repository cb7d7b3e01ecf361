# SPDX-License-Identifier: Apache-2.0
"""An engine that a tracer was put around, as operators do it: its hooks and ours are both called.

The tracers lie in a folder beside the environment (scripts/test.sh puts them there), with a wrapt of their own.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import engine_process, tiny_model

pytest.importorskip("vllm")

TRACERS = Path(sys.prefix) / "neighbours-for-tests"
pytestmark = pytest.mark.skipif(not TRACERS.is_dir(), reason=f"no tracers in {TRACERS}: run scripts/test.sh")
ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.make(str(tmp_path_factory.mktemp("tiny") / "model"))


def called(model: str, folder: Path, wrapper: str, env: dict[str, str]) -> tuple[set[str], str]:
    """Serve one image under ``wrapper``; the targets of ours that were called there, and the server's log."""
    reports = folder / "reports"
    settings = {
        "PYTHONPATH": str(TRACERS),
        "VLLM_OMNI_PATCH_REPORT_DIR": str(reports),
        "LMCACHE_EC_LOCAL_DISK": str(folder / "cache"),
        **env,
    }
    server = engine_process.Server(
        model, str(folder), ec={"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}, flag="1", env=settings,
        wrapper=[str(TRACERS / "bin" / wrapper)],
    )  # fmt: skip
    try:
        answer = server.image(1)
        assert answer.ok, answer.error
    finally:
        left = server.stop()
    assert left == {}
    ledgers = [json.loads(path.read_text()) for path in reports.glob("ledger-*.json")]
    assert {"api server", "engine core", "worker"} <= {one["role"] for one in ledgers}
    entries = [entry for one in ledgers for entry in one["entries"]]
    assert [entry for entry in entries if entry["state"] == "failed"] == []
    return {entry["target"].partition(":")[2] for entry in entries if entry["called"]}, server.log()


OURS = {
    "EngineArgs.create_engine_config",
    "CPUWorker.determine_available_memory",
    "CPUModelRunner.load_model",
    "GPUModelRunner._execute_mm_encoder",
}


def test_opentelemetry_instrument(model: str, tmp_path: Path) -> None:
    env = {
        "OTEL_SERVICE_NAME": "tiny",
        "OTEL_TRACES_EXPORTER": "console",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    ours, log = called(model, tmp_path, "opentelemetry-instrument", env)
    assert ours >= OURS
    assert f'"http.route": "{ROUTE}"' in log or f'"name": "POST {ROUTE}"' in log


@contextmanager
def agent() -> Iterator[tuple[str, list[bytes]]]:
    """What ddtrace sends its traces to, and what has come."""
    come: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            come.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.answer(200, b"{}")

        do_POST = do_PUT

        def do_GET(self) -> None:
            self.answer(404, b"")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", come
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_ddtrace_run(model: str, tmp_path: Path) -> None:
    with agent() as (url, come):
        env = {
            "DD_SERVICE": "tiny",
            "DD_TRACE_AGENT_URL": url,
            "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "DD_REMOTE_CONFIGURATION_ENABLED": "false",
            "DD_CRASHTRACKING_ENABLED": "false",
        }
        ours, _ = called(model, tmp_path, "ddtrace-run", env)
    assert ours >= OURS
    traces = b"".join(come)
    assert b"fastapi.request" in traces
    assert ROUTE.encode() in traces
