# SPDX-License-Identifier: Apache-2.0
"""The encoder cache in real engines: three boots show what it is for and that a failed hit hurts nobody.

One engine with vLLM's own example connector gives the reference answers, one of ours is killed, one starts again on
the same folder. More boots (roles, storages, releases) are in ``test_ec_server_more.py``, marked ``slow``.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from support import ec_faults, tiny_model
from support.engine_process import Answer, Server, left_over, picture

# Room for two images of 32 embeddings in vLLM's own cache: the third one drops the first.
ARGUMENTS = ["--max-num-batched-tokens", "64", "--no-enable-prefix-caching"]
# A trainer's way into the worker, and the routes that it calls.
TRAINED = [*ARGUMENTS, "--worker-extension-cls", "support.rlhf_worker.Trainer"]
TRAINER = {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "VLLM_SERVER_DEV_MODE": "1"}
IMAGES = (1, 2, 3, 4)
OURS = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ec-engine")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return tiny_model.make(str(folder / "model"))


@dataclass
class Reference:
    """Answers without our connector: of the checkpoint, and after the trainer's write."""

    answers: dict[int, Answer]
    written: dict[int, Answer]


@pytest.fixture(scope="module")
def both(folder: Path, model: str) -> Reference:
    """Answers of an engine with another connector and every patch of ours on. It must behave as a stock one does."""
    store = folder / "example"
    example = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }
    env = {
        **TRAINER,
        "VLLM_OMNI_PATCH_REPORT_DIR": str(folder / "example-report"),
        "LMCACHE_EC_LOCAL_DISK": str(folder / "none"),
    }
    with Server(model, str(folder), ec=example, flag="ec_connector", env=env, arguments=TRAINED) as server:
        answers = {seed: server.image(seed) for seed in IMAGES}
        assert all(answer.ok for answer in answers.values()), server.log()[-3000:]
        shutil.rmtree(store)  # that connector knows nothing of weights
        write_weights(server)
        written = {seed: server.image(seed) for seed in IMAGES}
        assert all(answer.ok and not answer.same(answers[seed], 1e-2) for seed, answer in written.items())
        assert counters(server) == {}
        assert server.stop() == {}
    assert len(list(store.glob("*/encoder_cache.safetensors"))) == len(IMAGES)
    assert not (folder / "none").exists()
    return Reference(answers, written)


@pytest.fixture(scope="module")
def reference(both: Reference) -> dict[int, Answer]:
    return both.answers


def write_weights(server: Server) -> None:
    """What RLHF trainers do: write in place by a method of their own, then reset the prefix cache."""
    status, text = server.post("/collective_rpc", {"method": "write_encoder"})
    assert status == 200 and "embed" in text, text
    assert server.post("/reset_prefix_cache")[0] == 200


def reset_without_writing(server: Server) -> list[str]:
    """What resets vLLM's caches although no weight changes; returns what this release has of it."""
    done = []
    for path in ("/pause?mode=abort&clear_cache=true", "/resume", "/sleep?level=1", "/wake_up", "/reset_encoder_cache"):
        status, text = server.post(path)
        assert status in (200, 404), f"{path}: {text}"
        if status == 200:
            done.append(path.split("?")[0])
    return done


@dataclass
class Run:
    """What a run left behind: resets that it lived through, counters before the trainer wrote and at the end, and
    answers after the write."""

    resets: list[str]
    before: dict[str, float]
    after: dict[str, float]
    written: dict[int, Answer]


@pytest.fixture(scope="module")
def run(folder: Path, model: str, reference: dict[int, Answer]) -> Run:
    """Our connector with a disk path; filled, asked again, its weights written in place, and killed."""
    env = {**TRAINER, "LMCACHE_EC_LOCAL_DISK": str(folder / "disk")}
    server = Server(model, str(folder), ec=OURS, flag="ec_connector", env=env, arguments=TRAINED)
    try:
        for _ in range(2):
            for seed in IMAGES:
                assert server.image(seed).same(reference[seed], 1e-4), server.log()[-3000:]
            wait_for(lambda: len(entries(folder / "disk")) == len(IMAGES))
            resets = reset_without_writing(server)
        counted(server, "hits", len(IMAGES) if "/reset_encoder_cache" in resets else len(IMAGES) - 2)
        counted(server, "stored", len(IMAGES))
        before, known = counters(server), set(entries(folder / "disk"))
        write_weights(server)
        written = {seed: server.image(seed) for seed in IMAGES}
        counted(server, "stored", 2 * len(IMAGES))
        for _ in range(2):
            assert all(server.image(seed).same(written[seed], 1e-4) for seed in IMAGES)
        counted(server, "hits", before["hits"] + len(IMAGES))
        counted(server, "fallbacks", 1)
        after = counters(server)
    finally:
        shared = server.group.shared_folders()
        server.group.kill()
        assert len(shared) == 2 and left_over(shared) == [], "the numbers and the cache's, though nobody could clear"
    for path in set(entries(folder / "disk")) - known:
        os.unlink(path)  # of the generation that ended with the run; the tests below count the others
    return Run(resets, before, after, written)


@pytest.fixture(scope="module")
def killed(run: Run) -> dict[str, float]:
    return run.before


@pytest.fixture(scope="module")
def restarted(folder: Path, model: str, killed: dict[str, float]) -> Iterator[tuple[Server, dict[str, str]]]:
    """The same folder after the kill, with the means to damage entries."""
    env = {
        "LMCACHE_EC_LOCAL_DISK": str(folder / "disk"),
        # Beside the entries on disk: what the disk cannot take for a while is damaged there.
        "LMCACHE_EC_SHM_PATH": str(folder / "disk"),
        "VLLM_OMNI_PATCH_REPORT_DIR": str(folder / "report"),
        **ec_faults.prepare(str(folder / "faults")),
    }
    with Server(model, str(folder), ec=OURS, flag="ec_connector", env=env, arguments=ARGUMENTS) as server:
        yield server, env


