"""Identifies a model and its KV writer; imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from cacheblend_rag.homes import remembered_sum

if TYPE_CHECKING:
    import torch

# Fields of a config.json that do not affect the numbers a model computes.
_VOLATILE_CONFIG = {"transformers_version", "_name_or_path", "use_cache", "architectures", "dtype", "torch_dtype"}
_READ_BLOCK = 1 << 24


@dataclass(frozen=True)
class ModelFingerprint:
    """Identifies a model's numbers: architecture, weights and dtype.

    Two engines with equal fingerprints may share stored KV, even if the engines are of different classes.

    Attributes:
        digest: Hex digest over the config, every weight and the dtype.
        name: Name that the user gave to the model; informative, not part of the identity.
        dtype: Dtype of the weights, such as ``"bfloat16"``; informative, since the digest covers the dtype. None in
            indexes of older versions, and for a model on a server.
    """

    digest: str
    name: str = field(compare=False)
    dtype: str | None = field(default=None, compare=False)

    @classmethod
    def from_directory(cls, directory: Path, dtype: torch.dtype, name: str | None = None) -> ModelFingerprint:
        """Fingerprint a model directory from its ``config.json`` and weight files.

        Reading the files, not the loaded module, makes the digest the same for every engine that loads them.
        """
        return cls(cls.digests(directory, [dtype])[0], name or str(directory), dtype_name(dtype))

    @staticmethod
    def digests(directory: Path, dtypes: Sequence[torch.dtype]) -> list[str]:
        """Return the digest of a model directory in each of several dtypes."""
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        files = weight_files(directory)
        weights = remembered_sum("names and contents", files, lambda: _sum(files))
        return [_digest(config, weights, dtype) for dtype in dtypes]

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, config: Mapping[str, Any], dtype: torch.dtype, name: str
    ) -> ModelFingerprint:
        """Fingerprint a model that exists only in memory (random weights, a module that the user passed)."""
        import torch  # imported here, so that listing documents does not wait for torch

        state = xxhash.xxh3_128()
        for key, tensor in sorted(module.state_dict().items()):
            state.update(key.encode())
            state.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return cls(_digest(config, state.hexdigest(), dtype), name, dtype_name(dtype))


def weight_files(directory: Path) -> list[Path]:
    """Return the files with the weights of a model, sorted."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as commands write it: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _sum(files: Iterable[Path]) -> str:
    """Return the sum of the names and contents of ``files``."""
    state, block = xxhash.xxh3_128(), bytearray(_READ_BLOCK)
    for file in files:
        state.update(file.name.encode())
        with file.open("rb", buffering=0) as handle:
            while size := handle.readinto(block):
                state.update(memoryview(block)[:size])
    return state.hexdigest()


def _digest(config: Mapping[str, Any], weights: str, dtype: torch.dtype) -> str:
    kept = {k: v for k, v in config.items() if k not in _VOLATILE_CONFIG}
    text = json.dumps({"config": kept, "weights": weights, "dtype": str(dtype)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class WrittenBy:
    """Identifies a KV writer, which computes the KV of chunks in place of the model.

    Attributes:
        digest: Hash of the writer's numbers.
        directory: Directory of the writer; informative, not part of the identity.
        behind_probe: Whether the writer lets the model itself compute each chunk, behind the probe.
    """

    digest: str
    directory: str = field(compare=False)
    behind_probe: bool = False
