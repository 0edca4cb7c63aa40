"""The driver of the interpreted backend, which makes a CPU Triton's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends import driver
from triton.backends.compiler import GPUTarget


class InterpretedDriver(driver.DriverBase):
    """A driver that is always active."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def once(kernel: Callable[[], Any], **_: Any) -> list[float]:
            kernel()
            return [1.0]

        return once

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0
