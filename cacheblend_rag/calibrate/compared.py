"""Compares one prompt's blend with its full recompute, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cacheblend_rag.blending.fusor import fuse, kv_deviation
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.calibrate.metrics import Judge
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.target import TransformersSubject, TransformersTarget
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import LayerKV

ANSWER_TOKENS: Final = 16
"""Maximum number of answer tokens that are compared."""

Planner = Callable[[TokenizedPrompt], BlendPlan]
"""Returns the plan of a prompt; the plan has stored KV for all of the prompt's chunks."""

Coarser = Callable[[Sequence[int], int], torch.Tensor]
"""Returns logits ``[last, vocab]`` by coarser weights, from token ids and ``last``, the number of final tokens."""


@dataclass(frozen=True)
class Comparison:
    """Compares one blend of one prompt with full recompute.

    Attributes:
        agrees: For each token of the answer, whether blend and full recompute have the same likeliest token.
        kl: For each token of the answer, KL(full recompute ‖ blend) in nats.
        compute: Compute of the blend (dense pass, the question's ranking pass and sparse pass), as a share of the
            prompt's tokens through all layers.
        loss: Score of full recompute's answer minus the score of the blend's own answer, if a judge scores answers;
            below 0 the blend is better. ``agrees`` and ``kl`` then end at the first token at which the two answers
            differ.
    """

    agrees: tuple[bool, ...]
    kl: tuple[float, ...]
    compute: float
    loss: float = 0.0


class PromptMeasurement:
    """Measures one prompt: its answer by full recompute, and how near blends come to that answer.

    Blends are teacher-forced on the answer of full recompute. With a judge a blend generates its own answer.

    Attributes:
        prompt: The prompt.
        stale_tokens: Number of tokens with stale KV.
        forced_tokens: Number of tokens that are always computed: text between chunks and the question.
        static: Static deviation of the tokens with stale KV, ``[candidates]``; None if a chunk has none.
    """

    def __init__(
        self,
        subject: TransformersSubject,
        rope: Rope,
        prompt: TokenizedPrompt,
        planner: Planner,
        end_token: int | None = None,
        *,
        continuation: Sequence[int] = (),
        judge: Judge | None = None,
    ):
        """Run the full recompute.

        Args:
            subject: The model.
            rope: The model's rotation.
            prompt: A prompt of at least two chunks.
            planner: Source of the chunks' KV.
            end_token: Token id that ends an answer.
            continuation: Token ids that follow the prompt, instead of the model's own greedy answer.
            judge: Scores answers.
        """
        self._subject, self._rope, self.prompt, self._planner = subject, rope, prompt, planner
        self._end_token, self._judge = end_token, judge
        plan = self._plan
        self.stale_tokens = sum(span.end - span.start for span in plan.stale)
        self.forced_tokens = plan.num_tokens - plan.exact_tokens - self.stale_tokens
        self._answer = list(continuation)
        target = subject.target(prompt.token_ids, rope)
        fuse(plan, target, FuseOptions(policy("hkvd"), 1.0))  # at ratio 1 no policy chooses
        self._answer, logits = (self._answer, self._follow(target)) if self._answer else self._greedy(target)
        self._truth = logits.float().cpu()
        static = [span.static_deviation() for span in plan.stale]
        known = [part for part in static if part is not None]
        self.static = torch.cat(known) if len(known) == len(static) else None

    @property
    def _plan(self) -> BlendPlan:
        return self._planner(self.prompt)

    def compare(self, options: FuseOptions) -> Comparison:
        """Blend the prompt and compare the answer's token distributions; raises InputError if a fallback policy had to choose."""
        target = self._subject.target(self.prompt.token_ids, self._rope)
        outcome = fuse(self._plan, target, options).outcome
        if outcome.policy != options.policy.name:
            raise InputError(outcome.reason)
        done = outcome.usage
        compute = (done.computed_tokens + done.selection_tokens) / len(self.prompt.token_ids)
        if self._judge is None:
            return self._compared(self._follow(target), compute)
        answer, logits = self._greedy(target)
        return self._compared(logits, compute, self.score() - self._judge.score(answer))

    def score(self) -> float:
        """Return the judge's score of full recompute's answer."""
        assert self._judge is not None
        return self._judge.score(self._answer)

    def by_weights(self, coarser: Coarser) -> Comparison:
        """Compare a full prefill of prompt and answer by coarser weights with full recompute."""
        ids = (*self.prompt.token_ids, *self._answer[:-1])
        return self._compared(coarser(ids, len(self._answer)), 1.0)

    def _compared(self, logits: torch.Tensor, compute: float, loss: float = 0.0) -> Comparison:
        count = min(len(logits), len(self._truth))
        other, truth = (each[:count].double().cpu().log_softmax(-1) for each in (logits, self._truth))
        kl = (truth.exp() * (truth - other)).sum(-1)
        agrees = truth.argmax(-1) == other.argmax(-1)
        if self._judge is not None:  # answers are not comparable after their first difference
            count = min(count, int(agrees.cumprod(0).sum()) + 1)
        return Comparison(tuple(agrees[:count].tolist()), tuple(kl[:count].tolist()), compute, loss)

    def _greedy(self, target: BlendTarget) -> tuple[list[int], torch.Tensor]:
        """Return the greedy answer and its logits ``[tokens, vocab]``."""
        answer, found = [], [self._subject.logits(target)]
        while True:
            answer.append(int(found[-1].argmax()))
            ends = len(answer) == ANSWER_TOKENS if self._judge is None else self._judge.ends(answer)
            if answer[-1] == self._end_token or ends:
                return answer, torch.stack(found)
            found.append(decoded(self._subject, target, answer[-1:])[0])

    def _follow(self, target: BlendTarget) -> torch.Tensor:
        """Return the logits ``[tokens, vocab]`` of the answer's tokens, each computed behind the answer tokens before it."""
        first = self._subject.logits(target)[None]
        if len(self._answer) == 1:
            return first
        return torch.cat([first, decoded(self._subject, target, self._answer[:-1])])

    def deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV deviation ``[layers, candidates]``, and the mean square ``[layers]`` of a token's KV."""
        rows, sizes = [], []
        for fresh, stale in fresh_and_stale(self._plan, self._subject, self.prompt, self._rope):
            rows.append(kv_deviation(fresh, stale))
            sizes.append(kv_deviation(fresh, LayerKV(torch.zeros_like(fresh.k), torch.zeros_like(fresh.v))).mean())
        return torch.stack(rows).cpu(), torch.stack(sizes).cpu()


