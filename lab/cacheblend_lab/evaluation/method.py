"""Defines a method of the comparison: it answers a case on an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_lab.samples import EvalCase
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import without_thoughts
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt


@dataclass(frozen=True)
class Reply:
    """A method's answer to one case. Times in seconds.

    Attributes:
        text: The answer.
        ttft_s: Time to first token.
        total_s: Time to the last one.
        load_s: Of the TTFT, how long the computation waited for stored KV.
        prompt_tokens: Tokens of the prompt; of all prompts for MapReduce and MapRerank.
        computed_tokens: Those that went through all layers.
        reused_tokens: Those whose stored KV was used.
        mode: ``blend`` or ``prefill``; ``requests`` for answers that took several.
        first_logits: Logits ``[vocab]`` of the first token, where the engine shows them.
        chunks: The chunks in the prompt, where they are not the case's, in its order.
        reordered_full: What full recompute answers to a reordered prompt.
        background_tokens: Tokens that were computed behind the answer, for later prompts.
        selection_tokens: What choosing tokens cost besides; see :class:`Usage`.
    """

    text: str
    ttft_s: float
    total_s: float
    load_s: float
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    mode: str
    first_logits: torch.Tensor | None = None
    chunks: Sequence[Chunk] | None = None
    reordered_full: str | None = None
    background_tokens: int = 0
    selection_tokens: float = 0.0

    @classmethod
    def of_requests(cls, text: str, requests: Sequence[Generation], last: Generation | None = None) -> Reply:
        """Return an answer that took several requests, which is the text of the ``last``.

        Without that nothing can be shown before all of them have been answered.
        """
        total = sum(done.timings.total_s for done in requests)
        return cls(
            text,
            total if last is None else total - last.timings.total_s + last.timings.ttft_s,
            total,
            0.0,
            sum(done.usage.prompt_tokens for done in requests),
            sum(done.usage.computed_tokens for done in requests),
            sum(done.usage.reused_tokens for done in requests),
            "requests",
        )


class Method(ABC):
    """A way to answer.

    Attributes:
        name: As in results.
        label: As people read it.
        key: All that its answers depend on: answers of equal keys may be reused.
    """

    name: str
    label: str
    key: str

    @abstractmethod
    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """Answer; the case's chunks have been precomputed."""


class InTurn(Method):
    """A method whose answer to a case depends on the cases before it.

    What it depends on is worked out before the first answer, so that neither an interruption nor a repetition changes it.
    """

    @abstractmethod
    def begin(self, cases: Sequence[EvalCase]) -> None:
        """Take every case of the run, in turn; sets :attr:`key`."""


def generate_reply(
    engine: BlendEngine, prompt: BlendPrompt, max_tokens: int, settings: BlendSettings, free_loads: bool = False
) -> Reply:
    """Answer one prompt; with ``free_loads`` the time spent waiting for stored KV is not counted.

    No other prompt's KV helps it but what is in the store: an engine's own prefix cache is emptied first.
    """
    engine.reset_prefix_cache()
    seen: list[torch.Tensor] = []
    watched: Any = engine
    if hasattr(engine, "on_first_logits"):
        watched.on_first_logits = seen.append
    try:
        done = engine.generate(prompt, SamplingParams(max_tokens), settings)
    finally:
        if hasattr(engine, "on_first_logits"):
            watched.on_first_logits = None
    free = done.load_s if free_loads else 0.0
    return Reply(
        without_thoughts(engine, prompt, done).text.strip(),
        done.timings.ttft_s - free,
        done.timings.total_s - free,
        done.load_s - free,
        done.usage.prompt_tokens,
        done.usage.computed_tokens,
        done.usage.reused_tokens,
        done.mode,
        seen[0] if seen else None,
        selection_tokens=done.usage.selection_tokens,
    )
