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
"""Most tokens of an answer that are compared."""

Planner = Callable[[TokenizedPrompt], BlendPlan]
"""Says what is stored for a prompt, which then must be all of its chunks."""

Coarser = Callable[[Sequence[int], int], torch.Tensor]
"""Returns the logits ``[last, vocab]`` of the last tokens by coarser weights; the second argument says how many."""


@dataclass(frozen=True)
class Comparison:
    """Compares one blend of one prompt with full recompute.

    Attributes:
        agrees: For each token of the answer, whether both hold the same token likeliest.
        kl: For each, KL(full recompute ‖ blend) in nats.
        compute: What the blend computed, as a share of the prompt's tokens through all layers: dense pass, the question's ranking
            pass and sparse pass.
        loss: How much lower its own answer scores than full recompute's, where a judge scores them; below 0 it is better. The
            tokens above are then those before the answers part, and the one at which they do.
    """

    agrees: tuple[bool, ...]
    kl: tuple[float, ...]
    compute: float
    loss: float = 0.0


class PromptMeasurement:
    """Measures one prompt: its answer by full recompute, and how near blends come to it, teacher-forced on that answer.

    With a judge a blend gives an answer of its own instead.

    Attributes:
        usable: Whether the prompt has tokens with stale KV at all; the rest is there only if so.
        stale_tokens: Number of those tokens.
        forced_tokens: Number of tokens that are computed whatever is selected: text between chunks and the question.
        static: Static deviation of the tokens with stale KV, ``[candidates]``; None where a chunk has none.
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
            rope: Its rotation.
            header: What chunks are computed behind.
            prompt: The prompt.
            end_token: Ends the answer.
            probe: What chunks are ranked behind, if they are to be ranked.
            continuation: What follows the prompt, instead of the model's own greedy answer.
            planner: Where the chunks' KV comes from; None computes it here, and keeps it.
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
        """Compute every chunk alone, and behind ``probe`` if there is one."""
        alone: dict[tuple[int, ...], ChunkKV] = {}
        header = self._header
        for ids in {tuple(span.chunk.token_ids) for span in self.prompt.spans} | ({()} if header else set()):
            _, kv = self._subject.full_prefill([*header, *ids])
            alone[ids] = cut(kv, len(header) if ids else 0)
            if ids and probe:
                alone[ids] = self._ranked(alone[ids], [*header, *probe], ids)
        return make_plan(self.prompt, header, lambda ids: alone[tuple(ids)])

    def _ranked(self, alone: ChunkKV, before: Sequence[int], ids: Sequence[int]) -> ChunkKV:
        """Return a chunk's KV with its static deviation, as an index holds it."""
        behind = cut(self._subject.full_prefill([*before, *ids])[1], len(before))
        return alone.ranked(static_deviation(alone, behind.layers, behind.start, self._rope))

    def compare(self, options: FuseOptions) -> Comparison:
        """Blend, and compare the distributions of the answer's tokens; raises InputError where another policy had to choose."""
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
        """Return full recompute's score by the judge."""
        assert self._judge is not None
        return self._judge.score(self._answer)

    def by_weights(self, coarser: Coarser) -> Comparison:
        """Compare a full prefill of prompt and answer by other weights."""
        ids = (*self.prompt.token_ids, *self._answer[:-1])
        return self._compared(coarser(ids, len(self._answer)), 1.0)

    def _compared(self, logits: torch.Tensor, compute: float, loss: float = 0.0) -> Comparison:
        count = min(len(logits), len(self._truth))
        other, truth = (each[:count].double().cpu().log_softmax(-1) for each in (logits, self._truth))
        kl = (truth.exp() * (truth - other)).sum(-1)
        agrees = truth.argmax(-1) == other.argmax(-1)
        if self._judge is not None:  # behind where they part, answers say nothing of each other
            count = min(count, int(agrees.cumprod(0).sum()) + 1)
        return Comparison(tuple(agrees[:count].tolist()), tuple(kl[:count].tolist()), compute, loss)

    def kl(self, options: FuseOptions) -> float:
        """Return the mean KL, in nats, of a blend against full recompute, over the answer's first tokens."""
        return float(np.mean(self.compare(options).kl))

    @property
    def stale(self) -> list[tuple[int, int]]:
        """Return where each chunk with stale KV begins and ends: the candidates, in order."""
        return [(span.start, span.end) for span in self._plan.stale]

    def _greedy(self, target: BlendTarget) -> tuple[list[int], torch.Tensor]:
        """Return the likeliest answer and its logits ``[tokens, vocab]``."""
        answer, found = [], [self._subject.logits(target)]
        while True:
            answer.append(int(found[-1].argmax()))
            ends = len(answer) == ANSWER_TOKENS if self._judge is None else self._judge.ends(answer)
            if answer[-1] == self._end_token or ends:
                return answer, torch.stack(found)
            found.append(decoded(self._subject, target, answer[-1:])[0])

    def _follow(self, target: BlendTarget) -> torch.Tensor:
        """Return the logits ``[tokens, vocab]`` of the answer's tokens, each behind those before it."""
        first = self._subject.logits(target)[None]
        if len(self._answer) == 1:
            return first
        return torch.cat([first, decoded(self._subject, target, self._answer[:-1])])

    @cached_property
    def relative_deviation(self) -> torch.Tensor:
        """Return the KV deviation over the mean square of its layer's KV, ``[layers, candidates]``."""
        return self._deviations[0] / self._deviations[1][:, None].clamp_min(1e-30)

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Return the KV deviation of every token at every layer, ``[layers, candidates]``."""
        return self._deviations[0]

    @cached_property
    def oracle(self) -> torch.Tensor:
        """Return ``[candidates]``, the deviation of all layers, each over its mean."""
        later = self.deviation[1:]
        return (later / later.mean(1, keepdim=True).clamp_min(1e-30)).sum(0)

    @cached_property
    def _deviations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how far stored KV at its place is from the full prefill's, and the mean square ``[layers]`` of a token's."""
        rows, sizes = [], []
        for fresh, stale in fresh_and_stale(self._plan, self._subject, self.prompt, self._rope):
            rows.append(kv_deviation(fresh, stale))
            sizes.append(kv_deviation(fresh, LayerKV(torch.zeros_like(fresh.k), torch.zeros_like(fresh.v))).mean())
        return torch.stack(rows).cpu(), torch.stack(sizes).cpu()


def fresh_and_stale(
    plan: BlendPlan, subject: TransformersSubject, prompt: TokenizedPrompt, rope: Rope
) -> Iterator[tuple[LayerKV, LayerKV]]:
    """Yield of each layer the KV that a full prefill gives the tokens with stale KV, and their stored KV at its place."""
    _, full = subject.full_prefill(prompt.token_ids)
    with LayerLoader((), plan.stale, rope, subject.num_layers, full.layers[0].k.device) as loader:
        for layer, true in enumerate(full.layers):
            placed = loader.layer(layer)
            assert placed is not None
            yield LayerKV(true.k[:, placed.positions], true.v[:, placed.positions]), placed.moved().kv


def decoded(subject: TransformersSubject, target: BlendTarget, tokens: Sequence[int]) -> torch.Tensor:
    """Append ``tokens`` to a blended prompt; return the logits ``[tokens, vocab]`` of what follows each."""
    assert isinstance(target, TransformersTarget)
    runner = subject.runner
    return runner.follow(torch.tensor([list(tokens)], device=runner.device), target.cache)[0]
