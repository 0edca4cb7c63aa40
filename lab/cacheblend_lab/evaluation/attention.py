"""Measures the question's attention in one prompt, for any treatment of stored KV."""

from __future__ import annotations

from typing import Self

import torch

from cacheblend_lab.watching import watched
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.calibrate.why import PromptInspector
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.prompt import BlendPrompt, tokenize


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
