"""Compile the kernels for a kind of GPU as they are launched for a Llama of 8 billion weights. The program needs no GPU.

python compile_for.py COMPUTE_CAPABILITY
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from cacheblend_rag.engines.kernels import attention, place

GROUP, DIM = 4, 128
TARGET = int(sys.argv[1])
TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
# Bytes of shared memory for a block. The code for 8.0 also runs on 8.6, 8.9 and 12.0, which have less than 8.0 itself.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], **options: Any) -> Any:
    """Compile ``kernel``; arguments that are neither named in ``types`` nor constant are 32-bit integers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return compile(ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", TARGET, 32), options)


def attend(
    dtype: str, torch_dtype: Any, sinks: bool = False, window: int = 0, lse: bool = False, dim: int = DIM
) -> Any:
    rows, keys, warps = attention.tile(torch_dtype, GROUP, dim)
    types = dict.fromkeys(("query", "keys", "values", "sinks", "out"), f"*{dtype}")
    types |= {"positions": "*i64", "table": "*i32", "scale": "fp32", "soft_cap": "fp32", "lse": "*fp32"}
    constants = {"PAGE": 16, "DIM": dim, "DIM_UP": dim, "GROUP": GROUP, "ROWS": rows, "KEYS": keys, "CAPPED": False}
    constants |= {
        "WINDOW": window,
        "SINKS": sinks,
        "LSE": lse,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "keys_dim": 1,
        "values_dim": 1,
    }
    aligned = set(attention._attend.arg_names) - set(constants) - {"count", "scale", "soft_cap"}
    return compiled(attention._attend, types, constants, aligned, num_warps=warps, num_stages=2)


def added(dtype: str, torch_dtype: Any) -> Any:
    rows, keys, warps = attention.tile(torch_dtype, GROUP, DIM)
    types = dict.fromkeys(("query", "keys"), f"*{dtype}") | dict.fromkeys(("shares", "lse", "total"), "*fp32")
    types |= {"positions": "*i64", "scale": "fp32", "factor": "fp32"}
    constants = {"DIM": DIM, "DIM_UP": DIM, "GROUP": GROUP, "ROWS": rows, "KEYS": keys, "WINDOW": 0, "keys_dim": 1}
    constants["PRECISION"] = "ieee" if dtype == "fp32" else "tf32"
    aligned = set(attention._add_shares.arg_names) - set(constants) - {"count", "length", "scale", "factor"}
    return compiled(attention._add_shares, types, constants, aligned, num_warps=warps, num_stages=2)


def placed(dtype: str) -> Any:
    types = dict.fromkeys(("from_keys", "from_values", "keys", "values"), f"*{dtype}")
    types |= {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
    constants = {"PAGE": 16, "DIM": DIM, "DIM_UP": DIM, "HALF": 64, "HALF_UP": 64, "REST_UP": 1, "INTERLEAVED": False}
    constants |= {"TOKENS": place._TOKENS, "keys_dim": 1, "values_dim": 1}
    aligned = set(place._place.arg_names) - set(constants) - {"tokens", "first"}
    return compiled(place._place, types, constants, aligned, num_warps=place._WARPS, enable_fp_fusion=False)


def placed_in_bulk(dtype: str, scale: int = 0) -> Any:
    types = dict.fromkeys(("memory", "scales", "keys", "values"), f"*{dtype}") | ({"memory": "*i8"} if scale else {})
    types |= {"cos": "*fp32", "sin": "*fp32"} | dict.fromkeys(
        ("before", "within", "length", "slots", "offsets"), "*i64"
    )
    constants = {"PAGE": 16, "HEADS": 8, "DIM": DIM, "DIM_UP": DIM, "HALF": 64, "HALF_UP": 64, "REST_UP": 1}
    constants |= {"INTERLEAVED": False, "TOKENS": place._TOKENS, "keys_dim": 1, "values_dim": 1, "SCALE": scale}
    aligned = set(place._place_layers.arg_names) - set(constants) - {"tokens", "first"}
    return compiled(place._place_layers, types, constants, aligned, num_warps=place._WARPS, enable_fp_fusion=False)


def stack(kernel: Any) -> int:
    """Return how many bytes of registers spill to memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:\d+ STACK:(\d+)", usage)[0])


def main() -> None:
    import torch

    half, whole = ("bf16", torch.bfloat16), ("fp32", torch.float32)
    attends = attend(*half)
    assert TENSOR_CORES[TARGET] in attends.asm["ptx"], "the tensor cores are not used"
    made, moves = [attends], [placed_in_bulk("bf16", 2)]
    if TARGET == 90:
        made += [added(*half), attend(*whole), added(*whole), attend(*half, sinks=True, window=128, lse=True)]
        moves += [placed("bf16"), placed_in_bulk("bf16"), placed("fp32"), placed_in_bulk("fp32", 4)]
        assert not any(map(stack, made)), "a tile is too large for the registers"
    if TARGET < 100:
        made += [attend(*half, dim=256), attend(*whole, dim=256)]  # heads as large as Gemma's
    for kernel in made:
        assert kernel.metadata.shared <= SHARED[TARGET], f"{kernel.metadata.shared} bytes of shared memory"
    for move in moves:
        # Compute capability 8.0 multiplies bf16 rows by a fused addition of 0, which rounds once, or never for a power of 2.
        assert not re.search(r"fma\S*\.f32", move.asm["ptx"]), "a product is not rounded"
        assert stack(move) == 0


if __name__ == "__main__":
    sys.exit(main())
