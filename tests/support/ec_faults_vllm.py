# SPDX-License-Identifier: Apache-2.0
"""Inject faults into the encoder cache of a real vLLM, between the scheduler's yes and the worker's load.

``python scripts/fault_ec_vllm.py [--faults 100] [--storage disk|memory|both]``

Boots vLLM once without a cache for the reference answers, then once per storage with ours. Each round asks about an
image whose entry is stored and no longer in vLLM's own cache, and damages that entry once it was promised. Meanwhile
another client asks text questions. Exit status 0: no engine death, every answer equal to the reference, no process
left behind, every fault really applied.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import tempfile
import threading
import time
from typing import Any

from support import ec_faults, engine_process, tiny_model

# Room for two images of 32 embeddings in vLLM's own cache: the third one drops the first.
ARGUMENTS = ["--max-num-batched-tokens", "64", "--no-enable-prefix-caching"]
IMAGES = range(100, 106)
TEXT_TOLERANCE = 1e-3  # text is answered in batches of changing size, whose sums differ in the last digits
EC = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=100, help="faults in all (default 100)")
    parser.add_argument("--storage", choices=("disk", "memory", "both"), default="both")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="fault-ec-")
    model = tiny_model.make(os.path.join(folder, "model"))
    with engine_process.Server(model, folder, arguments=ARGUMENTS, name="reference") as server:
        reference = {seed: server.image(seed) for seed in IMAGES}
        text = server.chat()
        leaked = len(server.stop())
    if not all(answer.ok for answer in reference.values()):
        print("the reference run failed:", reference)
        return 1
    storages = ["disk", "memory"] if options.storage == "both" else [options.storage]
    totals = {"faults": 0, "wrong": 0, "deaths": 0, "leaked": leaked, "text": 0, "text wrong": 0}
    for storage in storages:
        wanted = -(-options.faults // len(storages))
        for key, value in run(storage, wanted, folder, model, reference, text).items():
            totals[key] += value
    print(
        f"{totals['faults']} faults of {len(ec_faults.FAULTS)} kinds on {', '.join(storages)}: "
        f"{totals['deaths']} engine deaths, {totals['wrong']} wrong answers, {totals['text wrong']} of "
        f"{totals['text']} other answers disturbed, {totals['leaked']} processes left"
    )
    good = totals["faults"] >= options.faults and not any(
        totals[k] for k in ("deaths", "wrong", "leaked", "text wrong")
    )
    print("fault_ec_vllm:", "ok" if good else f"FAILED, logs in {folder}")
    return 0 if good else 1


def run(storage: str, wanted: int, folder: str, model: str, reference: dict[int, Any], text: Any) -> dict[str, int]:
    """``wanted`` faults on one storage, in one engine."""
    env = ec_faults.prepare(os.path.join(folder, storage))
    # One folder for both tiers: what the disk cannot take for a while goes to shared memory, and is damaged there.
    root = tempfile.mkdtemp(prefix="fault-ec-", dir="/dev/shm")
    env["LMCACHE_EC_SHM_PATH"] = root
    if storage == "disk":
        env["LMCACHE_EC_LOCAL_DISK"] = os.path.join(root, "disk")
    counted = {"faults": 0, "wrong": 0, "deaths": 0, "leaked": 0, "text": 0, "text wrong": 0}
    with engine_process.Server(
        model, folder, ec=EC, flag="ec_connector", env=env, arguments=ARGUMENTS, name=f"faults-{storage}"
    ) as server:
        stop = threading.Event()
        other = threading.Thread(target=ask_text, args=(server, text, stop, counted), daemon=True)
        other.start()
        kinds = list(ec_faults.FAULTS)
        for number in range(2 * wanted):
            if counted["faults"] >= wanted:
                break
            kind, seed = kinds[number % len(kinds)], list(IMAGES)[number % len(IMAGES)]
            # The other images, last of all two that push ``seed`` out of vLLM's own cache.
            for filler in (s for s in IMAGES if s != seed):
                counted["wrong"] += not server.image(filler).same(reference[filler], TEXT_TOLERANCE)
            store_all(server, root, reference, seed)
            before = len(ec_faults.done(env))
            ec_faults.ask(env, kind, root)
            answer = server.image(seed)
            ec_faults.withdraw(env)
            missed = not any(one["files"] for one in ec_faults.done(env)[before:])
            counted["faults"] += not missed
            if not answer.same(reference[seed], TEXT_TOLERANCE):
                counted["wrong"] += 1
                print(f"{storage}, {kind}: image {seed} answered {answer}, not {reference[seed]}")
            elif missed:
                print(f"{storage}, {kind}: image {seed} was not promised, so nothing was damaged")
            if not server.healthy():
                counted["deaths"] += 1
                print(f"{storage}, {kind}: the engine is dead\n{server.log()[-4000:]}")
                break
        stop.set()
        other.join(30)
        metrics = server.get("/metrics").splitlines()
        print(f"{storage}:", *(line for line in metrics if line.startswith("vllm_omni_patch_ec")))
        counted["leaked"] = len(server.stop())
    shutil.rmtree(root, ignore_errors=True)
    return counted


def store_all(server: Any, root: str, reference: dict[int, Any], seed: int) -> None:
    """Wait until as many entries as images are stored; a fault of before may have taken some away."""
    for _ in range(8):
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            found = glob.glob(os.path.join(root, "**", "*.ec"), recursive=True)
            if sum(map(os.path.isfile, found)) >= len(reference):
                return
            time.sleep(0.01)
        ec_faults.repair(root)
        for image in (seed, *(s for s in reference if s != seed)):
            server.image(image)


def ask_text(server: Any, text: Any, stop: threading.Event, counted: dict[str, int]) -> None:
    """Another client: text questions for as long as the faults go on."""
    while not stop.is_set():
        answer = server.chat()
        counted["text"] += 1
        counted["text wrong"] += not answer.same(text, TEXT_TOLERANCE)
        time.sleep(0.02)
