"""A device that behaves as CUDA does where it matters, made of CPU tensors: `pytest -m device`.

- Its tensors refuse to meet CPU tensors, except in copies, as indices, and as single numbers.
- Only CPU tensors can be pinned; copies from pinned memory on a side stream finish late: until an event behind them is waited
  for, the target holds NaN, and what the source holds then is what arrives.
- A tensor that was allocated on one stream may be used on another only once it is recorded there: PyTorch's allocator would
  hand its memory to somebody else as soon as the first stream has let go of it.
- Memory that nobody wrote holds NaN.
- It counts how often the host waits for it: numbers read one by one, copies to the host and copies to it that do not say
  ``non_blocking``, indices that it must count first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "sim"


class Stream:
    """Work in order; what is queued runs when somebody waits for it."""

    def __init__(self, device: object = None, **_: object) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self._lock = threading.Lock()

    def run(self, end: int | None = None) -> None:
        """Run what was queued before ``end``."""
        with self._lock:
            while self.done < (len(self.queue) if end is None else end):
                self.queue[self.done]()
                self.done += 1

    synchronize = run

    def wait_event(self, event: Event) -> None:
        event._stream.run(event._end)

    def wait_stream(self, stream: Stream) -> None:
        stream.run()


class Event:
    """A place in a stream's work."""

    def __init__(self, **_: object) -> None:
        self._stream, self._end = DEFAULT, 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._end = len(self._stream.queue)

    def synchronize(self) -> None:
        SimulatedTensor.waits += 1
        self._stream.run(self._end)

    def query(self) -> bool:
        return self._stream.done >= self._end


DEFAULT = Stream()
_local = threading.local()


def current_stream(device: object = None) -> Stream:
    found: Stream = getattr(_local, "stream", DEFAULT)
    return found


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    _local.stream = chosen
    try:
        yield
    finally:
        _local.stream = before


class _Allocation:
    """Memory of one or several tensors: the streams that may use it."""

    def __init__(self) -> None:
        self.streams = {current_stream()}


class SimulatedTensor(torch.Tensor):
    """A tensor on the device; ``raw`` is the CPU tensor that it is made of."""

    raw: torch.Tensor
    allocation: _Allocation
    copies: ClassVar[int] = 0
    """Copies from the host to the device so far."""
    waits: ClassVar[int] = 0
    """How often the host has waited for the device so far."""
    launches: ClassVar[int] = 0
    """Operations that the device was given so far, views among them."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, allocation: _Allocation | None = None) -> SimulatedTensor:
        with torch.inference_mode(False):  # a view of a normal tensor must be one, too
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
        """Return plain numbers, as any tensor does; of a subclass PyTorch would not give them."""
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Allow use on ``stream``."""
        self.allocation.streams.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # In inference mode even ops that are made of others arrive here.
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func is torch.ops.aten.copy_.default:
            return _copy(*args, **kwargs)
        current_stream().run()  # in order: what was queued on this stream comes first
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        _refuse_strangers(func, tensors)
        SimulatedTensor.waits += _waits(func, args, kwargs)
        SimulatedTensor.launches += 1
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type == "cpu":
            return torch.ops.aten._to_copy.default(args[0].raw, **{**kwargs, "non_blocking": False})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        raw_args, raw_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            result = func(*raw_args, **raw_kwargs)
            if "empty" in func.__name__:
                tree_map(_garbage, result)
        return tree_map(lambda out: _wrapped(out, tensors), result)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, SimulatedTensor) else value


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


_COUNTS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
_INDICES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Say whether the host must wait for the device before it can go on."""
    if func is torch.ops.aten._to_copy.default:
        crosses = torch.device(kwargs.get("device") or NAME).type != args[0].device.type
        return crosses and not kwargs.get("non_blocking")
    if func in _INDICES:
        indices = [index for index in args[1] if index is not None]
        return any(i.dtype is torch.bool or not isinstance(i, SimulatedTensor) for i in indices)
    return func in _COUNTS


def _refuse_strangers(func: Any, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, SimulatedTensor):
            _check_stream(func, tensor)
        elif tensor.dim() > 0 and func not in _INDICES:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found at least two: {NAME} and cpu"
            )


def _check_stream(func: Any, tensor: SimulatedTensor) -> None:
    if current_stream() not in tensor.allocation.streams and tensor.allocation.streams != {DEFAULT}:
        raise RuntimeError(f"{func}: a tensor of another stream is used without record_stream; its memory may be gone")


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    here = current_stream()
    for tensor in (target, source):
        if isinstance(tensor, SimulatedTensor):
            _check_stream("copy_", tensor)
    to, of = _raw(target), _raw(source)
    if isinstance(target, SimulatedTensor) and not isinstance(source, SimulatedTensor):
        SimulatedTensor.copies += 1
        if non_blocking and here is not DEFAULT and source.is_pinned():
            _garbage(to)
            here.queue.append(lambda: to.copy_(of))
            return target
    SimulatedTensor.waits += target.device.type != source.device.type and not non_blocking
    here.run()
    to.copy_(of)
    return target


def _garbage(raw: torch.Tensor) -> torch.Tensor:
    return raw.fill_(float("nan") if raw.is_floating_point() else 0)


class _Module:
    """What `torch.sim` offers, as `torch.cuda` does."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(stream)

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


_pinned: WeakSet[torch.Tensor] = WeakSet()


def _pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    if self.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{self.device.type}' tensors: only dense CPU tensors can be pinned")
    copy = self.detach().clone()
    _pinned.add(copy)
    return copy


def _is_pinned(self: torch.Tensor, device: object = None) -> bool:
    # Views of pinned memory are pinned.
    return any(self.untyped_storage().data_ptr() == pinned.untyped_storage().data_ptr() for pinned in _pinned)


_registered: list[Any] = []


def _register() -> None:
    """Make the device known to PyTorch, which is for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return SimulatedTensor(_garbage(torch.empty(size, dtype=dtype, device="cpu")))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return SimulatedTensor(_garbage(torch.empty_strided(size, stride, dtype=dtype, device="cpu")))

    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        begin, end = (0, start) if end is None else (start, end)
        return SimulatedTensor(torch.arange(begin, end, step, dtype=dtype, device="cpu"))

    library.impl("arange", arange, "PrivateUse1")
    library.impl("arange.start", arange, "PrivateUse1")
    library.impl("arange.start_step", arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source), "PrivateUse1")


@contextmanager
def usable() -> Iterator[None]:
    """Let `torch.device("sim")` be used; PyTorch itself can pin memory for its own devices only."""
    if not _registered:
        _register()
    before = torch.Tensor.pin_memory, torch.Tensor.is_pinned
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = _pin_memory, _is_pinned  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.pin_memory, torch.Tensor.is_pinned = before  # type: ignore[method-assign]
        _pinned.clear()
