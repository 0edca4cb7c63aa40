"""Manages the directory of entries that all processes on one store share. A process must hold the lock to change it."""

from __future__ import annotations

import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store.files import (
    DEFAULT_NAME,
    LOCK_TIMEOUT_S,
    create_file,
    explained,
    file_mode,
    make_inside,
    open_file,
    read_text,
    write_text,
)
from cacheblend_rag.store.kv import KVKey, checked_key, is_key
from cacheblend_rag.store.source import Keyring

_USAGE = struct.Struct("<qq")


class EntryFile(NamedTuple):
    """Describes the file of one entry. ``mtime_ns`` is the time of the entry's last use, by which eviction orders."""

    mtime_ns: int
    key: KVKey
    nbytes: int


class EntryDirectory:
    """Manages ``<root>/kv``: one file per entry, a lock, and a count of the bytes in use.

    The count is an upper bound at every instant, also after a crash: the count is raised before a file appears and
    lowered after a file is gone. A put therefore need not list the directory. :meth:`recount` makes the count exact,
    when the store is opened and when eviction has no candidates left.
    """

    def __init__(self, path: Path):
        """Describe the directory at ``path``, without reading or writing any file."""
        self.path = path
        self.mutex = threading.RLock()  # threads queue here, so that they do not poll for the file lock
        self._usage, self._encrypted = path / "usage", path / "encrypted"
        self._candidates: dict[KVKey, EntryFile] = {}
        self._clock_lock = threading.Lock()
        self._clock_ns = 0

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock against all threads and processes. Callers of methods marked "Locked" must hold the lock.

        Raises:
            filelock.Timeout: Another process or thread has held the lock for ``LOCK_TIMEOUT_S``.
            OSError: The lock file cannot be written.
        """
        # Each call makes a new FileLock, because a FileLock made before a fork cannot be used after the fork.
        mode = file_mode(self.path)
        with self.mutex, FileLock(self.path / "lock", timeout=LOCK_TIMEOUT_S, mode=mode, poll_interval=0.005):
            yield

    def claim(self, keys: Keyring | None) -> None:
        """Check that the entries are encrypted with ``keys``; in an empty directory, record the id of the default key.

        Raises:
            InputError: The keys lie in the store.
            StoreError: The entries are encrypted with other keys, or ``keys`` are given and the entries are not
                encrypted, or the entries are encrypted and ``keys`` is None, or the id cannot be recorded.
        """
        with explained(self.path.parent):
            noted = (read_text(self._encrypted) or "").strip()
            if keys is None:
                if noted:
                    raise StoreError(
                        f"The KV in {self.path} is encrypted: name the directory of its keys, by --encrypt KEYS or in the "
                        "address, as file:///kv?encrypt=KEYS."
                    )
                return
            place, own = keys.directory, keys.name(DEFAULT_NAME).id
            if place.resolve().is_relative_to(self.path.parent.resolve()):
                raise InputError(
                    f"The keys in {place} would lie in the store that they encrypt, and who has it would have them. "
                    "Move them elsewhere."
                )
            if not noted:
                with self.exclusive():
                    if self.scan():
                        raise StoreError(
                            f"{self.path} holds KV that is not encrypted, and would stay so. Delete that directory (KV is "
                            "computed anew, documents stay indexed), or give another one."
                        )
                    write_text(self._encrypted, f"{own}\n")
            elif noted != own:
                raise StoreError(
                    f"The KV in {self.path} is encrypted by the key {noted}, and {place} holds the key {own}. Name the "
                    "directory with the right one; if it is lost, delete the KV, which is computed anew."
                )

    def file(self, key: KVKey) -> Path:
        """Return the path of ``key``'s file, whether or not it exists.

        Raises:
            InputError: ``key`` is not a KV key.
        """
        checked_key(key)
        return self.path / key[:2] / f"{key}.safetensors"

    @contextmanager
    def _shard(self, key: KVKey) -> Iterator[tuple[str, int]]:
        """Open the directory of ``key``'s file; yield the file's name and the directory's descriptor.

        The method refuses a link: an attacker could place one to have other files read, touched, replaced or deleted.

        Raises:
            InputError: ``key`` is not a KV key.
            OSError: The directory is missing, is a link or a file, or cannot be opened.
        """
        path = self.file(key)
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield path.name, fd
        finally:
            os.close(fd)

    def open(self, key: KVKey) -> int:
        """Open ``key``'s file for reading and return the descriptor; raises as :meth:`_shard` and ``open_file`` do."""
        with self._shard(key) as (name, shard):
            return open_file(name, os.O_RDONLY, dir_fd=shard)

    def status(self, key: KVKey) -> os.stat_result | None:
        """Return the stat result of ``key``'s file, or None if there is no regular file."""
        with suppress(OSError), self._shard(key) as (name, shard):
            found = os.stat(name, dir_fd=shard, follow_symlinks=False)
            return found if stat.S_ISREG(found.st_mode) else None
        return None

    def entry(self, key: KVKey) -> EntryFile | None:
        """Return ``key``'s file as :meth:`scan` lists it, or None if the file does not exist."""
        status = self.status(key)
        return None if status is None else EntryFile(status.st_mtime_ns, key, status.st_size)

    def size(self, key: KVKey) -> int | None:
        """Return the size of ``key``'s file in bytes, or None if the file does not exist."""
        file = self.entry(key)
        return file and file.nbytes

    def touch(self, key: KVKey) -> None:
        """Mark ``key``'s file as used now; do nothing if the file does not exist or may not be changed."""
        with suppress(OSError), self._shard(key) as (name, shard):
            os.utime(name, ns=self._now(), dir_fd=shard, follow_symlinks=False)

    def _now(self) -> tuple[int, int]:
        """Return the time of a use as a pair for the argument ``ns`` of ``os.utime``."""
        with self._clock_lock:
            self._clock_ns = max(time.time_ns(), self._clock_ns + 1)  # no two uses have the same time
            return self._clock_ns, self._clock_ns

    def scan(self) -> list[EntryFile]:
        """List all entries, least recently used first."""
        found = []
        for shard in _listing(self.path):
            if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
                continue
            for file in _listing(shard.path):
                key = KVKey(file.name.removesuffix(".safetensors"))
                if key == file.name or not is_key(key):
                    continue
                with suppress(OSError):  # the file was evicted after the listing, or cannot be read now
                    status = file.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    found.append(EntryFile(status.st_mtime_ns, key, status.st_size))
        return sorted(found)

    def used(self) -> int:
        """Return an upper bound on the bytes in use. Locked."""
        with suppress(OSError, struct.error):
            count: int
            count, check = _USAGE.unpack(self._read_usage())
            if count >= 0 and check == ~count:
                return count
        return self.recount()

    def recount(self) -> int:
        """Make the count and the candidates for eviction exact, and return the count. Locked."""
        files = self.scan()
        if files:  # the next use must be later than all earlier uses, even if the machine's clock was set back
            with self._clock_lock:
                self._clock_ns = max(self._clock_ns, files[-1].mtime_ns)
        self._candidates = {file.key: file for file in files}
        count = sum(file.nbytes for file in files)
        self._write_usage(count)
        return count

    def publish(self, temporary: Path, key: KVKey, nbytes: int) -> list[Path]:
        """Move a written and synced file of ``nbytes`` into the place of the entry ``key``. Locked.

        Returns:
            The directories to sync (without the lock), so that the entry outlasts a power failure.
        """
        directory = self.file(key).parent
        with suppress(OSError):
            os.utime(temporary, ns=self._now(), follow_symlinks=False)
        changed = [directory]
        if not directory.exists():
            make_inside(directory)
            changed.append(self.path)
        with self._shard(key) as (name, shard):
            self._write_usage(max(0, self.used() + nbytes - (self.size(key) or 0)))
            os.replace(temporary, name, dst_dir_fd=shard)
        return changed

    def remove(self, key: KVKey) -> int | None:
        """Remove an entry and return its size, or None if there is no entry. Locked."""
        size = self.size(key)
        if size is None:
            return None
        used = self.used()
        self._unlink(key)
        self._write_usage(max(0, used - size))
        return size

    def evict(self, limit: int) -> list[int]:
        """Remove least recently used entries until at most ``limit`` bytes are in use. Locked.

        Candidates come from the last :meth:`recount`. A candidate that was used or replaced since then has another
        mtime and is newer than all remaining candidates, so the order is exact without listing the directory again.

        Returns:
            The size of each removed entry.
        """
        used = self.used()
        exact = False
        freed: list[int] = []
        try:
            while used > limit:
                victim = next(iter(self._candidates.values()), None)
                if victim is None:
                    if exact:
                        break
                    used, exact = self.recount(), True
                elif self.entry(victim.key) != victim:
                    del self._candidates[victim.key]
                else:
                    with suppress(FileNotFoundError):
                        self._unlink(victim.key)
                    del self._candidates[victim.key]
                    used -= victim.nbytes
                    freed.append(victim.nbytes)
        finally:
            self._write_usage(used)
        return freed

    def _unlink(self, key: KVKey) -> None:
        with self._shard(key) as (name, shard):
            os.unlink(name, dir_fd=shard)

    def _read_usage(self) -> bytes:
        fd = open_file(self._usage, os.O_RDONLY)
        try:
            return os.read(fd, _USAGE.size + 1)
        finally:
            os.close(fd)

    def _write_usage(self, count: int) -> None:
        try:
            with suppress(FileExistsError):
                create_file(self._usage)
            # Writing in place and within one sector works on a full disk. The complement marks a valid count.
            fd = open_file(self._usage, os.O_WRONLY)
            try:
                os.write(fd, _USAGE.pack(count, ~count))
            finally:
                os.close(fd)
        except OSError:
            self._usage.unlink(missing_ok=True)  # a missing count is recounted, a wrong count would be used


def sync(path: Path) -> None:
    """Force a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _listing(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
