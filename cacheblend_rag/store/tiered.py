"""Several tiers as one store."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from cacheblend_rag.errors import DamagedKVError, InputError, StoreError, StoreUnavailableError
from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, VerifyReport
from cacheblend_rag.store.block import ALIGNMENT, Pieces, Take, plain
from cacheblend_rag.store.events import Activity, Events
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV
from cacheblend_rag.store.tally import Tally

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TieredStore(KVStore):
    """Tiers, fastest first. Puts go to every tier; what is read whole from a slower tier moves up into the faster ones.

    Any :class:`KVStore` can be a tier. While one does not answer, the others go on without it.
    """

    def __init__(self, tiers: Sequence[KVStore], tally: Tally | None = None):
        """Combine ``tiers`` (fastest first), which belong to this store from now on.

        Args:
            tiers: See above.
            tally: Where to add what was counted when the store is closed.

        Raises:
            InputError: There are none, or two are encrypted with different keys.
        """
        if not tiers:
            raise InputError("a tiered KV store needs at least one tier")
        rings = [tier.keys for tier in tiers if tier.keys is not None]
        if len({ring.directory.resolve() for ring in rings}) > 1:
            raise InputError("The tiers of a store are encrypted with different keys; give all of them the same.")
        self.keys = rings[0] if rings else None
        self.tiers = tuple(tiers)
        self.lasts, self.remote = any(tier.lasts for tier in tiers), any(tier.remote for tier in tiers)
        self.codecs = tuple(dict.fromkeys(name for tier in tiers for name in tier.codecs))
        self._events = Events()
        self._lock = threading.RLock()  # reentrant: a handle can end by garbage collection while it is held
        self._promoting = 0
        self._tally = tally
        self._refused: dict[KVStore, str] = {}

    def get(self, key: KVKey) -> StoredKV | None:
        """See :meth:`KVStore.get`. The fastest tier that has the entry serves it; the use counts in all of them."""
        for level, tier in enumerate(self.tiers):
            found = tier.get(key)
            if found is None:
                continue
            for slower in self.tiers[level + 1 :]:
                slower.touch(key)
            self._events.add("hits")
            return self._promoted(key, found, self.tiers[:level])
        self._events.add("misses")
        return None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. Every tier is tried; True when at least one has the entry.

        A tier's refusal is an error only where no other tier has the entry that outlasts the process; else it is logged, once.

        Raises:
            StoreError: A tier refused. The others have been given the entry.
        """
        known = self.contains(key)
        stored = lasts = False
        refusals: list[StoreError] = []
        for tier in self.tiers:
            try:
                took = tier.put(key, kv, replace)
                stored, lasts = stored or took, lasts or (took and tier.lasts)
                self._refused.pop(tier, None)
            except StoreError as error:
                refusals.append(error)
                self._say_once(tier, error)
        if refusals and not lasts:
            raise refusals[0]
        if stored and not known:
            self._events.add("puts")
        return stored

    def _say_once(self, tier: KVStore, error: StoreError) -> None:
        """Log why a tier did not take an entry, but not for every entry."""
        kind = type(error).__name__
        if self._refused.get(tier) != kind:
            self._refused[tier] = kind
            if not isinstance(error, StoreUnavailableError):  # the tier has said so itself
                _log.warning("Entries go to the other tiers alone: %s", error)

    def contains(self, key: KVKey) -> bool:
        """See :meth:`KVStore.contains`."""
        return any(tier.contains(key) for tier in self.tiers)

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`; from every tier, also where one refuses."""
        return any(self._of_each(lambda tier: tier.delete(key)))

    def _of_each(self, act: Callable[[KVStore], _T]) -> list[_T]:
        """Do the same with every tier; a tier's error is raised when all others are done."""
        done: list[_T] = []
        failure: StoreError | None = None
        for tier in self.tiers:
            try:
                done.append(act(tier))
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return done

    def touch(self, key: KVKey) -> None:
        """See :meth:`KVStore.touch`."""
        for tier in self.tiers:
            tier.touch(key)

    def pin_for(self, device: torch.device) -> None:
        """See :meth:`KVStore.pin_for`; every tier that can."""
        for tier in self.tiers:
            tier.pin_for(device)

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """See :meth:`KVStore.room`; the first tier's that has any."""
        return next((room for tier in self.tiers if (room := tier.room(nbytes, wait)) is not None), None)

    def entry(self, key: KVKey) -> EntryInfo | None:
        """See :meth:`KVStore.entry`, of the fastest tier that has it; of tiers that answer."""
        for tier in self.tiers:
            with suppress(StoreUnavailableError):  # the tier has said so itself
                if (found := tier.entry(key)) is not None:
                    return found
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`KVStore.entries`. Each key once, as the fastest tier that has it lists it; of tiers that answer."""
        merged: dict[KVKey, EntryInfo] = {}
        for tier in self.tiers:
            try:
                for entry in tier.entries():
                    merged.setdefault(entry.key, entry)
            except StoreUnavailableError:
                pass  # the tier has said so itself
        return iter(sorted(merged.values(), key=lambda entry: entry.last_used))

    def evict(self, to_bytes: int) -> int:
        """See :meth:`KVStore.evict`; every tier is brought down to ``to_bytes``."""
        return sum(self._of_each(lambda tier: tier.evict(to_bytes)))

    def stats(self) -> StoreStats:
        """See :meth:`KVStore.stats`. Entries are counted once, bytes in every tier; the tiers' own stats are nested."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        counts = self._events.counts()
        return StoreStats(
            tier="tiered",
            entries=sum(1 for _ in self.entries()),
            nbytes=sum(stats.nbytes for stats in tiers),
            budget=self.budget,
            hits=counts["hits"],
            misses=counts["misses"],
            puts=counts["puts"],
            evictions=sum(stats.evictions for stats in tiers),
            damaged=sum(stats.damaged for stats in tiers),
            tiers=tiers,
        )

    def out(self) -> dict[str, bool]:
        """See :meth:`KVStore.out`."""
        return {name: is_out for tier in self.tiers for name, is_out in tier.out().items()}

    def activity(self) -> dict[str, Activity]:
        """See :meth:`KVStore.activity`."""
        return {name: counted for tier in self.tiers for name, counted in tier.activity().items()}

    def verify(self, repair: bool = True) -> VerifyReport:
        """See :meth:`KVStore.verify`; every copy is checked."""
        reports = self._of_each(lambda tier: tier.verify(repair))
        return VerifyReport(
            sum(report.checked for report in reports),
            tuple(dict.fromkeys(key for report in reports for key in report.damaged)),
            tuple(dict.fromkeys(key for report in reports for key in report.unreadable)),
        )

    def close(self) -> None:
        """Close every tier."""
        if self._tally is not None:
            self._tally.add(self.activity())
            self._tally = None
        for tier in self.tiers:
            tier.close()

    def _promoted(self, key: KVKey, found: StoredKV, faster: Sequence[KVStore]) -> StoredKV:
        """Return ``found``, wrapped so that reading all of it puts it into the ``faster`` tiers that can hold it."""
        targets = [tier for tier in faster if tier.budget is None or tier.budget >= found.nbytes]
        if not targets:
            return found
        limit = max(math.inf if tier.budget is None else tier.budget for tier in targets)
        with self._lock:
            if self._promoting + found.nbytes > limit:
                return found
            self._promoting += found.nbytes
        return _Promotion(key, found, targets, self._promotion_ended)

    def _promotion_ended(self, nbytes: int) -> None:
        with self._lock:
            self._promoting -= nbytes


class _Promotion(StoredKV):
    """A handle that keeps the layers read through it and, once it has all, puts them into the faster tiers.

    So a promotion costs no read of its own, and no copy where a tier gives it room to read into. What unfinished
    promotions hold together is bounded by the faster tier's budget: of a prompt larger than that, the rest is read through.
    """

    def __init__(self, key: KVKey, source: StoredKV, targets: Sequence[KVStore], on_end: Callable[[int], None]):
        """Read from ``source``; call ``on_end`` with its size once, when the promotion is over or given up."""
        self._key = key
        self._source = source
        self._targets = targets
        self._layers: dict[int, LayerKV] = {}
        self._take: Take | None = None
        self._lock = threading.Lock()
        self.num_layers = source.num_layers
        self.num_tokens = source.num_tokens
        self.start = source.start
        self.nbytes, self.stored_nbytes = source.nbytes, source.stored_nbytes
        self.tier = source.tier
        self.at_once = source.at_once
        self._end = weakref.finalize(self, on_end, source.nbytes)

    def layer(self, index: int) -> LayerKV:
        """See :meth:`StoredKV.layer`."""
        with self._lock:
            held = self._layers.get(index)
            if held is None and self._take is None:
                self._take = self._room()
        if held is not None:
            return held
        assert self._take is not None
        layer = self._source.layer_in(index, self._take)
        with self._lock:
            complete = index not in self._layers and len(self._layers) == self.num_layers - 1
            self._layers.setdefault(index, layer)
        if complete:
            # To RAM at once, without a copy; writing to a medium would hold up whoever waits for this layer.
            self._promote(lasting=False)
            if not any(tier.lasts for tier in self._targets):
                self._end()
        return layer

    def static_deviation(self) -> torch.Tensor | None:
        """See :meth:`StoredKV.static_deviation`."""
        return self._source.static_deviation()

    def finish(self) -> None:
        """See :meth:`StoredKV.finish`: read what the blend did not need, such as the layers below its check layer."""
        try:
            for index in range(self.num_layers):
                self.layer(index)
        except (DamagedKVError, StoreUnavailableError) as error:  # the answer did not use these layers
            _log.warning("KV entry %s stays in the %s tier: %s", self._key, self.tier, error)
            return
        self._promote(lasting=True)
        self._end()

    def _room(self) -> Take:
        nbytes = self.nbytes + self.num_layers * ALIGNMENT
        rooms = (tier.room(nbytes) for tier in self._targets)
        room = next((room for room in rooms if room is not None), None)
        return plain if room is None else Pieces(room)

    def _promote(self, lasting: bool) -> None:
        targets = [tier for tier in self._targets if tier.lasts == lasting]
        if not targets:
            return
        layers = [self._layers[index] for index in range(self.num_layers)]
        kv = ChunkKV(layers, self.start, static=self.static_deviation())
        for tier in targets:
            try:
                tier.put(self._key, kv)
            except StoreUnavailableError:
                pass  # the tier has said so itself
            except StoreError as error:  # the read itself went well
                _log.warning("KV entry %s stays in the %s tier: %s", self._key, self.tier, error)
