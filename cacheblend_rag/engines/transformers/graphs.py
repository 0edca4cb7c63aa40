"""Places all layers of stored KV at once, and replays passes as CUDA graphs, so that a GPU does not wait for Python.

A pass of a few hundred tokens takes an 8B model a few milliseconds on an H200, and Python takes five times as long to
launch the pass. A graph needs one launch. A graph is captured from the model's own forward over a fixed number of
tokens, in one block of memory that one prompt at a time uses. Positions are read from the device, and determine which
keys a token sees. A pass with fewer tokens is padded with its last token, whose repetition gives the same numbers.
Before a group of layers, a graph waits for an event of another stream, recorded when the stored KV of the layers is
placed, so that loading and computing overlap as without a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.blending.bulk import Arrivals, StoredLayers
from cacheblend_rag.blending.transfer import transfer_to
from cacheblend_rag.engines.kernels.check import can_place, placing_works
from cacheblend_rag.engines.replay import Replays, capture, padded
from cacheblend_rag.engines.transformers.attention import NAME, Looks
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.store.kv import LayerKV

if TYPE_CHECKING:
    from cacheblend_rag.engines.kernels.place import Layers

_LEAST_CAPACITY = 4096
# Maximum share of the device's memory for the block that graphs read and write.
_SHARE = 1 / 8


@dataclass(frozen=True)
class _Pass:
    """Holds a captured pass: its input tensors, its replay function and its output tensors."""

    ids: torch.Tensor
    positions: torch.Tensor
    looks: Looks | None
    logits: torch.Tensor
    replay: Callable[[], object]


def total_memory(device: torch.device) -> int:
    """Return a GPU's memory in bytes."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


