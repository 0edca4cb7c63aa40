"""Stores entries in files. ``docs/store.md`` describes the format of the files and the guarantees of the tier."""

from __future__ import annotations

import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import torch

from cacheblend_rag.errors import DamagedKVError, StoreError, StoreUnavailableError
from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, TierOptions, VerifyReport
from cacheblend_rag.store.directory import EntryDirectory, sync
from cacheblend_rag.store.files import Spool, explain, explained, file_mode, make_inside, make_root
from cacheblend_rag.store.kv import ChunkKV, KVKey
from cacheblend_rag.store.kvfile import KVFile

_log = logging.getLogger(__name__)
_SILENT_S = 60


class FileSource:
    """Reads an entry from an open file. An eviction leaves the open file readable, and its inode is not reused.

    ``preadv`` reads into memory that the reader provides. A mapped file would turn an unreadable sector or a truncation
    into a crash, and could change after its check.
    """

    def __init__(self, path: Path, fd: int):
        """Read the open file ``fd``, which is closed when the source is collected; messages name ``path``."""
        self.path, self.place = path, str(path)
        self._fd = fd
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self.inode, self.nbytes = status.st_ino, status.st_size

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`."""
        view = into.numpy().data
        done = 0
        while done < len(view):
            try:
                size = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                # EIO is no damage either: a network file system reports EIO if its server is away.
                raise StoreUnavailableError(f"{self.path} cannot be read now: {error}; check the disk.") from error
            if not size:
                raise ValueError("the file ends too early")
            done += size


class DiskStore(KVStore):
    """Stores KV entries in files under one directory, which any number of processes may use at once.

    Readers take no lock. Budgets count whole files. Each process limits the total of all processes to its own budget.
    Entries that are being written count once they are complete.
    """

    lists = True

    def __init__(self, root: Path | str, budget: int | Literal["half"] | None = None, **options: Unpack[TierOptions]):
        """Open the store at ``root``; create the directory if it is missing.

        Args:
            root: Directory of the store. A read-only directory can be read.
            budget: Most bytes on disk that a put may lead to. None: no limit. ``half``: half of the free disk space,
                counting the store's entries as free.
            options: See :class:`KVStore`. A directory is encrypted with the same keys from its first entry on, or
                never.

        Raises:
            InputError: The keys lie in the store.
            StoreError: ``root`` is not a directory or cannot be made, or holds KV that is encrypted with other keys, or
                keys are given for KV that is not encrypted.
        """
        options.setdefault("tier", "disk")
        super().__init__(None if budget == "half" else budget, **options)
        self.root = Path(root)
        self._directory = EntryDirectory(self.root / "kv")
        self._spool = Spool(self.root / "tmp")
        self._condemned: dict[KVKey, int] = {}  # damaged entries that could not be removed, by the inode of their file
        self._silent_until = 0.0
        self._prepare()
        if budget == "half":  # the store's entries count as free, so that the budget does not depend on them
            held = sum(file.nbytes for file in self._directory.scan())
            self.budget = (shutil.disk_usage(self.root).free + held) // 2

    def get(self, key: KVKey) -> KVFile | None:
        """See :meth:`KVStore.get`. The returned handle has its file open, and stays readable after an eviction."""
        found = self._open(key)
        if found is not None:
            self._directory.touch(key)
        self._events.add("misses" if found is None else "hits")
        return found

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. On return the entry is on the disk, not only in the system's cache."""
        if not replace and self.contains(key):
            self._directory.touch(key)
            return True
        encoded = self.format.encode(key, kv)
        if not self._fits(encoded.nbytes):
            return False
        with explained(self.root), self._temporary() as temporary:
            self.format.write(encoded, temporary)
            if not self._fits(temporary.stat().st_size):  # the size includes the header
                return False
            # safetensors makes files private, but all users of the directory may use its files.
            temporary.chmod(file_mode(self.root))
            sync(temporary)
            self._publish(temporary, key, replace)
        return True

    def contains(self, key: KVKey) -> bool:
        status = self._directory.status(key)
        return status is not None and status.st_ino != self._condemned.get(key)

    def delete(self, key: KVKey) -> bool:
        if self._directory.size(key) is None:
            return False
        with explained(self.root), self._directory.exclusive():
            return self._directory.remove(key) is not None

    def touch(self, key: KVKey) -> None:
        self._directory.touch(key)

    def entry(self, key: KVKey) -> EntryInfo | None:
        file = self._directory.entry(key)
        return file and EntryInfo(file.key, file.nbytes, self.tier, file.mtime_ns / 1e9)

    def entries(self) -> Iterator[EntryInfo]:
        for file in self._directory.scan():
            yield EntryInfo(file.key, file.nbytes, self.tier, file.mtime_ns / 1e9)

    def evict(self, to_bytes: int) -> int:
        with explained(self.root), self._directory.exclusive():
            return self._evict(to_bytes)

    def stats(self) -> StoreStats:
        """See :meth:`KVStore.stats`; the contents include the entries of all processes."""
        sizes, free = [file.nbytes for file in self._directory.scan()], None
        with suppress(OSError):
            free = shutil.disk_usage(self.root).free
        return replace(self._stats(len(sizes), sum(sizes)), free=free)

    def verify(self, repair: bool = True) -> VerifyReport:
        on_damage = self._discard if repair else lambda *_: None

        def opened(key: KVKey) -> KVFile | None:
            try:
                return self._file(key, on_damage)
            except FileNotFoundError:  # the entry was evicted after the scan
                return None

        return VerifyReport.of((file.key for file in self._directory.scan()), opened)

    def close(self) -> None:
        """Remove this writer's temporary directory. Handles that :meth:`get` returned stay readable."""
        with suppress(OSError), self._directory.exclusive():
            self._spool.close()

    def _prepare(self) -> None:
        entries = self._directory.path
        try:
            try:
                self._make()
            except OSError:
                # A store that is read-only or on a full disk can be opened.
                if not self.root.is_dir() or entries.exists():
                    raise
            else:
                next(entries.iterdir(), None)  # raises, so that an unreadable store does not look like an empty store
        except OSError as error:
            raise explain(error, self.root, "open") from error
        self._directory.claim(self.format.keys)
        with suppress(OSError), self._directory.exclusive():
            self._spool.sweep()
            self._directory.recount()

    def _open(self, key: KVKey) -> KVFile | None:
        try:
            found = self._file(key, self._discard)
        except (FileNotFoundError, DamagedKVError):
            return None
        except (StoreUnavailableError, OSError) as error:
            # The entry may be intact (too many open files, no permission, a stale handle), so the file stays.
            self._unreadable(key, error)
            return None
        return None if _file_of(found).inode == self._condemned.get(key) else found

    def _unreadable(self, key: KVKey, error: Exception) -> None:
        # An absent disk fails every look-up, so the warning is logged once in _SILENT_S seconds.
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SILENT_S
            _log.warning(
                "KV entry %s cannot be read now and counts as missing, as may others; it stays: %s (said once in %d s)",
                key,
                str(error),
                _SILENT_S,
            )

    def _file(self, key: KVKey, on_damage: Callable[[KVFile, DamagedKVError], None]) -> KVFile:
        return self.format.open(self._source(key), key, self.tier, on_damage, self._events)

    def _source(self, key: KVKey) -> FileSource:
        return FileSource(self._directory.file(key), self._directory.open(key))

    def _make(self) -> None:
        make_root(self.root)
        make_inside(self._directory.path)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        self._make()
        with self._directory.exclusive():
            path = self._spool.new_file()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _publish(self, temporary: Path, key: KVKey, replace: bool) -> None:
        """Make room by eviction, and move a written and synced file into the place of the entry ``key``."""
        size = temporary.stat().st_size
        with self._directory.exclusive():
            if not replace and self.contains(key):  # another writer was faster
                self._directory.touch(key)
                return
            own = self._directory.size(key) or 0
            if self.budget is not None and self._directory.used() + size - own > self.budget:
                self._directory.touch(key)  # the replaced entry is evicted last: its room is counted as free already
                self._evict(self.budget - size + own)
            changed = self._directory.publish(temporary, key, size)
            self._condemned.pop(key, None)  # a later file may get the inode of the removed file
        for directory in changed:
            sync(directory)
        self._events.add("puts")

    def _evict(self, to_bytes: int) -> int:
        """Evict entries until at most ``to_bytes`` remain; return the bytes freed. Locked."""
        freed = self._directory.evict(to_bytes)
        self._events.add("evictions", len(freed))
        return sum(freed)

    def _discard(self, entry: KVFile, damage: DamagedKVError) -> None:
        """Remove a damaged entry, unless another file has already replaced the entry."""
        self._events.add("damaged")
        # The log gets text, because a stored record would hold the exception, and by its frames the open file.
        _log.warning("%s", str(damage))
        file = _file_of(entry)
        try:
            with explained(self.root), self._directory.exclusive(), suppress(FileNotFoundError):
                # The handle has the file open, so no other file can have the inode number.
                status = self._directory.status(entry.key)
                if status is not None and status.st_ino == file.inode:
                    self._directory.remove(entry.key)
        except StoreError as error:
            _log.warning("the damaged entry stays, unused: %s", str(error))
            self._condemned[entry.key] = file.inode


def _file_of(entry: KVFile) -> FileSource:
    assert isinstance(entry.source, FileSource)
    return entry.source
