"""Entries whose contents follow from a number, so that any process can check their tensors."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from cacheblend_rag.store import kvfile
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, ModelFingerprint, StoredKV, kv_key
from cacheblend_rag.store.source import Keyring


def key_of(number: int) -> KVKey:
    return KVKey(hashlib.sha256(str(number).encode()).hexdigest()[:40])


def sample_keys(seed: int = 1) -> Keyring:
    """Keys of the default tenant and of the tenant acme."""
    keys = {tenant: hashlib.sha256(f"{tenant} {seed}".encode()).digest() for tenant in ("default", "acme")}
    return Keyring(keys, Path(f"/keys/{seed}"))


def encrypted_key_of(number: int, keys: Keyring, tenant: str = "default") -> KVKey:
    return kv_key(ModelFingerprint("0" * 32, "sample"), [], [number], namespace=tenant, encrypted=keys.name(tenant))


def numbers(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return random eighths up to 15/8 and no -0: every codec stores them exactly, bit for bit."""
    return (4 * torch.randn(shape, generator=generator)).round().clamp(-15, 15) / 8 + 0.0


def kv_of(number: int, layers: int = 2, tokens: int = 3, dtype: torch.dtype = torch.float32) -> ChunkKV:
    generator = torch.Generator().manual_seed(number)

    def tensor(*shape: int) -> torch.Tensor:
        return numbers(*shape, generator=generator).to(dtype)

    return ChunkKV([LayerKV(tensor(2, tokens, 4), tensor(2, tokens, 8)) for _ in range(layers)], start=number % 7)


def ranked(kv: ChunkKV) -> ChunkKV:
    """Return the same entry with static deviations."""
    return ChunkKV(kv.layers, kv.start, static=torch.arange(1.0, 1.0 + kv.num_tokens))


def same(stored: StoredKV, expected: ChunkKV) -> bool:
    """Read every layer of ``stored`` and compare all there is to compare, bit for bit."""
    described = (stored.num_layers, stored.num_tokens, stored.start, stored.nbytes)
    if described != (expected.num_layers, expected.num_tokens, expected.start, expected.nbytes):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for index in range(expected.num_layers)
        for a, b in zip(stored.layer(index), expected.layer(index), strict=True)
    )


def sign(header: dict[str, Any], data: bytes) -> None:
    """Make the checksums of an entry's header right for the ``data`` behind it, as far as the header makes sense."""
    metadata, states = header["__metadata__"], {}
    for name in sorted(header):
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            entry = header[name]
            begin, end = entry["data_offsets"]
            state = states.setdefault(name if name == "static" else name.split(".", 2)[1], xxhash.xxh3_128())
            state.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode() + data[begin:end])
    metadata.update({f"checksum.{layer}": state.hexdigest() for layer, state in states.items()})
    metadata.pop("checksum", None)
    metadata["checksum"] = kvfile._metadata_checksum(metadata)


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Make a directory in shared memory where possible, quick to sync; open to other users, unlike pytest's."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as path:
        Path(path).chmod(0o755)
        yield Path(path)
