"""Tracks which documents of a framework hold a chunk, so that KV is deleted only when no document needs the KV.

A text's renditions are the forms that formatters commonly give the text. Each rendition is a chunk of its own, because
a prompt with the rendition has other tokens, and so other KV. All renditions can be made from the text alone, so that
their stored KV is deleted together with the text's KV.
"""

from __future__ import annotations

import html
import json
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk
from cacheblend_rag.prompts.placing import in_json
from cacheblend_rag.prompts.prompt import chunk_of
from cacheblend_rag.prompts.registry import MATCH_WINDOW

_MOST_KEPT = 256


@lru_cache(_MOST_KEPT)
def renditions(text: str) -> tuple[str, ...]:
    """Return the renditions that differ from the text, without outer whitespace or renditions too short to be found."""
    forms = (
        json.dumps(text)[1:-1],
        in_json(text),
        repr(text)[1:-1],
        html.escape(text, quote=True),
        html.escape(text, quote=False),
        " ".join(text.split()),
    )
    made = dict.fromkeys(form.strip() for form in forms)
    return tuple(form for form in made if form != text and len(form) >= MATCH_WINDOW)


_Use = tuple[object, Hashable]


class ChunkUses:
    """Tracks the chunks that frameworks have brought to one engine, and the documents with the chunks. Thread-safe.

    A document is identified by its vector store and by its id in the store. Documents that were in a vector store
    before this process started are learned when they are retrieved; a chunk that other code registered with the engine,
    such as a ``RagPipeline``, is in use forever.
    """

    def __init__(self, engine: BlendEngine):
        """Start without uses and without a reference to the engine."""
        self._lock = threading.Lock()
        self._documents: dict[_Use, str] = {}
        self._uses: defaultdict[str, set[_Use]] = defaultdict(set)
        self._ours: set[str] = set()
        self._header = len(getattr(engine, "header_ids", ()))

    def introduce(self, chunks: Iterable[Chunk], engine: BlendEngine | None = None) -> None:
        """Record chunks that a framework is about to register with the engine."""
        with self._lock:
            self._ours.update(c.id for c in chunks if engine is None or c.id not in engine.registry)

    def register(self, engine: BlendEngine, texts: Iterable[str]) -> list[Chunk]:
        """Register whole texts as chunks with the engine, without computing anything; return the chunks.

        A text that is empty, not valid Unicode or longer than the context window is left out: it can never be a chunk
        of a prompt.
        """
        chunks = []
        for text in texts:
            try:
                chunk = chunk_of(text, engine.tokenizer, engine.registry)
            except InputError:  # not valid Unicode: the model sees such a text, if at all, as ordinary text
                continue
            if chunk is not None and self._header + len(chunk.token_ids) < engine.context_window:
                chunks.append(chunk)
        new = [chunk for chunk in chunks if chunk.id not in engine.registry]
        if new:
            self.introduce(new)
            engine.registry.add(new)
        return chunks

    def hold(self, owner: object, documents: Iterable[tuple[Hashable | None, Chunk | None]]) -> set[str]:
        """Record the chunk, or None, that each of ``owner``'s documents holds; return the ids of unused chunks."""
        with self._lock:
            freed = set()
            for name, chunk in documents:
                if name is None:
                    continue
                if chunk is None or self._documents.get((owner, name)) != chunk.id:
                    freed.add(self._let_go(owner, name))
                if chunk is not None:
                    self._documents[owner, name] = chunk.id
                    self._uses[chunk.id].add((owner, name))
            return self._given_up(freed)

    def release(self, owner: object, names: Iterable[Hashable]) -> set[str]:
        """Record that ``owner``'s documents are gone; return the ids of chunks that became unused."""
        with self._lock:
            return self._given_up({self._let_go(owner, name) for name in names})

    def held_by(self, owner: object) -> list[Any]:
        """Return the ids of the documents of ``owner``."""
        with self._lock:
            return [name for (holder, name) in self._documents if holder is owner]

    def forget(self, engine: BlendEngine, chunk_ids: Iterable[str]) -> None:
        """Make the engine forget unused chunks and the renditions of their texts, and delete their KV.

        Raises:
            StoreError: The store cannot be written.
        """
        named = {name: engine.registry.get(name) for name in chunk_ids}
        gone = [chunk for chunk in named.values() if chunk is not None]
        forms = [make_chunk(form, engine.tokenizer) for chunk in gone for form in renditions(chunk.text)]
        with self._lock:
            # A rendition that is a document's own text, or that other code registered, stays.
            forms = [f for f in forms if f.id not in self._uses and (f.id in self._ours or f.id not in engine.registry)]
            self._ours -= {form.id for form in forms}
        if named:
            # A server may know chunks that this process has forgotten.
            engine.forget([*gone, *forms, *(name for name, chunk in named.items() if chunk is None)])

    def _let_go(self, owner: object, name: Hashable) -> str:
        chunk_id = self._documents.pop((owner, name), "")
        self._uses[chunk_id].discard((owner, name))
        if not self._uses[chunk_id]:
            del self._uses[chunk_id]
        return chunk_id

    def _given_up(self, chunk_ids: set[str]) -> set[str]:
        """Return the chunks that frameworks brought and that are unused now; stop tracking them."""
        unused = {chunk_id for chunk_id in chunk_ids & self._ours if chunk_id not in self._uses}
        self._ours -= unused
        return unused


