"""Combines several tiers into one store."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import torch

from cacheblend_rag.errors import InputError, StoreError, StoreUnavailableError
from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, VerifyReport
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.moving import Promotion, WriteQueue

_log = logging.getLogger(__name__)
_Tier = TypeVar("_Tier")
_Done = TypeVar("_Done")


class TieredStore(KVStore):
    """Combines tiers, fastest first. Puts go to every tier; entries read whole from a slower tier go to faster tiers.

    A thread may write entries to a slower tier later (:attr:`KVStore.writes`). Any :class:`KVStore` can be a tier.
    While a tier does not answer, the store uses the other tiers.
    """

    lists = True

    def __init__(self, tiers: Sequence[KVStore]):
        """Combine ``tiers`` (fastest first); the store closes the tiers.

        Raises:
            InputError: ``tiers`` is empty, or two tiers are encrypted with different keys.
        """
        if not tiers:
            raise InputError("a tiered KV store needs at least one tier")
        super().__init__(tier="tiered")
        self.tiers = tuple(tiers)
        if len({each.keys.directory.resolve() for each in self.formats if each.keys is not None}) > 1:
            raise InputError("The tiers of a store are encrypted with different keys; give all of them the same.")
        self.lasts, self.remote = any(tier.lasts for tier in tiers), any(tier.remote for tier in tiers)
        self._lock = threading.RLock()  # reentrant: garbage collection can end a promotion while the lock is held
        self._promoting = 0
        self._deleting = self._deleted = 0  # number of running deletes, and of finished deletes
        self._promotions: WeakSet[Promotion] = WeakSet()
        self._refused: dict[KVStore, str] = {}
        self._behind = {
            tier: WriteQueue(tier, partial(self._say_once, tier)) for tier in self.tiers if tier.writes == "back"
        }

    @property
    def formats(self) -> tuple[EntryFormat, ...]:
        """Return the formats of all tiers."""
        return tuple(each for tier in self.tiers for each in tier.formats)

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Return the names of the tiers that cannot list entries; listings lack entries that only such a tier holds."""
        return tuple(tier.tier for tier in self.tiers if not tier.lists)

    def get(self, key: KVKey) -> StoredKV | None:
        """See :meth:`KVStore.get`. The fastest tier with the entry serves it; the use counts in slower tiers, too."""
        deleted = self._deleted
        for level, tier in enumerate(self.tiers):
            found = self._on_its_way(tier, key) or tier.get(key)
            if found is None:
                continue
            for slower in self.tiers[level + 1 :]:
                slower.touch(key)
            self._events.add("hits")
            return self._promoted(key, found, self.tiers[:level], deleted)
        self._events.add("misses")
        return None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. Every tier is tried; True if at least one tier holds the entry, or will be given it.

        A tier's refusal is an error only if no other tier that outlasts the process holds the entry; else the refusal
        is logged once.

        Raises:
            StoreError: A tier refused the entry. The other tiers have been given the entry.
        """
        known = self.contains(key)
        stored = lasts = False
        refusals: list[StoreError] = []
        for tier in self.tiers:
            try:
                took = self._give(tier, key, kv, replace)
                stored, lasts = stored or took, lasts or (took and tier.lasts)
                if tier not in self._behind:
                    self._refused.pop(tier, None)
            except StoreError as error:
                refusals.append(error)
                self._say_once(tier, error)
        if refusals and not lasts:
            raise refusals[0]
        if stored and not known:
            self._events.add("puts")
        return stored

    def _give(self, tier: KVStore, key: KVKey, kv: ChunkKV, replace: bool) -> bool:
        large = tier.budget is not None and kv.nbytes > tier.budget  # a refusal is returned at once
        if tier not in self._behind or large:
            return tier.put(key, kv, replace)
        self._behind[tier].put(key, kv, replace)
        return True

    def _on_its_way(self, tier: KVStore, key: KVKey) -> StoredKV | None:
        return self._behind[tier].get(key) if tier in self._behind else None

    def flush(self) -> None:
        """Wait until all deferred writes to the tiers have ended."""
        for queue in self._behind.values():
            queue.flush()

    def _say_once(self, tier: KVStore, error: StoreError) -> None:
        """Log why a tier refused an entry, once for each tier and class of error in sequence."""
        kind = type(error).__name__
        if self._refused.get(tier) != kind:
            self._refused[tier] = kind
            if not isinstance(error, StoreUnavailableError):  # which the tier has logged itself
                _log.warning("Entries go to the other tiers alone: %s", error)

    def contains(self, key: KVKey) -> bool:
        return any(self._on_its_way(tier, key) is not None or tier.contains(key) for tier in self.tiers)

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`; the entry is deleted from every other tier even if a tier raises an error."""
        with self._lock:
            self._deleting += 1
            promotions = list(self._promotions)
        try:
            for promotion in promotions:
                promotion.give_up(key)  # otherwise a running promotion would store the entry again
            waiting = [queue.cancel(key) for queue in self._behind.values()]
            return any(_of_each(self.tiers, lambda tier: tier.delete(key))) or any(waiting)
        finally:
            with self._lock:
                self._deleting, self._deleted = self._deleting - 1, self._deleted + 1

    def touch(self, key: KVKey) -> None:
        for tier in self.tiers:
            tier.touch(key)

    def page_lock_for(self, device: torch.device) -> None:
        for tier in self.tiers:
            tier.page_lock_for(device)

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        return next((room for tier in self.tiers if (room := tier.room(nbytes, wait)) is not None), None)

    def entry(self, key: KVKey) -> EntryInfo | None:
        for tier in self.tiers:
            with suppress(StoreUnavailableError):  # the tier has logged the error
                if (found := tier.entry(key)) is not None:
                    return found
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`KVStore.entries`. Each key is listed once, by the fastest tier that can list and answers."""
        merged: dict[KVKey, EntryInfo] = {}
        for tier in self.tiers:
            try:
                for entry in tier.entries():
                    merged.setdefault(entry.key, entry)
            except StoreUnavailableError:
                pass  # the tier has logged the error
        return iter(sorted(merged.values(), key=lambda entry: entry.last_used))

    def evict(self, to_bytes: int) -> int:
        """See :meth:`KVStore.evict`; every tier that evicts is reduced to ``to_bytes``."""
        self.flush()
        return sum(_of_each(self.tiers, lambda tier: tier.evict(to_bytes)))

    def stats(self) -> StoreStats:
        """See :meth:`KVStore.stats`. Each entry counts once, and its bytes count in every tier that holds them."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        return replace(
            self._stats(sum(1 for _ in self.entries()), sum(stats.nbytes for stats in tiers)),
            evictions=sum(stats.evictions for stats in tiers),
            damaged=sum(stats.damaged for stats in tiers),
            codec="",
            tiers=tiers,
        )

    def out(self) -> dict[str, bool]:
        return {name: is_out for tier in self.tiers for name, is_out in tier.out().items()}

    def verify(self, repair: bool = True) -> VerifyReport:
        reports = _of_each(self.tiers, lambda tier: tier.verify(repair))
        return VerifyReport(
            sum(report.checked for report in reports),
            tuple(dict.fromkeys(key for report in reports for key in report.damaged)),
            tuple(dict.fromkeys(key for report in reports for key in report.unreadable)),
        )

    def close(self) -> None:
        """Finish the deferred writes, and close every tier."""
        for queue in self._behind.values():
            queue.close()
        for tier in self.tiers:
            tier.close()

    def _promoted(self, key: KVKey, found: StoredKV, faster: Sequence[KVStore], deleted: int) -> StoredKV:
        """Wrap ``found`` so that a complete read puts the entry into the ``faster`` tiers with large enough budgets.

        ``deleted`` is the number of finished deletes before the look-up. If a delete has ended since or is running, the
        method returns ``found`` itself, because the deleted entry must not be stored again.
        """
        targets = [tier for tier in faster if tier.budget is None or tier.budget >= found.nbytes]
        if not targets:
            return found
        limit = max(math.inf if tier.budget is None else tier.budget for tier in targets)
        with self._lock:
            if self._deleting or self._deleted != deleted or self._promoting + found.nbytes > limit:
                return found
            self._promoting += found.nbytes
            promotion = Promotion(key, found, targets, self._promotion_ended)
            self._promotions.add(promotion)
        return promotion

    def _promotion_ended(self, nbytes: int) -> None:
        with self._lock:
            self._promoting -= nbytes


def _of_each(tiers: Iterable[_Tier], act: Callable[[_Tier], _Done]) -> list[_Done]:
    """Call ``act`` with every tier and return the results; raise a tier's error after all tiers were called."""
    done: list[_Done] = []
    failure: StoreError | None = None
    for tier in tiers:
        try:
            done.append(act(tier))
        except StoreError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return done
