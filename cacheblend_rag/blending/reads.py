"""Reads stored KV layer by layer for the computation: in the caller's thread, in other threads, or by the device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.blending.transfer import Slot, Staged, Transfer, transfer_to
from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store.codec import numbers
from cacheblend_rag.store.events import ReadClock, TierReads
from cacheblend_rag.store.kv import LayerKV, StoredKV, join_tokens

_T = TypeVar("_T")

# Limit on the bytes that wait on the device before they are used: enough that copies never wait for the computation,
# little beside a model's memory. Two layers are always allowed, so that one is copied while the other is used.
AHEAD_BYTES = 128 << 20
# From a disk to a CPU, reading two layers ahead hides a slow read; a second thread would take a core from the
# computation. From a remote tier, where a read is a round trip, there are as many threads as the tier answers reads at
# once, and one layer more than threads is under way.
_CPU_LAYERS_AHEAD = 2
# For a device the threads only read and check; a single thread is slower than the device's bus.
_DEVICE_THREADS = 4


class UnusableSpanError(Exception):
    """Says that stored KV failed its checks, could not be read, or came too late, while it was being loaded.

    Attributes:
        spans: Spans whose stored KV is unusable; empty if the KV is on another tensor-parallel rank.
        late: Whether the stored KV only came too late; then the KV itself is intact.
        reads: Reads so far from the tiers that are late.
        waited_s: Seconds that the computation has waited.
    """

    def __init__(
        self,
        *spans: StoredSpan,
        late: bool = False,
        reads: Mapping[str, TierReads] | None = None,
        waited_s: float = 0.0,
    ):
        where = ", ".join(f"{span.start} to {span.end}" for span in spans)
        super().__init__(
            f"stored KV {f'for positions {where}' if spans else 'on another rank'} {'is late' if late else 'cannot be used'}"
        )
        self.spans, self.late, self.reads, self.waited_s = spans, late, reads or {}, waited_s

    @property
    def entries(self) -> frozenset[tuple[int, ...]]:
        """Return the token ids of each entry, ``()`` for the header's entry."""
        return frozenset(() if span.chunk is None else span.chunk.token_ids for span in self.spans)


class NotYetError(Exception):
    """Says that a layer was not read within the allowed time."""


SpansOf = Callable[[int], Sequence[StoredSpan]]
"""Maps a layer index to the spans wanted in that layer; the last layer wants all spans."""