_uses: WeakKeyDictionary[Any, ChunkUses] = WeakKeyDictionary()
_uses_lock = threading.Lock()


def uses_of(engine: BlendEngine) -> ChunkUses:
    """Return the uses of ``engine``'s chunks: one table for each engine, shared by all callers."""
    with _uses_lock:
        known = _uses.get(engine)
        if known is None:
            known = _uses[engine] = ChunkUses(engine)
        return known


_log = logging.getLogger(__name__)
# One thread for all engines, because all KV that is read ahead comes from one disk.
READER = ThreadPoolExecutor(1, "cacheblend-read-ahead")

_Owner = TypeVar("_Owner")
_owners: dict[int, Any] = {}


def owner_of(base: object, make: Callable[[], _Owner]) -> _Owner:
    """Return the object that stands for a vector store as owner of its documents: made once for the store's lifetime.

    A store that is wrapped twice is one owner; the store need not be hashable.
    """
    if id(base) not in _owners:
        _owners[id(base)] = make()
        weakref.finalize(base, _owners.pop, id(base), None)
    owner: _Owner = _owners[id(base)]
    return owner


class StoreChunks:
    """Tracks which chunks of an engine the documents of one vector store hold. Thread-safe.

    Attributes:
        engine: Engine that answers.
        forms: Maximum number of texts of a document: the form that prompts are expected to have, and other acceptable
            forms.
    """

    def __init__(self, engine: BlendEngine, owner: object, forms: int = 1):
        """Start with the recorded uses of ``owner``; see :func:`owner_of`."""
        self.engine, self.forms = engine, forms
        self._owner, self._uses = owner, uses_of(engine)

    def hold(self, documents: Iterable[tuple[Hashable | None, Sequence[str]]]) -> list[Chunk]:
        """Register documents' texts with the engine, and record which documents hold them; forget unused chunks.

        Args:
            documents: Id (None without one) and texts of each document.

        Returns:
            The registered chunks, without chunks that a later document of the same id has released; see
            :meth:`ChunkUses.register`.
        """
        given = [(name, [form.strip() for form in forms]) for name, forms in documents]
        registered = self._uses.register(self.engine, [form for _, forms in given for form in forms])
        chunks = {chunk.id: chunk for chunk in registered}
        held: list[tuple[Hashable | None, Chunk | None]] = []
        for name, forms in given:
            # A document may have fewer texts than the document that it replaces.
            found = [chunks.get(chunk_id(form)) for form in forms] + [None] * (self.forms - len(forms))
            held += [(None if name is None else (name, at), chunk) for at, chunk in enumerate(found)]
        self._uses.forget(self.engine, self._uses.hold(self._owner, held))
        return [chunk for chunk in registered if chunk.id in self.engine.registry]

    def release(self, names: Iterable[Hashable]) -> None:
        """Record that documents are gone; forget unused chunks."""
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
    except Exception:  # the prompt reads the KV again, and reports the error
        _log.debug("Stored KV could not be read ahead.", exc_info=True)
