"""Provides measurements with rounds, turns and the peak memory."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from cacheblend_rag.errors import InputError

_T = TypeVar("_T")


class PeakMemory:
    """Measures the peak memory since :meth:`restart`: of a CUDA device as its allocator counts it, else of this process."""

    def __init__(self, device: torch.device):
        """Measure ``device``'s memory, or the process's resident set if ``device`` is a CPU."""
        self._device = device

    def restart(self) -> None:
        """Reset the peak. Free memory is released first, so that the next peak does not include it."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # glibc holds freed blocks, which would count as memory of the next method
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except (OSError, AttributeError):
            self._device = torch.device("meta")

    def nbytes(self) -> int | None:
        """Return the peak in bytes; None if the system cannot reset the peak (resetting needs Linux's ``clear_refs``)."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self._device.type == "meta":
            return None
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        return int(found[1]) * 1024 if found else None


def check_positive(settings: object, *names: str) -> None:
    """Raise an error unless all fields ``names`` of ``settings`` are at least 1.

    Raises:
        InputError: A field is less than 1; the message names it.
    """
    for name in names:
        if getattr(settings, name) < 1:
            raise InputError(f"{name} is {getattr(settings, name)}; give at least 1.")


def count_rounds(repeat: int) -> Iterator[tuple[int, str]]:
    """Yield number and name of every round: one warm-up with number 0, and ``repeat`` timed rounds."""
    for number in range(repeat + 1):
        yield number, f"round {number} of {repeat}" if number else "warm-up"


def take_turns(items: Iterable[_T], number: int) -> list[_T]:
    """Return ``items`` rotated by ``number``, so that a machine that slows down during a round slows all items alike."""
    listed = list(items)
    turn = number % len(listed)
    return listed[turn:] + listed[:turn]