class Reads(ABC):
    """Reads the layers of some spans ahead, in ascending order.

    Attributes:
        meter: Counts and times of the reads so far.
        in_place: Whether all KV lies in page-locked memory, so that the device copies from there by itself.
        until: Layers from ``until`` on are not begun before they are asked for.
    """

    in_place = False

    def __init__(self, spans: SpansOf, num_layers: int, trace: Trace | None, pool: ThreadPoolExecutor | None):
        """Read in ``pool``; without a pool, in the caller's thread."""
        self._spans, self._num_layers, self._trace, self._pool = spans, num_layers, trace, pool
        self.meter, self.until = ReadMeter(), num_layers

    @abstractmethod
    def ready(self) -> bool:
        """Return whether all layers are in host memory."""

    @abstractmethod
    def parts(self, layer: int, most_s: float | None = None) -> list[LayerKV]:
        """Return each span's KV on the compute device, waiting for it if need be; valid until :meth:`joined`.

        Call once for each layer that has spans, in ascending order.

        Args:
            layer: Index of the layer.
            most_s: Number of seconds to wait for its reads; None for no limit.

        Raises:
            UnusableSpanError: A stored layer failed its checks, or cannot be read now.
            NotYetError: The layer is not read within ``most_s`` seconds.
        """

    @abstractmethod
    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        """Return the parts of ``layer`` joined, ``[kv_heads, tokens, head_dim]``, and release the parts' memory."""

    def close(self, wait: bool = True) -> None:
        """Stop reading; without ``wait``, return before reads that have begun end."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)

    def _read(self, layer: int) -> list[LayerKV]:
        return [self._read_one(span, layer, partial(span.layer, layer)) for span in self._spans(layer)]

    def _read_one(self, span: StoredSpan, layer: int, read: Callable[[], LayerKV]) -> LayerKV:
        """Read one layer of one span, and count the read."""
        traced: AbstractContextManager[None] = nullcontext()
        if self._trace is not None:
            details = {"tier": span.kv.tier, "bytes": span.kv.stored_nbytes // span.kv.num_layers}
            traced = self._trace.during("loading", f"layer {layer}", **details)
        try:
            with self.meter.reading(span.kv), traced:
                return read()
        except (DamagedKVError, StoreUnavailableError) as error:
            raise UnusableSpanError(span) from error


def reads_of(
    spans: SpansOf, num_layers: int, device: torch.device, trace: Trace | None = None, whole: bool = False
) -> Reads:
    """Begin to read the layers of ``spans`` for ``device``; a failed read raises when its layer is requested.

    With ``whole``, read all layers into host memory, not only the next few.
    """
    transfer = transfer_to(device)
    if transfer is None:
        return _CPUReads(spans, num_layers, trace, whole)
    return _DeviceReads(spans, num_layers, trace, transfer, whole)


class _CPUReads(Reads):
    """Reads for a CPU: from RAM when a layer is requested, from other tiers ahead, in threads."""

    def __init__(self, spans: SpansOf, num_layers: int, trace: Trace | None, whole: bool):
        every = spans(num_layers - 1)
        threads = _at_once(every)
        in_ram = all(span.kv.tier == "ram" for span in every)
        super().__init__(spans, num_layers, trace, None if in_ram else ThreadPoolExecutor(threads, "cacheblend-load"))
        self._ahead = num_layers if whole else max(_CPU_LAYERS_AHEAD, threads + 1)
        self._pending: dict[int, Future[list[LayerKV]]] = {}
        self._submitted = 0
        self._read_ahead(self._ahead)

    def ready(self) -> bool:
        if self._pool is None:
            return True
        return self._submitted == self._num_layers and all(each.done() for each in self._pending.values())

    def parts(self, layer: int, most_s: float | None = None) -> list[LayerKV]:
        self._read_ahead(layer + 1 + self._ahead)
        return self._read(layer) if self._pool is None else _within(most_s, self._pending.pop(layer))

    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        # Joined here and not in the reading thread, whose parallel operations would compete with the computation for
        # cores.
        return join_tokens(parts)

    def _read_ahead(self, end: int) -> None:
        while self._pool is not None and self._submitted < min(end, self._num_layers):
            if self._spans(self._submitted):
                self._pending[self._submitted] = self._pool.submit(self._read, self._submitted)
            self._submitted += 1


class _DeviceReads(Reads):
    """Copies every layer to memory on the device, which a later layer uses again.

    If all KV lies in page-locked memory, the copies are only queued, without a thread; otherwise threads read.
    """

    def __init__(self, spans: SpansOf, num_layers: int, trace: Trace | None, transfer: Transfer, whole: bool):
        every = spans(num_layers - 1)
        held = [(span.kv.held or span.kv).layer(0).k for span in every if span.kv.tier == "ram"]
        alike = len({k.dtype for k in held}) <= 1  # dtypes as held, before decoding
        in_place = alike and len(held) == len(every) and all(k.is_pinned() for k in held)
        threads = max(_DEVICE_THREADS, _at_once(every))
        pool = None if in_place else ThreadPoolExecutor(threads, "cacheblend-load", initializer=transfer.enter_thread)
        super().__init__(spans, num_layers, trace, pool)
        self.in_place, self._transfer = in_place, transfer
        self._tokens = sum(span.kv.num_tokens for span in every)
        nbytes = sum(span.kv.nbytes for span in every) // num_layers
        self._slots = [Slot() for _ in range(min(max(2, AHEAD_BYTES // max(nbytes, 1)), num_layers))]
        self._pending: dict[int, tuple[Slot, Future[Staged]]] = {}
        self._next = 0
        self._host: dict[int, Future[list[LayerKV]]] = {}
        if whole and self._pool is not None:  # before the copies, so that no copying thread waits for an unqueued read
            self._host = {n: self._pool.submit(self._read, n) for n in range(num_layers) if spans(n)}
        if not self.in_place:  # if in place, all layers may be copied at once
            self._fill()

    def ready(self) -> bool:
        return self._pool is None or (bool(self._host) and all(each.done() for each in self._host.values()))

    def parts(self, layer: int, most_s: float | None = None) -> list[LayerKV]:
        if layer not in self._pending:
            self.until = self.until if layer < self.until else self._num_layers
            self._fill()
        staged = _within(most_s, self._pending[layer][1])
        self._transfer.wait(staged)
        return [_decoded(span, part) for span, part in zip(self._spans(layer), staged.parts, strict=True)]

    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        kv = LayerKV(*(torch.cat(side, dim=1) for side in zip(*parts, strict=True)))
        slot, _ = self._pending.pop(layer)
        self._transfer.used(slot)
        self._slots.append(slot)
        self._fill()
        return kv

    def _fill(self) -> None:
        """Begin with the next layers while slots are free."""
        while self._next < self.until and (self._slots or not self._spans(self._next)):
            if self._spans(self._next):
                slot = self._slots.pop(0)
                self._pending[self._next] = slot, self._begin(slot, self._next)
            self._next += 1

    def _begin(self, slot: Slot, layer: int) -> Future[Staged]:
        if self._pool is not None:
            return self._pool.submit(self._stage, slot, layer)
        staged: Future[Staged] = Future()
        try:
            staged.set_result(self._stage(slot, layer))
        except Exception as error:
            staged.set_exception(error)
        return staged

    def _stage(self, slot: Slot, layer: int) -> Staged:
        # Copies whole entries, since only they lie in one piece; the device leaves out the tokens that are not wanted.
        take = self._transfer.buffer
        whole: Iterable[LayerKV] = (
            self._read_one(span, layer, partial(((self.in_place and span.kv.held) or span.kv).layer_in, layer, take))
            for span in self._spans(layer)
        )
        if layer in self._host:
            whole = self._host[layer].result()
        return self._transfer.stage(slot, whole, self._tokens)

    def _read(self, layer: int) -> list[LayerKV]:  # whole entries, as :meth:`_stage` needs them
        return [self._read_one(span, layer, partial(span.kv.layer, layer)) for span in self._spans(layer)]


def _decoded(span: StoredSpan, part: LayerKV) -> LayerKV:
    """Return the wanted tokens of a span's layer, decoded if the layer came as it is held."""
    wanted, dtype = span.cut(part), span.kv.dtype
    return wanted if dtype is None or part.k.dtype == dtype else numbers(wanted, dtype)


