"""Blends one prompt: place → front → dense pass → select → sparse pass, written once for every engine (paper section 4).

1. *Place*: stored KV goes to its positions, layer by layer, just before the layer is computed.
2. *Front*: tokens without stored KV in front of the first stale chunk see no stale KV. Where a policy measures anything, they run
   once, through all layers, before it does; no later pass runs them again.
3. *Dense pass*: all tokens behind the front run up to the check layer, where fresh KV is compared with stored KV.
4. *Select*: the policy chooses the tokens to recompute; with several check layers the set narrows (gradual filtering).
5. *Sparse pass*: the chosen tokens and everything without stored KV run through all layers, from layer 0.

The passes are the model's own forward at given positions; the causal mask they use is ``kv_position <= query_position``.

Which tokens are candidates, chosen and computed is kept in host memory: the device is asked for what was measured alone, once
per selection, and never waited for otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import BlendPlan, counted
from cacheblend_rag.blending.policies import Candidates, gave_way, possible
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.settings import BlendSchedule, FuseOptions, TextRatio
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.blending.trace import Trace, computing
from cacheblend_rag.blending.transfer import Fetch, sent
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV, join_tokens

_log = logging.getLogger(__name__)


class OtherRankError(Exception):
    """Says that another tensor-parallel rank could not go on, so that none does."""

    def __init__(self) -> None:
        super().__init__("another rank failed; its log says why")


class Awaited(Protocol):
    """Stands for stored KV that other machines and devices are to deliver."""

    @property
    def ready(self) -> bool:
        """Return whether it is there."""


@dataclass
class Segment:
    """Says what a blend is about to do: part of a pass, or to wait for the device.

    Attributes:
        kind: Of the pass; ``"fetch"`` waits for what the device has measured, and computes nothing; so does ``"load"``, for
            stored KV.
        tokens: How many are left in this pass.
        share: Of the layers that they go through.
        done: How many of them have been run since, once the blend has gone on.
        awaited: What is waited for, of ``"load"``.
    """

    kind: Literal["front", "question", "dense", "sparse", "fetch", "load"]
    tokens: int = 0
    share: float = 0.0
    done: int = 0
    awaited: Awaited | None = None


Segments = Generator[Segment, int | None, None]


@dataclass(frozen=True)
class FuseResult:
    """Holds what became of the positions of a blend, and those recomputed of tokens with stored KV, ascending, in host memory."""

    recomputed: torch.Tensor
    outcome: PromptOutcome


def fuse(plan: BlendPlan, target: BlendTarget, options: FuseOptions) -> FuseResult:
    """Do all of :func:`fuse_stepwise` at once."""
    steps = fuse_stepwise(plan, target, options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: FuseResult = end.value
            return result


def fuse_stepwise(
    plan: BlendPlan, target: BlendTarget, options: FuseOptions
) -> Generator[Segment, int | None, FuseResult]:
    """Build the KV cache of the prompt of ``plan``, which uses stored KV, in ``target``; keep the last position's logits there.

    Yields before every segment of a pass, so that an engine can do other work in between; it may send the segment's most tokens.

    Raises:
        UnusableSpanError: Stored KV is damaged, cannot be read now, or is late; the KV cache is unusable and the plan must be
            made anew.
        OtherRankError: Loading or placing KV failed on another tensor-parallel rank.
        InputError: A check layer lies outside the model.
    """
    fusor = _Fusor(plan, target, options)
    with fusor.loader:
        try:
            if options.whole:
                yield Segment("load", awaited=fusor.loader)
            yield from fusor.compute_front()
            yield from fusor.watch_question()
            for layer, width in fusor.checks:
                yield from fusor.check(layer, width)
            yield from fusor.recompute()
        finally:  # where it was given up, what comes next may be given its memory
            fusor.placer.settle()
    return fusor.result()


class _Fusor:
    """Does one blend, step by step. ``keep`` says of each candidate whether it is still to be recomputed."""

    def __init__(self, plan: BlendPlan, target: BlendTarget, options: FuseOptions):
        self._plan, self._began = plan, time.perf_counter()
        policy, ratio, trace = options.policy, options.ratio, options.trace
        watched = target.shows_attention
        wants_static = possible(policy, True, watched).needs_static or isinstance(ratio, TextRatio)
        self._candidates = _candidates(plan, plan.static_deviation() if wants_static else None)
        # Where one rank cannot read a static deviation, none may use it: all must select the same tokens.
        self._unranked = wants_static and not target.agree(self._candidates.static is not None)
        if isinstance(ratio, TextRatio):
            static = None if self._unranked else self._candidates.static
            ratio = ratio.least if static is None else ratio.choose(static)
        wanted, policy, self._gave_way = policy, possible(policy, not self._unranked, watched), ""
        self._name = wanted.name  # at ratio 0 and 1 none chooses, so none gives way
        if policy is not wanted and 0 < ratio < 1:
            ratio, self._name = min(1.0, ratio * policy.effort / wanted.effort), policy.name
            self._gave_way = gave_way(wanted, policy, ratio, self._unranked)
        self._target, self._policy, self._ratio = target, policy, ratio
        self._forced = _forced(plan, self._candidates.positions)
        # Where the engine itself computes the question, its attention is wanted all the same.
        self._behind = torch.arange(plan.num_tokens, plan.num_tokens + plan.behind)
        total = len(self._candidates.positions)
        self._count = round(ratio * total)
        undecided = 0 < self._count < total
        self._watches = policy.needs_attention and undecided
        self.checks = _checks(options.schedule, target.num_layers) if policy.needs_deviation and undecided else []
        measures = self._watches or bool(self.checks)
        first = int(self._candidates.positions[0]) if measures else 0
        self._front, self._forced = self._forced[self._forced < first], self._forced[self._forced >= first]
        if policy.needs_deviation or policy.needs_attention:
            self._keep = torch.full((total,), self._count > 0)
        else:
            self._keep = self._select(self._candidates, self._count)
        self.loader = LayerLoader(
            plan.exact,
            plan.stale if measures or not self._keep.all() else (),
            target.rope,
            target.num_layers,
            target.device,
            # Below the first check layer the dense pass computes every token; the question's pass reads all layers.
            stale_from_layer=self.checks[0][0] if self.checks and not self._watches else 0,
            trace=trace,
            whole=options.whole,
            most_wait_s=options.most_wait_s,
        )
        if self.checks and not self._watches:
            self.loader.expect_rest(self.checks[-1][0] + 1)
        self.placer = _Placer(self.loader, target, {layer for layer, _ in self.checks}, trace)
        self._trace = trace
        self._recomputed, self._computed, self._selection = self._forced[:0], 0, 0.0

    def _select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Let the policy choose; raise InputError for a mask that is none, which a policy of anybody's may return."""
        mask = self._policy.select(candidates, count)
        if mask.dtype != torch.bool or mask.shape != candidates.positions.shape:
            raise InputError(
                f"The selection policy {self._policy.name!r} returned {list(mask.shape)} of {mask.dtype} for "
                f"{len(candidates.positions)} tokens; it must be a boolean for each."
            )
        return mask

    def _run(
        self,
        kind: Literal["front", "question", "dense", "sparse"],
        positions: torch.Tensor,
        share: float,
        run: Callable[[torch.Tensor], object],
    ) -> Segments:
        """Hand ``positions`` to ``run``, segment by segment, as much at a time as the engine allows and the target takes."""
        while len(positions):
            segment = Segment(kind, len(positions), share)
            most = yield segment
            part = self._target.segment(positions, most)
            with computing(self._trace, f"{kind} pass", len(part)):
                run(part)
            segment.done = len(part)
            if kind in ("question", "dense"):
                self._selection += len(part) * share
            positions = positions[len(part) :]

    def compute_front(self) -> Segments:
        """Run the tokens in front of the first stale chunk through all layers: their KV is that of a full prefill."""
        if not len(self._front):
            return
        if self.checks:  # a check wants its layer's stored KV by itself
            self.placer.before_layer(self.checks[-1][0])
        self.placer.place_rest()
        yield from self._run(
            "front", self._front, 1.0, lambda part: self._target.forward(part, self.placer.before_layer)
        )

    def watch_question(self) -> Segments:
        """Measure the question's attention over stored KV, if the policy needs it; select, if nothing else is needed."""
        if not self._watches:
            return
        # Text between the chunks is run, too: without it the question would attend to slots that nothing was written to.
        between = int((self._forced <= self._candidates.positions[-1]).sum())
        asked = torch.cat([self._forced, self._behind])
        watch = self._target.attention(int(asked[between]), self.placer.before_layer)
        if not self.checks:  # a check wants its layer's stored KV by itself
            self.placer.place_rest()
        yield from self._run("question", asked, 1.0, watch.run)
        seen = Fetch(self._target.all_reduce(watch.mean()))
        yield Segment("fetch")
        self._candidates = replace(self._candidates, attention=seen.result()[self._candidates.positions])
        if not self.checks:
            self._keep = self._select(self._candidates, self._count)

    def check(self, layer: int, width: float) -> Segments:
        """Run a dense pass of what is kept so far up to ``layer``; keep ``width`` times the ratio of it, as the policy says."""
        running = self._candidates.at(self._keep)
        between = self._forced[self._forced < self._candidates.positions[-1]]
        positions = _merge(running.positions, between)
        parts: list[LayerKV] = []

        def run(segment: torch.Tensor) -> None:
            part = self._target.forward(segment, self.placer.before_layer, stop_layer=layer)
            assert part is not None
            parts.append(part)

        yield from self._run("dense", positions, layer / self._target.num_layers, run)
        fresh = _tokens_at(join_tokens(parts), torch.isin(positions, running.positions))
        stale = _tokens_at(self.placer.stale(layer, len(self._keep)), self._keep)
        measured = Fetch(self._target.all_reduce(kv_deviation(fresh, stale)))
        if layer == self.checks[-1][0]:  # to be waited for along with what is measured
            self.placer.place_rest()
        yield Segment("fetch")
        wanted = min(round(self._ratio * width * len(self._candidates.positions)), len(running.positions))
        chosen = self._select(replace(running, deviation=measured.result()), wanted)
        kept = self._keep.nonzero().squeeze(1)[chosen]
        self._keep = torch.zeros_like(self._keep)
        self._keep[kept] = True

    def recompute(self) -> Segments:
        """Run a sparse pass of the chosen tokens and the forced set through all layers."""
        self._recomputed = self._candidates.positions[self._keep]
        positions = _merge(self._recomputed, self._forced)
        self.placer.place_rest()
        yield from self._run(
            "sparse", positions, 1.0, lambda part: self._target.forward(part, self.placer.before_layer)
        )
        self.placer.before_layer(self._target.num_layers - 1)  # also where nothing is computed
        self._computed = len(self._front) + len(positions)

    def result(self) -> FuseResult:
        """Return what was done."""
        plan, loader = self._plan, self.loader
        unranked = [] if not self._unranked else [span.chunk.id for span in plan.stale if span.chunk is not None]
        outcome = replace(
            plan.outcome(self._computed, len(self._recomputed), self._selection),
            reason=plan.reason + self._gave_way,
            unranked=tuple(unranked),
            policy=self._name,
            ratio=self._ratio,
            load_s=loader.wait_s,
            blend_s=time.perf_counter() - self._began,
            loaded_bytes=loader.loaded_bytes,
            loads=loader.loads,
            reads=loader.reads,
        )
        return FuseResult(self._recomputed, outcome)


