# SPDX-License-Identifier: Apache-2.0
"""The numbers of all processes of this run, as the process that serves ``/metrics`` reads them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from vllm_omni_patch.telemetry import log_lines, number_file, numbers, processes, run_folder
from vllm_omni_patch.telemetry.number_file import Key, Number

_seen: dict[str, dict[Key, Number]] = {}  # by file: its numbers as they were last read


@dataclass(frozen=True)
class Process:
    """One process of the run with its numbers. ``alive``: it runs; one on another host is taken to."""

    host: str
    pid: int
    alive: bool
    numbers: dict[Key, Number]


def all_processes() -> list[Process]:
    """This process as it is now, and every other one of the run as its file says."""
    mine = numbers.mine
    found = [Process(platform.node(), os.getpid(), True, mine.all())]
    folder = run_folder.path()
    names = os.listdir(folder) if folder is not None and os.path.isdir(folder) else []
    for name in sorted(names):
        if name.startswith(number_file.START) and name != mine.file_name():
            try:
                host, pid, born = number_file.written_by(name)
            except ValueError:
                continue
            alive = processes.is_alive(host, pid, born) is not False
            found.append(Process(host, pid, alive, _read(os.path.join(str(folder), name))))
    return found


def _read(path: str) -> dict[Key, Number]:
    """The numbers in a file; what cannot be read is as it was, and no counter is less than it was."""
    before = _seen.get(path, {})
    try:
        now = number_file.read(path)
    except Exception as error:
        log_lines.logger("metrics").debug("could not read %s: %s", path, error)
        now = {}
    for key, number in now.items():
        if number.kind == "counter" and key in before:
            now[key] = number._replace(value=max(number.value, before[key].value))
    _seen[path] = {**before, **now}
    return _seen[path]
