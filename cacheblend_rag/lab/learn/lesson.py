"""Gives the loss of a batch: KL of the model's own full prefill and the blend of what the writer wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cacheblend_rag.lab.learn.blend import BatchBlender, PromptBatch, StoredBatch, count_of, deviation, divergence

_KERNELS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Lesson:
    """Compares a model with itself."""

    def __init__(self, blender: BatchBlender, writing: Any):
        """Blend by ``blender`` what ``writing`` writes; see :func:`cacheblend_rag.lab.learn.adapter.writing_copy`."""
        self.blender, self.writing = blender, writing

    def loss(self, batch: PromptBatch, ratio: float = 0.0, plain: bool = False) -> torch.Tensor:
        """Return the KL in nats, a scalar that gradients can be taken of.

        Args:
            batch: The prompts.
            ratio: Share of the stale tokens that is recomputed: those whose KV deviates most.
            plain: Let the model itself write.
        """
        with self.autocast():
            teacher, cache = self.blender.prefill(batch, keep_kv=ratio > 0)
            stored = self.blender.write(self.blender.model if plain else self.writing, batch)
            scores = None if cache is None else self._deviation(batch, stored, cache)
            del cache
            counts = [count_of(batch.layout, ratio)] * len(batch.ids)
            student = self.blender.blend(batch, stored, scores, counts)
        return divergence(teacher, student, batch.weights)

    def _deviation(self, batch: PromptBatch, stored: StoredBatch, cache: Any) -> torch.Tensor:
        return deviation(stored, self.blender.in_context(cache, stored), len(batch.layout.spans))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the LoRA, whose parameters are fp32, in the model's dtype."""
        low, device = self.blender.dtype != torch.float32, self.blender.device.type
        # cuDNN's attention is compiled for every new shape, and every batch has one.
        with sdpa_kernel(_KERNELS), torch.autocast(device, self.blender.dtype if low else torch.bfloat16, enabled=low):
            yield
