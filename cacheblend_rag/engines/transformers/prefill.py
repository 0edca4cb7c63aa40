"""A prompt that was prefilled, in whatever way, and what is said of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from cacheblend_rag.blending.controller import Choice
from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.meter import ChunkLoad
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.engines.request import Request
from cacheblend_rag.engines.results import Generation, Mode, Timings, Usage
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.conversations import Said
from cacheblend_rag.engines.transformers.decoding import AnswerBuilder
from cacheblend_rag.store.events import TierReads


@dataclass
class Prefill:
    """A prompt whose first token can be sampled; ``began`` says when its computing began, ``cache`` goes with the answer.

    The ``plan`` is for what stands behind the first ``kept`` tokens, which a conversation has left. Of the answer ``fed`` tokens
    are in the cache.
    """

    plan: BlendPlan
    began: float
    logits: torch.Tensor
    cache: PositionedCache | ModelsOwnCache
    computed: int
    recomputed: int = 0
    selection: float = 0.0
    load_s: float = 0.0
    policy: str | None = None
    ratio: float | None = None
    unranked: bool = False
    reads: Mapping[str, TierReads] = field(default_factory=dict)
    loads: tuple[ChunkLoad, ...] = ()
    choice: Choice | None = None
    said: Said | None = None
    kept: int = 0
    blended: bool = False
    fed: int = 0

    @property
    def mode(self) -> Mode:
        """Whether stored KV is in it."""
        return "blend" if self.blended else "prefill"


def generation_of(
    request: Request, prefill: Prefill, answer: AnswerBuilder, timings: Timings, costs: Costs | None
) -> Generation:
    """Return what came of a request; ``costs`` as they were before it."""
    prompt_tokens = len(request.prompt.token_ids)
    return Generation(
        text=answer.text,
        token_ids=tuple(answer.tokens),
        finish_reason=answer.finish_reason,
        mode=prefill.mode,
        reason=prefill.plan.reason,
        usage=Usage(
            prompt_tokens=prompt_tokens,
            reused_tokens=prompt_tokens - prefill.computed,
            recomputed_tokens=prefill.recomputed,
            computed_tokens=prefill.computed,
            completion_tokens=len(answer.tokens),
            selection_tokens=prefill.selection,
            kept_tokens=prefill.kept,
        ),
        timings=timings,
        missing=tuple(chunk.id for chunk in prefill.plan.missing),
        in_place=tuple(chunk.id for chunk in prefill.plan.in_place),
        policy=prefill.policy,
        ratio=prefill.ratio,
        loads=prefill.loads,
        prefill_s=None if costs is None else costs.compute.seconds(prompt_tokens, prompt_tokens),
        expected_s=None if prefill.choice is None else prefill.choice.expected_s,
        logprobs=tuple(answer.logprobs),
    )
