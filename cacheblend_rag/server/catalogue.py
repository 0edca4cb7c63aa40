"""Synchronises a server's chunks with the index in its store directory, registrations over HTTP, and prompts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.retrieval.registered import RegisteredChunks
from cacheblend_rag.server.keys import NO_QUOTA, Quota
from cacheblend_rag.store.files import DEFAULT_NAME, home_of
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

Origin = Literal["registered", "index", "shared"]

_log = logging.getLogger("vllm.cacheblend")  # child of vLLM's logger, which vLLM's flags configure
_REFRESH_S = 0.5
_MAX_NOTED, _MAX_NOTED_CHARACTERS = 4096, 1 << 26


class ChunkCatalogue:
    """Synchronises an engine's registry with a store directory, and knows the origin of each chunk.

    The registry finds chunks in prompts and is lost when the process ends. Chunks registered over HTTP are stored in a file
    beside the index. Chunks of the index, made by ``cacheblend index``, are never removed here. Each namespace has an index
    of its own. Thread-safe; several servers may share the directory.
    """

    def __init__(
        self,
        directory: Path | None,
        registry: ChunkRegistry,
        fingerprint: ModelFingerprint,
        namespace: str = DEFAULT_NAME,
        quota: Quota = NO_QUOTA,
        clock: Callable[[], float] = time.time,
        writer: WrittenBy | None = None,
    ):
        """Open the files in the store ``directory`` (None: store nothing) and register their chunks for this model.

        The ``quota`` limits how many chunks may be registered, and for how long by the ``clock`` (seconds since the epoch). The
        KV writer ``writer`` computes the KV of chunks; None for the model itself.

        Raises:
            StoreError: A file in the directory cannot be used.
        """
        self.warnings: list[str] = []
        self._registry, self._fingerprint, self._quota = registry, fingerprint, quota
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._noted: dict[str, int] = {}  # chunk ids with the lengths of their texts, oldest first
        self._namespace, self._directory, self._clock, self._writer = namespace, directory, clock, writer
        self._lenders: tuple[ChunkCatalogue, ...] = ()
        self._followers = [registry]  # registries of this process that learn of new chunks at once
        self._registered = RegisteredChunks(directory, fingerprint.digest, namespace)
        self._index: ChunkIndex | None = None
        registry.attach(self._registered)
        self.refresh(force=True)

    def _open_index(self) -> None:
        if self._index is not None or self._directory is None:
            return
        home = home_of(self._directory, self._namespace)
        if not ChunkIndex.exists(home):
            return
        index = ChunkIndex(home)
        made_for = index.config.model
        if made_for == self._fingerprint:
            self._registry.attach(index)
            self._index = index
            if unused := index.config.unused_by(self._writer):
                self.warnings.append(unused)
            return
        index.close()
        warning = (
            f"The index in {home} is of another model, or of another dtype or flags ({made_for.name}, "
            f"{made_for.digest[:8]}), not of {self._fingerprint.name} ({self._fingerprint.digest[:8]}): its chunks are not known "
            "to this server."
        )
        if warning not in self.warnings:
            self.warnings.append(warning)

    def read(self, lenders: Sequence[ChunkCatalogue]) -> None:
        """Make the chunks of other catalogues usable in prompts, but neither listed nor changed here.

        Raises:
            StoreError: A file of the other catalogues cannot be read.
        """
        self._lenders = tuple(lenders)
        for lender in lenders:
            lender._followers.append(self._registry)
        self.refresh(force=True)

    @property
    def _sources(self) -> list[RegisteredChunks | ChunkIndex]:
        return [source for source in (self._registered, self._index) if source is not None]

    def watch(self, then: Callable[[], None] = lambda: None) -> None:
        """Start a thread that calls :meth:`refresh` and ``then`` twice a second, so that no request waits for them."""
        self._watcher = threading.Thread(target=self._watch, args=(then,), name="cacheblend-registry", daemon=True)
        self._watcher.start()

    def _watch(self, then: Callable[[], None]) -> None:
        while not self._closing.wait(_REFRESH_S):
            try:
                self.refresh()
                then()
            except Exception:  # the next refresh may succeed
                _log.exception("What other processes have registered or indexed cannot be looked up")

    def refresh(self, force: bool = False) -> None:
        """Load the changes that other servers and ``cacheblend index`` have made.

        Without ``force``, unreadable files are left for a later call: chunks that are already known can still be served.

        Raises:
            StoreError: The files cannot be read, and ``force`` is set.
        """
        with self._lock:
            try:
                self._open_index()
                for source in self._lent():
                    self._registry.attach(source, lent=True)
                self._registry.follow()
            except StoreError as error:
                if force:
                    raise
                _log.warning("What other processes have registered or indexed is not known here: %s", error)

    def add(
        self, chunks: Sequence[Chunk], kv_bytes: Mapping[str, int] = MappingProxyType({}), holder: str = ""
    ) -> None:
        """Store and register chunks, with the bytes of their KV by chunk id; the client ``holder`` holds the chunks, too.

        The time to expiry of chunks that are registered already starts again.

        Raises:
            ConflictError: An id belongs to another text meanwhile; no chunk is stored.
            StoreError: The chunks cannot be written, are too many or have too much KV; no chunk is stored.
        """

        def check_room() -> None:
            self.check_room({chunk.id for chunk in chunks})
            if self._quota.max_kv is not None:
                self._quota.check_kv(self._registered.kv_bytes(list(kv_bytes)), sum(kv_bytes.values()))

        with self._lock:
            after = self._quota.expire_after_s
            expires = None if after is None else self._clock() + after
            self._registered.add(chunks, kv_bytes, expires, holder, check_room)
            for registry in self._followers:
                registry.follow(self._registered)

    def check_room(self, names: AbstractSet[str]) -> None:
        """Check that the chunks with these ids may be registered within the quota.

        Raises:
            StoreError: The chunks are too many, or the file cannot be read.
        """
        new = len(names - self._registered.known(list(names)))
        self._quota.check_chunks(self._registered.count() if new else 0, new)

    def expire(self) -> list[Chunk]:
        """Remove the registered chunks that have expired, and return them.

        Raises:
            StoreError: The file cannot be written.
        """
        if self._quota.expire_after_s is None:
            return []
        with self._lock:
            return self._registered.expire(self._clock())

    def note(self, chunk: Chunk) -> None:
        """Register a chunk that came with a prompt, so that its KV can be written back; a restart loses the chunk.

        Prompts may bring any number of chunks, so the oldest are removed. A chunk whose id is not its text's is ignored: a client
        could otherwise make other clients' requests that name the id use a text of its own.
        """
        if chunk.id != chunk_id(chunk.text):
            return
        with self._lock:
            if chunk.id in self._registry:
                return
            self._noted[chunk.id] = len(chunk.text)
            self._registry.add([chunk])
            while len(self._noted) > _MAX_NOTED or sum(self._noted.values()) > _MAX_NOTED_CHARACTERS:
                oldest = next(iter(self._noted))
                del self._noted[oldest]
                self._registry.remove([oldest])

    def release(self, chunk_ids: Sequence[str], holder: str) -> list[str]:
        """Remove a client from the holders of chunks; return the ids of the chunks that no other client holds.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._lock:
            return self._registered.release(chunk_ids, holder)

    def remove(self, chunk_ids: Sequence[str]) -> None:
        """Remove registered chunks; chunks of the index stay.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._lock:
            self._registered.remove(chunk_ids)
            for name in chunk_ids:
                self._noted.pop(name, None)
            self._registry.remove(chunk_ids)

    def _lent(self) -> list[RegisteredChunks | ChunkIndex]:
        return [source for lender in self._lenders for source in lender._sources]

    def origin(self, chunk_id: str) -> Origin | None:
        """Return where a chunk is stored; None for an unknown chunk, or a chunk that only came with a prompt.

        A chunk of another catalogue, which is only read here, is "shared".
        """
        if self._index is not None and self._index.known([chunk_id]):
            return "index"
        if self._registered.known([chunk_id]):
            return "registered"
        return "shared" if self._registry.is_lent(chunk_id) else None

    def stop(self) -> None:
        """Stop the thread of :meth:`watch`, and detach the chunks of other catalogues."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            for source in self._lent():
                self._registry.detach(source)
            self._lenders = ()

    def close(self) -> None:
        """Stop, and close the files; catalogues that read these chunks must have been stopped before."""
        self.stop()
        with self._lock:
            for source in self._sources:
                self._registry.detach(source)
                source.close()
