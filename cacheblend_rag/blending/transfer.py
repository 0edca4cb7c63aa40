"""From host memory to the device while it computes: pin, copy, event, record. The only place that knows of streams."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from cacheblend_rag.store.kv import LayerKV


class Transfer:
    """Copies to one device on a stream of its own, so that copying and computing go on side by side."""

    def __init__(self, device: torch.device):
        """Use ``device``, which must have streams; :func:`transfer_to` says whether it has."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def start(self, kv: LayerKV) -> tuple[LayerKV, Any]:
        """Begin to copy ``kv`` from host memory; return the copy and the event that :meth:`wait` takes."""
        with self._module.stream(self._stream):
            copy = LayerKV(*(tensor.pin_memory().to(self._device, non_blocking=True) for tensor in kv))
            ready = self._module.Event()
            ready.record(self._stream)
        return copy, ready

    def wait(self, copy: LayerKV, ready: Any) -> None:
        """Let the caller's current stream wait for ``copy``, and keep its memory until that stream has used it."""
        using = self._module.current_stream(self._device)
        using.wait_event(ready)
        for tensor in copy:
            tensor.record_stream(using)


@cache
def transfer_to(device: torch.device) -> Transfer | None:
    """Return the transfer to ``device``, one for the whole process; None for a CPU and for devices without streams."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return Transfer(device)