def _within(most_s: float | None, future: Future[_T]) -> _T:
    if not wait([future], most_s).done:
        raise NotYetError
    return future.result()


def _at_once(spans: Sequence[StoredSpan]) -> int:
    return max((span.kv.at_once for span in spans), default=1)


class ReadMeter:
    """Counts and times the reads of a prompt's layers, from several threads. RAM is not measured: it needs no reads."""

    def __init__(self) -> None:
        self._tiers: dict[str, ReadClock] = {}
        self._entries: dict[int, ReadClock] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, kv: StoredKV) -> Iterator[None]:
        """Measure the body as the read of one layer of ``kv``; a read that fails adds only its time."""
        if kv.tier == "ram":
            yield
            return
        with self._lock:
            tier = self._tiers.setdefault(kv.tier, ReadClock())
            entry = self._entries.setdefault(id(kv), ReadClock())
        nbytes = kv.stored_nbytes // kv.num_layers
        with tier.reading(nbytes), entry.reading(nbytes):
            yield

    def taken(self) -> Mapping[str, TierReads]:
        """Return the reads so far, by tier."""
        with self._lock:
            return {name: tier.taken() for name, tier in self._tiers.items()}

    def under_way(self) -> Mapping[str, TierReads]:
        """Return the reads so far of each tier that is being read; see :meth:`ReadClock.under_way`."""
        with self._lock:
            tiers = dict(self._tiers)
        return {name: reads for name, tier in tiers.items() if (reads := tier.under_way()) is not None}

    def taken_of(self, kv: StoredKV) -> TierReads:
        """Return the reads of one entry so far."""
        with self._lock:
            entry = self._entries.get(id(kv))
        return TierReads() if entry is None else entry.taken()
