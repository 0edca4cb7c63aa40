"""The stored KV of the chunks a server knows, whatever the number of tensor-parallel ranks it is cut for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.kv import KVKey
from cacheblend_rag.store import EntryInfo

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.client import BlendClient


class StoredChunks:
    """Looks up and drops entries. Blocking."""

    def __init__(self, client: BlendClient):
        """Use the store, model and header of ``client``."""
        self._client = client

    def listing(self) -> dict[KVKey, EntryInfo]:
        """Return all entries of the store by key."""
        return {entry.key: entry for entry in self._client.store.entries()}

    def contains(self, chunk: Chunk) -> bool:
        """Say whether every rank will find the chunk's KV."""
        return self._client.entries.contains(chunk.token_ids)

    def found(self, chunk: Chunk, listing: Mapping[KVKey, EntryInfo]) -> list[EntryInfo]:
        """Return the entries of a chunk: one, or one for each rank."""
        return [entry for key in self._client.entries.keys(chunk.token_ids) if (entry := listing.get(key)) is not None]

    def drop(self, chunk: Chunk) -> None:
        """Remove the chunk's KV."""
        for key in self._client.entries.keys(chunk.token_ids):
            self._client.store.delete(key)
