"""Measures the question's attention in one prompt, for any treatment of stored KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from transformers import AttentionInterface

from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.calibrate.why import PromptInspector
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.attention import NAME, QUERIES, attention, weights
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.prompt import BlendPrompt, tokenize


@contextmanager
def watched(watcher: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Call ``watcher(layer, weights)`` with every layer's attention weights, ``[heads, queries, keys]`` in fp32.

    Use passes of few queries (a question): the weights of a whole prompt would not fit into memory. Models that need
    eager attention are not observed. Passes of other threads are observed, too.
    """

    def shown(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        mask, queries = attention_mask, QUERIES.get()
        if queries is not None:
            window = None if attention_mask is None else attention_mask.shape[3]
            mask = queries.visible(0, query.shape[2], 0, key.shape[2], window)
        watcher(int(module.layer_idx), weights(query, key, mask, scaling))  # type: ignore[arg-type]
        return attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(NAME, shown)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attention)


class AttentionInspector(PromptInspector):
    """Measures the question's attention, in addition to the measurements of its base class."""

    @classmethod
    def of(cls, engine: TransformersEngine, prompt: BlendPrompt) -> Self:
        """Return an inspector of a prompt that is not tokenised yet."""
        return cls(engine, tokenize(prompt, engine.tokenizer, engine.registry))

    @property
    def question(self) -> torch.Tensor:
        """Return the positions behind the last chunk."""
        return torch.arange(self.tokens.spans[-1].end, len(self.tokens.token_ids), device=self._engine.runner.device)

    def measure_attention(self, options: FuseOptions) -> torch.Tensor:
        """Return the question's attention ``[layers, heads, question, tokens]`` after a blend, in fp32 on the CPU.

        Raises:
            ModelError: The model's attention cannot be observed (it needs eager attention).
        """
        target, _ = self._blended(options)
        found: dict[int, torch.Tensor] = {}
        with watched(lambda layer, weights: found.__setitem__(layer, weights.cpu())):
            target.forward(self.question, lambda layer: None)  # writes the question's KV again, with the same values
        if len(found) != self._engine.runner.num_layers:
            raise ModelError("The attention of this model cannot be watched: it runs eager attention of its own.")
        return torch.stack([found[layer] for layer in sorted(found)])
