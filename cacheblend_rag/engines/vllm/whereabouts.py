"""Finds where entries are, for the loading controller: the scheduler sees every tier but the workers' RAM."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.store import KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.base import EntryInfo
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV

_MOST_STATIC = 4096


class RAMLog:
    """Records in the first rank's worker what came into its RAM and what left it, until it is reported."""

    def __init__(self, store: KVStore):
        """Take note of what changes in the RAM tiers of ``store``."""
        self._lock = threading.Lock()
        self._changes: dict[KVKey, int] = {}
        for tier in store.tiers if isinstance(store, TieredStore) else (store,):
            if isinstance(tier, MemoryStore):
                tier.tell_changes(self._note)

    def _note(self, key: KVKey, nbytes: int) -> None:
        with self._lock:
            self._changes[key] = nbytes

    def take(self) -> dict[KVKey, int]:
        """Return the bytes that are held of every key that has changed since the last call, 0 for none."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return changes


class Whereabouts:
    """Finds, in the scheduler, an entry's tier and size as the first rank's worker would, without reading it.

    What a worker has taken into its RAM is known from its next report on; of what has left it meanwhile another tier is read.
    """

    def __init__(self) -> None:
        self._held: dict[KVKey, int] = {}
        self._lock = threading.Lock()  # look-ups run beside the engine's steps
        self._static: OrderedDict[tuple[KVKey, int], torch.Tensor] = OrderedDict()

    def take(self, changes: Mapping[KVKey, int]) -> None:
        """Take in what :meth:`RAMLog.take` reported."""
        self._held |= changes
        for key in [key for key, nbytes in changes.items() if not nbytes]:
            del self._held[key]

    def find(self, entries: Entries, token_ids: Sequence[int], static: bool = False) -> StoredKV | None:
        """Return what stands for one of ``entries``, of its size and tier and without layers; their store has no RAM.

        With ``static`` it has the entry's static deviation. None where not every rank will find it.
        """
        found = entries.entry(token_ids)
        if found is None:
            return None
        held = next((n for key in entries.read_keys(token_ids) if (n := self._held.get(key))), 0)
        deviation = self._static_of(found, entries, token_ids) if static else None
        kv = ChunkKV((), 0, "ram" if held else found.tier, deviation)
        kv.num_tokens, kv.stored_nbytes = len(token_ids) or len(entries.header_ids), held or found.nbytes
        return kv

    def _static_of(self, found: EntryInfo, entries: Entries, token_ids: Sequence[int]) -> torch.Tensor | None:
        """Return the static deviation of the entry that was found, read once for as long as prompts ask for it."""
        key = found.key, found.nbytes  # the same entry without it is smaller
        with self._lock:
            known = self._static.pop(key, None)
        if known is None and token_ids:
            known = entries.static_deviation(token_ids)
        if known is not None:
            with self._lock:
                self._static[key] = known
                while len(self._static) > _MOST_STATIC:
                    self._static.popitem(last=False)
        return known
