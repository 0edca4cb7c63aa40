"""Keeps a server's chunks in step with the index in its store directory, registration over HTTP, and prompts."""

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

_log = logging.getLogger("vllm.cacheblend")  # below vLLM's logger, whose handlers and level its flags set
_REFRESH_S = 0.5
_MAX_NOTED, _MAX_NOTED_CHARACTERS = 4096, 1 << 26


class ChunkCatalogue:
    """Keeps an engine's registry in step with a store directory, and knows where each chunk comes from.

    The registry finds chunks in prompts and forgets them with the process. Chunks registered over HTTP are kept in a file
    beside the index; those of the index that ``cacheblend index`` made stay the index's and are not removed here. Each
    namespace has an index of its own. Thread-safe; several servers may share the directory.
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
        """Open the files in the store ``directory`` (None: keep nothing) and register what they hold for this model.

        The ``quota`` limits what may be registered, and how long it stays by the ``clock`` (seconds since the epoch). ``writer``
        computes the KV of chunks; None for the model itself.

        Raises:
            StoreError: A file there cannot be used.
        """
        self.warnings: list[str] = []
        self._registry, self._fingerprint, self._quota = registry, fingerprint, quota
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._noted: dict[str, int] = {}  # with the lengths of their texts, in the order they came
        self._namespace, self._directory, self._clock, self._writer = namespace, directory, clock, writer
        self._lenders: tuple[ChunkCatalogue, ...] = ()
        self._followers = [registry]  # of this process: readers are told at once of what is registered here
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
        """Know the chunks of other catalogues, too, from now on, without changing or listing them.

        Raises:
            StoreError: They cannot be read.
        """
        self._lenders = tuple(lenders)
        for lender in lenders:
            lender._followers.append(self._registry)
        self.refresh(force=True)

    @property
    def _sources(self) -> list[RegisteredChunks | ChunkIndex]:
        return [source for source in (self._registered, self._index) if source is not None]

    def watch(self, then: Callable[[], None] = lambda: None) -> None:
        """Do :meth:`refresh` and ``then`` twice a second from now on, in a thread of its own, so that no request waits for it."""
        self._watcher = threading.Thread(target=self._watch, args=(then,), name="cacheblend-registry", daemon=True)
        self._watcher.start()

    def _watch(self, then: Callable[[], None]) -> None:
        while not self._closing.wait(_REFRESH_S):
            try:
                self.refresh()
                then()
            except Exception:  # the next look may find it right
                _log.exception("What other processes have registered or indexed cannot be looked up")

    def refresh(self, force: bool = False) -> None:
        """Take up what other servers and ``cacheblend index`` have changed.

        Without ``force`` files that cannot be read for now are left for later: what is known already can still be served.

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
        """Keep and register chunks, with the size of their KV by their ids; the client ``holder`` holds them from now on, too.

        Those that are registered already are from now on, as to when they expire.

        Raises:
            ConflictError: An id has become another text's; none is kept.
            StoreError: They cannot be written, are too many or have too much KV; none is kept.
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
        """Refuse more chunks than may be registered, given their ids.

        Raises:
            StoreError: They are too many, or the file cannot be read.
        """
        new = len(names - self._registered.known(list(names)))
        self._quota.check_chunks(self._registered.count() if new else 0, new)

    def expire(self) -> list[Chunk]:
        """Forget the registered chunks whose time is over, and return them.

        Raises:
            StoreError: The file cannot be written.
        """
        if self._quota.expire_after_s is None:
            return []
        with self._lock:
            return self._registered.expire(self._clock())

    def note(self, chunk: Chunk) -> None:
        """Register a chunk that a prompt has brought, so that its KV can be written back; not kept over a restart.

        Anybody's prompt may bring any number of them: the oldest are forgotten. None is known by another id than its text's:
        whoever asks could have others who name that id be answered from a text of his.
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
        """Note that a client lets go of chunks; return the ids of those that no other client holds.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._lock:
            return self._registered.release(chunk_ids, holder)

    def remove(self, chunk_ids: Sequence[str]) -> None:
        """Forget registered chunks; those of the index stay.

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
        """Say where a chunk is kept; None for one that only this process knows (a prompt brought it) or nobody.

        Of another catalogue's, which is only read here, that it is shared.
        """
        if self._index is not None and self._index.known([chunk_id]):
            return "index"
        if self._registered.known([chunk_id]):
            return "registered"
        return "shared" if self._registry.is_lent(chunk_id) else None

    def stop(self) -> None:
        """Look no more for what others have changed, and let go of other catalogues' chunks."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            for source in self._lent():
                self._registry.detach(source)
            self._lenders = ()

    def close(self) -> None:
        """Stop looking, and close the files; those that read these chunks must have been stopped."""
        self.stop()
        with self._lock:
            for source in self._sources:
                self._registry.detach(source)
                source.close()
