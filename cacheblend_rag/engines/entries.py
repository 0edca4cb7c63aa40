"""One model's entries in a store, as a whole or as a tensor-parallel rank sees them: its own shard of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.store import KVStore, TieredStore
from cacheblend_rag.store.block import Take, plain
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, ModelFingerprint, StoredKV, kv_key


class Entries:
    """Entries of one model behind one header. ``()`` as token ids means the header itself."""

    def __init__(
        self, store: KVStore, fingerprint: ModelFingerprint, header_ids: Sequence[int], rank: int = 0, ranks: int = 1
    ):
        """Look into ``store`` as rank ``rank`` of ``ranks``."""
        self.store, self.header_ids = store, tuple(header_ids)
        self._fingerprint, self._rank, self._ranks = fingerprint, rank, ranks

    def lasting(self) -> Entries:
        """Return the same entries as the tiers alone have them that outlast the process; of RAM alone, as RAM has them."""
        store = self.store
        if isinstance(store, TieredStore):
            lasting = [tier for tier in store.tiers if tier.lasts] or store.tiers
            store = lasting[0] if len(lasting) == 1 else TieredStore(lasting)
        return Entries(store, self._fingerprint, self.header_ids, self._rank, self._ranks)

    def contains(self, token_ids: Sequence[int]) -> bool:
        """Say whether every rank will find an entry."""
        if self.store.contains(self._key(token_ids)):
            return True
        return self._ranks > 1 and all(map(self.store.contains, self.written_keys(token_ids)))

    def get(self, token_ids: Sequence[int], num_layers: int, kv_heads: int = 0) -> StoredKV | None:
        """Return this rank's shard, cut from the whole entry if that is what is stored (by another engine, say).

        Args:
            token_ids: The chunk's.
            num_layers: An entry of another depth is a miss.
            kv_heads: KV heads on this rank, where there are several.
        """
        found = self.store.get(self._key(token_ids, self._rank)) if self._ranks > 1 else None
        if found is None:
            found = self.store.get(self._key(token_ids))
            if found is not None and self._ranks > 1:
                found = _HeadSlice(found, self._rank, self._ranks, kv_heads)
        wanted = len(token_ids) or len(self.header_ids)
        return found if found is not None and (found.num_tokens, found.num_layers) == (wanted, num_layers) else None

    def put(self, token_ids: Sequence[int], kv: ChunkKV, replace: bool = False) -> bool:
        """Store this rank's shard; see :meth:`KVStore.put`."""
        return self.store.put(self.own_key(token_ids), kv, replace)

    def has_static(self, token_ids: Sequence[int]) -> bool:
        """Say whether every rank will find an entry's static deviation, which `static` policies need."""
        if self._has_static(self._key(token_ids)):
            return True
        return self._ranks > 1 and all(map(self._has_static, self.written_keys(token_ids)))

    def _has_static(self, key: KVKey) -> bool:
        found = self.store.get(key)
        return found is not None and found.static_deviation() is not None

    def delete(self, token_ids: Sequence[int]) -> int:
        """Delete an entry, every rank's shard of it; return how many of its parts were stored."""
        return sum(self.store.delete(key) for key in self.keys(token_ids))

    def warm(self, token_ids: Sequence[int]) -> None:
        """Move an entry into the fastest tier (blocking); one that is not stored is left out."""
        for key in self.keys(token_ids):
            if (kv := self.store.get(key)) is not None:
                kv.finish()

    def keys(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return every key an entry may lie under: the whole one's, and with tensor parallelism each rank's."""
        return list(dict.fromkeys([self._key(token_ids), *self.written_keys(token_ids)]))

    def written_keys(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return the keys under which the ranks together store an entry."""
        if self._ranks == 1:
            return [self._key(token_ids)]
        return [self._key(token_ids, rank) for rank in range(self._ranks)]

    def own_key(self, token_ids: Sequence[int]) -> KVKey:
        """Return the key this rank stores under."""
        return self.written_keys(token_ids)[self._rank]

    def _key(self, token_ids: Sequence[int], rank: int | None = None) -> KVKey:
        codec = "raw" if rank is None else f"raw:rank{rank}of{self._ranks}"
        return kv_key(self._fingerprint, self.header_ids, token_ids, codec)


class _HeadSlice(StoredKV):
    """One rank's heads of a whole entry."""

    def __init__(self, whole: StoredKV, rank: int, ranks: int, kv_heads: int):
        self._whole, self._rank, self._ranks, self._heads = whole, rank, ranks, kv_heads
        self.num_layers, self.num_tokens, self.start = whole.num_layers, whole.num_tokens, whole.start
        self.nbytes, self.stored_nbytes, self.tier = whole.nbytes // ranks, whole.stored_nbytes // ranks, whole.tier

    def layer(self, index: int) -> LayerKV:
        return self.layer_in(index, plain)

    def layer_in(self, index: int, take: Take) -> LayerKV:
        kv = self._whole.layer_in(index, take)
        # With fewer heads than ranks vLLM gives neighbouring ranks the same head.
        first = kv.k.shape[0] * self._rank // self._ranks
        return LayerKV(*(t[first : first + self._heads] for t in kv))

    def static_deviation(self) -> torch.Tensor | None:
        return self._whole.static_deviation()  # of all heads: every rank must see the same

    def finish(self) -> None:
        self._whole.finish()