def planner_of(engine: TransformersEngine) -> Planner:
    """Return a function that plans a prompt from an engine's store, and first computes KV that the store lacks.

    Raises:
        ModelError: The model is not blended.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")

    def plan(prompt: TokenizedPrompt) -> BlendPlan:
        chunks = [span.chunk for span in prompt.spans]
        engine.precompute(chunks)
        engine.precompute_first(chunks[:1])
        layers = engine.num_layers
        return engine.entries.plan(prompt, lambda source, ids: source.get(ids, layers), longest=engine.runner.longest)

    return plan


def fresh_and_stale(
    plan: BlendPlan, subject: TransformersSubject, prompt: TokenizedPrompt, rope: Rope
) -> Iterator[tuple[LayerKV, LayerKV]]:
    """Yield, for each layer, the full prefill's KV of the tokens with stale KV, and their stored KV rotated to its place."""
    _, full = subject.full_prefill(prompt.token_ids)
    with LayerLoader((), plan.stale, rope, subject.num_layers, full.layers[0].k.device) as loader:
        for layer, true in enumerate(full.layers):
            placed = loader.layer(layer)
            assert placed is not None
            yield LayerKV(true.k[:, placed.positions], true.v[:, placed.positions]), placed.moved().kv


def decoded(subject: TransformersSubject, target: BlendTarget, tokens: Sequence[int]) -> torch.Tensor:
    """Append ``tokens`` to a blended prompt; return the logits ``[tokens, vocab]`` of the token after each."""
    assert isinstance(target, TransformersTarget)
    runner = subject.runner
    return runner.follow(torch.tensor([list(tokens)], device=runner.device), target.cache)[0]