def kv_deviation(fresh: LayerKV, stale: LayerKV) -> torch.Tensor:
    """Return the KV deviation ``[tokens]``: squared L2 distance of keys plus that of values, summed over KV heads, in fp32."""
    k = (fresh.k.float() - stale.k.float()).square().sum((0, 2))
    v = (fresh.v.float() - stale.v.float()).square().sum((0, 2))
    return k + v


class _Placer:
    """Places each layer once, when the first pass reaches it; later passes find it as the earlier ones left it."""

    def __init__(self, loader: LayerLoader, target: BlendTarget, remember: set[int], trace: Trace | None):
        self._loader, self._target, self._remember, self._trace = loader, target, remember, trace
        self._next = 0
        self._stale: dict[int, LayerKV] = {}
        self._await: Callable[[int], None] | None = None

    def place_rest(self) -> None:
        """Begin to place all layers that are left at once, where their KV and the target allow it."""
        if self._await is not None:  # all is on its way
            return
        stored, waiting, begin = None, None, time.perf_counter()
        try:
            if (stored := self._loader.rest(self._next)) is not None:
                waiting = self._target.place_layers(stored)
        except Exception as error:  # layer by layer less memory is enough
            _log.warning("Stored KV is placed layer by layer: %s: %s", type(error).__name__, error)
        # One rank that read layer by layer would wait for the others' votes.
        if self._target.agree(waiting is not None) and waiting is not None and stored is not None:
            self._await, self._target.placed = waiting, True
            self._loader.brought(stored)
            if self._trace is not None:
                layers = self._target.num_layers - self._next
                name = f"layers {self._next} to {self._target.num_layers - 1}"
                self._trace.add("loading", name, begin, tier="ram", bytes=stored.layer_bytes * layers)
            self._next = self._target.num_layers
        elif waiting is not None:  # what has begun must not come later than what is computed
            waiting(self._target.num_layers - 1)

    def settle(self) -> None:
        """Let whatever the device is given from now on come behind the KV that is on its way."""
        if self._await is not None:
            self._await(self._target.num_layers - 1)

    def before_layer(self, layer: int) -> None:
        if self._await is not None:
            self._await(layer)
            return
        while self._next <= layer:
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        failure: Exception | None = None
        try:
            placed = self._loader.layer(layer)
            if placed is None:
                return  # nothing is stored for it, on no rank
            if layer in self._remember:
                placed = placed.moved()
            self._target.place(layer, placed.kv, placed.positions, placed.move)
            if layer in self._remember:
                self._stale[layer] = LayerKV(*(t[:, placed.stale_from :] for t in placed.kv))
        except Exception as error:  # whatever it is: a rank that went alone would leave the others waiting for it
            failure = error
        if self._target.agree(failure is None):
            return
        damage = self._target.agree(failure is None or isinstance(failure, UnusableSpanError))
        if failure is not None and isinstance(failure, UnusableSpanError) == damage:
            raise failure
        raise UnusableSpanError if damage else OtherRankError

    def stale(self, layer: int, tokens: int) -> LayerKV:
        # The prompt's last token is no candidate where its logits are wanted, though a stored chunk may end with it.
        return LayerKV(*(t[:, :tokens] for t in self._stale.pop(layer)))


