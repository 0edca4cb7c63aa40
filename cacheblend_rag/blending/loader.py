"""Loads stored KV layer by layer while the computation runs (paper section 5: loading overlaps recomputation)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.outcome import ChunkLoad
from cacheblend_rag.blending.plan import StoredSpan, counted
from cacheblend_rag.blending.reads import NotYetError, UnusableSpanError, reads_of
from cacheblend_rag.blending.rope import Move, Rope, moved
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.store.events import TierReads
from cacheblend_rag.store.kv import LayerKV


@dataclass(frozen=True)
class PlacedLayer:
    """Holds one layer's stored KV for some spans, on the compute device, and its move to the prompt's positions.

    Attributes:
        kv: ``[kv_heads, tokens, head_dim]``, the spans one after another, keys as they were stored.
        move: Rotation that the keys still need; None for no rotation.
        positions: ``[tokens]``, prompt positions of the tokens.
        stale_from: Index of the first token that belongs to a stale span; earlier tokens are exact.
    """

    kv: LayerKV
    move: Move | None
    positions: torch.Tensor
    stale_from: int

    def moved(self) -> PlacedLayer:
        """Return the layer with its keys moved."""
        return replace(self, kv=moved(self.kv, self.move), move=None)


class LoadOptions(TypedDict, total=False):
    """Says how one blend loads stored KV: keyword arguments of the fusor, which belong to one run of the fusor.

    Attributes:
        trace: Trace that records loads and computations with their times; None to record nothing.
        most_wait_s: Longest total time that the computation may wait for stored KV; None for no limit.
        whole: Whether the blend begins with a segment that waits until all stored KV is in host memory. An engine that
            goes on earlier computes layer by layer while loading, as without ``whole``.
    """

    trace: Trace | None
    most_wait_s: float | None
    whole: bool


class LayerLoader:
    """Delivers the layers of a plan's spans in order; the next layers are read and copied meanwhile.

    Exact spans are delivered for every layer. Stale spans are delivered from ``stale_from_layer`` on, since a dense
    pass computes the layers below. Use as a context manager.
    """

    def __init__(
        self,
        exact: Sequence[StoredSpan],
        stale: Sequence[StoredSpan],
        rope: Rope,
        num_layers: int,
        device: torch.device,
        stale_from_layer: int = 0,
        trace: Trace | None = None,
        whole: bool = False,
        most_wait_s: float | None = None,
    ):
        """Start reading at once; see :class:`LoadOptions` for ``whole`` and the wait."""
        self._exact, self._all = tuple(exact), (*exact, *stale)
        self._rope, self._stale_from_layer, self._num_layers = rope, stale_from_layer, num_layers
        self._reads = reads_of(self._spans, num_layers, device, trace, whole)
        self._began, self._most_wait_s = time.perf_counter(), most_wait_s
        self._exact_tokens = sum(s.end - s.start for s in self._exact)
        self._positions = sent(counted(self._all, [span.start for span in self._all]), device)
        source = sent(counted(stale, [span.kv.start + span.skip for span in stale]), device)
        self._rotations = rope.rotations(source, self._positions[self._exact_tokens :])
        self.wait_s = 0.0
        self.loaded_bytes = 0
        self._layers = [0] * len(self._all)

    @property
    def reads(self) -> Mapping[str, TierReads]:
        """Return the reads so far, by tier."""
        return self._reads.meter.taken()

    def loads(self) -> dict[int, ChunkLoad]:
        """Return the loads so far of each span, by :attr:`StoredSpan.origin`."""
        return {
            span.origin: ChunkLoad(
                span.kv.tier,
                span.kv.stored_nbytes * layers // span.kv.num_layers,
                self._reads.meter.taken_of(span.kv).seconds,
            )
            for span, layers in zip(self._all, self._layers, strict=True)
            if layers
        }

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Stop reading. After a failed blend, do not wait for reads that have begun: a late read may be the reason."""
        self._reads.close(wait=error is None)

    @property
    def ready(self) -> bool:
        """Return whether all stored KV is in host memory."""
        return self._reads.ready()

    @property
    def overdue(self) -> bool:
        """Return whether reading has exceeded the longest allowed wait and is not finished."""
        most = self._most_wait_s
        return most is not None and time.perf_counter() - self._began > most and not self.ready

    def too_late(self, waited_s: float | None = None) -> UnusableSpanError:
        """Return the error to raise for all spans in tiers that are still being read.

        ``waited_s`` is the time that the computation has waited; the time since the start if None.
        """
        reads = self._reads.meter.under_way()
        spans = (span for span in self._all if span.kv.tier in (reads or {span.kv.tier}) and span.kv.tier != "ram")
        waited = time.perf_counter() - self._began if waited_s is None else waited_s
        return UnusableSpanError(*spans, late=True, reads=reads, waited_s=waited)

    def layer(self, index: int) -> PlacedLayer | None:
        """Return layer ``index``, waiting for it if need be; None if the plan has nothing stored for this layer.

        Call once for each layer, in ascending order.

        Raises:
            UnusableSpanError: A stored layer failed its checks, cannot be read now, or is late.
        """
        if not self._spans(index):
            return None
        begin = time.perf_counter()
        left_s = None if self._most_wait_s is None else max(0.0, self._most_wait_s - self.wait_s)
        try:
            parts = self._reads.parts(index, left_s)
        except NotYetError as error:
            raise self.too_late(self.wait_s + time.perf_counter() - begin) from error
        self.wait_s += time.perf_counter() - begin
        for span in range(len(parts)):  # exact spans stand first, and every layer includes them
            self._layers[span] += 1
        kv = self._reads.joined(index, parts)
        self.loaded_bytes += kv.k.nbytes + kv.v.nbytes
        count = kv.k.shape[1]
        # The exact prefix stays at the positions it was computed at: it is not rotated, so its bits stay unchanged.
        fixed = self._exact_tokens
        move = None if count == fixed else self._rope.move(index, self._rotations, first=fixed)
        return PlacedLayer(kv, move, self._positions[:count], fixed)

    def expect_rest(self, first: int) -> None:
        """Copy no layer from ``first`` on ahead of its use, where :meth:`rest` may copy all of these layers at once."""
        if self._reads.in_place:
            self._reads.until = first

    def rest(self, first: int) -> StoredLayers | None:
        """Return the remaining layers from ``first`` on, if none of them must be read; then do not call :meth:`layer`.

        Return None if the KV is not in page-locked memory, or if layers use different spans.
        """
        spans = self._all if first >= self._stale_from_layer else ()
        if not self._reads.in_place or (self._all and not spans):
            return None
        if any((held := span.kv.held) is None or held.blocks(0, held.num_layers) is None for span in spans):
            return None
        rope, fixed, made = self._rope, self._exact_tokens, {}
        kinds = list(zip(rope.table_of_layer, rope.layout_of_layer, strict=True))
        for layer, kind in enumerate(kinds if len(self._positions) > fixed else ()):
            if kind not in made:
                made[kind] = rope.move(layer, self._rotations, first=fixed)
        return StoredLayers(first, spans, tuple(made.get(kind) for kind in kinds), self._positions)

    def brought(self, stored: StoredLayers) -> None:
        """Count ``stored`` as loaded."""
        for index in range(len(stored.spans)):
            self._layers[index] += self._num_layers - stored.first
        wanted = sum(span.kv.nbytes * (span.end - span.start) // span.kv.num_tokens for span in stored.spans)
        self.loaded_bytes += wanted * (self._num_layers - stored.first) // self._num_layers

    def _spans(self, layer: int) -> tuple[StoredSpan, ...]:
        return self._all if layer >= self._stale_from_layer else self._exact
