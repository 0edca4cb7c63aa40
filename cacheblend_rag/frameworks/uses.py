"""Keeps an engine's chunks in step with a framework's documents: deleting one drops KV only when no other needs it.

A text's renditions are the forms that formatters commonly give it, each a chunk of its own: its tokens, and so its KV, are those
that a prompt with it has. All can be made from the text alone, so that what is stored of them is deleted with it.
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
    """Return the renditions of a text that differ from it, without outer whitespace; those too short to be found are left out."""
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
    """The chunks that frameworks have brought to one engine, and the documents that hold them. Thread-safe.

    A document is named by the vector store it is in and its id there. What was in a vector store before this process
    started is learned when it is retrieved; a chunk that something else registered with the engine, such as a
    ``RagPipeline``, is in use for good.
    """

    def __init__(self, engine: BlendEngine):
        """Start without uses; the engine is not kept alive."""
        self._lock = threading.Lock()
        self._documents: dict[_Use, str] = {}
        self._uses: defaultdict[str, set[_Use]] = defaultdict(set)
        self._ours: set[str] = set()
        self._header = len(getattr(engine, "header_ids", ()))

    def introduce(self, chunks: Iterable[Chunk], engine: BlendEngine | None = None) -> None:
        """Note chunks that are about to be registered with the engine because of us."""
        with self._lock:
            self._ours.update(c.id for c in chunks if engine is None or c.id not in engine.registry)

    def register(self, engine: BlendEngine, texts: Iterable[str]) -> list[Chunk]:
        """Register the chunks of whole texts with the engine, without computing anything; return them.

        Text that is empty, not valid Unicode or longer than the context window is left out: it can never be a chunk of a prompt.
        """
        chunks = []
        for text in texts:
            try:
                chunk = chunk_of(text, engine.tokenizer, engine.registry)
            except InputError:  # not valid Unicode: it reaches the model, if at all, as ordinary text
                continue
            if chunk is not None and self._header + len(chunk.token_ids) < engine.context_window:
                chunks.append(chunk)
        new = [chunk for chunk in chunks if chunk.id not in engine.registry]
        if new:
            self.introduce(new)
            engine.registry.add(new)
        return chunks

    def hold(self, owner: object, documents: Iterable[tuple[Hashable | None, Chunk | None]]) -> set[str]:
        """Note that ``owner``'s documents hold these chunks, or none; return the ids of chunks that nothing uses any more."""
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
        """Note that ``owner``'s documents are gone; return the ids of chunks that nothing uses any more."""
        with self._lock:
            return self._given_up({self._let_go(owner, name) for name in names})

    def held_by(self, owner: object) -> list[Any]:
        """Return the ids of the documents of ``owner``."""
        with self._lock:
            return [name for (holder, name) in self._documents if holder is owner]

    def forget(self, engine: BlendEngine, chunk_ids: Iterable[str]) -> None:
        """Make the engine forget chunks that nothing uses any more, and the renditions of their texts; their KV is deleted.

        Raises:
            StoreError: The store cannot be written.
        """
        named = {name: engine.registry.get(name) for name in chunk_ids}
        gone = [chunk for chunk in named.values() if chunk is not None]
        forms = [make_chunk(form, engine.tokenizer) for chunk in gone for form in renditions(chunk.text)]
        with self._lock:
            # One that is a document's own text, or that something else registered, is not ours to delete.
            forms = [f for f in forms if f.id not in self._uses and (f.id in self._ours or f.id not in engine.registry)]
            self._ours -= {form.id for form in forms}
        if named:
            # A server may know what this process has forgotten.
            engine.forget([*gone, *forms, *(name for name, chunk in named.items() if chunk is None)])

    def _let_go(self, owner: object, name: Hashable) -> str:
        chunk_id = self._documents.pop((owner, name), "")
        self._uses[chunk_id].discard((owner, name))
        if not self._uses[chunk_id]:
            del self._uses[chunk_id]
        return chunk_id

    def _given_up(self, chunk_ids: set[str]) -> set[str]:
        """Return those that were brought here and are used no more; they are not ours from now on."""
        unused = {chunk_id for chunk_id in chunk_ids & self._ours if chunk_id not in self._uses}
        self._ours -= unused
        return unused


_uses: WeakKeyDictionary[Any, ChunkUses] = WeakKeyDictionary()
_uses_lock = threading.Lock()


def uses_of(engine: BlendEngine) -> ChunkUses:
    """Return the uses of ``engine``'s chunks: one table an engine, shared by all that works with it."""
    with _uses_lock:
        known = _uses.get(engine)
        if known is None:
            known = _uses[engine] = ChunkUses(engine)
        return known


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
            The chunks that are registered, without those that a later document of the same id has let go of; see
            :meth:`ChunkUses.register`.
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
        return [chunk for chunk in registered if chunk.id in self.engine.registry]

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
