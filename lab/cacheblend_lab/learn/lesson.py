"""Computes the loss of a batch: the KL divergence between the model's full prefill and a blend of the writer's KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from cacheblend_lab.learn.blend import (
    BatchBlender,
    BatchLayout,
    PromptBatch,
    StoredBatch,
    count_of,
    deviation,
    divergence,
)

_KERNELS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Lesson:
    """Compares a model's full prefill with the model's blend of a writer's KV."""

    def __init__(self, blender: BatchBlender, writing: Any):
        """Set the blender, and the writer from :func:`cacheblend_lab.learn.adapter.writing_copy`."""
        self.blender, self.writing = blender, writing

    def loss(self, batch: PromptBatch, ratio: float = 0.0, plain: bool = False) -> torch.Tensor:
        """Return the KL divergence in nats, a differentiable scalar.

        Args:
            batch: The prompts.
            ratio: Share of the stale tokens to recompute; the tokens with the largest KV deviation are chosen.
            plain: Whether the model itself computes the chunk KV instead of the writer.
        """
        with self.autocast():
            layout = batch.layout
            teacher, cache = self.blender.prefill(batch, keep_kv=True)
            assert cache is not None
            stale = self.blender.write(self.blender.model if plain else self.writing, batch)
            stored = self.blender.behind_exact(layout, cache, stale)
            scores = self._scores(layout, stale, cache) if ratio > 0 else None
            del cache
            counts = [count_of(layout, ratio)] * len(batch.ids)
            student = self.blender.blend(batch, stored, scores, counts)
        return divergence(teacher, student, batch.weights)

    def _scores(self, layout: BatchLayout, stale: StoredBatch, cache: Any) -> torch.Tensor:
        """Return the KV deviation of all stored tokens, ``[prompts, stored]``; 0 for the exact chunks."""
        fresh = self.blender.in_context(cache, stale.positions)
        found = deviation(stale, fresh, len(layout.spans) - layout.exact)
        return pad(found, (sum(end - start for start, end in layout.spans[: layout.exact]), 0))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the LoRA, whose parameters are fp32, in the model's dtype inside the context."""
        low, device = self.blender.dtype != torch.float32, self.blender.device.type
        # cuDNN's attention compiles for every new shape, and every batch has a new shape.
        with sdpa_kernel(_KERNELS), torch.autocast(device, self.blender.dtype if low else torch.bfloat16, enabled=low):
            yield
