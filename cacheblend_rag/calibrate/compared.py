"""Compares one prompt's blend with its full recompute, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch

from cacheblend_rag.blending.fusor import fuse, kv_deviation
from cacheblend_rag.blending.gate import cut
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.blending.static import static_deviation
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.calibrate.judge import Judge
from cacheblend_rag.engines.transformers.target import TransformersSubject, TransformersTarget
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV, LayerKV

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
        usable: Whether the prompt has tokens with stale KV. The other attributes exist only if it has.
        stale_tokens: Number of tokens with stale KV.
        forced_tokens: Number of tokens that are always computed: text between chunks and the question.
        static: Static deviation of the tokens with stale KV, ``[candidates]``; None if a chunk has none.
    """

    def __init__(
        self,
        subject: TransformersSubject,
        rope: Rope,
        header: Sequence[int],
        prompt: TokenizedPrompt,
        end_token: int | None,
        probe: Sequence[int] = (),
        *,
        continuation: Sequence[int] = (),
        planner: Planner | None = None,
        judge: Judge | None = None,
    ):
        """Run the full recompute.

        Args:
            subject: The model.
            rope: The model's rotation.
            header: Token ids that chunks are computed behind.
            prompt: The prompt.
            end_token: Token id that ends an answer.
            probe: Token ids that chunks are ranked behind; empty for no ranking.
            continuation: Token ids that follow the prompt, instead of the model's own greedy answer.
            planner: Source of the chunks' KV; None computes the KV here and holds it in memory.
            judge: Scores answers.
        """
        self._subject, self._rope, self._header, self.prompt = subject, rope, tuple(header), prompt
        self._end_token, self._judge = end_token, judge
        if planner is None:
            own = self._compute_chunks(probe)
            planner = lambda _: own  # noqa: E731
        self._planner = planner
        plan = self._plan
        self.usable = bool(plan.stale)
        if not self.usable:
            return
        self.stale_tokens = sum(span.end - span.start for span in plan.stale)
        self.forced_tokens = plan.num_tokens - plan.exact_tokens - self.stale_tokens
        self._answer = list(continuation)
        target = subject.target(prompt.token_ids, rope)
        fuse(plan, target, FuseOptions(policy("full-recompute"), 1.0))
        self._answer, logits = (self._answer, self._follow(target)) if self._answer else self._greedy(target)
        self._truth = logits.float().cpu()
        static = [span.static_deviation() for span in plan.stale]
        known = [part for part in static if part is not None]
        self.static = torch.cat(known) if len(known) == len(static) else None

    @property
    def _plan(self) -> BlendPlan:
        return self._planner(self.prompt)

    def _compute_chunks(self, probe: Sequence[int]) -> BlendPlan:
        """Return a plan with each chunk's KV computed behind the header, and ranked if ``probe`` is given."""
        alone: dict[tuple[int, ...], ChunkKV] = {}
        header = self._header
        for ids in {tuple(span.chunk.token_ids) for span in self.prompt.spans} | ({()} if header else set()):
            _, kv = self._subject.full_prefill([*header, *ids])
            alone[ids] = cut(kv, len(header) if ids else 0)
            if ids and probe:
                alone[ids] = self._ranked(alone[ids], [*header, *probe], ids)
        return make_plan(self.prompt, header, lambda ids: alone[tuple(ids)])

    def _ranked(self, alone: ChunkKV, before: Sequence[int], ids: Sequence[int]) -> ChunkKV:
        """Return a chunk's KV with its static deviation, as an index stores it."""
        behind = cut(self._subject.full_prefill([*before, *ids])[1], len(before))
        return alone.ranked(static_deviation(alone, behind.layers, behind.start, self._rope))

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

    def kl(self, options: FuseOptions) -> float:
        """Return the mean KL, in nats, of a blend against full recompute, over the compared answer tokens."""
        return float(np.mean(self.compare(options).kl))

    @property
    def stale(self) -> list[tuple[int, int]]:
        """Return start and end of each chunk with stale KV: the candidates, in order."""
        return [(span.start, span.end) for span in self._plan.stale]

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

    @cached_property
    def relative_deviation(self) -> torch.Tensor:
        """Return the KV deviation divided by the mean square of its layer's KV, ``[layers, candidates]``."""
        return self._deviations[0] / self._deviations[1][:, None].clamp_min(1e-30)

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Return the KV deviation of every token at every layer, ``[layers, candidates]``."""
        return self._deviations[0]

    @cached_property
    def oracle(self) -> torch.Tensor:
        """Return the sum over layers from 1 on of the KV deviation divided by its layer's mean, ``[candidates]``."""
        later = self.deviation[1:]
        return (later / later.mean(1, keepdim=True).clamp_min(1e-30)).sum(0)

    @cached_property
    def _deviations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return placed stored KV's deviation from the full prefill's KV, and the mean square ``[layers]`` of a token's KV."""
        rows, sizes = [], []
        for fresh, stale in fresh_and_stale(self._plan, self._subject, self.prompt, self._rope):
            rows.append(kv_deviation(fresh, stale))
            sizes.append(kv_deviation(fresh, LayerKV(torch.zeros_like(fresh.k), torch.zeros_like(fresh.v))).mean())
        return torch.stack(rows).cpu(), torch.stack(sizes).cpu()


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
