"""Simulate a CUDA device with CPU tensors, for `pytest -m device`.

- Operations refuse its tensors together with CPU tensors, except in copies, as indices, and as single numbers.
- Only CPU memory can be pinned; copies to and from pinned memory, on any stream, finish late: until the host waits for an event
  behind them, the target holds NaN; the copy then takes the source's values of that moment.
- A stream may use memory that another stream wrote, or overwrite memory that it used, only behind its event or a host wait.
- A tensor that was allocated on one stream may be used on another only once it is recorded there: PyTorch's allocator would
  reuse its memory as soon as the first stream has released it.
- Unwritten memory holds NaN.
- Threads that load must have set their device before they use a stream: CUDA would open the first device for them, too.
- It counts how often the host waits for it: numbers read one by one, indices that it must count first, and copies that are
  not ``non_blocking``, that end in ordinary memory, or that bring more than 64 KiB from there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "sim"
LARGE = 64 << 10
"""Larger copies from ordinary memory pass through the driver's page-locked memory, once the stream is done."""


class Known(dict["Stream", int]):
    """The number of operations of each stream that are known to be done."""

    def learn(self, other: Known) -> None:
        with _order:
            for stream, count in other.items():
                self[stream] = max(self.get(stream, 0), count)


_order = threading.RLock()


def _nothing() -> None:
    """Replace an operation in the queue that is done."""


class Stream:
    """A stream of work in order; queued work runs when a stream or the host waits for it."""

    def __init__(self, device: object = None, **_: object) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.known = Known()
        self._lock = threading.Lock()

    def operation(self) -> None:
        """Begin the next operation; it comes behind all work that the host has waited for, because the host issues it."""
        with _order:
            self.known.learn(HOST)
            self.known[self] = self.known.get(self, 0) + 1

    def run(self, end: int | None = None) -> None:
        """Run the work that was queued before ``end``."""
        with self._lock:
            while self.done < (len(self.queue) if end is None else end):
                _local.copying = True
                self.queue[self.done]()
                _local.copying = False
                self.queue[self.done] = _nothing  # releases source and target
                self.done += 1

    def synchronize(self) -> None:
        self.run()
        HOST.learn(self.known)

    def wait_event(self, event: Event) -> None:
        event.run()
        self.known.learn(event.known)

    def wait_stream(self, stream: Stream) -> None:
        stream.run()
        self.known.learn(stream.known)


class Event:
    """A place in a stream's work."""

    def __init__(self, **_: object) -> None:
        self._stream, self._end, self.known = DEFAULT, 0, Known()

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._end = len(self._stream.queue)
        self.known = Known(self._stream.known)

    def run(self) -> None:
        self._stream.run(self._end)

    def synchronize(self) -> None:
        _count_wait(True)
        self.run()
        HOST.learn(self.known)

    def query(self) -> bool:
        return self._stream.done >= self._end


HOST = Known()
DEFAULT = Stream()
_local = threading.local()


def is_copying() -> bool:
    """Return whether this thread now runs the device's work, not the processor's."""
    return getattr(_local, "copying", False)


def current_stream(device: object = None) -> Stream:
    found: Stream = getattr(_local, "stream", DEFAULT)
    return found


def set_device(device: object) -> None:
    _local.device = device


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    if threading.current_thread().name.startswith("cacheblend-load") and not hasattr(_local, "device"):
        raise RuntimeError("a thread that has not set its device would open the first one, too")
    before = current_stream()
    _local.stream = chosen
    try:
        yield
    finally:
        _local.stream = before


class _Allocation:
    """The memory of one or several tensors, with the streams that may use it, and each stream's last uses and writes."""

    def __init__(self) -> None:
        here = current_stream()
        here.operation()
        self.streams = {here}
        self.uses = Known({here: here.known[here]})
        self.writes = Known(self.uses)

    def access(self, func: Any, stream: Stream, write: bool) -> None:
        with _order:
            for other, count in (self.uses if write else self.writes).items():
                if other is not stream and stream.known.get(other, 0) < count:
                    raise RuntimeError(
                        f"{func}: {'overwrites' if write else 'uses'} what another stream may still be using"
                    )
            self.uses[stream] = stream.known[stream]
            if write:
                self.writes[stream] = stream.known[stream]


