"""Finds one model's entries, or one tensor-parallel rank's shards of them, in a store, and reports their tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch

from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store import KVStore, TieredStore
from cacheblend_rag.store.base import EntryInfo
from cacheblend_rag.store.codec import LOSSY
from cacheblend_rag.store.files import DEFAULT, Namespace
from cacheblend_rag.store.kv import (
    ChunkKV,
    KVKey,
    LayerKV,
    ModelFingerprint,
    Shard,
    StoredKV,
    Take,
    WrittenBy,
    kv_key,
    plain,
)

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import Reuse


_T = TypeVar("_T")
_AT_ONCE = 8
_key_of = lru_cache(1024)(kv_key)  # many prompts contain the same chunks

Lookup = Callable[["Entries", Sequence[int]], _T]
"""Looks up an entry: takes one writer's entries and a chunk's token ids (``()`` for the header), returns the result."""

Ranking = Literal["now", "lazy", "off"]
"""When static deviations are measured: together with the KV, after the first blend that needs them, or never."""


def chosen_ranking(asked: Ranking | None, default_policy: str) -> Ranking:
    """Return ``asked``; for None return ``"now"`` if ``default_policy`` needs static deviations, else ``"lazy"``.

    Raises:
        InputError: ``asked`` is none of the choices.
    """
    if asked not in (None, *get_args(Ranking)):
        raise InputError(f"ranking is {asked!r}; give {', '.join(map(repr, get_args(Ranking)))}, or leave it out.")
    return asked or ("now" if policy(default_policy).needs_static else "lazy")


class Entries:
    """Accesses one model's entries behind one header in a store, within a namespace. Token ids ``()`` mean the header.

    Writes and deletions affect the namespace itself. A look-up that finds no entry there continues in the namespaces
    that the namespace reads.
    """

    def __init__(
        self,
        store: KVStore,
        fingerprint: ModelFingerprint,
        header_ids: Sequence[int],
        rank: int = 0,
        ranks: int = 1,
        namespace: Namespace = DEFAULT,
        writer: WrittenBy | None = None,
    ):
        """Access ``store`` as rank ``rank`` of ``ranks``, for chunks' KV from ``writer``; None is the model itself.

        Raises:
            InputError: The store is encrypted, and the namespace has no key.
        """
        self.store, self.header_ids, self.namespace, self.writer = store, tuple(header_ids), namespace, writer
        self._fingerprint, self._rank, self._ranks = fingerprint, rank, ranks
        self._key_names = {namespace.name: store.key_name(namespace.name)}
        for each in namespace.reads:
            with suppress(InputError):  # a namespace whose key was destroyed has no readable entries
                self._key_names[each] = store.key_name(each)
        self._owners = tuple(self._key_names)

    def within(self, namespace: Namespace) -> Entries:
        """Return the entries of the same store within ``namespace``."""
        return self if namespace == self.namespace else self._like(namespace=namespace)

    def by(self, writer: WrittenBy | None) -> Entries:
        """Return the entries that ``writer`` has written; for None return the model's own entries."""
        return self if self.writer == writer else self._like(writer=writer)

    @property
    def sources(self) -> tuple[Entries, ...]:
        """Return these entries and, for a KV writer's, also the model's own, which a prompt's first chunk uses."""
        return (self,) if self.writer is None else (self, self.by(None))

    def _like(self, **changed: Any) -> Entries:
        like = {"store": self.store, "namespace": self.namespace, "writer": self.writer, **changed}
        return Entries(
            fingerprint=self._fingerprint, header_ids=self.header_ids, rank=self._rank, ranks=self._ranks, **like
        )

    def plan(
        self,
        prompt: TokenizedPrompt,
        look: Lookup[StoredKV | None],
        reuse: Reuse = "chunks",
        longest: int | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> BlendPlan:
        """Return the plan for a prompt whose entries ``look`` finds; see :func:`make_plan`.

        With ``reuse="prefix"`` the plan uses no stored KV if any of the KV was stored by a lossy codec.
        """
        own = None if self.writer is None else partial(look, self.by(None))
        plan = make_plan(prompt, self.header_ids, partial(look, self), reuse, longest, own, agree)
        if reuse != "prefix" or all(agree(span.kv.exact) for span in plan.spans):
            return plan
        why = f"what is stored of the prompt's beginning has been kept in {LOSSY}, which is not exact"
        return plan.without(plan.spans, why)

    def wanted(self, prompt: TokenizedPrompt) -> list[tuple[Entries, tuple[int, ...]]]:
        """Return everything that a plan for ``prompt`` may look up: the header's entry and each chunk's entry."""
        chunks = [span.chunk.token_ids for span in prompt.spans]
        own = [(self.by(None), token_ids) for token_ids in chunks[:1] if self.writer is not None]
        return [(self, ()), *own, *((self, token_ids) for token_ids in chunks)]

    def lasting(self) -> Entries:
        """Return the same entries, limited to tiers that outlast the process; a store of RAM alone is not limited."""
        store = self.store
        if isinstance(store, TieredStore):
            lasting = [tier for tier in store.tiers if tier.lasts] or store.tiers
            store = lasting[0] if len(lasting) == 1 else TieredStore(lasting)
        return self._like(store=store)

    def contains(self, token_ids: Sequence[int]) -> bool:
        """Return whether every rank will find the entry."""
        return self._owner(token_ids) is not None

    def owns(self, token_ids: Sequence[int]) -> bool:
        """Return whether every rank will find the entry in the namespace itself."""
        return self._has(self.namespace.name, token_ids)

    def _owner(self, token_ids: Sequence[int]) -> str | None:
        """Return the name of the first namespace in which every rank will find the entry; None without a match."""
        return next((owner for owner in self._owners if self._has(owner, token_ids)), None)

    def _has(self, owner: str, token_ids: Sequence[int]) -> bool:
        return self._each_rank(self.store.contains, owner, token_ids)

    def _each_rank(self, holds: Callable[[KVKey], bool], owner: str, token_ids: Sequence[int]) -> bool:
        """Return whether ``holds`` is true for the key of the whole entry, or for the keys of all ranks' shards."""
        if holds(self._key(owner, token_ids)):
            return True
        return self._ranks > 1 and all(map(holds, self.written_keys(token_ids, owner)))

    def entry(self, token_ids: Sequence[int]) -> EntryInfo | None:
        """Return the size and tier of this rank's part of an entry, as the store lists the part, without reading it.

        Returns None if :meth:`contains` returns False.
        """
        for owner in self._owners:
            if self._ranks > 1:
                if not self._has(owner, token_ids):
                    continue
                if (shard := self.store.entry(self._key(owner, token_ids, self._rank))) is not None:
                    return shard
            if (whole := self.store.entry(self._key(owner, token_ids))) is not None:
                return replace(whole, nbytes=whole.nbytes // self._ranks)
        return None

    def get(self, token_ids: Sequence[int], num_layers: int, kv_heads: int = 0) -> StoredKV | None:
        """Return this rank's shard of an entry; if only the whole entry is stored, the shard is cut from it.

        Returns None if the entry is missing or has another number of layers or tokens. ``kv_heads`` is the number of KV
        heads on this rank; a single rank ignores ``kv_heads``.
        """
        wanted = len(token_ids) or len(self.header_ids), num_layers
        shards = (self._shard(owner, token_ids, kv_heads) for owner in self._owners)
        return next((kv for kv in shards if kv is not None and (kv.num_tokens, kv.num_layers) == wanted), None)

    def _shard(self, owner: str, token_ids: Sequence[int], kv_heads: int) -> StoredKV | None:
        found = self.store.get(self._key(owner, token_ids, self._rank)) if self._ranks > 1 else None
        if found is None:
            found = self.store.get(self._key(owner, token_ids))
            if found is not None and self._ranks > 1:
                found = _HeadSlice(found, self._rank, self._ranks, kv_heads)
        return found

    def read_keys(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return the keys under which this rank looks up an entry, in the order of the look-ups."""
        ranks = [self._rank, None] if self._ranks > 1 else [None]
        return [self._key(owner, token_ids, rank) for owner in self._owners for rank in ranks]

    def put(self, token_ids: Sequence[int], kv: ChunkKV, replace: bool = False) -> bool:
        """Store this rank's shard; see :meth:`KVStore.put`."""
        return self.store.put(self.own_key(token_ids), kv, replace)

    def static_deviation(self, token_ids: Sequence[int]) -> torch.Tensor | None:
        """Return the static deviation that this rank finds for an entry, without reading layers; None if missing."""
        found = next((kv for key in self.read_keys(token_ids) if (kv := self.store.get(key)) is not None), None)
        return None if found is None else found.static_deviation()

    def has_static(self, token_ids: Sequence[int]) -> bool:
        """Return whether every rank will find the entry's static deviation, which `static` policies need."""
        owner = self._owner(token_ids)
        return owner is not None and self._each_rank(self._has_static, owner, token_ids)

    def _has_static(self, key: KVKey) -> bool:
        found = self.store.get(key)
        return found is not None and found.static_deviation() is not None

    def delete(self, token_ids: Sequence[int]) -> int:
        """Delete an entry with all shards, from every writer; return the number of deleted parts."""
        deleted = sum(self.store.delete(key) for key in self.keys(token_ids))
        _key_of.cache_clear()  # the cache holds token ids of deleted entries
        return deleted

    def warm(self, token_ids: Sequence[int]) -> None:
        """Move an entry, from every writer, into the fastest tier (blocking); a missing entry is ignored."""
        for source in self.sources:
            owner = source._owner(token_ids)
            for key in () if owner is None else source._keys(owner, token_ids):
                if (kv := self.store.get(key)) is not None:
                    kv.finish()

    def keys(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return all keys of an entry in the namespace: for each writer, the keys of the whole entry and its shards."""
        own = self.namespace.name
        return list(dict.fromkeys(key for source in self.sources for key in source._keys(own, token_ids)))

    def _keys(self, owner: str, token_ids: Sequence[int]) -> list[KVKey]:
        return list(dict.fromkeys([self._key(owner, token_ids), *self.written_keys(token_ids, owner)]))

    def written_keys(self, token_ids: Sequence[int], owner: str | None = None) -> list[KVKey]:
        """Return the keys under which the ranks together store an entry in ``owner``, by default the own namespace."""
        ranks: Iterable[int | None] = (None,) if self._ranks == 1 else range(self._ranks)
        return [self._key(owner or self.namespace.name, token_ids, rank) for rank in ranks]

    def own_key(self, token_ids: Sequence[int]) -> KVKey:
        """Return the key under which this rank stores an entry."""
        return self.written_keys(token_ids)[self._rank]

    def _key(self, owner: str, token_ids: Sequence[int], rank: int | None = None) -> KVKey:
        shard = None if rank is None else Shard(rank, self._ranks)
        key_name = self._key_names[owner]
        return _key_of(self._fingerprint, self.header_ids, tuple(token_ids), shard, owner, key_name, self.writer)


class _HeadSlice(StoredKV):
    """Provides one rank's heads of a whole entry."""

    def __init__(self, whole: StoredKV, rank: int, ranks: int, kv_heads: int):
        self._whole, self._rank, self._ranks, self._heads = whole, rank, ranks, kv_heads
        self.num_layers, self.num_tokens, self.start = whole.num_layers, whole.num_tokens, whole.start
        self.nbytes, self.stored_nbytes, self.tier = whole.nbytes // ranks, whole.stored_nbytes // ranks, whole.tier
        self.exact = whole.exact

    def layer(self, index: int) -> LayerKV:
        return self.layer_in(index, plain)

    def layer_in(self, index: int, take: Take) -> LayerKV:
        kv = self._whole.layer_in(index, take)
        # With fewer heads than ranks, vLLM assigns the same head to neighbouring ranks.
        first = kv.k.shape[0] * self._rank // self._ranks
        return LayerKV(*(t[first : first + self._heads] for t in kv))

    def static_deviation(self) -> torch.Tensor | None:
        return self._whole.static_deviation()  # over all heads, so that every rank selects the same tokens

    def finish(self) -> None:
        self._whole.finish()


class SideBySide(Generic[_T]):
    """Runs look-ups in parallel threads if the store is remote, else one by one on request.

    A prompt of many chunks therefore waits for a few round trips only, and for a hanging tier no longer than one
    deadline. An error of a look-up is raised when the result is requested.
    """

    def __init__(self, look: Lookup[_T], wanted: Iterable[tuple[Entries, Sequence[int]]], remote: bool):
        """Start the look-ups ``wanted`` with ``look`` if the store is ``remote``."""
        self._look = look
        self._asked: dict[tuple[WrittenBy | None, tuple[int, ...]], Future[_T]] = {}
        if remote:
            pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cacheblend-lookup")
            distinct = {(source.writer, tuple(token_ids)): source for source, token_ids in wanted}
            self._asked = {(writer, ids): pool.submit(look, source, ids) for (writer, ids), source in distinct.items()}
            pool.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Return whether all started look-ups have finished."""
        return all(answer.done() for answer in self._asked.values())

    def __call__(self, entries: Entries, token_ids: Sequence[int]) -> _T:
        answer = self._asked.get((entries.writer, tuple(token_ids)))
        return self._look(entries, token_ids) if answer is None else answer.result()
