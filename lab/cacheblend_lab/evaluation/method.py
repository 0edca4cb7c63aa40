"""Defines a method of the comparison, which answers a case on an engine."""

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
    """Holds a method's answer to one case. Times are in seconds.

    Attributes:
        load_s: Part of the TTFT that the computation waited for stored KV.
        prompt_tokens: Tokens of the prompt; of all prompts for MapReduce and MapRerank.
        mode: ``blend`` or ``prefill``; ``requests`` for answers from several requests.
        first_logits: Logits ``[vocab]`` of the first token, if the engine shows them.
        chunks: Chunks in the prompt, in prompt order, if they differ from the case's chunks.
        reordered_full: Full recompute's answer to the reordered prompt.
        background_tokens: Tokens computed after the answer, for later prompts.
        selection_tokens: Additional tokens computed to choose tokens; see :class:`Usage`.
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
        """Return the reply of several requests with the answer ``text``; ``last`` is the request that produced the answer.

        Without ``last`` the TTFT is the total time, because the answer is unknown until all requests have finished.
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
    """Answers a case in one way.

    Attributes:
        name: Name in results.
        label: Display name.
        key: Identifies everything that the answers depend on: answers with equal keys may be reused.
    """

    name: str
    label: str
    key: str

    @abstractmethod
    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        """Answer the case; the case's chunks have been precomputed."""


class InTurn(Method):
    """Answers each case depending on the cases before it.

    The dependence is computed before the first answer, so that an interruption or a repetition does not change it.
    """

    @abstractmethod
    def begin(self, cases: Sequence[EvalCase]) -> None:
        """Receive every case of the run, in order, and set :attr:`key`."""


def generate_reply(
    engine: BlendEngine, prompt: BlendPrompt, max_tokens: int, settings: BlendSettings, free_loads: bool = False
) -> Reply:
    """Answer one prompt; with ``free_loads`` the seconds of waiting for stored KV are not counted.

    The engine's own prefix cache is emptied first, so that only stored KV helps the prompt.
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
