"""Measures how fast this machine moves KV within RAM, from disk and to the device: medians, in bytes per second."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from cacheblend_rag.blending.costs import TierCost
from cacheblend_rag.calibrate.measure import drop_page_cache

_BLOCK = 256 << 20
_REPEAT = 3


def measure_ram_copy() -> float:
    """Return the rate of copying 256 MiB from RAM to RAM, in bytes per second."""
    source = torch.ones(_BLOCK, dtype=torch.uint8)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), _BLOCK)


def measure_device_copy(device: torch.device) -> float:
    """Return the rate of copying 256 MiB of page-locked memory to a CUDA device, in bytes per second."""
    source = torch.ones(_BLOCK, dtype=torch.uint8).pin_memory()
    target = torch.empty(_BLOCK, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return _rate(copy, _BLOCK)


def measure_disk(directory: Path, cold: bool) -> TierCost | None:
    """Return the latency and the rate of reading up to 256 MiB of entry files in ``directory``.

    If ``directory`` holds less than 64 MiB and is writable, a temporary file of 256 MiB is read instead. The latency,
    in seconds, is that of reading 4 KiB that the page cache does not hold. Return None if ``directory`` is empty and
    not writable.
    """
    with _files(directory) as files:
        if not files:
            return None

        def read() -> None:
            for file in files:
                with file.open("rb", buffering=0) as handle:
                    handle.read()

        nbytes = sum(file.stat().st_size for file in files)
        rate = _rate(read, nbytes, (lambda: drop_page_cache(files)) if cold else None)
        return TierCost(_latency(files[0]), rate)


def _latency(file: Path) -> float:
    times = []
    for part in range(_REPEAT):
        drop_page_cache([file])
        with file.open("rb", buffering=0) as handle:
            handle.seek(part * file.stat().st_size // (_REPEAT + 1))
            begin = time.perf_counter()
            handle.read(4096)
            times.append(time.perf_counter() - begin)
    return median(times)


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
