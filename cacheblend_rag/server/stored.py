"""The stored KV of the chunks a server knows, whatever the number of tensor-parallel ranks it is cut for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.engines.vllm.entries import Entries
from cacheblend_rag.kv import KVKey, kv_key
from cacheblend_rag.store import EntryInfo

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.client import BlendClient


class StoredChunks:
    """Looks up and drops entries. Blocking."""

    def __init__(self, client: BlendClient):
        """Use the store, model and header of ``client``."""
        self._client = client
        ranks = client.llm.vllm_config.parallel_config.tensor_parallel_size
        shards = range(ranks)
        self._ranks = [
            Entries(client.store, client.fingerprint, client.header_ids, rank, len(shards)) for rank in shards
        ]

    def listing(self) -> dict[KVKey, EntryInfo]:
        """Return all entries of the store by key."""
        return {entry.key: entry for entry in self._client.store.entries()}

    def contains(self, chunk: Chunk) -> bool:
        """Say whether every rank will find the chunk's KV."""
        return self._ranks[0].contains(chunk.token_ids)

    def found(self, chunk: Chunk, listing: Mapping[KVKey, EntryInfo]) -> list[EntryInfo]:
        """Return the entries of a chunk: one, or one for each rank."""
        return [entry for key in self._keys(chunk) if (entry := listing.get(key)) is not None]

    def drop(self, chunk: Chunk) -> None:
        """Remove the chunk's KV."""
        for key in self._keys(chunk):
            self._client.store.delete(key)

    def _keys(self, chunk: Chunk) -> list[KVKey]:
        whole = kv_key(self._client.fingerprint, self._client.header_ids, chunk.token_ids)
        return list(dict.fromkeys([whole, *(entries.own_key(chunk.token_ids) for entries in self._ranks)]))
