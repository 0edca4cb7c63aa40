"""Stored KV on its way to the computation, layer by layer: read by the computing thread, by others, or by the device itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch

from cacheblend_rag.blending.meter import ReadMeter
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.blending.transfer import Slot, Staged, Transfer, transfer_to
from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store.kv import LayerKV, join_tokens

# How much may lie ready on the device before it is computed with: enough that the copies never wait for the computation,
# little enough to stay unseen beside a model. Two layers may always, so that one is copied while the other is used.
AHEAD_BYTES = 128 << 20
# From a disk to a CPU two layers hide a slow read; a second thread would take a core from the computation. From afar, where a
# read is a round trip, there are as many threads as the tier answers reads at once, and a layer more than that on its way.
_CPU_LAYERS_AHEAD = 2
# To a device the threads only read and check; one alone is slower than the device's bus.
_DEVICE_THREADS = 4


class UnusableSpanError(Exception):
    """A span's stored KV failed its checks, or could not be read, while it was being loaded."""

    def __init__(self, span: StoredSpan | None):
        """Name the span; None if another tensor-parallel rank holds it."""
        where = "on another rank" if span is None else f"for positions {span.start} to {span.end}"
        super().__init__(f"stored KV {where} cannot be used")
        self.span = span

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Token ids of the entry, ``()`` for the header's; None if another rank holds it."""
        if self.span is None:
            return None
        return self.span.chunk.token_ids if self.span.chunk is not None else ()


class Reads(Protocol):
    """The layers of some spans, read ahead in ascending order.

    Attributes:
        meter: What the reads took so far.
    """

    meter: ReadMeter

    def parts(self, layer: int) -> list[LayerKV]:
        """Return each span's KV on the compute device, waiting for it if need be; good until :meth:`joined`.

        Call once for each layer that has spans, in ascending order.

        Raises:
            UnusableSpanError: A stored layer failed its checks, or cannot be read now.
        """

    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        """Return the parts of ``layer`` one behind the other, ``[kv_heads, tokens, head_dim]``, and give back their memory."""

    def close(self) -> None:
        """Stop reading."""


SpansOf = Callable[[int], Sequence[StoredSpan]]
"""Layer index to the spans wanted in that layer; the last layer wants all of them."""


def reads_of(spans: SpansOf, num_layers: int, device: torch.device, trace: Trace | None = None) -> Reads:
    """Begin to read the layers of ``spans`` for ``device``. What fails is raised where its layer is asked for."""
    transfer, one = transfer_to(device), _OneRead(ReadMeter(), trace)
    return _CPUReads(spans, num_layers, one) if transfer is None else _DeviceReads(spans, num_layers, one, transfer)


class _CPUReads:
    """From RAM to a CPU there is nothing to hide; from elsewhere a thread reads ahead."""

    def __init__(self, spans: SpansOf, num_layers: int, one: _OneRead):
        self._spans, self._num_layers, self._one, self.meter = spans, num_layers, one, one.meter
        every = spans(num_layers - 1)
        threads = _at_once(every)
        self._ahead = max(_CPU_LAYERS_AHEAD, threads + 1)
        in_place = all(span.kv.tier == "ram" for span in every)
        self._pool = None if in_place else ThreadPoolExecutor(threads, thread_name_prefix="cacheblend-load")
        self._pending: dict[int, Future[list[LayerKV]]] = {}
        self._submitted = 0
        self._read_ahead(self._ahead)

    def parts(self, layer: int) -> list[LayerKV]:
        self._read_ahead(layer + 1 + self._ahead)
        return self._read(layer) if self._pool is None else self._pending.pop(layer).result()

    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        # Here and not in the reading thread: its parallel operations would fight the computation for cores.
        return join_tokens(parts)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, end: int) -> None:
        while self._pool is not None and self._submitted < min(end, self._num_layers):
            if self._spans(self._submitted):
                self._pending[self._submitted] = self._pool.submit(self._read, self._submitted)
            self._submitted += 1

    def _read(self, layer: int) -> list[LayerKV]:
        return [self._one(span, layer, partial(span.layer, layer)) for span in self._spans(layer)]


class _DeviceReads:
    """Every layer is copied to memory on the device, which a later layer uses again.

    Where all KV lies in pinned memory the copies are only asked for, so no thread is needed; else threads read.
    """

    def __init__(self, spans: SpansOf, num_layers: int, one: _OneRead, transfer: Transfer):
        self._spans, self._num_layers, self._one, self.meter = spans, num_layers, one, one.meter
        self._transfer = transfer
        every = spans(num_layers - 1)
        self._tokens = sum(span.kv.num_tokens for span in every)
        in_place = all(span.kv.tier == "ram" and span.kv.layer(0).k.is_pinned() for span in every)
        threads = max(_DEVICE_THREADS, _at_once(every))
        self._pool = None if in_place else ThreadPoolExecutor(threads, thread_name_prefix="cacheblend-load")
        nbytes = sum(span.kv.nbytes for span in every) // num_layers
        self._slots = [Slot() for _ in range(min(max(2, AHEAD_BYTES // max(nbytes, 1)), num_layers))]
        self._pending: dict[int, tuple[Slot, Future[Staged]]] = {}
        self._next = 0
        self._fill()

    def parts(self, layer: int) -> list[LayerKV]:
        staged = self._pending[layer][1].result()
        self._transfer.wait(staged)
        return [span.cut(part) for span, part in zip(self._spans(layer), staged.parts, strict=True)]

    def joined(self, layer: int, parts: Sequence[LayerKV]) -> LayerKV:
        kv = LayerKV(*(torch.cat(side, dim=1) for side in zip(*parts, strict=True)))
        slot, _ = self._pending.pop(layer)
        self._transfer.used(slot)
        self._slots.append(slot)
        self._fill()
        return kv

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        """Begin with the next layers while there are slots for them."""
        while self._next < self._num_layers and (self._slots or not self._spans(self._next)):
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
        # Whole entries, since only those lie in one piece; what is not wanted of them is left out on the device.
        take = self._transfer.buffer
        whole = (self._one(span, layer, partial(span.kv.layer_in, layer, take)) for span in self._spans(layer))
        return self._transfer.stage(slot, whole, self._tokens)


def _at_once(spans: Sequence[StoredSpan]) -> int:
    return max((span.kv.at_once for span in spans), default=1)


class _OneRead:
    """Reads one layer of one span, and counts it."""

    def __init__(self, meter: ReadMeter, trace: Trace | None):
        self.meter, self._trace = meter, trace

    def __call__(self, span: StoredSpan, layer: int, read: Callable[[], LayerKV]) -> LayerKV:
        try:
            with self.meter.reading(span.kv), self._traced(span, layer):
                return read()
        except (DamagedKVError, StoreUnavailableError) as error:
            raise UnusableSpanError(span) from error

    def _traced(self, span: StoredSpan, layer: int) -> AbstractContextManager[None]:
        if self._trace is None:
            return nullcontext()
        chunk = "header" if span.chunk is None else span.chunk.id
        details = {"layer": layer, "tier": span.kv.tier, "bytes": span.kv.stored_nbytes // span.kv.num_layers}
        return self._trace.during("loading", f"layer {layer}, {chunk[:12]}", chunk=chunk, **details)
