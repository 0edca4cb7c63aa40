"""Holds what comes out of an engine: an answer, piece by piece or whole, and what it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cacheblend_rag.blending.outcome import PromptOutcome


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request.

    Attributes:
        ttft_s: Time to first token, from the engine's receipt of the prompt.
        total_s: Time to the last token.
    """

    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """Says how likely the model held a generated token, before temperature and nucleus.

    Attributes:
        token_id: The token.
        logprob: Its natural-log probability.
        top: Token ids and log-probabilities of the likeliest tokens, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Score:
    """Says how likely the model holds a given completion behind a prompt, at temperature 1.

    Attributes:
        token_logprobs: Natural-log probability of each of its tokens, given the prompt and those before it.
    """

    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Return the log-likelihood of the whole completion: log p(y | prompt)."""
        return sum(self.token_logprobs)


def likeliest(logprobs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` likeliest of token ids with their log-probabilities, likeliest first."""
    return tuple(sorted(logprobs, key=lambda pair: -pair[1])[:count])


@dataclass(frozen=True, kw_only=True)
class Generation(PromptOutcome):
    """A finished answer, and what became of its prompt.

    Attributes:
        text: The answer.
        token_ids: Generated token ids, the end-of-sequence token excluded.
        finish_reason: ``"stop"`` or ``"length"``.
        timings: Wall-clock seconds.
        logprobs: One for each of ``token_ids``, where :attr:`SamplingParams.logprobs` asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(
        cls,
        outcome: PromptOutcome,
        text: str,
        token_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        timings: Timings,
        logprobs: Iterable[TokenLogprob] = (),
    ) -> Generation:
        """Return the answer to a prompt of which ``outcome`` is known; ``logprobs`` beyond its tokens are left out."""
        usage = replace(outcome.usage, completion_tokens=len(token_ids))
        return cls(
            **{**vars(outcome), "usage": usage},
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            timings=timings,
            logprobs=tuple(logprobs)[: len(token_ids)],
        )


@dataclass(frozen=True)
class StreamEvent:
    """A piece of a streamed answer; the last event carries the whole :class:`Generation`.

    Without a tokenizer there is no text, and an event for every token all the same.
    """

    text: str
    generation: Generation | None = None


@dataclass(frozen=True)
class PrecomputeReport:
    """Says what :meth:`BlendEngine.precompute` did.

    Attributes:
        computed: Chunks whose KV was computed.
        present: Chunks whose KV was in the store already.
        tokens: Tokens of the former.
        seconds: Wall-clock time.
        failed: Chunk ids, and why their KV is not in the store.
        ranked: Chunks whose static deviation was measured.
        rank_s: Seconds of that, where it can be told apart.
    """

    computed: int = 0
    present: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    ranked: int = 0
    rank_s: float = 0.0

    def __add__(self, other: PrecomputeReport) -> PrecomputeReport:
        """Return what both did."""
        return PrecomputeReport(
            self.computed + other.computed,
            self.present + other.present,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            {**self.failed, **other.failed},
            self.ranked + other.ranked,
            self.rank_s + other.rank_s,
        )
