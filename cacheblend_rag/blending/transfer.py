"""Moves KV between host memory and the device; only this file uses streams, events and page-locked buffers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend_rag.store.kv import LayerKV, can_page_lock, flat, laid_out, nbytes_of, packed, plain, unflat
from cacheblend_rag.store.memory import PageLockedMemory

# Buffers for KV outside page-locked memory. Each holds a chunk's layer of a large model (512 tokens of 8 KV heads of
# 128, in 16 bits, are 2 MiB); there are enough of them for a few threads to read while the device copies.
BUFFER_BYTES = 8 << 20
_BUFFERS = 8
_POLL_S = 0.0005
# CUDA copies at most this many bytes from ordinary memory without waiting for the work queued on its stream.
_STAGED_BYTES = 64 << 10

Arrival = Callable[[], list[LayerKV]]
"""Waits until layers are in host memory, and returns them (blocking; from any thread)."""


@dataclass
class Slot:
    """Holds device memory for one layer of all spans, used again for a later layer.

    Attributes:
        memory: ``[elements]``; None until the first layer comes.
        free: Event behind the computation's last use of the memory; None before the first use.
    """

    memory: torch.Tensor | None = None
    free: Any = None


@dataclass
class Staged:
    """Stands for a layer's spans on their way to a :class:`Slot`: views of the slot's memory, ready behind an event."""

    slot: Slot
    parts: list[LayerKV] = field(default_factory=list)
    ready: Any = None


class Step(NamedTuple):
    """Describes one step of :meth:`Transfer.bring`: the tensors to copy, and the work that uses them.

    Attributes:
        sources: Page-locked tensors, each ``[elements]``.
        use: Called with device memory ``[elements]`` that will hold the sources one behind another; queues the work
            that uses them.
        done: Event to record behind that work; None for no event.
    """

    sources: Sequence[torch.Tensor]
    use: Callable[[torch.Tensor], None]
    done: Any


class Transfer:
    """Copies from and to one device on streams of its own, so that copying and computing run at the same time.

    Thread-safe. KV in page-locked memory is copied from there, at once and without a thread. Other KV passes through
    page-locked buffers, which the calling thread fills.
    """

    def __init__(self, device: torch.device):
        """Use ``device``, which must have streams (see :func:`transfer_to`), and pin the buffers."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._up, self._down = self._module.Stream(device), self._module.Stream(device)
        self._buffers = PageLockedMemory(device, _BUFFERS * BUFFER_BYTES)
        self._has_buffers = self._buffers.grow(_BUFFERS * BUFFER_BYTES)
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def enter_thread(self) -> None:
        """Select the device for this thread; a new thread would otherwise open the first device, on every rank."""
        self._module.set_device(self._device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory to read into before :meth:`stage`, as a :data:`~cacheblend_rag.store.kv.Take` (blocking).

        The memory is a page-locked buffer if one is large enough.
        """
        if nbytes > BUFFER_BYTES or not self._has_buffers:
            return plain(nbytes)
        while (found := self._buffers.take(BUFFER_BYTES)) is None:
            self._await_oldest()
        return found[:nbytes]

    def stage(self, slot: Slot, reads: Iterable[LayerKV], tokens: int) -> Staged:
        """Begin to copy one layer of all spans to ``slot``; each span is read while the span before it is copied.

        The earlier use of ``slot`` must have been ended by :meth:`used`. ``reads`` are each span's KV in host memory,
        with ``tokens`` tokens in total.
        """
        staged = Staged(slot)
        sources: list[torch.Tensor] = []
        with torch.inference_mode(False), self._module.stream(self._up):
            if slot.free is not None:
                self._up.wait_event(slot.free)
            at = 0
            try:
                for layer in reads:
                    count = layer.k.numel() + layer.v.numel()
                    if not staged.parts:
                        self._make_room(slot, count // layer.k.shape[1] * tokens, layer.k.dtype)
                    assert slot.memory is not None
                    into = slot.memory[at : at + count]
                    at += count
                    sources += self._copy(into, layer)
                    staged.parts.append(unflat(into, layer))
                    del layer  # releases a buffer before the next one is requested
            finally:  # if a read fails, the copies before it continue
                staged.ready = self._recorded(self._up)
                self._hold(staged.ready, sources)
        return staged

    def wait(self, staged: Staged) -> None:
        """Let the caller's current stream wait for ``staged``, and keep its memory until that stream has used it."""
        using = self._module.current_stream(self._device)
        using.wait_event(staged.ready)
        if staged.slot.memory is not None:
            staged.slot.memory.record_stream(using)

    def used(self, slot: Slot) -> None:
        """Record that all uses of ``slot`` are queued on the caller's current stream; later copies may overwrite it."""
        slot.free = self._recorded(self._module.current_stream(self._device))

    def bring(self, steps: Sequence[Step], dtype: torch.dtype, used: Sequence[torch.Tensor]) -> None:
        """Begin all ``steps``, one after another beside the computation, behind the work that the caller has queued.

        All sources are of ``dtype``; ``used`` are the other device tensors that the steps use.
        """
        using = self._module.current_stream(self._device)
        sources: list[torch.Tensor] = []
        with torch.inference_mode(False), self._module.stream(self._up):
            self._up.wait_stream(using)
            sizes = [[each.numel() for each in step.sources] for step in steps]
            memory = torch.empty(max(map(sum, sizes), default=0), dtype=dtype, device=self._device)
            for step, parts in zip(steps, sizes, strict=True):
                for into, source in zip(memory[: sum(parts)].split_with_sizes(parts), step.sources, strict=True):
                    into.copy_(source, non_blocking=True)
                sources += step.sources
                step.use(memory)
                if step.done is not None:
                    step.done.record(self._up)
        for tensor in used:
            tensor.record_stream(self._up)
        self._hold(self._recorded(self._up), sources)

    def fetch(self, layers: Sequence[LayerKV], room: torch.Tensor | None) -> Arrival:
        """Begin to copy layers to host memory; see :func:`fetch`."""
        tensors = [tensor for layer in layers for tensor in layer]
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("KV of several dtypes cannot be copied as one")
        alike = len({tensor.shape for tensor in tensors}) == 1
        gathered = torch.cat(tensors if alike else [tensor.reshape(-1) for tensor in tensors]).view(-1)
        done = self._recorded(self._module.current_stream(self._device))
        gathered.record_stream(self._down)
        shapes = [LayerKV(*(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in layer)) for layer in layers]
        if room is not None:
            return partial(_arrive, self._bring(gathered, done, room), shapes, room)

        def arrive() -> list[LayerKV]:
            memory = plain(gathered.nbytes)
            return _arrive(self._bring(gathered, done, memory), shapes, memory)

        return arrive

    def _bring(self, gathered: torch.Tensor, done: Any, memory: torch.Tensor) -> Any:
        with torch.inference_mode(False), self._module.stream(self._down):
            self._down.wait_event(done)
            memory[: gathered.nbytes].view(gathered.dtype).copy_(gathered, non_blocking=True)
            ready = self._recorded(self._down)
        self._hold(ready, [memory])
        return ready

    def _make_room(self, slot: Slot, elements: int, dtype: torch.dtype) -> None:
        if slot.memory is None or slot.memory.dtype != dtype or len(slot.memory) < elements:
            slot.memory = torch.empty(elements, dtype=dtype, device=self._device)

    def _copy(self, into: torch.Tensor, layer: LayerKV) -> list[torch.Tensor]:
        """Copy to ``into``, ``[elements]``; return the sources that must stay unchanged until the copies are done."""
        whole = flat(layer)
        sources = [tensor.reshape(-1) for tensor in layer] if whole is None else [whole]
        kept = []
        for part, source in zip(torch.split(into, [len(source) for source in sources]), sources, strict=True):
            if not source.is_pinned():
                self._copy_through_buffers(part, source)
                continue
            part.copy_(source, non_blocking=True)
            if self._buffers.holds(source):
                self._hold(self._recorded(self._up), [source])  # other threads wait for this buffer
            else:
                kept.append(source)
        return kept

    def _copy_through_buffers(self, into: torch.Tensor, source: torch.Tensor) -> None:
        step = BUFFER_BYTES // source.element_size()
        for part, piece in zip(torch.split(into, step), torch.split(source, step), strict=True):
            buffer = self.buffer(piece.nbytes).view(piece.dtype)
            buffer.copy_(piece)
            part.copy_(buffer, non_blocking=True)
            self._hold(self._recorded(self._up), [buffer])

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def _hold(self, done: Any, memory: list[torch.Tensor]) -> None:
        """Keep host memory alive until ``done``; release the memory of copies that are done."""
        with self._lock:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((done, memory))

    def _await_oldest(self) -> None:
        with self._lock:
            oldest = self._in_flight.popleft() if self._in_flight else None
        if oldest is None:
            time.sleep(_POLL_S)  # other threads are filling all buffers
        else:
            oldest[0].synchronize()


def _arrive(ready: Any, shapes: Sequence[LayerKV], memory: torch.Tensor) -> list[LayerKV]:
    ready.synchronize()
    return laid_out(shapes, memory)


def transfer_to(device: torch.device) -> Transfer | None:
    """Return the process-wide transfer to ``device``; None for a CPU and for devices without streams."""
    if not can_page_lock(device):
        return None
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return _transfer_to(torch.device(device.type, index))


@cache
def _transfer_to(device: torch.device) -> Transfer:
    return Transfer(device)


def fetch(layers: Sequence[LayerKV], room: Callable[[int], torch.Tensor | None]) -> Arrival:
    """Begin to copy an entry's layers to host memory, where each layer is one block. The caller does not wait.

    From a device: one gather on the caller's stream, so that later work on the stream may overwrite the layers, and one
    copy beside it into page-locked memory. Without page-locked memory, the :data:`Arrival` makes the copy. From a CPU,
    the :data:`Arrival` does everything, and the layers must stay unchanged until then.

    Args:
        layers: Layers of one dtype, each ``[kv_heads, tokens, head_dim]``.
        room: Returns page-locked memory for a number of bytes, or None; see :meth:`~cacheblend_rag.store.base.KVStore.room`.
    """
    transfer = transfer_to(layers[0].k.device)
    if transfer is None:
        return partial(packed, layers)
    return transfer.fetch(layers, room(nbytes_of(layers)))


class Fetch:
    """Copies ``values`` to host memory without waiting; the computation continues, and only a reader waits."""

    def __init__(self, values: torch.Tensor):
        """Start to copy ``values``, behind the work already queued on the device."""
        self._values, self._arrived = values, None
        if values.device.type == "cpu":
            return
        module: Any = torch.get_device_module(values.device)
        if not hasattr(module, "Stream"):  # devices without streams always copy synchronously
            self._values = values.cpu()
            return
        self._values = _pinned(torch.empty(values.shape, dtype=values.dtype))
        self._values.copy_(values, non_blocking=True)
        self._arrived = module.Event()
        self._arrived.record()

    def result(self) -> torch.Tensor:
        """Return the values in host memory; waits for the copy, and so for all earlier work of the stream."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def whole_numbers(values: Sequence[int]) -> torch.Tensor:
    """Return ``values`` in host memory, int64. For thousands of values torch.tensor takes eight times as long."""
    return torch.from_numpy(np.fromiter(values, np.int64, len(values)))


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``values``, which are in host memory, on ``device``, without waiting for the device's queued work."""
    if values.nbytes > _STAGED_BYTES and values.device.type == "cpu" and can_page_lock(device):
        values = _pinned(values)
    return values.to(device, non_blocking=True)


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Return a page-locked copy of ``values``; ``values`` itself if no such memory is left, so that copies wait."""
    try:
        return values.pin_memory()
    except RuntimeError:
        return values
