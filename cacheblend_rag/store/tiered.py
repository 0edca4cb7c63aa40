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
from cacheblend_rag.store.base import (
    EntryInfo,
    Evicting,
    KVStore,
    Listing,
    PageLocking,
    Reporting,
    StoreStats,
    VerifyReport,
    out_of,
    page_lock_for,
    room_in,
    stats_of,
)
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.moving import Promotion, WriteQueue

_log = logging.getLogger(__name__)
_Tier = TypeVar("_Tier")
_Done = TypeVar("_Done")


class TieredStore(KVStore, Listing, Evicting, Reporting, PageLocking):
    """Combines tiers, fastest first. Puts go to every tier; what is read whole from a slower tier moves up into the faster ones.

    A slower tier may be given entries later, by a thread (:attr:`KVStore.writes`).
    Any :class:`KVStore` can be a tier; what only some can do is done by those that can. While one does not answer, the others go
    on without it.
    """

    def __init__(self, tiers: Sequence[KVStore]):
        """Combine ``tiers`` (fastest first), which belong to this store from now on.

        Raises:
            InputError: There are none, or two are encrypted with different keys.
        """
        if not tiers:
            raise InputError("a tiered KV store needs at least one tier")
        super().__init__(tier="tiered")
        self.tiers = tuple(tiers)
        if len({each.keys.directory.resolve() for each in self.formats if each.keys is not None}) > 1:
            raise InputError("The tiers of a store are encrypted with different keys; give all of them the same.")
        self._listing = [tier for tier in tiers if isinstance(tier, Listing)]
        self._evicting = [tier for tier in tiers if isinstance(tier, Evicting)]
        self.lasts, self.remote = any(tier.lasts for tier in tiers), any(tier.remote for tier in tiers)
        self._lock = threading.RLock()  # reentrant: a handle can end by garbage collection while it is held
        self._promoting = 0
        self._deleting = self._deleted = 0  # deletes under way, and those that have ended
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
        """Return the tiers that cannot tell what they hold, by name; listings lack what they alone have."""
        return tuple(tier.tier for tier in self.tiers if not isinstance(tier, Listing))

    def get(self, key: KVKey) -> StoredKV | None:
        """See :meth:`KVStore.get`. The fastest tier that has the entry serves it; the use counts in all of them."""
        deleted = self._deleted
        for level, tier in enumerate(self.tiers):
            found = self._on_its_way(tier, key) or tier.get(key)
            if found is None:
                continue
            for slower in self.tiers[level + 1 :]:
                if isinstance(slower, Evicting):
                    slower.touch(key)
            self._events.add("hits")
            return self._promoted(key, found, self.tiers[:level], deleted)
        self._events.add("misses")
        return None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. Every tier is tried; True when at least one has the entry, or will be given it.

        A tier's refusal is an error only where no other tier has the entry that outlasts the process; else it is logged, once.

        Raises:
            StoreError: A tier refused. The others have been given the entry.
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
        large = tier.budget is not None and kv.nbytes > tier.budget  # what it refuses is said at once
        if tier not in self._behind or large:
            return tier.put(key, kv, replace)
        self._behind[tier].put(key, kv, replace)
        return True

    def _on_its_way(self, tier: KVStore, key: KVKey) -> StoredKV | None:
        return self._behind[tier].get(key) if tier in self._behind else None

    def flush(self) -> None:
        """Wait until every tier was given what was put."""
        for queue in self._behind.values():
            queue.flush()

    def _say_once(self, tier: KVStore, error: StoreError) -> None:
        """Log why a tier did not take an entry, but not for every entry."""
        kind = type(error).__name__
        if self._refused.get(tier) != kind:
            self._refused[tier] = kind
            if not isinstance(error, StoreUnavailableError):  # the tier has said so itself
                _log.warning("Entries go to the other tiers alone: %s", error)

    def contains(self, key: KVKey) -> bool:
        return any(self._on_its_way(tier, key) is not None or tier.contains(key) for tier in self.tiers)

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`; from every tier, also where one refuses."""
        with self._lock:
            self._deleting += 1
            promotions = list(self._promotions)
        try:
            for promotion in promotions:
                promotion.give_up(key)  # else it would come back with the last layer that a prompt reads
            waiting = [queue.cancel(key) for queue in self._behind.values()]
            return any(_of_each(self.tiers, lambda tier: tier.delete(key))) or any(waiting)
        finally:
            with self._lock:
                self._deleting, self._deleted = self._deleting - 1, self._deleted + 1

    def touch(self, key: KVKey) -> None:
        for tier in self._evicting:
            tier.touch(key)

    def page_lock_for(self, device: torch.device) -> None:
        """See :meth:`PageLocking.page_lock_for`; every tier that can."""
        for tier in self.tiers:
            page_lock_for(tier, device)

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """See :meth:`PageLocking.room`; the first tier's that has any."""
        return next((room for tier in self.tiers if (room := room_in(tier, nbytes, wait)) is not None), None)

    def entry(self, key: KVKey) -> EntryInfo | None:
        """See :meth:`KVStore.entry`, of the fastest tier that has it; of tiers that answer."""
        for tier in self.tiers:
            with suppress(StoreUnavailableError):  # the tier has said so itself
                if (found := tier.entry(key)) is not None:
                    return found
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`Listing.entries`. Each key once, as the fastest tier that has it lists it; of tiers that can and answer."""
        merged: dict[KVKey, EntryInfo] = {}
        for tier in self._listing:
            try:
                for entry in tier.entries():
                    merged.setdefault(entry.key, entry)
            except StoreUnavailableError:
                pass  # the tier has said so itself
        return iter(sorted(merged.values(), key=lambda entry: entry.last_used))

    def evict(self, to_bytes: int) -> int:
        """See :meth:`Evicting.evict`; every tier that can is brought down to ``to_bytes``."""
        self.flush()
        return sum(_of_each(self._evicting, lambda tier: tier.evict(to_bytes)))

    def stats(self) -> StoreStats:
        """See :meth:`Reporting.stats`. Entries are counted once, bytes in every tier; the tiers' own stats are nested."""
        tiers = tuple(map(stats_of, self.tiers))
        return replace(
            self._stats(sum(1 for _ in self.entries()), sum(stats.nbytes for stats in tiers)),
            evictions=sum(stats.evictions for stats in tiers),
            damaged=sum(stats.damaged for stats in tiers),
            codec="",
            tiers=tiers,
        )

    def out(self) -> dict[str, bool]:
        return {name: is_out for tier in self.tiers for name, is_out in out_of(tier).items()}

    def verify(self, repair: bool = True) -> VerifyReport:
        """See :meth:`Listing.verify`; every copy is checked that a tier lists."""
        reports = _of_each(self._listing, lambda tier: tier.verify(repair))
        return VerifyReport(
            sum(report.checked for report in reports),
            tuple(dict.fromkeys(key for report in reports for key in report.damaged)),
            tuple(dict.fromkeys(key for report in reports for key in report.unreadable)),
        )

    def close(self) -> None:
        """Write what is still to be written, and close every tier."""
        for queue in self._behind.values():
            queue.close()
        for tier in self.tiers:
            tier.close()

    def _promoted(self, key: KVKey, found: StoredKV, faster: Sequence[KVStore], deleted: int) -> StoredKV:
        """Return ``found``, wrapped so that reading all of it puts it into the ``faster`` tiers that can hold it.

        ``deleted`` is how many deletes had ended when it was looked for: behind another one it may be what must not come back.
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
    """Do the same with every tier; a tier's error is raised when all others are done."""
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
