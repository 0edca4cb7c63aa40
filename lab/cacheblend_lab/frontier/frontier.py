"""Measures how near blends come to full recompute: every policy at every ratio, with and without a writer, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from cacheblend_lab.frontier.measured import BEHIND, PLAIN, RECOMPUTED, WRITTEN, Measured
from cacheblend_lab.frontier.prompts import FrontierPrompt
from cacheblend_lab.learn.answers import Answered, answered
from cacheblend_lab.learn.blend import (
    NOWHERE,
    BatchLayout,
    PromptBatch,
    StoredBatch,
    count_of,
    deviation,
    divergences,
)
from cacheblend_lab.learn.lesson import Lesson
from cacheblend_lab.watching import watched
from cacheblend_rag.blending.fusor import kv_deviation
from cacheblend_rag.blending.policies import POLICIES, Candidates
from cacheblend_rag.blending.policies import policy as policy_named
from cacheblend_rag.blending.settings import BlendSchedule
from cacheblend_rag.calibrate.compared import ANSWER_TOKENS
from cacheblend_rag.store.kv import LayerKV

RATIOS: Final = (0.05, 0.15, 0.3, 0.5, 0.7)
COMPARED: Final = ("full-recompute", "random", *POLICIES)
_CHECK_LAYER: Final = BlendSchedule().check_layers[0]
_REUSE, _ALL = "full-reuse", "full-recompute"


class Frontier:
    """Measures prompts on one model.

    The first chunk is exact, with a writer and without, as in the engines. Full KV reuse is always measured. A blend
    that recomputes all tokens, without a writer, shows the numerical noise.
    """

    def __init__(
        self,
        lesson: Lesson,
        probe: Sequence[int],
        ends: frozenset[int],
        batch_tokens: int,
        ratios: Sequence[float] = RATIOS,
        policies: Sequence[str] = COMPARED,
        weights: Mapping[str, Any] | None = None,
        behind: bool = False,
    ):
        """Set up the measurement.

        Args:
            lesson: Model and writer; without a writer (None) only the model's own KV is measured.
            probe: Token ids that chunks are ranked behind.
            ends: Token ids that end an answer.
            batch_tokens: Maximum number of prompt tokens that are computed at once.
            ratios: Shares of the stale tokens to recompute.
            policies: Names of policies.
            weights: Copies of the model whose full recompute is measured, too, by name.
            behind: Whether the KV that the model computes behind the probe is measured, too.
        """
        self.lesson, self.probe, self.ends, self.batch_tokens = lesson, probe, ends, batch_tokens
        self.behind = behind
        self.runs = [
            (name, ratio) for ratio in sorted(ratios) for name in policies if ratio and name not in (_REUSE, _ALL)
        ]
        self.noise = _ALL in policies
        self.weights = weights or {}
        self._starts: dict[tuple[bool, tuple[int, ...]], DynamicCache] = {}

    @torch.no_grad()
    def measure(self, prompts: Sequence[FrontierPrompt]) -> Iterator[list[Measured]]:
        """Yield the measurements of each prompt; prompts answered together follow each other, the longest first."""
        ids = [each.ids for each in prompts]
        for answered_one in answered(self.lesson.blender.model, ids, ANSWER_TOKENS, self.ends, self.batch_tokens):
            with self.lesson.autocast():
                found = list(_PromptRun(self, prompts[answered_one.number], answered_one).measure())
            yield found

    def needs(self, what: str) -> bool:
        """Return whether a policy sets the attribute ``what``: ``needs_static``, ``needs_deviation`` or ``needs_attention``."""
        return any(getattr(policy_named(name), what) for name, _ in self.runs)

    def start(self, written: bool, ids: tuple[int, ...]) -> DynamicCache | None:
        """Return the KV that chunks are computed behind, by the writer or the model, computed once; None without tokens."""
        if ids and (written, ids) not in self._starts:
            model = self.lesson.writing if written else self.lesson.blender.model
            self._starts[written, ids] = self.lesson.blender.start(model, ids)
        return self._starts.get((written, ids))


class _PromptRun:
    """Measures one prompt. The model's own answer and the right answer follow each blend, and do not attend to each other."""

    def __init__(self, frontier: Frontier, prompt: FrontierPrompt, own: Answered):
        self._frontier, self._prompt, self._answer = frontier, prompt, own.answer
        self._blender, self._cache = frontier.lesson.blender, own.cache
        rest = [*own.answer[:-1], *prompt.gold[:-1]]
        length, watched = len(prompt.ids) + len(rest), 1 + len(rest)
        # The first chunk is exact only if it starts directly behind the header.
        exact = int(prompt.spans[0][0] == len(prompt.header))
        fork = len(prompt.ids) + len(own.answer) - 1 if prompt.gold else 0
        self._layout = BatchLayout(prompt.header, prompt.spans, length, watched, exact, fork)
        # Tokens that are always computed: _between before the last chunk's end, and _asked behind it.
        self._asked = len(prompt.ids) - prompt.spans[-1][1]
        self._between = prompt.spans[-1][1] - len(prompt.header) - sum(end - start for start, end in prompt.spans)
        self._ids = torch.tensor([[*prompt.ids, *rest]], device=self._blender.device)
        self._stale = prompt.spans[exact:]
        # The fusor runs the front, the tokens before the first stale chunk, once.
        before = prompt.spans[0][1] if exact else len(prompt.header)
        self._front = max(0, self._stale[0][0] - before) if self._stale else 0
        self._truth = self._blender.follow(self._batch(), self._cache)
        self._gold = self._likelihood(self._truth)

    def _batch(self, blends: int = 1) -> PromptBatch:
        weights = torch.ones(blends, self._layout.watched, device=self._ids.device)
        return PromptBatch(self._layout, self._ids.expand(blends, -1), weights)

    def measure(self) -> Iterator[Measured]:
        for name, other in self._frontier.weights.items():
            start = self._blender.start(other, self._ids[0, : -self._layout.watched].tolist())
            yield self._measured(RECOMPUTED, name, 1.0, self._blender.follow(self._batch(), start, other), 1.0)
        if not self._stale:
            return
        alone, behind, static = self._written_by(self._blender.model)
        yield from self._blends(PLAIN, alone, static)
        if self._frontier.behind and behind is not None:
            yield from self._blends(BEHIND, behind, static)
        if self._frontier.lesson.writing is not None:
            alone, _, static = self._written_by(self._frontier.lesson.writing)
            yield from self._blends(WRITTEN, alone, static)

    def _written_by(self, model: Any) -> tuple[StoredBatch, StoredBatch | None, torch.Tensor | None]:
        """Return the chunks' KV, with stale chunks as ``model`` writes them behind the header alone and behind the probe.

        The third result is the static deviation, ``[stored]``. The last two results are None if no policy needs static
        deviations and KV behind the probe is not measured.
        """
        batch, blender, header = self._batch(), self._blender, self._prompt.header
        probe, written = self._frontier.probe, model is not blender.model
        alone = blender.write(model, batch, start=self._frontier.start(written, header))
        stored = blender.behind_exact(self._layout, self._cache, alone)
        if not self._frontier.needs("needs_static") and not self._frontier.behind:
            return stored, None, None
        behind = blender.write(model, batch, probe, self._frontier.start(written, (*header, *probe)))
        static = deviation(alone, behind, len(self._stale))[0]
        moved = blender.behind_exact(self._layout, self._cache, behind)
        return stored, moved, pad(static, (len(stored.positions) - len(static), 0))

    def _blends(self, kv: str, stored: StoredBatch, static: torch.Tensor | None) -> Iterator[Measured]:
        reused, attention = self._reused(stored)
        at = (stored.positions >= self._stale[0][0]) & (stored.positions != NOWHERE)
        deviates = self._deviation(stored) if self._frontier.needs("needs_deviation") else None
        known = self._candidates(stored.positions, deviates, attention, static).at(at)
        yield self._measured(kv, _REUSE, 0.0, reused, self._compute(_REUSE, known, 0))
        noise = [(_ALL, 1.0)] if self._frontier.noise and kv == PLAIN else []
        for measured_first in (False, True):
            runs = [*noise, *self._frontier.runs]
            part = [run for run in runs if policy_named(run[0]).needs_deviation == measured_first]
            source = self._behind_dense_pass(stored) if measured_first and part else stored
            step = max(1, self._frontier.batch_tokens // self._ids.numel())
            # All rows of a batch are as long as the longest row, so that runs with equal ratios share a batch.
            for _, group in groupby(part, lambda run: run[1]):
                same = list(group)
                for first in range(0, len(same), step):
                    yield from self._together(kv, source, known, at, same[first : first + step])

    def _together(
        self, kv: str, stored: StoredBatch, known: Candidates, at: torch.Tensor, runs: Sequence[tuple[str, float]]
    ) -> Iterator[Measured]:
        wanted = [count_of(self._layout, ratio) for _, ratio in runs]
        masks = [policy_named(name).select(known, count) for (name, _), count in zip(runs, wanted, strict=True)]
        scores = torch.zeros(len(runs), len(stored.positions), device=self._ids.device)
        scores[:, at] = torch.stack(masks).float()
        counts = [int(count) for count in scores.sum(1).tolist()]
        logits = self._blender.blend(self._batch(len(runs)), stored, scores, counts)
        for (name, ratio), count, mine in zip(runs, counts, logits, strict=True):
            yield self._measured(kv, name, ratio, mine[None], self._compute(name, known, count))

    def _compute(self, name: str, known: Candidates, count: int) -> float:
        """Return the compute of a blend as the fusor counts it: a share of the prompt's tokens through all layers."""
        chosen, stale, between = policy_named(name), len(known.positions), self._between
        forced = between + self._asked
        computed = float(forced + count)
        if chosen.needs_attention and 0 < count < stale:
            computed += forced - self._front
        if chosen.needs_deviation and 0 < count < stale:
            computed += (stale + between - self._front) * _CHECK_LAYER / self._blender.num_layers
        return computed / len(self._prompt.ids)

    def _candidates(self, positions: torch.Tensor, *measured: torch.Tensor | None) -> Candidates:
        """Return the stored tokens, stale or not, as a policy's candidates."""
        starts = torch.tensor([start for start, _ in self._stale], device=positions.device)
        chunk = torch.searchsorted(starts, positions, right=True) - 1
        return Candidates(positions, chunk, positions - starts[chunk], *measured)

    def _behind_dense_pass(self, stored: StoredBatch) -> StoredBatch:
        """Return the stored KV after a dense pass: layers below the check layer hold the full prefill's KV."""
        layer, fresh = _CHECK_LAYER, self._fresh(stored)
        keys, values = fresh.keys[:layer] + stored.keys[layer:], fresh.values[:layer] + stored.values[layer:]
        return StoredBatch(keys, values, stored.positions)

    def _deviation(self, stored: StoredBatch) -> torch.Tensor:
        """Return the KV deviation at the check layer, ``[stored]``."""
        both = self._fresh(stored), stored
        new, old = (LayerKV(each.keys[_CHECK_LAYER][0], each.values[_CHECK_LAYER][0]) for each in both)
        return kv_deviation(new, old)

    def _fresh(self, stored: StoredBatch) -> StoredBatch:
        """Return the full prefill's KV of the chunks' tokens, up to and including the check layer."""
        fresh = self._blender.in_context(self._cache, stored.positions)
        few = slice(0, _CHECK_LAYER + 1)
        return StoredBatch(
            [part[:1] for part in fresh.keys[few]], [part[:1] for part in fresh.values[few]], stored.positions
        )

    def _reused(self, stored: StoredBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of full reuse and, if needed, the question's attention to stored tokens, ``[stored]``."""
        if not self._frontier.needs("needs_attention"):
            return self._blender.blend(self._batch(), stored), None
        first, count = len(self._layout.header), len(stored.positions)
        seen = torch.zeros(count, device=self._ids.device)

        def watch(_layer: int, weights: torch.Tensor) -> None:
            # The teacher-forced answers behind the question are not part of the question.
            question = weights[:, self._between : self._between + self._asked]
            seen.add_(question[..., first : first + count].float().mean((0, 1)))

        self._blender.header_kv(self._layout.header)  # first, so that the header's attention is not observed
        with watched(watch):
            logits = self._blender.blend(self._batch(), stored)
        return logits, seen / self._blender.num_layers

    def _likelihood(self, logits: torch.Tensor) -> float | None:
        """Return the right answer's mean log-likelihood from logits ``[1, watched, vocab]``; None without a right answer."""
        gold = self._prompt.gold
        if not gold:
            return None
        said = torch.cat([logits[0, :1], logits[0, len(self._answer) :]]).float().log_softmax(-1)
        return float(said.gather(1, torch.tensor(gold, device=said.device)[:, None]).mean())

    def _measured(self, kv: str, policy: str, ratio: float, logits: torch.Tensor, compute: float) -> Measured:
        count, prompt = len(self._answer), self._prompt
        truth, said = self._truth[:, :count], logits[:, :count]
        kl = divergences(truth, said)[0]
        agrees = truth[0].argmax(-1) == said[0].argmax(-1)
        numbers = torch.stack([kl.mean(), agrees.float().mean(), agrees.all().float()])
        mean, share, whole = numbers.tolist()
        gold = self._likelihood(logits)
        change = None if gold is None or self._gold is None else gold - self._gold
        return Measured(
            prompt.data, prompt.key, prompt.group, kv, policy, ratio, mean, share, whole, compute, gold, change
        )