def _checks(schedule: BlendSchedule, num_layers: int) -> list[tuple[int, float]]:
    # A check at layer 0 would always see zero: its KV depends on the token and its position alone.
    if not schedule.check_layers or not all(0 < layer < num_layers for layer in schedule.check_layers):
        raise InputError(
            f"check_layers is {list(schedule.check_layers)}; this model's KV deviation can be checked at layers 1 to "
            f"{num_layers - 1}."
        )
    return list(zip(schedule.check_layers, schedule.widths, strict=True))


def _candidates(plan: BlendPlan, static: torch.Tensor | None) -> Candidates:
    spans = plan.candidates
    within = counted(spans, [0] * len(spans))
    positions = counted(spans, [span.start for span in spans])
    return Candidates(positions, (within == 0).cumsum(0) - 1, within, static=static)


def _forced(plan: BlendPlan, candidates: torch.Tensor) -> torch.Tensor:
    """Return the positions that are neither exact nor candidates: text, missing chunks, the question; ascending."""
    forced = torch.ones(plan.num_tokens, dtype=torch.bool)
    forced[: plan.exact_tokens] = forced[candidates] = False
    return forced.nonzero().squeeze(1)


def _tokens_at(kv: LayerKV, mask: torch.Tensor) -> LayerKV:
    """Return the tokens that ``mask``, ``[tokens]`` in host memory, says: a mask on the device would have to be waited for."""
    if bool(mask.all()):
        return kv
    tokens = sent(mask.nonzero().squeeze(1), kv.k.device)
    return LayerKV(kv.k.index_select(1, tokens), kv.v.index_select(1, tokens))


def _merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b]).sort().values
