"""Writes temporary files, and tells those of dead writers from those of living ones."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.store.private import file_mode, make_inside

_LOCK_NAME = re.compile(r"[0-9a-f]{16}\.lock")  # whatever else stands in the directory is not ours to remove


class Spool:
    """Is a writer's own directory ``<root>/tmp/<token>``, beside a lock file that the writer holds while it lives.

    The system frees the lock when the process dies, however it dies; process ids could be reused or of another host.
    Every method needs the store's lock, so that a spool is never seen between its creation and its locking.
    """

    def __init__(self, path: Path):
        """Use ``path`` (``<root>/tmp``) once there is something to write; touches nothing yet."""
        self.path = path
        self._lock: FileLock | None = None
        self._own: Path | None = None
        self._pid = 0

    def new_file(self) -> Path:
        """Return the name of a file that no other writer uses. The directory of the file exists."""
        # A forked child must not count on its parent's lock, nor anyone on a lock file that is gone.
        if self._own is None or self._pid != os.getpid() or not _lock_of(self._own).exists():
            self._register()
        assert self._own is not None
        make_inside(self._own)
        return self._own / secrets.token_hex(8)

    def sweep(self) -> None:
        """Remove what dead writers left behind."""
        for path in self.path.glob("*.lock"):
            if not _LOCK_NAME.fullmatch(path.name):
                continue
            with suppress(Timeout), FileLock(path, timeout=0, mode=file_mode(self.path)):
                self._discard(path.with_suffix(""))

    def close(self) -> None:
        """Remove this writer's directory and free its lock."""
        if self._own is not None and self._lock is not None and self._pid == os.getpid():
            self._discard(self._own)
            self._lock.release()
        self._own = self._lock = None

    def _register(self) -> None:
        make_inside(self.path)
        self._own = self.path / secrets.token_hex(8)
        self._lock = FileLock(_lock_of(self._own), mode=file_mode(self.path))
        self._lock.acquire(timeout=0)
        self._pid = os.getpid()

    @staticmethod
    def _discard(directory: Path) -> None:
        # The lock file goes last: after a crash in between, the next sweep still finds the directory.
        shutil.rmtree(directory, ignore_errors=True)
        _lock_of(directory).unlink(missing_ok=True)


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")
