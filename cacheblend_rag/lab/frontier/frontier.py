"""Measures how near blends come to full recompute, every policy at every ratio, with a writer and without, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from cacheblend_rag.blending.fusor import kv_deviation
from cacheblend_rag.blending.options import BlendSchedule
from cacheblend_rag.blending.policies import policy as policy_named
from cacheblend_rag.blending.policies.base import Candidates
from cacheblend_rag.engines.transformers.attention import watched
from cacheblend_rag.lab.doctor.compared import ANSWER_TOKENS
from cacheblend_rag.lab.frontier.measured import Measured
from cacheblend_rag.lab.frontier.prompts import FrontierPrompt
from cacheblend_rag.lab.learn.answers import greedy
from cacheblend_rag.lab.learn.blend import (
    NOWHERE,
    BatchLayout,
    PromptBatch,
    StoredBatch,
    count_of,
    deviation,
    divergences,
)
from cacheblend_rag.lab.learn.lesson import Lesson
from cacheblend_rag.store.kv import LayerKV

RATIOS: Final = (0.05, 0.15, 0.3, 0.5, 0.7)
POLICIES: Final = ("random", "hkvd", "static", "query", "static-query")
PLAIN, WRITTEN, FIRST_EXACT = "as it is", "written", "written, first chunk exact"
RECOMPUTED: Final = "full recompute"
_CHECK_LAYER: Final = BlendSchedule().check_layers[0]
_ENDS = (("full-reuse", 0.0), ("full-recompute", 1.0))


class Frontier:
    """Measures prompts on one model.

    The first chunk is exact, with a writer and without, as the engines have it. With one stands beside it what it would be if
    the writer wrote that chunk, too, and every chunk were stale. In any case full KV reuse is measured and, without a
    writer, a blend that recomputes all: how far that is from the full prefill is the noise of the numbers.
    """

    def __init__(
        self,
        lesson: Lesson,
        probe: Sequence[int],
        ends: frozenset[int],
        batch_tokens: int,
        ratios: Sequence[float] = RATIOS,
        policies: Sequence[str] = POLICIES,
        weights: Mapping[str, Any] | None = None,
    ):
        """Set up.

        Args:
            lesson: Model and writer; without a writer (None) only the model's own KV is measured.
            probe: What chunks are ranked behind.
            ends: Tokens that end an answer.
            batch_tokens: Most tokens of prompts that are computed at once.
            ratios: Shares of the stale tokens to recompute.
            policies: Names of policies.
            weights: Copies of the model whose full recompute is measured, too.
        """
        self.lesson, self.probe, self.ends, self.batch_tokens = lesson, probe, ends, batch_tokens
        self.runs = [(name, ratio) for name in policies for ratio in ratios if ratio]
        self.weights = weights or {}

    @torch.no_grad()
    def measure(self, prompts: Sequence[FrontierPrompt]) -> Iterator[list[Measured]]:
        """Yield what was found of each prompt; their answers are computed together first."""
        model = self.lesson.blender.model
        answers = greedy(model, [each.ids for each in prompts], ANSWER_TOKENS, self.ends, self.batch_tokens)
        for prompt, answer in zip(prompts, answers, strict=True):
            with self.lesson.autocast():
                yield list(_PromptRun(self, prompt, answer).measure())


class _PromptRun:
    """Measures one prompt. Each blend is followed by the model's own answer and, in a row beside it, by the right one."""

    def __init__(self, frontier: Frontier, prompt: FrontierPrompt, answer: Sequence[int]):
        self._frontier, self._prompt = frontier, prompt
        self._blender = frontier.lesson.blender
        self._behind = [tuple(answer), *([prompt.gold] if prompt.gold else [])]
        self._watched = max(map(len, self._behind))
        rows = [[*prompt.ids, *each, *[0] * (self._watched - len(each))][:-1] for each in self._behind]
        self._ids = torch.tensor(rows, device=self._blender.device)
        deviates = any(policy_named(name).needs_deviation for name, _ in frontier.runs)
        self._truth, self._cache = self._blender.prefill(self._batch(0), keep_kv=deviates)
        self._gold = self._likelihood(self._truth)

    def _batch(self, exact: int, blends: int = 1, only_answer: bool = False) -> PromptBatch:
        prompt = self._prompt
        layout = BatchLayout(prompt.header, prompt.spans, self._ids.shape[1], self._watched, exact)
        ids = (self._ids[:1] if only_answer else self._ids).repeat(blends, 1)
        return PromptBatch(layout, ids, torch.ones(len(ids), self._watched, device=ids.device))

    def measure(self) -> Iterator[Measured]:
        model, writing = self._blender.model, self._frontier.lesson.writing
        for name, other in self._frontier.weights.items():
            batch = self._batch(0)
            logits = other(input_ids=batch.ids, use_cache=False, logits_to_keep=self._watched).logits
            yield self._measured(RECOMPUTED, name, 1.0, logits, 1.0)
        # Chunks that do not start behind the header have no exact first one.
        exact = int(self._prompt.spans[0][0] == len(self._prompt.header))
        plain, static = self._written_by(model)
        yield from self._blends(PLAIN, exact, plain, static)
        if writing is None:
            return
        written, ranked = self._written_by(writing)
        yield from self._blends(WRITTEN, 0, written, ranked)
        if exact:
            width = len(plain.positions) // len(self._prompt.spans)
            sides = [
                [torch.cat([one[:, :, :width], other[:, :, width:]], 2) for one, other in zip(*pair, strict=True)]
                for pair in zip(plain[:2], written[:2], strict=True)
            ]
            mixed = StoredBatch(sides[0], sides[1], plain.positions)
            yield from self._blends(FIRST_EXACT, exact, mixed, ranked)

    def _written_by(self, model: Any) -> tuple[StoredBatch, torch.Tensor | None]:
        """Return what a model writes, and its static deviation, ``[stored]``: None where that is not asked for."""
        batch = self._batch(0, only_answer=True)
        alone = self._blender.write(model, batch)
        if not any(policy_named(name).needs_static for name, _ in self._frontier.runs):
            return alone, None
        behind = self._blender.write(model, batch, self._frontier.probe)
        return alone, deviation(alone, behind, len(self._prompt.spans))[0]

    def _blends(self, kv: str, exact: int, stored: StoredBatch, static: torch.Tensor | None) -> Iterator[Measured]:
        known = self._candidates(exact, stored, static)
        if not len(known.positions):
            return
        column = {int(position): i for i, position in enumerate(stored.positions.tolist())}
        columns = torch.tensor([column[position] for position in known.positions.tolist()], device=self._ids.device)
        runs = [*_ENDS, *self._frontier.runs] if kv == PLAIN else [_ENDS[0], *self._frontier.runs]
        for deviates in (False, True):
            part = [(name, ratio) for name, ratio in runs if policy_named(name).needs_deviation == deviates]
            source = self._behind_dense_pass(stored) if deviates and part else stored
            step = max(1, self._frontier.batch_tokens // self._ids.numel())
            for at in range(0, len(part), step):
                yield from self._together(kv, exact, source, known, columns, part[at : at + step])

    def _together(
        self,
        kv: str,
        exact: int,
        stored: StoredBatch,
        known: Candidates,
        columns: torch.Tensor,
        runs: Sequence[tuple[str, float]],
    ) -> Iterator[Measured]:
        layout, rows = self._batch(exact).layout, len(self._behind)
        wanted = [count_of(layout, ratio) for _, ratio in runs]
        masks = [policy_named(name).select(known, count) for (name, _), count in zip(runs, wanted, strict=True)]
        scores = torch.zeros(len(runs), len(stored.positions), device=self._ids.device)
        scores[:, columns] = torch.stack(masks).float()
        counts = [int(count) for count in scores.sum(1).tolist()]
        each = [count for count in counts for _ in range(rows)]
        batch = self._batch(exact, len(runs))
        logits = self._blender.blend(batch, stored, scores.repeat_interleave(rows, 0), each)
        for (name, ratio), count, mine in zip(runs, counts, torch.split(logits, rows), strict=True):
            yield self._measured(kv, name, ratio, mine, self._compute(name, layout, known, count))

    def _compute(self, name: str, layout: BatchLayout, known: Candidates, count: int) -> float:
        """Return what a blend computes, as the fusor counts it: share of the prompt's tokens through all layers."""
        chosen, stale = policy_named(name), len(known.positions)
        ends = [0, *(end for _, end in layout.spans)]
        starts = [len(layout.header), *(start for start, _ in layout.spans)][1:]
        between = sum(start - max(end, len(layout.header)) for start, end in zip(starts, ends, strict=False))
        forced = between + len(self._prompt.ids) - ends[-1]
        computed = float(forced + count)
        if chosen.needs_attention and 0 < count < stale:
            computed += forced
        if chosen.needs_deviation and 0 < count < stale:
            computed += (stale + between) * _CHECK_LAYER / self._blender.num_layers
        return computed / len(self._prompt.ids)

    def _candidates(self, exact: int, stored: StoredBatch, static: torch.Tensor | None) -> Candidates:
        """Return all that a policy may ask about the stale tokens."""
        spans, device = self._prompt.spans[exact:], self._ids.device
        places = [(i, start, end) for i, (start, end) in enumerate(spans)]
        first = spans[0][0] if spans else NOWHERE
        at = (stored.positions >= first) & (stored.positions != NOWHERE)
        needs = [policy_named(name) for name, _ in self._frontier.runs]
        attention = self._attention(exact, stored)[at] if any(one.needs_attention for one in needs) else None
        deviates = self._deviation(stored)[at] if any(one.needs_deviation for one in needs) else None
        return Candidates(
            stored.positions[at],
            torch.cat([torch.full((end - start,), i, device=device) for i, start, end in places] or [_none(device)]),
            torch.cat([torch.arange(end - start, device=device) for _, start, end in places] or [_none(device)]),
            deviates,
            attention,
            None if static is None else static[at],
        )

    def _behind_dense_pass(self, stored: StoredBatch) -> StoredBatch:
        """Return what is stored; the layers below the check layer, which the dense pass computes, as they are in context."""
        layer, fresh = _CHECK_LAYER, self._fresh(stored)
        keys, values = fresh.keys[:layer] + stored.keys[layer:], fresh.values[:layer] + stored.values[layer:]
        return StoredBatch(keys, values, stored.positions)

    def _deviation(self, stored: StoredBatch) -> torch.Tensor:
        """Return the KV deviation at the check layer, ``[stored]``."""
        both = self._fresh(stored), stored
        new, old = (LayerKV(each.keys[_CHECK_LAYER][0], each.values[_CHECK_LAYER][0]) for each in both)
        return kv_deviation(new, old)

    def _fresh(self, stored: StoredBatch) -> StoredBatch:
        """Return the full prefill's KV of the chunks' tokens, as far up as the check layer."""
        assert self._cache is not None
        fresh = self._blender.in_context(self._cache, stored.positions)
        few = slice(0, _CHECK_LAYER + 1)
        return StoredBatch(
            [part[:1] for part in fresh.keys[few]], [part[:1] for part in fresh.values[few]], stored.positions
        )

    def _attention(self, exact: int, stored: StoredBatch) -> torch.Tensor:
        """Return the question's attention to stored tokens, ``[stored]``."""
        batch = self._batch(exact, only_answer=True)
        first, count = len(batch.layout.header), len(stored.positions)
        asked = len(self._prompt.ids) - batch.layout.spans[-1][1]
        seen = torch.zeros(count, device=self._ids.device)

        def watch(_layer: int, weights: torch.Tensor) -> None:
            # Behind the last chunk stand the question and, teacher-forced, its answer, which is not asked yet.
            end = weights.shape[1] - (self._watched - 1)
            seen.add_(weights[:, end - asked : end, first : first + count].float().mean((0, 1)))

        self._blender.header_kv(batch.layout.header)  # whose own attention is not meant
        with watched(watch):
            self._blender.blend(batch, stored)
        return seen / self._blender.num_layers

    def _likelihood(self, logits: torch.Tensor) -> float | None:
        """Return the right answer's mean log-likelihood, of logits ``[rows, watched, vocab]``."""
        gold = self._prompt.gold
        if not gold:
            return None
        said = logits[1, : len(gold)].float().log_softmax(-1)
        return float(said.gather(1, torch.tensor(gold, device=said.device)[:, None]).mean())

    def _measured(self, kv: str, policy: str, ratio: float, logits: torch.Tensor, compute: float) -> Measured:
        count, prompt = len(self._behind[0]), self._prompt
        truth, said = self._truth[:1, :count], logits[:1, :count]
        kl = divergences(truth, said)[0]
        agrees = truth[0].argmax(-1) == said[0].argmax(-1)
        numbers = torch.stack([kl.mean(), agrees.float().mean(), agrees.all().float()])
        mean, share, whole = numbers.tolist()
        gold = self._likelihood(logits)
        change = None if gold is None or self._gold is None else gold - self._gold
        return Measured(
            prompt.data, prompt.key, prompt.group, kv, policy, ratio, mean, share, whole, compute, gold, change
        )


def _none(device: torch.device) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.long, device=device)
