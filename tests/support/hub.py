# SPDX-License-Identifier: Apache-2.0
"""A hub on loopback with one model, for huggingface_hub's own client: set ``HF_ENDPOINT`` to ``Hub.url``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")
_API = re.compile(r"/api/models/(?P<repo>[^/?]+/[^/?]+)(?:/(?P<what>[a-z-]+)/(?P<revision>[^/?]+))?")


class Hub:
    """Serves folders as the commits of ``repo``; ``main`` is the one that was published last."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.commits: dict[str, str] = {}
        self.main = ""
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub._answer(self)

            def log_message(self, *_: Any) -> None:
                """Nothing: the requests are in ``Hub.asked``."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def publish(self, folder: str) -> str:
        """Make the content of ``folder`` the newest commit; returns its hash."""
        commit = hashlib.sha1(folder.encode()).hexdigest()
        self.commits[commit] = folder
        self.main = commit
        return commit

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, request: BaseHTTPRequestHandler, body: bool = True) -> None:
        self.asked.append(f"{request.command} {request.path}")
        found = _FILE.match(request.path) or _API.match(request.path)
        commit = found["revision"] if found and found["revision"] else "main"
        commit = self.main if commit == "main" else commit
        if found is None or found["repo"] != self.repo or commit not in self.commits:
            return _send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        folder = self.commits[commit]
        named = found.groupdict()
        if named.get("file"):
            try:
                with open(os.path.join(folder, os.path.basename(named["file"])), "rb") as file:
                    data = file.read()
            except OSError:
                return _send(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            return _send(request, 200, data, {"ETag": etag, "X-Repo-Commit": commit}, body)
        rows = [
            {"type": "file", "path": name, "oid": "0" * 40, "size": os.path.getsize(os.path.join(folder, name))}
            for name in sorted(os.listdir(folder))
        ]
        model = {"_id": "1", "id": self.repo, "modelId": self.repo, "sha": commit, "private": False, "tags": []}
        model["siblings"] = [{"rfilename": row["path"]} for row in rows]
        listed = named["what"] in ("tree", "paths-info")
        return _send(request, 200, json.dumps(rows if listed else model).encode(), {"X-Repo-Commit": commit}, body)


def _send(request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    if body:
        request.wfile.write(data)
