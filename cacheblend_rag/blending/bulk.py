"""Brings all layers of stored KV that lies in page-locked memory to a device by few large copies, and places them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cacheblend_rag.blending.plan import StoredSpan, counted
from cacheblend_rag.blending.rope import Move
from cacheblend_rag.blending.transfer import Step, Transfer

# Layers that are waited for together: few at first, so that computing begins soon, then enough that waiting costs nothing.
_FIRST, _MOST = 1, 8
# Device memory for what has been copied and not been placed.
_STAGED_BYTES = 128 << 20


@dataclass(frozen=True)
class StoredLayers:
    """Holds the stored KV of spans from a layer on, in host memory.

    Attributes:
        first: The layer.
        spans: Whose KV: each held in page-locked memory, every layer of it one block, all of one dtype.
        moves: What each layer's keys need, from layer 0 on: one object for all layers that rotate alike, None for nothing.
        positions: ``[tokens]``, on the device: where they belong, span after span.
    """

    first: int
    spans: tuple[StoredSpan, ...]
    moves: tuple[Move | None, ...]
    positions: torch.Tensor

    @property
    def dtype(self) -> torch.dtype | None:
        """Return that of keys and values; None where nothing is stored, or of several."""
        found = {span.kv.dtype for span in self.spans}
        return found.pop() if len(found) == 1 else None

    @property
    def in_rows(self) -> bool:
        """Return whether they come in rows of bytes (:func:`~cacheblend_rag.store.codec.coded`)."""
        return any(span.kv.held is not None and span.kv.held.dtype != span.kv.dtype for span in self.spans)

    @property
    def layer_bytes(self) -> int:
        """Return the size of one layer of the whole entries."""
        return sum(span.kv.stored_nbytes // span.kv.num_layers for span in self.spans)

    def alike(self, begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield those of the layers ``begin`` to before ``end`` that are stored, in runs of up to ``most`` that rotate alike."""
        at = max(begin, self.first) if self.spans else end
        while at < end:
            until = at + 1
            while until < min(at + most, end) and self.moves[until] is self.moves[at]:
                until += 1
            yield at, until
            at = until

    def table(self) -> torch.Tensor:
        """Return for each token how many tokens the entries before its own have, which of its own it is, and how many that has.

        ``[3, tokens]``, int64, in host memory.
        """
        spans = [(span.end - span.start, span.kv.num_tokens) for span in self.spans]
        counts, lengths = np.array(spans, np.int64).reshape(-1, 2).T
        before, whole = torch.from_numpy(np.repeat([np.cumsum(lengths) - lengths, lengths], counts, axis=1))
        return torch.stack([before, counted(self.spans, [span.skip for span in self.spans]), whole])

    def sources(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the layers ``begin`` to before ``end`` of each entry, ``[elements]``; what is one block stays one."""
        found: list[torch.Tensor] = []
        for span in self.spans:
            assert span.kv.held is not None
            blocks = span.kv.held.blocks(begin, end)
            assert blocks is not None
            found += blocks
        return found


class Arrivals:
    """Tells when groups of layers have been placed: few layers in the first group, so that computing begins soon."""

    def __init__(self, device: torch.device, num_layers: int, **options: bool):
        """Make an event for each group, with ``options``; none has been recorded."""
        module = torch.get_device_module(device)
        self._current_stream, self._device, self._last = module.current_stream, device, num_layers - 1
        begins, at, size = [], 0, _FIRST
        while at < num_layers:
            begins.append(at)
            at, size = at + size, min(2 * size, _MOST)
        self.groups = [(*ends, module.Event(**options)) for ends in zip(begins, [*begins[1:], num_layers], strict=True)]
        self._of = {begin: event for begin, _, event in self.groups}
        # Where nothing is computed, only the last layer is asked for.
        self._of.setdefault(self._last, self.groups[-1][2])

    def record(self) -> None:
        """Say that all layers have been placed, on the caller's stream."""
        for *_, event in self.groups:
            event.record()

    def wait(self, layer: int) -> None:
        """Let the caller's stream wait for what ``layer`` needs; to be called for one layer after another."""
        if layer in self._of:
            self._current_stream(self._device).wait_event(self._of[layer])


def bring(
    stored: StoredLayers,
    transfer: Transfer,
    arrivals: Arrivals,
    place: Callable[[int, int, torch.Tensor], None],
    used: Sequence[torch.Tensor],
) -> None:
    """Copy and place all of ``stored``, beside what is computed.

    Args:
        stored: What; all of one dtype.
        transfer: To the device.
        arrivals: Will tell when it has been placed.
        place: Called with layers, begin and end, and device memory that will hold them of each entry one behind another: queues
            their placing. They rotate alike.
        used: What that reads and writes on the device, beside what was copied.
    """
    at_once = max(1, _STAGED_BYTES // max(stored.layer_bytes, 1))
    steps = []
    for begin, end, event in arrivals.groups:
        parts = list(stored.alike(begin, end, at_once))
        for a, b in parts:
            steps.append(Step(stored.sources(a, b), partial(place, a, b), event if b == end else None))
        if not parts:  # what waits for it must not wait for an earlier prompt's
            steps.append(Step((), lambda memory: None, event))
    sources = [source for step in steps for source in step.sources]
    transfer.bring(steps, sources[0].dtype if sources else torch.uint8, used)
