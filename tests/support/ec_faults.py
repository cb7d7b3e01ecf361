# SPDX-License-Identifier: Apache-2.0
"""Damages encoder cache entries inside a running vLLM, after the scheduler's yes and before the worker's load.

From outside that moment cannot be met. So a ``sitecustomize`` for the vLLM processes (``prepare``) wraps the
scheduler's last act of a step, reads the fault that is asked for from a file (``ask``), and applies it to the entries
that this step promises. Everything else in those processes is the real thing.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

SITE = """
import os, sys
sys.path.insert(0, {here!r})
import wrapt
def _arm(module):
    from support import ec_faults
    ec_faults.arm(module)
def _arm_worker(module):
    from support import ec_faults
    ec_faults.arm_worker(module)
def _impatient(module):
    from support import ec_faults
    ec_faults.impatient(module)
wrapt.register_post_import_hook(_impatient, "vllm_omni_patch.patches.ec_connector.config")
wrapt.register_post_import_hook(_arm, "vllm_omni_patch.patches.ec_connector.vllm.scheduler")
wrapt.register_post_import_hook(_arm_worker, "vllm_omni_patch.patches.ec_connector.vllm.worker")
"""
_FILE = "EC_FAULT_FILE"


def prepare(folder: str) -> dict[str, str]:
    """Write the ``sitecustomize`` and return the environment that makes the vLLM processes use it."""
    site = os.path.join(folder, "site")
    os.makedirs(site, exist_ok=True)
    with open(os.path.join(site, "sitecustomize.py"), "w") as file:
        file.write(SITE.format(here=os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return {"PYTHONPATH": site, _FILE: os.path.join(folder, "fault.json")}


def impatient(module: Any) -> None:
    """Try a storage that failed again after 0.1 s, so that a test of faults need not wait for 5 s after each."""
    load = module.load_ec_config
    module.load_ec_config = lambda *args: dataclasses.replace(load(*args), retry_seconds=0.1)


def ask(environment: dict[str, str], kind: str, root: str) -> None:
    """Ask for ``kind`` on the entries under ``root`` that the next step promises."""
    path = environment[_FILE]
    with open(f"{path}.new", "w") as file:
        json.dump({"kind": kind, "root": root}, file)
    os.replace(f"{path}.new", path)


def done(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Faults applied so far, in order."""
    try:
        with open(environment[_FILE] + ".done") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def withdraw(environment: dict[str, str]) -> bool:
    """Take back a fault that was not applied; whether there was one."""
    try:
        os.unlink(environment[_FILE])
    except FileNotFoundError:
        return False
    return True


def repair(root: str) -> None:
    """Take away what a fault left in the place of an entry or a folder, as an operator would."""
    for path in glob.glob(os.path.join(root, "**", "*.ec"), recursive=True):
        if os.path.isdir(path):
            os.rmdir(path)
    for path in glob.glob(os.path.join(root, "**", "ec-v1", "*"), recursive=True):
        if os.path.isfile(path) and os.path.basename(path) not in ("lock", "alive") and os.path.getsize(path) == 0:
            os.unlink(path)


def arm(module: Any) -> None:
    """In a vLLM process: apply the asked-for fault once a step's promises stand."""
    original = module.SchedulerSide.plan

    def plan(self: Any) -> Any:
        result = original(self)
        if result.loads and os.path.exists(os.environ[_FILE]):
            with open(os.environ[_FILE]) as file:
                wanted = json.load(file)
            os.unlink(os.environ[_FILE])
            for load in result.loads:
                _apply(wanted, load, self._engine)
                # As for a rank on another host, which cannot map what the scheduler has verified.
                result.places[load.mm_hash] = replace(result.places[load.mm_hash], host="another host")
        return result

    module.SchedulerSide.plan = plan


def arm_worker(module: Any) -> None:
    """In a worker that is not the first rank: lose what is loaded while the file beside the fault file is there."""
    original = module.WorkerSide._open

    def lose(self: Any, load: Any, *arguments: Any) -> Any:
        tensor = original(self, load, *arguments)
        if not self._stores and os.path.exists(os.environ[_FILE] + ".one-rank"):
            with open(os.environ[_FILE] + ".done", "a") as file:
                file.write(json.dumps({"kind": "lost on one rank", "key": load.key, "files": 1}) + "\n")
            return None
        return tensor

    module.WorkerSide._open = lose