class SimulatedTensor(torch.Tensor):
    """A tensor on the device; the CPU tensor ``raw`` has its values."""

    raw: torch.Tensor
    allocation: _Allocation
    copies: ClassVar[int] = 0
    """Copies of KV (of floating-point tensors) from the host to the device so far; positions and the like are launches."""
    waits: ClassVar[int] = 0
    """How often the host's main thread has waited for the device so far; threads that load may wait."""
    launches: ClassVar[int] = 0
    """Operations that the device was given so far, views among them."""
    late_fetches: ClassVar[int] = 0
    """Copies from the device to the host so far for which the host did not wait at once."""
    unpinned: ClassVar[int] = 0
    """Copies of KV from ordinary memory so far, for which the host had to wait."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, allocation: _Allocation | None = None) -> SimulatedTensor:
        with torch.inference_mode(False):  # a view of a normal tensor must be a normal tensor, too
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=f"{NAME}:0",
            )
        made.raw, made.allocation = raw, allocation or _Allocation()
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimulatedTensor({self.raw})"

    def tolist(self) -> Any:
        """Return plain numbers; PyTorch does not return them for a subclass."""
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Allow use on ``stream``."""
        self.allocation.streams.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # In inference mode composite operations arrive here, too.
        if func not in _WHOLE:
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            _WHOLE.add(func)
        if func is torch.ops.aten.copy_.default:
            return _copy(*args, **kwargs)
        if not _is_view(func):
            current_stream().run()  # in order: the work queued on this stream comes first
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        _refuse_strangers(func, tensors)
        _count_wait(_waits(func, args, kwargs))
        SimulatedTensor.launches += 1
        _access(func, args, kwargs)
        if func in _TO_HOST:
            HOST.learn(current_stream().known)
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type == "cpu":
            HOST.learn(current_stream().known)
            return torch.ops.aten._to_copy.default(args[0].raw, **{**kwargs, "non_blocking": False})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        raw_args, raw_kwargs = _raw(args), {name: _raw(value) for name, value in kwargs.items()}
        with torch.inference_mode(False), torch.no_grad():
            result = func(*raw_args, **raw_kwargs)
            if "empty" in func.__name__:
                tree_map(_garbage, result)
        return tree_map(lambda out: _wrapped(out, tensors), result)


def _raw(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_raw(each) for each in value]
    return value.raw if isinstance(value, SimulatedTensor) else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments, which are values and lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _wrapped(out: Any, inputs: list[torch.Tensor]) -> Any:
    if not isinstance(out, torch.Tensor):
        return out
    for tensor in inputs:
        if isinstance(tensor, SimulatedTensor):
            if tensor.raw is out:
                assert tensor.shape == out.shape, "the device cannot resize a tensor"
                return tensor  # in place
            if tensor.raw.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() and out.numel():
                return SimulatedTensor(out, tensor.allocation)  # a view
    return SimulatedTensor(out)


# The operations that are not composite.
_WHOLE: set[Any] = set()
_TO_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
}
_INDICES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


def _count_wait(waits: bool) -> None:
    if threading.current_thread() is threading.main_thread():
        SimulatedTensor.waits += waits


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host must wait for the device before it can continue."""
    if func is torch.ops.aten._to_copy.default:
        crosses = torch.device(kwargs.get("device") or NAME).type != args[0].device.type
        return crosses and not kwargs.get("non_blocking")
    if func in _INDICES:
        indices = [index for index in args[1] if index is not None]
        return any(i.dtype is torch.bool or not isinstance(i, SimulatedTensor) for i in indices)
    return func in _TO_HOST


def _refuse_strangers(func: Any, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, SimulatedTensor):
            _check_stream(func, tensor)
        elif tensor.dim() > 0 and func not in _INDICES:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found at least two: {NAME} and cpu"
            )


@cache
def _arguments(func: Any) -> list[tuple[str, bool | None]]:
    """Return an operation's arguments, each with whether the operation writes (True) or views it (False), or neither (None)."""
    arguments = func._schema.arguments
    return [(each.name, None if each.alias_info is None else each.alias_info.is_write) for each in arguments]


@cache
def _is_view(func: Any) -> bool:
    return any(writes is False for _, writes in _arguments(func))


def _access(func: Any, args: Any, kwargs: Any) -> None:
    """Note which memory an operation reads and writes on the current stream; refuse memory that other streams may be using."""
    if _is_view(func):
        return  # a view reads no memory yet
    here = current_stream()
    here.operation()
    for index, (name, writes) in enumerate(_arguments(func)):
        for tensor in _tensors((args[index] if index < len(args) else kwargs.get(name),)):
            if isinstance(tensor, SimulatedTensor):
                tensor.allocation.access(func, here, bool(writes))


