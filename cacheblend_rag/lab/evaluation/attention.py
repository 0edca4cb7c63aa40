"""Looks at the question's attention in one prompt, for any treatment of stored KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.lab.inspection import PromptInspector
from cacheblend_rag.lab.watching import watched
from cacheblend_rag.prompts.prompt import BlendPrompt, tokenize
from cacheblend_rag.store.kv import LayerKV


class AttentionInspector(PromptInspector):
    """Measures what the question attends to, besides what its base class does."""

    @classmethod
    def of(cls, engine: TransformersEngine, prompt: BlendPrompt) -> Self:
        """Look into a prompt that is not tokenised yet."""
        return cls(engine, tokenize(prompt, engine.tokenizer, engine.registry))

    @property
    def question(self) -> torch.Tensor:
        """Positions behind the last chunk."""
        return torch.arange(self.tokens.spans[-1].end, len(self.tokens.token_ids), device=self._engine.runner.device)

    def measure_attention(self, options: FuseOptions) -> torch.Tensor:
        """Return the question's attention ``[layers, heads, question, tokens]`` after a blend, in fp32 on the CPU.

        Raises:
            ModelError: The model's attention cannot be watched (it needs eager attention).
        """
        target, _ = self._blended(options)
        # The question's KV is written once more, with the same values.
        return self._watch(lambda: target.forward(self.question, lambda layer: None))

    def measure_attention_without(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the question's attention ``[layers, heads, question, tokens]`` over a part of the stored KV.

        Args:
            hidden: Positions in front of the question that it does not see; they get 0.

        Raises:
            ModelError: The model's attention cannot be watched (it needs eager attention).
        """
        runner, begin = self._engine.runner, int(self.question[0])
        cache = self._blended(FuseOptions(policy("full-reuse"), 0.0))[0].cache
        before = torch.arange(begin, device=runner.device)
        kept = before[~torch.isin(before, hidden.to(runner.device))]
        stored = [cache.read(layer, 0, 0, begin) for layer in range(runner.num_layers)]
        less = runner.new_cache(len(kept) + len(self.question))
        less.begin([LayerKV(kv.k[:, kept], kv.v[:, kept]) for kv in stored], 1)
        ids = torch.tensor([self.tokens.token_ids[begin:]], device=runner.device)
        # Fewer tokens stand before the question, which keeps its positions.
        seen = self._watch(lambda: runner.append(ids, less, begin - len(kept)))
        whole = seen.new_zeros(*seen.shape[:3], len(self.tokens.token_ids))
        whole[..., torch.cat([kept, self.question]).cpu()] = seen
        return whole

    def _watch(self, run: Callable[[], object]) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        with watched(lambda layer, weights: found.__setitem__(layer, weights.cpu())):
            run()
        if len(found) != self._engine.runner.num_layers:
            raise ModelError("The attention of this model cannot be watched: it runs eager attention of its own.")
        return torch.stack([found[layer] for layer in sorted(found)])
