"""Keeps an engine's chunks in step with the documents of a vector store, and reads ahead what a retriever has found."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.frameworks.uses import uses_of
from cacheblend_rag.prompts.chunk import Chunk, chunk_id

_log = logging.getLogger(__name__)
# One thread for all: what it reads ahead of the model comes from one disk.
READER = ThreadPoolExecutor(1, "cacheblend-read-ahead")

_Owner = TypeVar("_Owner")
_owners: dict[int, Any] = {}


def owner_of(base: object, make: Callable[[], _Owner]) -> _Owner:
    """Return what stands for a vector store as the owner of its documents: made once, and kept while the store lives.

    A store that is wrapped twice is one owner; it need not be hashable.
    """
    if id(base) not in _owners:
        _owners[id(base)] = make()
        weakref.finalize(base, _owners.pop, id(base), None)
    owner: _Owner = _owners[id(base)]
    return owner


class StoreChunks:
    """Knows which chunks of an engine the documents of one vector store hold. Thread-safe.

    Attributes:
        engine: The engine that answers.
        forms: The most texts that a document has: as prompts are expected to hold it, and others that are as good.
    """

    def __init__(self, engine: BlendEngine, owner: object, forms: int = 1):
        """Start with what is known of ``owner`` already; see :func:`owner_of`."""
        self.engine, self.forms = engine, forms
        self._owner, self._uses = owner, uses_of(engine)

    def hold(self, documents: Iterable[tuple[Hashable | None, Sequence[str]]]) -> list[Chunk]:
        """Register documents' texts with the engine, and note who holds them; what nothing holds any more is forgotten.

        Args:
            documents: Each one's id, None where it has none, and its texts.

        Returns:
            The chunks that are registered; see :meth:`ChunkUses.register`.
        """
        given = [(name, [form.strip() for form in forms]) for name, forms in documents]
        registered = self._uses.register(self.engine, [form for _, forms in given for form in forms])
        chunks = {chunk.id: chunk for chunk in registered}
        held: list[tuple[Hashable | None, Chunk | None]] = []
        for name, forms in given:
            # A document may have fewer texts than the one that it replaces.
            found = [chunks.get(chunk_id(form)) for form in forms] + [None] * (self.forms - len(forms))
            held += [(None if name is None else (name, at), chunk) for at, chunk in enumerate(found)]
        self._uses.forget(self.engine, self._uses.hold(self._owner, held))
        return registered

    def release(self, names: Iterable[Hashable]) -> None:
        """Note that documents are gone; what nothing holds any more is forgotten."""
        held = [(name, at) for name in names for at in range(self.forms)]
        self._uses.forget(self.engine, self._uses.release(self._owner, held))

    def names(self) -> list[Any]:
        """Return the ids of the documents that hold chunks."""
        return list(dict.fromkeys(name for name, _ in self._uses.held_by(self._owner)))


def read_ahead(engine: BlendEngine, chunks: Sequence[Chunk]) -> None:
    """Move the stored KV of chunks into the fastest tier, in the background."""
    if chunks:
        READER.submit(_prefetch, engine, [chunk.id for chunk in chunks])


def _prefetch(engine: BlendEngine, chunk_ids: list[str]) -> None:
    try:
        engine.prefetch(chunk_ids)
    except Exception:  # the prompt reads it again, and reports what is wrong
        _log.debug("Stored KV could not be read ahead.", exc_info=True)