def counters(server: Server) -> dict[str, float]:
    """``vllm_omni_patch_ec_*`` on ``/metrics``, by name without prefix and ``_total``."""
    found = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith("vllm_omni_patch_ec_"):
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("vllm_omni_patch_ec_").removesuffix("_total")] = float(value)
    return found


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def counted(server: Server, name: str, at_least: float) -> float:
    """The counter once it is that high: workers pass their numbers on at intervals."""
    wait_for(lambda: counters(server).get(name, 0) >= at_least)
    return counters(server)[name]


def entries(root: Path) -> list[str]:
    return glob.glob(str(root / "**" / "*.ec"), recursive=True)


def test_found_again_by_another_process_and_after_eviction(killed: dict[str, float]) -> None:
    """The scheduler sees what the worker stored, and what vLLM's own cache dropped comes back from the store."""
    assert killed["hits"] >= len(IMAGES) - 2
    assert killed["stored"] >= len(IMAGES)


def test_resets_that_change_no_weight_begin_no_epoch(run: Run, killed: dict[str, float]) -> None:
    """Sleep and wake-up, pause, ``reset_encoder_cache``: all images stay stored, and were stored once.

    vLLM's CPU worker leaves its weights where they are; what the engine does around it is the same everywhere.
    """
    if not {"/sleep", "/wake_up", "/reset_encoder_cache"} <= set(run.resets):
        pytest.skip(f"this release has only {run.resets}")
    assert killed["hits"] == len(IMAGES) and killed["stored"] == len(IMAGES)
    assert killed.get("fallbacks", 0) == 0


def test_weights_written_in_place_are_answered_as_without_a_cache(run: Run, both: Reference) -> None:
    """The first item was promised before the worker saw the write; the others miss. Afterwards hits go on."""
    for seed in IMAGES:
        assert run.written[seed].same(both.written[seed], 1e-4)
    assert run.after["fallbacks"] == 1 and run.after["stored"] == 2 * len(IMAGES)


def test_found_again_after_a_kill(restarted: Any, reference: dict[int, Answer], folder: Path) -> None:
    server, _ = restarted
    before = {path: os.stat(path).st_mtime_ns for path in entries(folder / "disk")}
    for seed in IMAGES:
        assert server.image(seed).same(reference[seed], 1e-4)
    assert counted(server, "hits", len(IMAGES)) == len(IMAGES)
    assert counters(server).get("stored", 0) == 0
    assert {path: os.stat(path).st_mtime_ns for path in entries(folder / "disk")}.keys() == before.keys()


def test_the_disk_holds_no_client_text_and_is_private(restarted: Any, reference: Any, folder: Path) -> None:
    server, _ = restarted
    name = "../../x\u0000" + "\u00e4" * 3000
    assert server.image(9, uuid=name).ok
    store = folder / "disk"
    wait_for(lambda: len(entries(store)) == len(IMAGES) + 1)
    for path in store.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 and path.name.isascii() and len(path.name) < 120
    assert not (folder.parent / "x").exists()


@pytest.mark.parametrize("kind", list(ec_faults.FAULTS))
def test_a_failed_load_is_encoded(restarted: Any, reference: dict[int, Answer], folder: Path, kind: str) -> None:
    server, env = restarted
    seed = IMAGES[0]
    ec_faults.repair(str(folder / "disk"))
    wait_for(lambda: _stored_and_dropped(server, folder, seed))
    before = len(ec_faults.done(env))
    ec_faults.ask(env, kind, str(folder / "disk"))
    answer = server.image(seed)
    assert not ec_faults.withdraw(env) and ec_faults.done(env)[before]["files"] == 1
    assert answer.same(reference[seed], 1e-4)
    assert server.image(IMAGES[1]).same(reference[IMAGES[1]], 1e-4)


def _stored_and_dropped(server: Server, folder: Path, seed: int) -> bool:
    """Ask about ``seed`` and then others, so that its entry is stored and vLLM's own cache no longer has it."""
    for other in (seed, *IMAGES[1:]):
        assert server.image(other).ok
    time.sleep(0.2)
    return len(entries(folder / "disk")) >= len(IMAGES)


def test_faults_are_counted_and_said(restarted: Any) -> None:
    server, env = restarted
    assert counted(server, "fallbacks", len(ec_faults.done(env))) >= len(ec_faults.FAULTS)
    assert "is unusable" in server.log()


def test_embeddings_are_not_accepted_unasked(restarted: Any) -> None:
    """vLLM from 0.30.0 would take them from any client of a consumer, and a wrong shape would end the engine."""
    server, _ = restarted
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    refused = server.chat(part)
    assert 400 <= refused.status < 500 and "enable-mm-embeds" in refused.error.replace("_", "-")
    assert server.healthy()


def test_every_process_accounts_for_itself_and_ends(restarted: Any, folder: Path) -> None:
    server, _ = restarted
    assert server.chat(picture(1)).ok
    assert server.stop() == {}
    ledgers = [json.loads(path.read_text()) for path in (folder / "report").glob("ledger-*.json")]
    applied = {entry["target"] for one in ledgers for entry in one["entries"] if entry["state"] == "applied"}
    assert any("ECConnectorFactory" in target for target in applied)
    assert any("_execute_mm_encoder" in target for target in applied)
    assert not [entry for one in ledgers for entry in one["entries"] if entry["state"] == "failed"]
