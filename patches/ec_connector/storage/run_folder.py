# SPDX-License-Identifier: Apache-2.0
"""What the processes of one engine on one host share: a private folder in shared memory.

It holds the entries when no disk is configured (so that the scheduler sees what a worker stored), the generation, and
the blocklist of entries that a worker could not use and could not remove. It goes with the last process of the engine,
however that ends (``shared_folder.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading

from vllm_omni_patch import ledger
from vllm_omni_patch.telemetry import shared_folder

_log = ledger.logger("ec")
_START = f"{shared_folder.PREFIX}ec-"


class RunFolder:
    """The shared folder of the engine that ``engine_id`` names; of this process alone when it is empty.

    Raises:
        OSError: no folder can be made, in ``shm_path`` nor among the temporary files.
    """

    def __init__(self, engine_id: str, shm_path: str) -> None:
        member = _join(engine_id or f"{os.getpid()}-{os.urandom(8).hex()}", shm_path)
        self._alive: shared_folder.Member | None = member
        self.path = member.path
        self.parent = os.path.dirname(self.path)
        self._generation_file, self._blocklist, self._found = map(self._file, ("generation", "blocklisted", "found"))
        self._mutex = threading.Lock()
        self._generation: tuple[tuple[int, int] | None, str] | None = None
        with contextlib.suppress(OSError):
            os.close(_new_file(self._generation_file))  # so that a missing one means that the folder was removed

    def generation(self) -> str:
        """The present generation, the same text in all processes of the engine on this host; ``""`` before the first.

        Raises:
            OSError: it cannot be read now.
        """
        known = self._generation
        try:
            status = os.stat(self._generation_file)
        except FileNotFoundError:
            return self._lost_generation()
        seen = _mark(status)
        if known is not None and known[0] == seen:
            return known[1]
        with open(self._generation_file, encoding="ascii", errors="replace") as file:
            text = file.read()
        if known is not None and not text:
            return known[1]  # a process that joined later found the folder empty
        self._generation = (seen, text)
        return text

    def _lost_generation(self) -> str:
        """The folder was removed under us: make it again, and begin a generation in it that all others will find."""
        with self._mutex:
            known = self._generation
            if self._alive is None or (known is not None and known[0] is None):
                return known[1] if known else ""
            if not self._alive.is_there():
                member = shared_folder.Member(self.path)
                self._alive.forget()
                self._alive = member
                _log.warning(
                    "The engine's shared folder %s was removed; it was created again, with a new generation.", self.path
                )
            if not os.path.exists(self._generation_file):
                self.new_generation()
        return self.generation()

    def new_generation(self) -> None:
        """Begin a generation that no earlier or other run of the engine can have had."""
        text = os.urandom(16).hex()
        temporary = self._file(f"generation.{text}")
        try:
            with open(_new_file(temporary), "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                status = os.fstat(file.fileno())
            os.rename(temporary, self._generation_file)
            self._generation = (_mark(status), text)
        except OSError as error:
            _log.warning(
                "Only this process knows of the new generation: %s. Other processes may still load entries "
                "stored before the reset.",
                error,
            )
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            seen = None
            with contextlib.suppress(OSError):
                seen = _mark(os.stat(self._generation_file))
            # In place of what the file says, until another process has begun a generation there.
            self._generation = (seen, text)

    def blocklist(self, path: str) -> None:
        """Mark an entry as unusable for every process of this engine."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._blocklist, 0o700)
            os.close(_new_file(self._blocklist_mark(path)))

    def first_to_find(self, path: str, version: str = "") -> bool:
        """Whether no process of this engine has found this version of a bad entry before; True where none can tell.

        Without a version: since an entry was last stored there.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._found, 0o700)
            os.close(_new_file(self._found_mark(path, version)))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def blocklisted(self, path: str) -> bool:
        """Whether :meth:`blocklist` was called for the entry, here or in another process of this engine."""
        return os.access(self._blocklist, os.F_OK) and os.access(self._blocklist_mark(path), os.F_OK)

    def allow(self, path: str) -> None:
        """Lift :meth:`blocklist`: another entry is there."""
        for mark in (self._blocklist_mark(path), self._found_mark(path, "")):
            with contextlib.suppress(OSError):
                os.unlink(mark)

    def room(self) -> int:
        """Bytes that entries may take of the file system below: half of it, because others live there too."""
        status = os.statvfs(self.path)
        return status.f_blocks * status.f_frsize // 2

    def close(self) -> None:
        """Leave; remove the folder when nobody else is in it. Never raises."""
        with self._mutex:
            member, self._alive = self._alive, None
        if member is not None:
            member.leave()

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _found_mark(self, path: str, version: str) -> str:
        return os.path.join(self._found, _digest(f"{path} {version}")[:40])

    def _blocklist_mark(self, path: str) -> str:
        return os.path.join(self._blocklist, _digest(path)[:40])


def _mark(status: os.stat_result) -> tuple[int, int]:
    """Tells one generation's file from the next."""
    return status.st_ino, status.st_mtime_ns


def _new_file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _join(name: str, shm_path: str) -> shared_folder.Member:
    """Take part in the folder of the engine ``name``. Whichever process comes first makes it: one that fell back to
    another place than the others would share nothing."""
    folder = f"{_START}{os.getuid()}-{_digest(name)[:32]}"
    failure: OSError | None = None
    for place in (lambda: shm_path, tempfile.gettempdir):
        try:
            parent = place()
            os.makedirs(parent, 0o700, exist_ok=True)
            member = shared_folder.Member(os.path.join(parent, folder))
        except OSError as error:
            failure = failure or error
            continue
        shared_folder.sweep(parent, lambda name: name.startswith(_START))
        return member
    raise failure or OSError("no place for shared memory")


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
