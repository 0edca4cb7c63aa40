"""Tracks which documents of a framework hold a chunk, so that KV is deleted only when no document needs the KV.

A text inside a JSON string is a chunk of its own, because a prompt with the JSON string has other tokens, and so other
KV. The JSON forms can be made from the text alone, so that their stored KV is deleted together with the text's KV.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk
from cacheblend_rag.prompts.placing import in_json
from cacheblend_rag.prompts.prompt import chunk_of


def json_forms(text: str) -> list[str]:
    """Return the text as JSON strings spell the text, with and without escapes for non-ASCII characters, if different."""
    return [form for form in dict.fromkeys((in_json(text), json.dumps(text)[1:-1])) if form != text]


class ChunkUses:
    """Tracks the chunks that frameworks have brought to one engine, and the documents with the chunks. Thread-safe.

    A document is identified by its vector store and by its id in the store. Documents that were in a vector store
    before this process started are learned when they are retrieved; a chunk that other code registered with the engine,
    such as a ``RagPipeline``, is in use forever.

    Attributes:
        warned: Whether the log has a warning of a prompt that lacked retrieved chunks.
    """

    def __init__(self, engine: BlendEngine):
        """Start without uses and without a reference to the engine."""
        self.warned = False
        self._lock = threading.Lock()
        self._held: defaultdict[object, dict[Hashable, frozenset[str]]] = defaultdict(dict)
        self._users: Counter[str] = Counter()
        self._ours: set[str] = set()
        self._header = len(getattr(engine, "header_ids", ()))

    def introduce(self, chunks: Iterable[Chunk], engine: BlendEngine) -> None:
        """Record chunks that a framework is about to register with the engine."""
        with self._lock:
            self._ours.update(chunk.id for chunk in chunks if chunk.id not in engine.registry)

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
        self.introduce(chunks, engine)
        engine.registry.add(chunk for chunk in chunks if chunk.id not in engine.registry)
        return chunks

    def hold(self, owner: object, documents: Iterable[tuple[Hashable, Iterable[str]]]) -> set[str]:
        """Record the ids of the chunks that each of ``owner``'s documents holds now; return the ids of unused chunks."""
        with self._lock:
            freed = set[str]()
            for name, chunk_ids in documents:
                before, now = self._held[owner].pop(name, frozenset()), frozenset(chunk_ids)
                if now:
                    self._held[owner][name] = now
                self._users.update(now - before)
                self._users.subtract(before - now)
                freed |= before - now
            unused = {name for name in freed if not self._users[name]}
            for name in unused:
                del self._users[name]
            unused &= self._ours
            self._ours -= unused
            return unused

    def held_by(self, owner: object) -> list[Any]:
        """Return the ids of the documents of ``owner`` that hold chunks."""
        with self._lock:
            return list(self._held[owner])

    def forget(self, engine: BlendEngine, chunk_ids: Iterable[str]) -> None:
        """Make the engine forget unused chunks and the JSON forms of their texts, and delete their KV.

        Raises:
            StoreError: The store cannot be written.
        """
        named = {name: engine.registry.get(name) for name in chunk_ids}
        gone = [chunk for chunk in named.values() if chunk is not None]
        forms = [make_chunk(form, engine.tokenizer) for chunk in gone for form in json_forms(chunk.text)]
        with self._lock:
            # A JSON form that is a document's own text, or that other code registered, stays.
            forms = [f for f in forms if not self._users[f.id] and (f.id in self._ours or f.id not in engine.registry)]
            self._ours -= {form.id for form in forms}
        if named:
            # A server may know chunks that this process has forgotten.
            engine.forget([*gone, *forms, *(name for name, chunk in named.items() if chunk is None)])


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
    """Tracks which chunks of an engine the documents of one vector store hold. Thread-safe."""

    def __init__(self, engine: BlendEngine, owner: object):
        """Start with the recorded uses of ``owner``; see :func:`owner_of`."""
        self._engine, self._owner, self._uses = engine, owner, uses_of(engine)

    def hold(self, documents: Iterable[tuple[Hashable | None, Sequence[str]]]) -> list[Chunk]:
        """Register documents' texts with the engine, and record which documents hold them; forget unused chunks.

        Args:
            documents: Id (None without one) and texts of each document.

        Returns:
            The registered chunks, without chunks that a later document of the same id has released; see
            :meth:`ChunkUses.register`.
        """
        given = [(name, [text.strip() for text in texts]) for name, texts in documents]
        registered = self._uses.register(self._engine, [text for _, texts in given for text in texts])
        known = {chunk.id for chunk in registered}
        held = ((name, known.intersection(map(chunk_id, texts))) for name, texts in given if name is not None)
        self._uses.forget(self._engine, self._uses.hold(self._owner, held))
        return [chunk for chunk in registered if chunk.id in self._engine.registry]

    def release(self, names: Iterable[Hashable]) -> None:
        """Record that documents are gone; forget unused chunks."""
        self._uses.forget(self._engine, self._uses.hold(self._owner, ((name, ()) for name in names)))

    def names(self) -> list[Any]:
        """Return the ids of the documents that hold chunks."""
        return self._uses.held_by(self._owner)


def read_ahead(engine: BlendEngine, chunks: Sequence[Chunk]) -> None:
    """Move the stored KV of chunks into the fastest tier, in the background."""
    if chunks:
        READER.submit(_prefetch, engine, [chunk.id for chunk in chunks])


def _prefetch(engine: BlendEngine, chunk_ids: list[str]) -> None:
    try:
        engine.prefetch(chunk_ids)
    except Exception:  # the prompt reads the KV again, and reports the error
        _log.debug("Stored KV could not be read ahead.", exc_info=True)
