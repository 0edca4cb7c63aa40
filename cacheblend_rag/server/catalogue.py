"""Where a server's chunks come from: the index in its store directory, registration over HTTP, and prompts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.retrieval.registered import RegisteredChunks
from cacheblend_rag.store.kv import ModelFingerprint

Origin = Literal["registered", "index"]

_log = logging.getLogger("vllm.cacheblend")  # below vLLM's logger, whose handlers and level its flags set
_REFRESH_S = 0.5
_MAX_NOTED, _MAX_NOTED_CHARACTERS = 4096, 1 << 26
DEFAULT_MAX_CHUNKS = 1_000_000


class ChunkCatalogue:
    """Keeps an engine's registry in step with a store directory, and knows where each chunk comes from.

    The registry finds chunks in prompts and forgets them with the process. Chunks registered over HTTP are kept in a file
    beside the index; those of the index that ``cacheblend index`` made stay the index's and are not removed here.
    Thread-safe; several servers may share the directory.

    Attributes:
        warnings: What the operator should know, such as an index of another model.
    """

    def __init__(
        self,
        directory: Path | None,
        registry: ChunkRegistry,
        fingerprint: ModelFingerprint,
        max_chunks: int = DEFAULT_MAX_CHUNKS,
    ):
        """Open the files in ``directory`` (None: keep nothing) and register what they hold for this model.

        Args:
            directory: The store directory.
            registry: What finds chunks in prompts.
            fingerprint: The model's identity.
            max_chunks: How many chunks may be registered.

        Raises:
            StoreError: A file there cannot be used.
        """
        self.warnings: list[str] = []
        self._registry, self._fingerprint, self._max_chunks = registry, fingerprint, max_chunks
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._noted: dict[str, int] = {}  # with the lengths of their texts, in the order they came
        self._directory = directory
        self._registered = RegisteredChunks(directory, fingerprint.digest)
        self._index: ChunkIndex | None = None
        registry.attach(self._registered)
        self.refresh(force=True)

    def _open_index(self) -> None:
        if self._index is not None or self._directory is None or not ChunkIndex.exists(self._directory):
            return
        index = ChunkIndex.open(self._directory)
        made_for = index.config.model
        if made_for == self._fingerprint:
            self._registry.attach(index)
            self._index = index
            return
        index.close()
        warning = (
            f"The index in {self._directory} is of another model or dtype ({made_for.name}, {made_for.digest[:8]}), not of "
            f"{self._fingerprint.name} ({self._fingerprint.digest[:8]}): its chunks are not known to this server."
        )
        if warning not in self.warnings:
            self.warnings.append(warning)

    def watch(self) -> None:
        """Do :meth:`refresh` twice a second from now on, in a thread of its own, so that no request waits for it."""
        self._watcher = threading.Thread(target=self._watch, name="cacheblend-registry", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._closing.wait(_REFRESH_S):
            try:
                self.refresh()
            except Exception:  # the next look may find it right
                _log.exception("What other processes have registered or indexed cannot be looked up")

    def refresh(self, force: bool = False) -> None:
        """Take up what other servers and ``cacheblend index`` have changed.

        Args:
            force: Otherwise files that cannot be read for now are left for later: what is known already can still be served.

        Raises:
            StoreError: The files cannot be read, and ``force`` is set.
        """
        with self._lock:
            try:
                self._open_index()
                self._registry.follow()
            except StoreError as error:
                if force:
                    raise
                _log.warning("What other processes have registered or indexed is not known here: %s", error)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Keep and register chunks.

        Raises:
            StoreError: They cannot be written, or there are too many; none is kept.
        """
        with self._lock:
            self.check_room(chunks)
            self._registered.add(chunks)
            self._registry.follow(self._registered)

    def check_room(self, chunks: Sequence[Chunk]) -> None:
        """Refuse more chunks than may be registered.

        Raises:
            StoreError: They are too many, or the file cannot be read.
        """
        names = {chunk.id for chunk in chunks}
        new = len(names - self._registered.known(list(names)))
        held = self._registered.count() if new else 0
        if held + new > self._max_chunks:
            raise StoreError(
                f"{held} chunks are registered, and {new} more would exceed the {self._max_chunks} that may be. Delete some, or "
                "start the server with a larger --max-chunks."
            )

    def note(self, chunk: Chunk) -> None:
        """Register a chunk that a prompt has brought, so that its KV can be written back; not kept over a restart.

        Anybody's prompt may bring any number of them: the oldest are forgotten.
        """
        with self._lock:
            if chunk.id in self._registry:
                return
            self._noted[chunk.id] = len(chunk.text)
            self._registry.add([chunk])
            while len(self._noted) > _MAX_NOTED or sum(self._noted.values()) > _MAX_NOTED_CHARACTERS:
                oldest = next(iter(self._noted))
                del self._noted[oldest]
                self._registry.remove([oldest])

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

    def origin(self, chunk_id: str) -> Origin | None:
        """Say where a chunk is kept; None for one that only this process knows (a prompt brought it) or nobody."""
        if self._index is not None and self._index.known([chunk_id]):
            return "index"
        return "registered" if self._registered.known([chunk_id]) else None

    def close(self) -> None:
        """Stop looking, and close the files."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            for source in (self._registered, self._index):
                if source is not None:
                    self._registry.detach(source)
                    source.close()
