"""Chooses the dtype of a model on a CPU, by a race of two matrix products, and checks that the model fits into memory."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from cacheblend_rag.errors import ModelError
from cacheblend_rag.homes import remembered
from cacheblend_rag.printable import size
from cacheblend_rag.store.identity import dtype_name, weight_files
from cacheblend_rag.store.opening import memory_bytes

_MEMORY = Path("/proc/meminfo")
_ROWS, _INNER, _OUTER = 256, 1024, 4096  # a part of a prompt, through one matrix of a model of 1B parameters
_HEATS: Final = 5
_LOST: Final = 2.0  # without bf16 instructions a product takes several times as long
_GAIN: Final = 1.2
"""How many times as fast bf16 must be: below, its rounding is not worth the change."""


def cpu_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype for a model with this ``config.json`` on this CPU.

    The dtype is bf16 if the model's own dtype is bf16 and this CPU multiplies at least 1.2 times as fast in bf16; else
    fp32. A CPU without bf16 instructions is slower and less exact in bf16.
    """
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return torch.bfloat16 if own == "bfloat16" and is_faster_in_bf16() else torch.float32


def is_faster_in_bf16() -> bool:
    """Return whether this CPU multiplies faster in bf16; the answer of the first call on a machine is remembered.

    Another CPU, number of threads or version of torch has an answer of its own.
    """
    return remembered("precision", [cpu_name(), torch.get_num_threads(), torch.__version__], bool, _race)


def check_memory(directory: Path, own: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Check, before anything is loaded, that a model's weights in ``dtype`` fit the free memory of ``device``.

    Args:
        directory: Directory of the model's files.
        own: Dtype of the weights in the files.
        dtype: Dtype in which the model will run.
        device: The CPU or a GPU.

    Raises:
        ModelError: The weights take more memory than is free; the message gives both sizes.
    """
    needed = sum(file.stat().st_size for file in weight_files(directory)) * dtype.itemsize // own.itemsize
    free = _free_bytes(device)
    if free is not None and needed > free:
        half = " or give --dtype bfloat16, which takes half," if dtype.itemsize > torch.bfloat16.itemsize else ""
        raise ModelError(
            f"The model in {directory} takes {size(needed)} of memory in {dtype_name(dtype)}, and "
            f"{size(free)} are free. Free some memory,{half} or choose a smaller model (`cacheblend models`)."
        )


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a model may take on ``device``, swap included; None if this system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="utf-8").splitlines())
        free = sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):  # not Linux
        return None
    return min(free, memory_bytes())


def _race() -> bool:
    """Return whether the fastest product in bf16 is fast enough against the fastest product in fp32."""
    best = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    pairs = {dtype: (torch.ones(_ROWS, _INNER, dtype=dtype), torch.ones(_OUTER, _INNER, dtype=dtype)) for dtype in best}
    with torch.inference_mode():
        for _ in range(_HEATS + 1):  # in turns, because the machine may be busy for a while
            for dtype, (x, weight) in pairs.items():
                begin = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                best[dtype] = min(best[dtype], time.perf_counter() - begin)
            if best[torch.bfloat16] > _LOST * best[torch.float32]:
                return False
    return best[torch.float32] >= _GAIN * best[torch.bfloat16]


def cpu_name() -> str:
    """Return the name of this machine's CPU, or ``"unknown"``."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
