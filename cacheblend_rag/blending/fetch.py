"""Copies from the device to host memory without waiting: computing goes on, and whoever reads the copy waits for it."""

from __future__ import annotations

from typing import Any

import torch


class Fetch:
    """Brings a copy of ``values`` to host memory."""

    def __init__(self, values: torch.Tensor):
        """Start to copy ``values``, behind what is queued on the device already."""
        self._values, self._arrived = values, None
        if values.device.type == "cpu":
            return
        module: Any = torch.get_device_module(values.device)
        if not hasattr(module, "Stream"):  # a device without streams: all copies wait
            self._values = values.cpu()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype).pin_memory()
        self._values.copy_(values, non_blocking=True)
        self._arrived = module.Event()
        self._arrived.record()

    def result(self) -> torch.Tensor:
        """Return the values in host memory; waits for the copy, and so for the device up to it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``values``, which are in host memory, on ``device``, without waiting for what the device is at."""
    return values.to(device, non_blocking=True)
