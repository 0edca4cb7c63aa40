"""Inspects a prompt: the KV deviation of its tokens, and the tokens that a blend recomputes."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.fusor import FuseResult, fuse
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.calibrate.calibrated_engine import planner_of
from cacheblend_rag.calibrate.compared import fresh_and_stale
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.prompt import TokenizedPrompt


class PromptInspector:
    """Inspects one tokenised prompt of an engine; all chunks of the prompt are precomputed."""

    def __init__(self, engine: TransformersEngine, tokens: TokenizedPrompt):
        """Precompute the prompt's chunks and plan the prompt.

        Raises:
            ModelError: The model is not blended, or the prompt has no token with stale KV.
        """
        plan = planner_of(engine)
        assert engine.rope is not None
        self._engine, self._rope, self.tokens = engine, engine.rope, tokens
        self._plan = plan(tokens)
        if not self._plan.stale:
            raise ModelError("This prompt has no chunk behind the first, so no KV of it is stale; use more chunks.")

    def measure_deviations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the deviation of K and the deviation of V of full KV reuse, each ``[layers, tokens with stale KV]``.

        A deviation is the squared L2 distance, summed over KV heads, between stored KV at its place and the full
        prefill's KV, in fp32 on the CPU.
        """
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for pair in fresh_and_stale(self._plan, self._engine.subject(), self.tokens, self._rope):
            for side, fresh, stale in zip(found, *pair, strict=True):
                side.append((fresh.float() - stale.float()).square().sum((0, 2)).cpu())
        return torch.stack(found[0]), torch.stack(found[1])

    def measure_deviation(self) -> torch.Tensor:
        """Return the KV deviation ``[layers, tokens with stale KV]`` of full KV reuse: deviation of K plus deviation of V."""
        k, v = self.measure_deviations()
        return k + v

    @property
    def stale(self) -> torch.Tensor:
        """Return the positions of the tokens with stale KV, in the order of the deviations."""
        return torch.cat([torch.arange(span.start, span.end) for span in self._plan.stale])

    def recomputed(self, settings: BlendSettings) -> torch.Tensor:
        """Blend the prompt as the engine does, and return the positions of the recomputed tokens, on the CPU."""
        profile = self._engine.profile
        wanted = profile.resolve(settings, self._engine.num_layers)
        _, result = self._blended(profile.options(wanted))
        return result.recomputed.cpu()

    def _blended(self, options: FuseOptions) -> tuple[TransformersTarget, FuseResult]:
        target = TransformersTarget(self._engine.runner, self._rope, self.tokens.token_ids)
        return target, fuse(self._plan, target, options)
