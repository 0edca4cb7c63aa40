"""Copies all layers of stored KV from page-locked memory to a device by a few large copies, and places the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cacheblend_rag.blending.plan import StoredSpan, counted
from cacheblend_rag.blending.rope import Move
from cacheblend_rag.blending.transfer import Step, Transfer

# Layers per group; the computation waits for one group at a time. The first group is small, so that computing begins
# soon; later groups are large enough that waiting costs nothing.
_FIRST, _MOST = 1, 8
# Device memory for layers that are copied but not yet placed.
_STAGED_BYTES = 128 << 20


@dataclass(frozen=True)
class StoredLayers:
    """Holds the stored KV of several spans, from one layer on, in host memory.

    Attributes:
        first: Index of the first layer held.
        spans: Spans that own the KV. Each span's KV lies in page-locked memory, each layer is one block, and all have
            one dtype.
        moves: Move of each layer's keys, from layer 0 on. Layers that rotate alike share one object; None means no
            rotation.
        positions: ``[tokens]``, on the device: prompt positions of the tokens, span after span.
    """

    first: int
    spans: tuple[StoredSpan, ...]
    moves: tuple[Move | None, ...]
    positions: torch.Tensor

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of keys and values; None if there are no spans or several dtypes."""
        found = {span.kv.dtype for span in self.spans}
        return found.pop() if len(found) == 1 else None

    @property
    def in_rows(self) -> bool:
        """Return whether any span's layers are held as rows of bytes (:func:`~cacheblend_rag.store.codec.coded`)."""
        return any(span.kv.held is not None and span.kv.held.dtype != span.kv.dtype for span in self.spans)

    @property
    def layer_bytes(self) -> int:
        """Return the size of one layer of the whole entries in bytes."""
        return sum(span.kv.stored_nbytes // span.kv.num_layers for span in self.spans)

    def alike(self, begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield runs (begin, end) of up to ``most`` stored layers that rotate alike, within ``begin`` to ``end``."""
        at = max(begin, self.first) if self.spans else end
        while at < end:
            until = at + 1
            while until < min(at + most, end) and self.moves[until] is self.moves[at]:
                until += 1
            yield at, until
            at = until

    def table(self) -> torch.Tensor:
        """Return for each token: tokens in earlier entries, its index in its own entry, the length of its own entry.

        The result is ``[3, tokens]``, int64, in host memory.
        """
        spans = [(span.end - span.start, span.kv.num_tokens) for span in self.spans]
        counts, lengths = np.array(spans, np.int64).reshape(-1, 2).T
        before, whole = torch.from_numpy(np.repeat([np.cumsum(lengths) - lengths, lengths], counts, axis=1))
        return torch.stack([before, counted(self.spans, [span.skip for span in self.spans]), whole])

    def sources(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the layers ``begin`` to before ``end`` of each entry, as few blocks ``[elements]`` as possible."""
        found: list[torch.Tensor] = []
        for span in self.spans:
            assert span.kv.held is not None
            blocks = span.kv.held.blocks(begin, end)
            assert blocks is not None
            found += blocks
        return found


class Arrivals:
    """Records when groups of layers have been placed. The first group has few layers, so that computing begins soon."""

    def __init__(self, device: torch.device, num_layers: int, **options: bool):
        """Create one event for each group, with ``options``; no event is recorded yet."""
        module = torch.get_device_module(device)
        self._current_stream, self._device, self._last = module.current_stream, device, num_layers - 1
        begins, at, size = [], 0, _FIRST
        while at < num_layers:
            begins.append(at)
            at, size = at + size, min(2 * size, _MOST)
        self.groups = [(*ends, module.Event(**options)) for ends in zip(begins, [*begins[1:], num_layers], strict=True)]
        self._of = {begin: event for begin, _, event in self.groups}
        # If no token is computed, the fusor waits only for the last layer.
        self._of.setdefault(self._last, self.groups[-1][2])

    def record(self) -> None:
        """Record, on the caller's stream, that all layers have been placed."""
        for *_, event in self.groups:
            event.record()

    def wait(self, layer: int) -> None:
        """Let the caller's stream wait until ``layer`` is placed. Call once for each layer, in ascending order."""
        if layer in self._of:
            self._current_stream(self._device).wait_event(self._of[layer])


def bring(
    stored: StoredLayers,
    transfer: Transfer,
    arrivals: Arrivals,
    place: Callable[[int, int, torch.Tensor], None],
    used: Sequence[torch.Tensor],
) -> None:
    """Copy and place all layers of ``stored`` while the computation runs.

    Args:
        stored: Layers to copy; all of one dtype.
        transfer: Transfer to the device.
        arrivals: Events to record as the layers are placed.
        place: Called with (begin, end, memory) and queues the placing of these layers. The device memory will hold the
            layers of each entry, one entry behind another; all of these layers rotate alike.
        used: Other device tensors that ``place`` reads or writes.
    """
    at_once = max(1, _STAGED_BYTES // max(stored.layer_bytes, 1))
    steps = []
    for begin, end, event in arrivals.groups:
        parts = list(stored.alike(begin, end, at_once))
        for a, b in parts:
            steps.append(Step(stored.sources(a, b), partial(place, a, b), event if b == end else None))
        if not parts:  # the event must not stand for an earlier prompt
            steps.append(Step((), lambda memory: None, event))
    sources = [source for step in steps for source in step.sources]
    transfer.bring(steps, sources[0].dtype if sources else torch.uint8, used)
