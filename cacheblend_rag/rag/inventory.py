"""Lists the contents of a store directory, chunk by chunk, without a model: joins the index and the KV store by key."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.models import writer_of
from cacheblend_rag.engines.writer import KVWriter
from cacheblend_rag.errors import InputError, StoreError, StoreUnavailableError, UnknownChunkError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.indexing import IndexReport, nothing_to_read, vanished
from cacheblend_rag.rag.locking import indexing_alone
from cacheblend_rag.retrieval.documents import FoundDocuments, absolute
from cacheblend_rag.retrieval.index import ChunkIndex, IndexedDocument, IndexStats
from cacheblend_rag.store import StoreStats, open_store, recorded_tiers
from cacheblend_rag.store.base import Closing, EntryInfo
from cacheblend_rag.store.files import DEFAULT, DEFAULT_NAME, Namespace, home_of
from cacheblend_rag.store.kv import KVKey, entry_of

_MIN_PREFIX = 6


@dataclass(frozen=True)
class InventoryItem:
    """Describes a chunk, its stored KV, or both.

    Attributes:
        id: The chunk's id; the KV key if no chunk of the index belongs to the entry (the header, removed documents).
        path: The document in which the chunk stands; empty without a chunk.
        tokens: Tokens of the chunk; 0 without a chunk.
        keys: Keys of the chunk's KV, one for each KV writer and one for the model itself.
        nbytes: Size of the stored KV; None if no KV is stored.
        last_used: Seconds since the epoch; None if no KV is stored.
    """

    id: str
    path: str
    tokens: int
    keys: tuple[KVKey, ...]
    nbytes: int | None
    last_used: float | None


@dataclass(frozen=True)
class RemovedDocument:
    """Reports what was removed together with a document.

    Attributes:
        path: The document.
        chunks: Number of distinct chunks in the document.
        removed: Number of these chunks that no other document holds: they left the index, and their KV left the store.
        nbytes: Size of the removed KV.
    """

    path: str
    chunks: int
    removed: int
    nbytes: int


class Inventory(Closing):
    """Opens a store directory for listing and removing, as ``cacheblend store`` and ``cacheblend documents`` do.

    The index lists chunks, and the KV store lists entries by key; the inventory joins both lists.
    """

    def __init__(self, directory: Path | str, namespace: str = DEFAULT_NAME):
        """Open the store in ``directory``, with the index of a namespace.

        Raises:
            StoreError: There is no store in the directory, or the store cannot be read.
        """
        self.directory = from_home(directory)
        self._namespace, self._home = Namespace(namespace), home_of(self.directory, namespace)
        known = ChunkIndex.exists(self._home) or (self.directory / "kv").is_dir() or recorded_tiers(self.directory)
        if not self.directory.is_dir() or not known:
            raise StoreError(
                f"There is no store in {self.directory}. Make one with `cacheblend index FILES --store DIR`."
            )
        self.store = open_store(self.directory, ram_budget=0)

    def unchanged(
        self,
        found: FoundDocuments,
        model: str | None,
        dtype: str | None = None,
        writer: str | None = None,
        **made_with: Any,
    ) -> IndexReport | None:
        """Return the report of indexing files again if nothing is to do; None if work is left or only a model can tell.

        The method warns, as indexing does, if another writer has written the KV. ``model`` and ``dtype`` are names, and
        the KV writer has the form that an engine takes; ``made_with`` holds other settings of :class:`IndexConfig`, None
        for the index's own.

        Raises:
            InputError: The writer cannot be read.
        """
        named = writer_of(model, writer)
        by = None if named is None else KVWriter.read(named).name
        with self._index() as index:
            if index is None:
                return None
            made, given = index.config, {name: value for name, value in made_with.items() if value is not None}
            if (made.model.name, made.model.dtype) != (model, dtype) or by not in (None, made.writer):
                return None
            if replace(made, **given) != made:
                return None
            known = {document.path: document.digest for document in index.documents()}
            report = nothing_to_read(found, known)
            if report is None or vanished(known.keys() - set(report.unchanged), found.roots):
                return None
            own = self._entries(index).lasting()
            chunks = (chunk for path in report.unchanged for chunk in index.chunks_of(path))
            if not all(own.contains(chunk.token_ids) for chunk in chunks):
                return None
        if why := made.unused_by(by):
            warnings.warn(why, stacklevel=2)
        report.kv_bytes = max(tier.nbytes for tier in self.store.stats().tiers)
        return report

    def items(self) -> list[InventoryItem]:
        """List every chunk of the index in document order; for the default namespace, also entries without a chunk."""
        stored = self._stored()
        found = []
        with self._index() as index:
            sources = () if index is None else self._sources(index)
            for chunk in index.chunks() if index is not None else ():
                keys = _keys(sources, chunk)
                parts = [part for key in keys for part in self._parts(key, stored)]
                for key in keys:
                    stored.pop(entry_of(key), None)
                path = str(chunk.metadata.get("source", ""))
                found.append(_item(chunk.id, path, len(chunk.token_ids), keys, parts))
        if self._namespace != DEFAULT:
            return found  # other namespaces own some of the remaining entries
        return found + [_item(parts[0].key, "", 0, (parts[0].key,), parts) for parts in stored.values()]

    def remove(self, item_id: str) -> InventoryItem:
        """Remove the stored KV of one item, named by its id or KV key, or by an unambiguous beginning of either.

        The chunk stays in the index; its KV is computed anew when a prompt needs the KV.

        Raises:
            UnknownChunkError: No item, or more than one item, has that id.
        """
        named = [
            item
            for item in self.items()
            for names in [(item.id, *item.keys)]
            if item_id in names or (len(item_id) >= _MIN_PREFIX and any(name.startswith(item_id) for name in names))
        ]
        if len(named) != 1:
            raise UnknownChunkError(_why_not_one(item_id, len(named)))
        self._need_every_tier()
        stored = self._stored()
        for part in [part for key in named[0].keys for part in self._parts(key, stored)]:
            self.store.delete(part.key)
        return named[0]

    def evict(self, to_bytes: int, tier: str | None = None) -> int:
        """Evict least recently used KV until ``to_bytes`` remain in one tier, or in every tier; return the bytes freed.

        Raises:
            InputError: The store has no such tier, or the tier cannot evict.
            StoreError: A tier refuses, or does not answer.
        """
        if tier is None:
            return self.store.evict(to_bytes)
        by_name = {each.tier: each for each in self.store.tiers}
        if tier not in by_name:
            raise InputError(f"This store has no tier {tier!r} to evict from; it has {', '.join(by_name)}.")
        if not by_name[tier].lists:
            raise InputError(
                f"The tier {tier} evicts nothing: its package does not offer that. `cacheblend store rm` removes."
            )
        return by_name[tier].evict(to_bytes)

    def documents(self) -> list[IndexedDocument]:
        """List the documents of the index in path order."""
        with self._index() as index:
            return [] if index is None else index.documents()

    def find_documents(self, name: str) -> list[str]:
        """Return the indexed documents that a user's ``name`` stands for.

        The name stands for the document with that path, for all documents below that directory, or for the only
        document with that file name.

        Raises:
            InputError: No document has the name, several documents have that file name, or the name is empty.
        """
        if not name:  # an empty name would stand for the current directory, and for all documents below it
            raise InputError("A name is empty: a variable that is not set? Write . for the current directory.")
        path = str(absolute(name))
        known = [document.path for document in self.documents()]
        if path in known:
            return [path]
        if below := [each for each in known if Path(each).is_relative_to(path)]:
            return below
        named = [each for each in known if Path(each).name == name]
        if len(named) != 1:
            count = f"{len(named)} documents called {name} are" if named else f"{name} is not"
            raise InputError(
                f"{count} in the index {self.directory}; `cacheblend documents ls` lists what is. Give a path from there."
            )
        return named

    def remove_documents(self, paths: Iterable[str]) -> list[RemovedDocument]:
        """Remove documents from the index, and with each document the KV of chunks that no other document holds.

        Raises:
            InputError: A document is not in the index; the documents before it are removed.
            StoreError: The index cannot be written, or a run is indexing into it.
        """
        self._need_every_tier()
        removed: list[RemovedDocument] = []
        gone: set[KVKey] = set()
        with ChunkIndex(self._home) as index, indexing_alone(self._home):
            sources, stored = self._sources(index), self._stored()
            for path in paths:
                held = {chunk.id for chunk in index.chunks_of(path)}
                orphans = index.delete(path)
                keys = {key for chunk in orphans for key in _keys(sources, chunk)}
                removed.append(RemovedDocument(path, len(held), len(orphans), self._delete(keys, stored)))
                gone |= keys
            self._delete(gone, self._stored())  # KV that a server has written meanwhile
        return removed

    def _delete(self, keys: Iterable[KVKey], stored: Mapping[str, list[EntryInfo]]) -> int:
        """Delete the stored entries under the given keys; return the bytes freed."""
        parts = [part for key in keys for part in self._parts(key, stored)]
        return sum(part.nbytes for part in parts if self.store.delete(part.key))

    def _stored(self) -> dict[str, list[EntryInfo]]:
        """Return the parts of each listed entry: the whole entry, the shards of tensor-parallel ranks, or both."""
        found: dict[str, list[EntryInfo]] = {}
        for part in self.store.entries():
            found.setdefault(entry_of(part.key), []).append(part)
        return found

    def _parts(self, key: KVKey, stored: Mapping[str, list[EntryInfo]]) -> list[EntryInfo]:
        """Return all stored parts of the entry under ``key``; a tier without a listing gives only the whole entry."""
        parts = stored.get(entry_of(key), [])
        if not parts and self.store.unlisted and (whole := self.store.entry(key)) is not None:
            return [whole]
        return parts

    def _need_every_tier(self) -> None:
        for tier in self.store.stats().tiers:
            if tier.out:
                raise StoreUnavailableError(
                    f"The {tier.tier} tier does not answer ({tier.out}), and what is to be removed would stay there. Try again "
                    "when it answers."
                )

    def stats(self) -> tuple[StoreStats, IndexStats | None]:
        """Return the statistics of the KV store, and of the index or None without an index."""
        with self._index() as index:
            return self.store.stats(), None if index is None else index.stats()

    def _entries(self, index: ChunkIndex) -> Entries:
        made = index.config
        return Entries(self.store, made.model, made.header_ids, namespace=self._namespace, writer=made.writer)

    def _sources(self, index: ChunkIndex) -> tuple[Entries, ...]:
        """Return the entries of all possible writers of the chunks' KV: current and former KV writers, and the LLM."""
        entries = self._entries(index)
        return (*(entries.by(each) for each in index.config.writers), entries.by(None))

    @contextmanager
    def _index(self) -> Iterator[ChunkIndex | None]:
        if not ChunkIndex.exists(self._home):
            yield None
            return
        with ChunkIndex(self._home) as index:
            yield index

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def _keys(sources: Iterable[Entries], chunk: Chunk) -> tuple[KVKey, ...]:
    """Return the key of a chunk's whole KV for each writer."""
    return tuple(source.own_key(chunk.token_ids) for source in sources)


def _item(name: str, path: str, tokens: int, keys: tuple[KVKey, ...], parts: Sequence[EntryInfo]) -> InventoryItem:
    nbytes, used = sum(part.nbytes for part in parts), max((part.last_used for part in parts), default=0.0)
    return InventoryItem(name, path, tokens, keys, nbytes if parts else None, used if parts else None)


def _why_not_one(item_id: str, found: int) -> str:
    listed = "`cacheblend store ls` lists the ids."
    if found:
        return f"{found} items in this store begin with {item_id!r}; give more of the id. {listed}"
    if len(item_id) < _MIN_PREFIX:
        return f"{item_id!r} is too short: give at least {_MIN_PREFIX} characters of an id. {listed}"
    return f"Nothing in this store answers to {item_id!r}; {listed}"