def one_rank(environment: dict[str, str], lose: bool) -> None:
    """Make every rank but the first lose what it loads, or stop that."""
    path = environment[_FILE] + ".one-rank"
    if lose:
        with open(path, "w"):
            pass
    else:
        os.unlink(path)


def entry_files(root: str, key: str) -> list[str]:
    """Files of the entry ``key`` under ``root``, whatever model they belong to."""
    from vllm_omni_patch.patches.ec_connector.storage.key import stable_u64

    return glob.glob(os.path.join(root, "**", f"*@{stable_u64(key):016x}@*.ec"), recursive=True)


def _apply(wanted: dict[str, str], load: Any, engine: Any) -> None:
    files = entry_files(wanted["root"], load.key)
    for path in files:
        FAULTS[wanted["kind"]](path, load, engine)
    with open(os.environ[_FILE] + ".done", "a") as file:
        file.write(json.dumps({"kind": wanted["kind"], "key": load.key, "files": len(files), "at": time.time()}) + "\n")


def _overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


def _flip(path: str, at: int) -> None:
    with open(path, "rb") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
    _overwrite(path, at, bytes([byte ^ 0x41]))


def _replace(path: str, data: bytes) -> None:
    with open(f"{path}.x", "wb") as file:
        file.write(data)
    os.replace(f"{path}.x", path)


def _another_entry(path: str, load: Any, engine: Any) -> None:
    others = [p for p in glob.glob(os.path.join(os.path.dirname(path), "*.ec")) if p != path]
    with open(others[0] if others else __file__, "rb") as file:
        _replace(path, file.read())


def _other_length(path: str, load: Any, engine: Any) -> None:
    """A sound entry of the same id and model that has seven rows: a client's uuid used again for another input."""
    import torch

    from vllm_omni_patch.patches.ec_connector.storage.entry import Entry, bytes_of

    payload = bytes_of(torch.ones(7, 64).view(torch.uint8).view(-1))
    entry = Entry.describe(engine._key(load.key), 7, 64, "float32", payload, {})
    _replace(path, entry.header + bytes(payload))


def _to_directory(path: str, load: Any, engine: Any) -> None:
    os.unlink(path)
    os.mkdir(path)


def _to_fifo(path: str, load: Any, engine: Any) -> None:
    os.unlink(path)
    os.mkfifo(path)


def _to_symlink(path: str, load: Any, engine: Any) -> None:
    os.rename(path, f"{path}.moved")
    os.symlink(f"{path}.moved", path)


def _folder_gone(path: str, load: Any, engine: Any) -> None:
    shutil.rmtree(os.path.dirname(path))


def _folder_is_a_file(path: str, load: Any, engine: Any) -> None:
    folder = os.path.dirname(path)
    shutil.rmtree(folder)
    with open(folder, "w"):
        pass


FAULTS: dict[str, Callable[[str, Any, Any], None]] = {
    "deleted": lambda path, load, engine: os.unlink(path),
    "cut in the payload": lambda path, load, engine: os.truncate(path, os.path.getsize(path) - 100),
    "cut in the header": lambda path, load, engine: os.truncate(path, 50),
    "emptied": lambda path, load, engine: os.truncate(path, 0),
    "bit flipped in the payload": lambda path, load, engine: _flip(path, -1),
    "bit flipped in the first payload byte": lambda path, load, engine: _flip(path, -8192),
    "bit flipped in the header": lambda path, load, engine: _flip(path, 30),
    "magic lost": lambda path, load, engine: _overwrite(path, 0, b"12345678"),
    "garbage": lambda path, load, engine: _replace(path, random.Random(1).randbytes(9000)),
    "zeroed": lambda path, load, engine: _overwrite(path, 0, bytes(os.path.getsize(path))),
    "grown": lambda path, load, engine: os.truncate(path, 1 << 30),
    "another entry": _another_entry,
    "other length": _other_length,
    "a directory": _to_directory,
    "a pipe": _to_fifo,
    "a symbolic link": _to_symlink,
    "folder removed": _folder_gone,
    "folder turned into a file": _folder_is_a_file,
}
# Faults that only hold for a user whom permissions bind.
if os.geteuid() != 0:
    FAULTS["unreadable"] = lambda path, load, engine: os.chmod(path, 0)