def _check_stream(func: Any, tensor: SimulatedTensor) -> None:
    if current_stream() not in tensor.allocation.streams and tensor.allocation.streams != {DEFAULT}:
        raise RuntimeError(f"{func}: a tensor of another stream is used without record_stream; its memory may be gone")


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    here = current_stream()
    here.operation()
    for tensor in (target, source):
        if isinstance(tensor, SimulatedTensor):
            _check_stream("copy_", tensor)
            tensor.allocation.access("copy_", here, write=tensor is target)
    to, of = _raw(target), _raw(source)
    up = isinstance(target, SimulatedTensor) and not isinstance(source, SimulatedTensor)
    down = isinstance(source, SimulatedTensor) and not isinstance(target, SimulatedTensor)
    if up and not (of.is_floating_point() or of.dtype == torch.uint8):  # neither KV nor its int8 rows
        SimulatedTensor.launches += 1
    elif up:
        SimulatedTensor.copies += 1
        SimulatedTensor.unpinned += not source.is_pinned()
    if non_blocking and ((up and source.is_pinned()) or (down and target.is_pinned())):
        if down and here not in source.allocation.streams:  # type: ignore[attr-defined]
            raise RuntimeError("copy_: the source of a late copy needs record_stream; its memory may be gone")
        SimulatedTensor.late_fetches += down
        with torch.inference_mode(False), torch.no_grad():
            _garbage(to)
        here.queue.append(lambda: _arrive(to, of))
        return target
    _count_wait((up or down) and (not non_blocking or down or source.nbytes > LARGE))
    here.run()
    to.copy_(of)
    if down:
        HOST.learn(here.known)
    return target


@torch.inference_mode()
def _arrive(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy now, in inference mode, because tensors made in inference mode may be written nowhere else."""
    to.copy_(of)


def _garbage(raw: torch.Tensor) -> torch.Tensor:
    return raw.fill_(float("nan") if raw.is_floating_point() else 0)


class _Module:
    """The functions of `torch.sim`, named as those of `torch.cuda`."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(stream)
    set_device = staticmethod(set_device)

    @staticmethod
    def default_stream(device: object = None) -> Stream:
        return DEFAULT

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def device(index: int) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_pinned: dict[int, int] = {}
"""Addresses of pinned memory, and its bytes."""
pins = [0]
"""How often memory was pinned so far."""
_empty = torch.empty


def _pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    if self.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{self.device.type}' tensors: only dense CPU tensors can be pinned")
    return _pinned_memory(self.nbytes).view(self.dtype).view(self.shape).copy_(self.detach())


def _empty_maybe_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return _pinned_memory(*args) if pin_memory else _empty(*args, **kwargs)


def _pinned_memory(nbytes: int) -> torch.Tensor:
    memory = np.empty(nbytes, dtype=np.uint8)  # views of the tensor keep the array alive
    _pinned[memory.ctypes.data] = nbytes
    weakref.finalize(memory, _pinned.pop, memory.ctypes.data)
    pins[0] += 1
    return torch.from_numpy(memory)


def _is_pinned(self: torch.Tensor, device: object = None) -> bool:
    # Views of pinned memory are pinned.
    at = self.data_ptr()
    return any(begin <= at < begin + nbytes for begin, nbytes in list(_pinned.items()))


_registered: list[Any] = []


def _register() -> None:
    """Register the device with PyTorch, for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return SimulatedTensor(_garbage(torch.empty(size, dtype=dtype, device="cpu")))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return SimulatedTensor(_garbage(torch.empty_strided(size, stride, dtype=dtype, device="cpu")))

    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        begin, end = (0, start) if end is None else (start, end)
        SimulatedTensor.launches += 1
        return SimulatedTensor(torch.arange(begin, end, step, dtype=dtype, device="cpu"))

    library.impl("arange", arange, "PrivateUse1")
    library.impl("arange.start", arange, "PrivateUse1")
    library.impl("arange.start_step", arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source), "PrivateUse1")


@contextmanager
def usable() -> Iterator[None]:
    """Make `torch.device("sim")` usable; PyTorch itself can pin memory for its own devices only."""
    if not _registered:
        _register()
    before = torch.Tensor.pin_memory, torch.Tensor.is_pinned
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = _pin_memory, _is_pinned  # type: ignore[method-assign,assignment]
    torch.empty = _empty_maybe_pinned  # type: ignore[assignment]
    try:
        yield
    finally:
        _await_loading()
        torch.Tensor.pin_memory, torch.Tensor.is_pinned = before  # type: ignore[method-assign]
        torch.empty = _empty


def _await_loading() -> None:
    """Wait for reads of abandoned blends, which continue and would be counted by the next test."""
    for thread in threading.enumerate():
        if thread.name.startswith("cacheblend-load"):
            thread.join(timeout=600)
