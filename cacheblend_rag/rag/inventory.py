"""What a store directory holds, chunk by chunk, without loading a model: the index and the KV store joined by key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import StoreError, UnknownChunkError
from cacheblend_rag.retrieval.index import ChunkIndex, IndexStats
from cacheblend_rag.store import DiskStore, StoreStats
from cacheblend_rag.store.kv import KVKey, kv_key

_MIN_PREFIX = 6


@dataclass(frozen=True)
class InventoryItem:
    """A chunk, its KV, or both.

    Attributes:
        id: The chunk's id; the KV key where no chunk of the index belongs to the entry (the header, removed documents).
        path: The document the chunk stands in; empty without a chunk.
        tokens: Tokens of the chunk; 0 without one.
        key: Key of its KV.
        nbytes: Size of the stored KV; None if none is stored.
        last_used: Seconds since the epoch; None if no KV is stored.
    """

    id: str
    path: str
    tokens: int
    key: KVKey
    nbytes: int | None
    last_used: float | None


class Inventory:
    """A store directory opened for looking at and tidying up, as ``cacheblend store`` does.

    The index knows chunks, the KV store entries by key; this joins the two. Changes KV only, never the index.
    """

    def __init__(self, directory: Path | str):
        """Open the store in ``directory``.

        Raises:
            StoreError: There is none, or it cannot be read.
        """
        self.directory = Path(directory).expanduser()
        if not self.directory.is_dir() or not (ChunkIndex.exists(self.directory) or (self.directory / "kv").is_dir()):
            raise StoreError(
                f"There is no store in {self.directory}. Make one with `cacheblend index FILES --store DIR`."
            )
        self.store = DiskStore(self.directory)

    def items(self) -> list[InventoryItem]:
        """List every chunk of the index and every stored entry: chunks in document order, then entries without one."""
        entries = {entry.key: entry for entry in self.store.entries()}
        found = []
        with self._index() as index:
            for chunk in index.chunks() if index is not None else ():
                assert index is not None
                key = kv_key(index.config.model, index.config.header_ids, chunk.token_ids)
                entry = entries.pop(key, None)
                path = str(chunk.metadata.get("source", ""))
                nbytes, used = (entry.nbytes, entry.last_used) if entry is not None else (None, None)
                found.append(InventoryItem(chunk.id, path, len(chunk.token_ids), key, nbytes, used))
        without_chunk = [InventoryItem(e.key, "", 0, e.key, e.nbytes, e.last_used) for e in entries.values()]
        return found + without_chunk

    def remove(self, item_id: str) -> InventoryItem:
        """Remove the KV of one item, named by its id or KV key or an unambiguous beginning of either.

        The chunk stays in the index; its KV is computed anew when a prompt needs it.

        Raises:
            UnknownChunkError: Nothing, or more than one thing, is called that.
        """
        named = [
            item
            for item in self.items()
            if item_id in (item.id, item.key)
            or (len(item_id) >= _MIN_PREFIX and (item.id.startswith(item_id) or item.key.startswith(item_id)))
        ]
        if len(named) != 1:
            count = "Nothing" if not named else f"{len(named)} items"
            raise UnknownChunkError(
                f"{count} in this store answers to {item_id!r}; `cacheblend store ls` lists the ids."
            )
        self.store.delete(named[0].key)
        return named[0]

    def stats(self) -> tuple[StoreStats, IndexStats | None]:
        """Return the contents of the KV store and of the index, if there is one."""
        with self._index() as index:
            return self.store.stats(), None if index is None else index.stats()

    @contextmanager
    def _index(self) -> Iterator[ChunkIndex | None]:
        if not ChunkIndex.exists(self.directory):
            yield None
            return
        with ChunkIndex.open(self.directory) as index:
            yield index

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Inventory:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()
