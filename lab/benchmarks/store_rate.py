"""Measures the rates of the disk tier's reads and writes, encrypted and not, against plain reads and writes.

    python lab/benchmarks/store_rate.py [--json]

Reads go layer by layer, checksums included, as in the fusor. "cold" drops the files from the page cache first. Methods
alternate from entry to entry, so that a busy machine slows all methods equally; the results are medians over all
entries.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from cacheblend_lab.bench import drop_page_cache
from cacheblend_rag.store import ChunkKV, DiskStore, EntryFormat, Keyring, KVKey, LayerKV


def write_plain(file: Path, data: list[memoryview]) -> None:
    """Write and sync one file."""
    with file.open("wb", buffering=0) as handle:
        for block in data:
            handle.write(block)
        os.fsync(handle.fileno())


def read_plain(file: Path) -> None:
    """Read one whole file."""
    with file.open("rb", buffering=0) as handle:
        handle.read()


def read_stored(store: DiskStore, key: KVKey) -> None:
    """Read one entry as the fusor does: layer by layer, and drop each layer before the next."""
    entry = store.get(key)
    assert entry is not None
    for index in range(entry.num_layers):
        entry.layer(index)


def measure(args: argparse.Namespace, root: Path) -> dict[str, object]:
    """Return the medians of all methods in GB/s, and their ratios."""
    shape = (args.kv_heads, args.tokens, args.head_dim)
    dtype = getattr(torch, args.dtype)
    kv = ChunkKV([LayerKV(*torch.randn(2, *shape).to(dtype).clone().unbind()) for _ in range(args.layers)], start=0)
    blocks = [tensor.contiguous().view(torch.uint8).numpy().data for layer in kv.layers for tensor in layer]
    ring = Keyring({"default": os.urandom(32)}, root / "keys")
    stores = {
        "store": DiskStore(root / "store"),
        "encrypted": DiskStore(root / "encrypted", format=EntryFormat(keys=ring)),
    }
    keys = [KVKey(f"{index:040x}") for index in range(args.entries)]
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[[], object]) -> None:
        begin = time.perf_counter()
        function()
        seconds[name].append(time.perf_counter() - begin)

    plain_files = [root / f"plain{index}" for index in range(args.entries)]
    for _ in range(args.repeat):
        for file, key in zip(plain_files, keys, strict=True):
            timed("write_plain", functools.partial(write_plain, file, blocks))
            for name, store in stores.items():
                timed(f"write_{name}", functools.partial(store.put, key, kv))
        for state in ("warm", "cold"):
            for key, plain in zip(keys, plain_files, strict=True):
                if state == "cold":
                    drop_page_cache([plain, *root.glob(f"*/kv/*/{key}.safetensors")])
                timed(f"read_{state}_plain", functools.partial(read_plain, plain))
                for name, store in stores.items():
                    timed(f"read_{state}_{name}", functools.partial(read_stored, store, key))
        for file, key in zip(plain_files, keys, strict=True):
            file.unlink()
            for store in stores.values():
                store.delete(key)
        os.sync()  # freeing the files must not slow the next round
    rates = {name: kv.nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return {
        "settings": {**vars(args), "dir": str(args.dir or ""), "entry_bytes": kv.nbytes},
        "gb_per_s": rates,
        "store_over_plain": {
            "read_warm": rates["read_warm_store"] / rates["read_warm_plain"],
            "read_cold": rates["read_cold_store"] / rates["read_cold_plain"],
            "write": rates["write_store"] / rates["write_plain"],
        },
        "encrypted_over_store": {
            what: rates[f"{what}_encrypted"] / rates[f"{what}_store"] for what in ("read_warm", "read_cold", "write")
        },
    }


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--entries", type=int, default=6, help="entries read in a row, as the chunks of one prompt")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--dir", type=Path, help="directory on the disk to measure (default: the temporary directory)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        result = measure(args, Path(root))
    if args.json:
        print(json.dumps(result))
        return
    for name, rate in result["gb_per_s"].items():
        print(f"{name:20} {rate:6.2f} GB/s")
    for name, ratio in result["store_over_plain"].items():
        print(f"store / plain, {name:10} {ratio:5.2f}")
    for name, ratio in result["encrypted_over_store"].items():
        print(f"encrypted / store, {name:10} {ratio:5.2f}")


if __name__ == "__main__":
    main()
