# SPDX-License-Identifier: Apache-2.0
"""Runs a real, unmodified vLLM in its own process group, sends it image requests, and ends it without leftovers.

``Server`` is ``python -m vllm.entrypoints.openai.api_server`` on a free loopback port; ``Offline`` is a child that
holds one ``LLM()`` and takes one JSON command per line. Both keep their log in a file and are killed by process group,
so a test that fails leaves nothing running. ``python tests/support/engine_process.py offline`` is the child itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BOOT_SECONDS = 240.0
REQUEST_SECONDS = 120.0
STOP_SECONDS = 40.0
# The script "vllm". It asks for the release of the distribution of that name; the one for the CPU is called otherwise.
SERVE = """
import importlib.metadata as metadata, sys
def version(name, known=metadata.version):
    try:
        return known(name)
    except metadata.PackageNotFoundError:
        return known(name + "-cpu") + "+cpu"
metadata.version = version
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass
class Answer:
    """One answer: HTTP status (0 when the connection broke), tokens, their logprobs, seconds from send to receive."""

    status: int
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    finish_reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    def same(self, other: Answer, tolerance: float = 0.0) -> bool:
        """Equal tokens, and logprobs no further apart than ``tolerance``."""
        return (
            self.ok
            and other.ok
            and self.tokens == other.tokens
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True))
        )


def environment(flag: str | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a vLLM child: the patch flag as given (``None``: unset), small CPU settings, no network."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("VLLM_OMNI_PATCH", "LMCACHE_")) and k not in ("VLLM_PLUGINS", "PYTHONPATH")
    }
    keep.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        LMCACHE_TRACK_USAGE="false",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    if flag is not None:
        keep["VLLM_OMNI_PATCH"] = flag
    keep.update(extra or {})
    return keep


