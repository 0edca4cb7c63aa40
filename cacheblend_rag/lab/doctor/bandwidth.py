"""Measures how fast this machine moves KV: within RAM, from the disk, to the device. Bytes per second, medians."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from cacheblend_rag.lab.doctor.measure import drop_page_cache

_BLOCK = 256 << 20
_REPEAT = 3


def measure_ram_copy() -> float:
    """Return the rate of copying 256 MiB from RAM to RAM."""
    source = torch.ones(_BLOCK, dtype=torch.uint8)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), _BLOCK)


def measure_device_copy(device: torch.device) -> float:
    """Return the rate of copying 256 MiB of page-locked memory to a CUDA device."""
    source = torch.ones(_BLOCK, dtype=torch.uint8).pin_memory()
    target = torch.empty(_BLOCK, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return _rate(copy, _BLOCK)


def measure_disk_read(directory: Path, cold: bool) -> float | None:
    """Return the rate of reading up to 256 MiB of the files in ``directory``; of a temporary one if there are few.

    None where nothing can be read: a directory that is empty and cannot be written to.
    """
    with _files(directory) as files:
        if not files:
            return None

        def read() -> None:
            for file in files:
                with file.open("rb", buffering=0) as handle:
                    handle.read()

        return _rate(
            read, sum(file.stat().st_size for file in files), (lambda: drop_page_cache(files)) if cold else None
        )


def measure_disk_latency(directory: Path) -> float:
    """Return the seconds that a read of 4 KiB takes whose page is not cached, of the files :func:`measure_disk_read` reads."""
    with _files(directory) as files:
        times = []
        for file in files[:1]:
            size = file.stat().st_size
            for part in range(_REPEAT):
                drop_page_cache([file])
                with file.open("rb", buffering=0) as handle:
                    handle.seek(part * size // (_REPEAT + 1))
                    begin = time.perf_counter()
                    handle.read(4096)
                    times.append(time.perf_counter() - begin)
        return median(times) if times else 0.0


@contextmanager
def _files(directory: Path) -> Iterator[list[Path]]:
    found: list[Path] = []
    total = 0
    for file in sorted(directory.rglob("*.safetensors")):
        if total >= _BLOCK or not os.access(file, os.R_OK):
            break
        found.append(file)
        total += file.stat().st_size
    if total >= _BLOCK // 4 or not os.access(directory, os.W_OK):
        yield found
        return
    with tempfile.NamedTemporaryFile(dir=directory, prefix="bandwidth-") as handle:
        handle.write(os.urandom(1 << 20) * (_BLOCK >> 20))
        handle.flush()
        os.fsync(handle.fileno())
        yield [Path(handle.name)]


def _rate(step: Callable[[], object], nbytes: int, before: Callable[[], object] | None = None) -> float:
    times = []
    step()
    for _ in range(_REPEAT):
        if before is not None:
            before()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return nbytes / median(times)
