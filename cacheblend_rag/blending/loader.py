"""Reading stored KV layer by layer, behind the computation (paper section 5: loading overlaps recomputation)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.rope import Move, Rope, moved
from cacheblend_rag.blending.transfer import transfer_to
from cacheblend_rag.errors import DamagedKVError
from cacheblend_rag.store.kv import LayerKV, join_tokens

# How many layers may wait in memory for the computation: enough to hide one slow read, little enough to stay unseen.
_LAYERS_AHEAD = 2


class DamagedSpanError(Exception):
    """A span's stored KV failed its checks while it was being loaded."""

    def __init__(self, span: StoredSpan | None):
        """Name the span; None if another tensor-parallel rank holds it."""
        where = "on another rank" if span is None else f"for positions {span.start} to {span.end}"
        super().__init__(f"stored KV {where} is damaged")
        self.span = span

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Token ids of the damaged entry, ``()`` for the header's; None if another rank holds it."""
        if self.span is None:
            return None
        return self.span.chunk.token_ids if self.span.chunk is not None else ()


@dataclass(frozen=True)
class PlacedLayer:
    """One layer's stored KV for a set of spans, on the compute device, and what moves it to the prompt's positions.

    Attributes:
        kv: ``[kv_heads, tokens, head_dim]``, the spans one after another, keys as they were stored.
        move: What the keys still need; None for nothing.
        positions: ``[tokens]``, where they belong.
        stale_from: Index of the first token that belongs to a stale span; those before it are exact.
    """

    kv: LayerKV
    move: Move | None
    positions: torch.Tensor
    stale_from: int

    def moved(self) -> PlacedLayer:
        """Return it with its keys moved."""
        return replace(self, kv=moved(self.kv, self.move), move=None)


class LayerLoader:
    """Delivers the layers of a plan's spans in order: the reads of the next layers run in a thread meanwhile.

    Exact spans are delivered for every layer; stale ones from ``stale_from_layer`` on, since a dense pass computes the
    layers below it afresh. Use as a context manager.
    """

    def __init__(
        self,
        exact: Sequence[StoredSpan],
        stale: Sequence[StoredSpan],
        rope: Rope,
        num_layers: int,
        device: torch.device,
        stale_from_layer: int = 0,
    ):
        """Start reading at once."""
        self._exact, self._all = tuple(exact), (*exact, *stale)
        self._rope, self._device, self._stale_from_layer = rope, device, stale_from_layer
        self._positions = _positions(self._all, device, lambda s: s.start)
        self._rotations = rope.rotations(
            _positions(stale, device, lambda s: s.kv.start + s.skip), _positions(stale, device, lambda s: s.start)
        )
        self._exact_tokens = sum(s.end - s.start for s in self._exact)
        self._num_layers = num_layers
        self._transfer = transfer_to(device)
        # From RAM to a CPU there is nothing to hide, and a second thread would take a core from the computation.
        in_place = device.type == "cpu" and all(s.kv.tier == "ram" for s in self._all)
        self._pool = None if in_place or not self._all else ThreadPoolExecutor(1, thread_name_prefix="cacheblend-load")
        self._pending: dict[int, Future[tuple[list[LayerKV], Any]]] = {}
        self.wait_s = 0.0
        self.loaded_bytes = 0
        self._submitted = 0
        self._read_ahead(_LAYERS_AHEAD)

    def __enter__(self) -> LayerLoader:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop reading."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def layer(self, index: int) -> PlacedLayer | None:
        """Return layer ``index``, waiting for it if need be; None if the plan has nothing stored for it.

        Call once for each layer, in ascending order.

        Raises:
            DamagedSpanError: A stored layer failed its checks.
        """
        if not self._spans(index):
            return None
        begin = time.perf_counter()
        self._read_ahead(index + 1 + _LAYERS_AHEAD)
        parts, ready = self._read(index) if self._pool is None else self._pending.pop(index).result()
        if self._transfer is not None and ready is not None:
            self._transfer.wait(parts[0], ready)
        self.wait_s += time.perf_counter() - begin
        kv = join_tokens(parts)
        self.loaded_bytes += kv.k.nbytes + kv.v.nbytes
        count = kv.k.shape[1]
        # The exact prefix stands where it was computed: it is not rotated, so it keeps its bits.
        fixed = self._exact_tokens
        move = None if count == fixed else self._rope.move(index, self._rotations, first=fixed)
        return PlacedLayer(kv, move, self._positions[:count], fixed)

    def _read_ahead(self, end: int) -> None:
        while self._pool is not None and self._submitted < min(end, self._num_layers):
            if self._spans(self._submitted):
                self._pending[self._submitted] = self._pool.submit(self._read, self._submitted)
            self._submitted += 1

    def _spans(self, layer: int) -> tuple[StoredSpan, ...]:
        return self._all if layer >= self._stale_from_layer else self._exact

    def _read(self, layer: int) -> tuple[list[LayerKV], Any]:
        parts = []
        for span in self._spans(layer):
            try:
                parts.append(span.layer(layer))
            except DamagedKVError as error:
                raise DamagedSpanError(span) from error
        if self._transfer is None or not parts:
            # Joining is left to the computing thread: a second thread of parallel operations would fight it for cores.
            return parts, None
        copy, ready = self._transfer.start(join_tokens(parts))
        return [copy], ready


def _positions(spans: Sequence[StoredSpan], device: torch.device, first: Callable[[StoredSpan], int]) -> torch.Tensor:
    parts = [torch.arange(first(s), first(s) + s.end - s.start, device=device) for s in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