class Group:
    """A child in a session of its own, its log file, and the means to end all of it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: str, stdin: bool = False) -> None:
        self.log_path = log
        self._log = open(log, "ab")  # noqa: SIM115 - the child writes to it until the group is ended
        self.process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdin else self._log,
            stderr=self._log,
            start_new_session=True,
            cwd=os.path.dirname(os.path.abspath(log)),
        )

    def log(self) -> str:
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def members(self) -> dict[int, str]:
        """Processes alive in this session, by pid, with their command line; zombies do not count."""
        found: dict[int, str] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        found[int(name)] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def shared_folders(self) -> set[str]:
        """The folders of ours in which a process of this session takes part now."""
        found = set()
        for pid in self.members():
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        folder, file = os.path.split(os.readlink(f"/proc/{pid}/fd/{name}"))
                        if file == "alive" and os.path.basename(folder).startswith("vllm-omni-patch-"):
                            found.add(folder)
        return found

    def stop(self, seconds: float = STOP_SECONDS) -> dict[int, str]:
        """Ask the head to end (SIGINT), wait; whatever of the session is alive after that is returned and killed."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)
        return self.reap(seconds)

    def reap(self, seconds: float = STOP_SECONDS) -> dict[int, str]:
        """Wait for the session to empty by itself; returns what had to be killed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.process.poll()
            if self.process.returncode is not None and not self.members():
                break
            time.sleep(0.2)
        left = self.members()
        self.kill()
        return left

    def kill(self) -> None:
        """SIGKILL to every process of the session."""
        for pid in [*self.members(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != self.process.pid or self.process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if not self._log.closed:
            self._log.close()


def left_over(folders: Iterable[str], seconds: float = 60.0) -> list[str]:
    """Which of ``folders`` do not go: whatever their last process was, removing them takes its time."""
    deadline = time.monotonic() + seconds
    while any(map(os.path.exists, folders)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [folder for folder in folders if os.path.exists(folder)]


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` on a free loopback port.

    ``ec`` is the value of ``--ec-transfer-config``. ``flag`` is the value of ``VLLM_OMNI_PATCH`` (``None``: unset).
    ``serve``: start it as ``vllm serve``, which alone heeds ``--api-server-count``. ``wrapper``: a command that starts
    the command that follows it, as a tracer does.
    """

    def __init__(
        self,
        model: str,
        folder: str,
        *,
        ec: Mapping[str, Any] | None = None,
        flag: str | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        dummy: bool = False,
        name: str = "server",
        wait: bool = True,
        boot_seconds: float = BOOT_SECONDS,
        serve: bool = False,
        wrapper: Sequence[str] = (),
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        self.model = model
        self.port = free_port()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        if serve:
            command = [python, "-c", SERVE, "serve", model]
        command += ["--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "256", "--max-num-seqs", "4"]
        command += ["--dtype", "float32", "--enforce-eager", "--seed", "0"]
        if dummy:
            command += ["--load-format", "dummy"]
        if ec is not None:
            command += ["--ec-transfer-config", json.dumps(dict(ec))]
        command = [*wrapper, *command, *arguments]
        log = os.path.join(folder, f"{name}-{self.port}.log")
        started = time.perf_counter()
        self.group = Group(command, environment(flag, env), log)
        self.boot_seconds = 0.0
        if wait:
            self.wait(boot_seconds)
            self.boot_seconds = time.perf_counter() - started

    def wait(self, seconds: float = BOOT_SECONDS) -> None:
        """Wait until ``/health`` answers.

        Raises:
            RuntimeError: the process ended, or did not answer in time; the text ends with its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.group.process.poll() is not None:
                log = self.log()
                self.group.kill()
                raise RuntimeError(f"vLLM ended with {self.group.process.returncode} at start.\n{log[-20000:]}")
            if self.healthy():
                return
            time.sleep(0.3)
        log = self.log()
        self.group.kill()
        raise RuntimeError(f"vLLM did not answer within {seconds:.0f} s.\n{log[-20000:]}")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS) -> tuple[int, str]:
        """POST ``body`` as JSON; returns (status, text), status 0 when the connection broke."""
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def chat(
        self,
        *parts: Mapping[str, Any],
        text: str = "What is it?",
        max_tokens: int = 4,
        timeout: float = REQUEST_SECONDS,
        **extra: Any,
    ) -> Answer:
        """One chat completion of ``parts`` (see :func:`picture`) and a text, greedy, with logprobs."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "ignore_eos": True,
            **extra,
        }
        started = time.perf_counter()
        status, reply = self.post("/v1/chat/completions", body, timeout)
        seconds = time.perf_counter() - started
        if status != 200:
            return Answer(status, seconds=seconds, error=reply)
        choice = json.loads(reply)["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            status,
            choice["message"].get("content") or "",
            [item["token"] for item in content],
            [item["logprob"] for item in content],
            seconds,
            finish_reason=choice.get("finish_reason") or "",
        )

    def image(self, seed: int, uuid: str | None = None, **extra: Any) -> Answer:
        """:meth:`chat` about one picture, made from ``seed``."""
        return self.chat(picture(seed, uuid), **extra)

    def log(self) -> str:
        return self.group.log()

    def stop(self) -> dict[int, str]:
        """End the server; returns the processes that did not end by themselves (they are killed)."""
        return self.group.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.stop()


class Offline:
    """A child process that holds one ``LLM()``; each call is one command to it.

    ``LLM(**llm)`` is built at once. A command that raises in the child comes back as ``{"error": text}``.
    """

    def __init__(
        self,
        model: str,
        folder: str,
        *,
        ec: Mapping[str, Any] | None = None,
        flag: str | None = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        name: str = "offline",
        **llm: Any,
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        log = os.path.join(folder, f"{name}-{time.monotonic_ns()}.log")
        self.group = Group([python, os.path.abspath(__file__), "offline"], environment(flag, env), log, stdin=True)
        options = dict(
            model=model, max_model_len=256, max_num_seqs=4, dtype="float32", enforce_eager=True, seed=0, **llm
        )
        if ec is not None:
            options["ec_transfer_config"] = dict(ec)
        self.ready = self.call("start", timeout=BOOT_SECONDS, options=options)

    def call(self, operation: str, timeout: float = REQUEST_SECONDS, **values: Any) -> Any:
        """Send one command; returns its result.

        Raises:
            RuntimeError: the child ended or did not answer in time; the text ends with its log.
        """
        stdin, stdout = self.group.process.stdin, self.group.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child has no pipes")
        line: list[bytes] = []

        def read() -> None:
            for raw in stdout:
                if raw.startswith(b"RESULT "):
                    line.append(raw[len(b"RESULT ") :])
                    return

        reader = threading.Thread(target=read, daemon=True)
        try:
            stdin.write(json.dumps({"operation": operation, **values}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the child has ended.\n{self.log()[-6000:]}") from None
        reader.start()
        reader.join(timeout)
        if not line:
            log = self.log()
            self.group.kill()
            raise RuntimeError(f"no answer to {operation!r} within {timeout:.0f} s.\n{log[-20000:]}")
        return json.loads(line[0])

    def image(self, seed: int, uuid: str | None = None, max_tokens: int = 4, text: str = "What is it?") -> Answer:
        """Greedy generation about one picture."""
        return self.images([seed], [uuid], max_tokens, text)[0]

    def images(
        self,
        seeds: Sequence[int],
        uuids: Sequence[str | None] | None = None,
        max_tokens: int = 4,
        text: str = "What is it?",
    ) -> list[Answer]:
        """One batch: one request per picture. Seconds are those of the whole batch."""
        names = list(uuids or [None] * len(seeds))
        rows = self.call("generate", seeds=list(seeds), uuids=names, max_tokens=max_tokens, text=text)
        if isinstance(rows, dict):
            return [Answer(500, error=rows["error"]) for _ in seeds]
        return [Answer(**row) for row in rows]

    def log(self) -> str:
        return self.group.log()

    def stop(self) -> dict[int, str]:
        """End the child; returns the processes that did not end by themselves (they are killed)."""
        with contextlib.suppress(OSError):
            if self.group.process.stdin is not None:
                self.group.process.stdin.close()
        return self.group.reap()

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def picture(seed: int, uuid: str | None = None) -> dict[str, Any]:
    """A chat content part: the picture made from ``seed``, under a client's ``uuid`` where given."""
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": _tiny_model().image_url(seed)}}
    if uuid is not None:
        part["uuid"] = uuid
    return part


def free_port() -> int:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _tiny_model() -> Any:
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)  # the child is this file, run by its path
    from support import tiny_model

    return tiny_model


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _serve_offline() -> None:
    from pkgutil import resolve_name

    engine: Any = None
    for command in _commands():
        operation = command["operation"]
        started = time.perf_counter()
        try:
            if operation == "start":
                from vllm import LLM

                engine = LLM(**command["options"])
                result: Any = {"seconds": time.perf_counter() - started}
            elif operation == "generate":
                result = _generate(engine, command)
            elif operation == "method":
                value = getattr(engine, command["name"])(*command.get("arguments", []))
                result = {"value": repr(value)}
            elif operation == "rpc":
                result = {"values": engine.collective_rpc(resolve_name(command["function"]))}
            elif operation == "engine":
                value = getattr(engine.llm_engine, command["name"])(*command.get("arguments", []))
                result = {"value": repr(value)}
            else:
                raise ValueError(f"unknown operation {operation!r}")
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


def _generate(engine: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"], logprobs=0, ignore_eos=True)
    prompts = []
    for seed, uuid in zip(command["seeds"], command["uuids"], strict=True):
        prompt: dict[str, Any] = {"prompt": command["text"]}
        if seed is not None:
            prompt["multi_modal_data"] = {"image": _tiny_model().image(seed)}
        if uuid is not None:
            prompt["multi_modal_uuids"] = {"image": [uuid]}
        prompts.append(prompt)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    rows = []
    for output in outputs:
        completion = output.outputs[0]
        chosen = [step[token] for step, token in zip(completion.logprobs or [], completion.token_ids, strict=True)]
        rows.append(
            {
                "status": 200,
                "text": completion.text,
                "tokens": [str(item) for item in completion.token_ids],
                "logprobs": [item.logprob for item in chosen],
                "seconds": seconds,
                "finish_reason": completion.finish_reason or "",
            }
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:] != ["offline"]:
        sys.exit("usage: engine_process.py offline")
    _serve_offline()