class Graphs:
    """Keeps the captured passes of one model, and their memory. Callers must hold the model's lock."""

    def __init__(self, runner: Any):
        """Start without graphs of ``runner``, a :class:`~cacheblend_rag.engines.transformers.target.ModelRunner`."""
        self._runner = weakref.proxy(runner)
        self._block: torch.Tensor | None = None
        self._lent: weakref.ref[PositionedCache] | None = None
        self.replays: Replays[_Pass] = Replays()
        self._pool: Any = None
        self.replays.refused = runner.config._attn_implementation != NAME
        self._layers: Layers | None = None  # description of the block's layers
        try:
            self._placed = Arrivals(runner.device, runner.num_layers, external=True)
        except TypeError:  # torch before 2.8: a graph cannot wait for another stream's work
            self._placed, self.replays.refused = Arrivals(runner.device, runner.num_layers), True

    def lend(self, tokens: int) -> PositionedCache | None:
        """Return an empty cache for ``tokens`` with all layers in one block; None for a model whose layers differ.

        The cache uses the graphs' block unless another prompt uses the block. The block is free again once the cache is
        garbage-collected.
        """
        runner = self._runner
        if runner.layer_shape is None:
            return None
        free = self._lent is None or self._lent() is None
        if free and (self._block is None or self._block.shape[3] < tokens):
            self._renew(tokens)
        own = self._block if free else None
        block = self._new_block(tokens) if own is None else own
        cache = PositionedCache(runner.num_layers, block.shape[3], block=block)
        if own is not None:
            self._lent = weakref.ref(cache)
        return cache

    def place(self, cache: PositionedCache, stored: StoredLayers) -> Callable[[int], None] | None:
        """Begin to place all of ``stored``; return a function to call before each layer, None if that is impossible."""
        block, transfer = cache.block, transfer_to(self._runner.device)
        if block is None or transfer is None:
            return None
        where = block.device, block.dtype, *block.shape[2::2]
        if not (placing_works(*where) and can_place(stored, *where)):
            return None
        from cacheblend_rag.engines.kernels.place import Layers, place_in_bulk

        layers = self._layers if block is self._block else None
        if layers is None:
            layers = Layers.of([LayerKV(block[0, i, None], block[1, i, None]) for i in range(block.shape[1])])
        if block is self._block:
            self._layers = layers
        if layers is None:
            return None
        place_in_bulk(stored, stored.positions, layers, transfer, self._placed, block)
        return self._placed.wait

    def run(
        self, cache: PositionedCache, ids: torch.Tensor, positions: torch.Tensor, looks: Looks | None = None
    ) -> torch.Tensor | None:
        """Run tokens by a graph, if there is a graph for their number.

        Args:
            cache: Cache in which stored KV has been placed, or is being placed by :meth:`place`.
            ids: ``[tokens]``, in host memory or on the device.
            positions: ``[tokens]``, ascending, in host memory.
            looks: Receives the tokens' attention; None if the attention is not needed.

        Returns:
            The last token's logits ``[vocab]``; None without a graph.
        """
        made, block = self.replays.serving(len(positions), looks is not None), cache.block
        # Past the end of the block the cache must grow, and then no longer uses the block.
        if made is None or block is None or block is not self._block or int(positions[-1]) >= block.shape[3]:
            return None
        logits = self._replay(made, ids, positions, looks)
        if looks is not None and made.looks is not None:
            looks.total, looks.layers = made.looks.total, made.looks.layers
        return logits

    def ran(
        self,
        cache: PositionedCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
        looks: Looks | None = None,
    ) -> None:
        """Record a pass for which :meth:`run` had no graph; capture a graph if a pass of this kind has run before."""
        block = cache.block
        kind = (
            None if block is None or block is not self._block else self.replays.due(len(positions), looks is not None)
        )
        if kind is None:
            return

        def replay(made: _Pass) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield self._replay(made, ids, positions, looks), logits
            if looks is not None and made.looks is not None:
                tokens = int(positions[-1]) + 1
                yield made.looks.mean(tokens), looks.mean(tokens)

        self.replays.add(kind, partial(self._captured, *kind), replay)

    @torch.inference_mode()
    def _replay(self, made: _Pass, ids: torch.Tensor, positions: torch.Tensor, looks: Looks | None) -> torch.Tensor:
        for into, given in ((made.ids, ids), (made.positions, positions)):
            into.copy_(padded(given, len(into)), non_blocking=True)
        if looks is not None and made.looks is not None:
            made.looks.shares.zero_()[: len(looks.shares)] = looks.shares
        made.replay()
        return made.logits.clone()

    @torch.inference_mode()
    def _captured(self, width: int, looked: bool) -> _Pass:
        runner, block = self._runner, self._block
        assert block is not None
        ids = torch.zeros(width, dtype=torch.int64, device=block.device)
        anywhere = torch.arange(width)
        positions = anywhere.to(block.device)
        shares = torch.zeros(width, device=block.device)

        def run(
            cache: PositionedCache, visible: int, before_layer: Callable[[int], None]
        ) -> tuple[torch.Tensor, Looks | None]:
            looks = Looks(shares) if looked else None
            return runner.scatter(ids, anywhere, positions, visible, cache, before_layer, looks=looks), looks

        # A first run outside the capture compiles and allocates everything that must not be captured.
        run(runner.new_cache(width), width, lambda layer: None)
        capacity = block.shape[3]
        cache = PositionedCache(runner.num_layers, capacity, block=block)
        self._placed.record()  # a graph would never wait for an event that was not recorded before the capture
        (logits, looks), replay, self._pool = capture(lambda: run(cache, capacity, self._placed.wait), self._pool)
        return _Pass(ids, positions, looks, logits, replay)

    def _renew(self, tokens: int) -> None:
        """Allocate a block for a prompt of ``tokens``, if not too large; discard the old block and its graphs."""
        self.replays.forget()
        self._block, self._layers, self._pool = None, None, None
        capacity = max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length())
        heads, dim = self._runner.layer_shape
        nbytes = 2 * self._runner.num_layers * heads * capacity * dim * self._runner.dtype.itemsize
        if nbytes <= _SHARE * total_memory(self._runner.device):
            self._block = self._new_block(capacity)

    def _new_block(self, capacity: int) -> torch.Tensor:
        heads, dim = self._runner.layer_shape
        shape = (2, self._runner.num_layers, heads, capacity + -capacity % 16, dim)
        return torch.empty(shape, dtype=self._runner.dtype, device=self._runner.device)
