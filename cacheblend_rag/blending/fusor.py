"""Blends one prompt: place → front → dense pass → select → sparse pass, written once for all engines (paper section 4).

1. *Place*: stored KV is written to its positions, layer by layer, just before the layer is computed.
2. *Front*: tokens without stored KV in front of the first stale chunk see no stale KV. If the policy measures anything,
   these tokens run once, through all layers, before the measurement; no later pass runs them again.
3. *Dense pass*: all tokens behind the front run up to the check layer, where fresh KV is compared with stored KV.
4. *Select*: the policy chooses the tokens to recompute; with several check layers the set narrows (gradual filtering).
5. *Sparse pass*: the chosen tokens and all tokens without stored KV run through all layers, from layer 0.

The passes are the model's own forward at given positions; their causal mask is ``kv_position <= query_position``.
Host memory holds which tokens are candidates, chosen and computed: the fusor waits for the device once per selection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Unpack

import torch

from cacheblend_rag.blending.loader import LayerLoader, LoadOptions
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import BlendPlan, counted
from cacheblend_rag.blending.policies import Candidates, fallback_reason, possible
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.settings import FuseOptions, TextRatio
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.blending.trace import Trace, computing
from cacheblend_rag.blending.transfer import Fetch, sent
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV, join_tokens

_Pass = Literal["front", "question", "dense", "sparse"]
_log = logging.getLogger(__name__)


class OtherRankError(Exception):
    """Says that another tensor-parallel rank failed, so that every rank stops."""

    def __init__(self) -> None:
        super().__init__("another rank failed; its log says why")


class Awaited(Protocol):
    """Stands for stored KV that other machines or devices deliver."""

    @property
    def ready(self) -> bool:
        """Return whether the stored KV has arrived."""


@dataclass
class Segment:
    """Describes the next step of a blend: a part of a pass, or a wait.

    Attributes:
        kind: Kind of the pass; ``"fetch"`` waits for measured values, ``"load"`` for stored KV, without computing.
        tokens: Number of tokens left in this pass.
        share: Share of the layers that these tokens go through.
        done: Number of tokens that have run, set once the blend has gone on.
        awaited: Stored KV that a ``"load"`` segment waits for.
    """

    kind: _Pass | Literal["fetch", "load"]
    tokens: int = 0
    share: float = 0.0
    done: int = 0
    awaited: Awaited | None = None


Segments = Generator[Segment, int | None, None]


@dataclass(frozen=True)
class FuseResult:
    """Holds a blend's outcome, and the recomputed positions of tokens with stored KV, ascending, in host memory.

    ``passes`` counts a pass through some layers by its share; the attention of ``watched`` tokens was measured.
    """

    recomputed: torch.Tensor
    outcome: PromptOutcome
    passes: float
    watched: int


def fuse(plan: BlendPlan, target: BlendTarget, options: FuseOptions, **loads: Unpack[LoadOptions]) -> FuseResult:
    """Run all steps of :func:`fuse_stepwise` at once."""
    steps = fuse_stepwise(plan, target, options, **loads)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: FuseResult = end.value
            return result


def fuse_stepwise(
    plan: BlendPlan, target: BlendTarget, options: FuseOptions, **loads: Unpack[LoadOptions]
) -> Generator[Segment, int | None, FuseResult]:
    """Build the KV cache of a prompt in ``target`` by ``plan``, which uses stored KV, up to the last position's logits.

    Yields before every segment of a pass, so that an engine can do other work in between. The engine may send the
    largest number of tokens for the segment.

    Raises:
        UnusableSpanError: Stored KV is damaged, cannot be read now, or is late. The KV cache is unusable, and a new
            plan must be made.
        OtherRankError: Loading or placing KV failed on another tensor-parallel rank.
        InputError: A check layer lies outside the model.
    """
    fusor = _Fusor(plan, target, options, loads)
    with fusor.loader:
        try:
            if loads.get("whole"):
                yield Segment("load", awaited=fusor.loader)
            yield from fusor.compute_front()
            yield from fusor.watch_question()
            for layer, width in fusor.checks:
                yield from fusor.check(layer, width)
            yield from fusor.recompute()
        finally:  # after a cancelled blend, other work may reuse the memory of this blend
            fusor.placer.settle()
    return fusor.result()


class _Fusor:
    """Does one blend, step by step. ``_keep`` says for each candidate whether it is still to be recomputed."""

    def __init__(self, plan: BlendPlan, target: BlendTarget, options: FuseOptions, loads: LoadOptions):
        self._plan, self._began, self._trace = plan, time.perf_counter(), loads.get("trace")
        policy, ratio = options.policy, options.ratio
        watched = target.shows_attention
        wants_static = possible(policy, True, watched).needs_static or isinstance(ratio, TextRatio)
        self._candidates = _candidates(plan, plan.static_deviation() if wants_static else None)
        # If one rank cannot read a static deviation, no rank may use any: all ranks must select the same tokens.
        self._unranked = wants_static and not target.agree(self._candidates.static is not None)
        if isinstance(ratio, TextRatio):
            static = None if self._unranked else self._candidates.static
            ratio = ratio.least if static is None else ratio.choose(static)
        wanted, policy, self._fallback = policy, possible(policy, not self._unranked, watched), ""
        self._name = wanted.name  # at ratio 0 and 1 no policy chooses, so no other policy is named
        if policy is not wanted and 0 < ratio < 1:
            ratio, self._name = min(1.0, ratio * policy.effort / wanted.effort), policy.name
            self._fallback = fallback_reason(wanted, policy, ratio, self._unranked)
        self._target, self._policy, self._ratio = target, policy, ratio
        self._forced = _forced(plan, self._candidates.positions)
        # The attention of the question is measured even if the engine itself computes the question.
        self._behind = torch.arange(plan.num_tokens, plan.num_tokens + plan.behind)
        total = len(self._candidates.positions)
        self._count = round(ratio * total)
        undecided = 0 < self._count < total
        self._watches = policy.needs_attention and undecided
        self.checks = _checks(options, target.num_layers) if policy.needs_deviation and undecided else []
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
            **loads,
        )
        if self.checks and not self._watches:
            self.loader.expect_rest(self.checks[-1][0] + 1)
        self.placer = _Placer(self.loader, target, {layer for layer, _ in self.checks}, self._trace)
        self._selection, self._passes, self._watched = 0.0, 0.0, 0

    def _select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the mask of tokens that the policy chooses; raise InputError if a policy returns a malformed mask."""
        mask = self._policy.select(candidates, count)
        if mask.dtype != torch.bool or mask.shape != candidates.positions.shape:
            raise InputError(
                f"The selection policy {self._policy.name!r} returned {list(mask.shape)} of {mask.dtype} for "
                f"{len(candidates.positions)} tokens; it must be a boolean for each."
            )
        return mask

    def _run(
        self, kind: _Pass, positions: torch.Tensor, share: float, run: Callable[[torch.Tensor], object]
    ) -> Segments:
        """Call ``run`` with ``positions``, segment by segment: as many at a time as the engine and the target allow."""
        while len(positions):
            segment = Segment(kind, len(positions), share)
            most = yield segment
            part = self._target.segment(positions, most)
            with computing(self._trace, f"{kind} pass", len(part)):
                run(part)
            segment.done = len(part)
            self._passes += share
            self._watched += len(part) if kind == "question" else 0
            if kind in ("question", "dense"):
                self._selection += len(part) * share
            positions = positions[len(part) :]

    def _forward(self, positions: torch.Tensor) -> None:
        self._target.forward(positions, self.placer.before_layer)

    def compute_front(self) -> Segments:
        """Run the tokens in front of the first stale chunk through all layers; their KV equals a full prefill's."""
        if not len(self._front):
            return
        if self.checks:  # a check needs its layer's stored KV separately
            self.placer.before_layer(self.checks[-1][0])
        self.placer.place_rest()
        yield from self._run("front", self._front, 1.0, self._forward)

    def watch_question(self) -> Segments:
        """Measure the question's attention over stored KV, if the policy needs it; select if no check follows."""
        if not self._watches:
            return
        # The pass includes the text between the chunks: otherwise the question would attend to unwritten slots.
        between = int((self._forced <= self._candidates.positions[-1]).sum())
        asked = torch.cat([self._forced, self._behind])
        watch = self._target.attention(int(asked[between]), self.placer.before_layer)
        if not self.checks:  # a check needs its layer's stored KV separately
            self.placer.place_rest()
        yield from self._run("question", asked, 1.0, watch.run)
        seen = Fetch(self._target.all_reduce(watch.mean()))
        yield Segment("fetch")
        self._candidates = replace(self._candidates, attention=seen.result()[self._candidates.positions])
        if not self.checks:
            self._keep = self._select(self._candidates, self._count)

    def check(self, layer: int, width: float) -> Segments:
        """Run a dense pass of the remaining tokens up to ``layer``; keep ``ratio * width`` of all candidates."""
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
        if layer == self.checks[-1][0]:  # one wait covers both the placing and the measured values
            self.placer.place_rest()
        yield Segment("fetch")
        wanted = min(round(self._ratio * width * len(self._candidates.positions)), len(running.positions))
        chosen = self._select(replace(running, deviation=measured.result()), wanted)
        kept = self._keep.nonzero().squeeze(1)[chosen]
        self._keep = torch.zeros_like(self._keep)
        self._keep[kept] = True

    def recompute(self) -> Segments:
        """Run a sparse pass of the chosen tokens and all tokens without stored KV through all layers."""
        self._recomputed = self._candidates.positions[self._keep]
        positions = _merge(self._recomputed, self._forced)
        self.placer.place_rest()
        yield from self._run("sparse", positions, 1.0, self._forward)
        self.placer.before_layer(self._target.num_layers - 1)  # needed if no token is computed
        self._computed = len(self._front) + len(positions)

    def result(self) -> FuseResult:
        """Return the recomputed positions and the outcome."""
        plan, loader = self._plan, self.loader
        outcome = replace(
            plan.outcome(self._computed, self._recomputed.tolist(), self._selection, loader.loads(), self._unranked),
            reason=plan.reason + self._fallback,
            policy=self._name,
            ratio=self._ratio,
            load_s=loader.wait_s,
            blend_s=time.perf_counter() - self._began,
            loaded_bytes=loader.loaded_bytes,
            reads=loader.reads,
        )
        return FuseResult(self._recomputed, outcome, self._passes, self._watched)


def kv_deviation(fresh: LayerKV, stale: LayerKV) -> torch.Tensor:
    """Return the KV deviation ``[tokens]``: squared L2 distance of keys plus that of values, summed over KV heads, in fp32."""
    k = (fresh.k.float() - stale.k.float()).square().sum((0, 2))
    v = (fresh.v.float() - stale.v.float()).square().sum((0, 2))
    return k + v


class _Placer:
    """Places each layer once, when the first pass reaches it. Later passes use the layer as earlier passes left it."""

    def __init__(self, loader: LayerLoader, target: BlendTarget, remember: set[int], trace: Trace | None):
        self._loader, self._target, self._remember, self._trace = loader, target, remember, trace
        self._next = 0
        self._stale: dict[int, LayerKV] = {}
        self._await: Callable[[int], None] | None = None

    def place_rest(self) -> None:
        """Begin to place all remaining layers at once, if their KV and the target allow it."""
        if self._await is not None:  # all layers are under way
            return
        stored, waiting, begin = None, None, time.perf_counter()
        try:
            if (stored := self._loader.rest(self._next)) is not None:
                waiting = self._target.place_layers(stored)
        except Exception as error:  # placing layer by layer needs less memory
            _log.warning("Stored KV is placed layer by layer: %s: %s", type(error).__name__, error)
        # A rank that reads layer by layer would wait for the votes of the others.
        if self._target.agree(waiting is not None) and waiting is not None and stored is not None:
            self._await, self._target.placed = waiting, True
            self._loader.brought(stored)
            if self._trace is not None:
                layers = self._target.num_layers - self._next
                name = f"layers {self._next} to {self._target.num_layers - 1}"
                self._trace.add("loading", name, begin, tier="ram", bytes=stored.layer_bytes * layers)
            self._next = self._target.num_layers
        elif waiting is not None:  # the KV that is under way must arrive before the computed KV
            waiting(self._target.num_layers - 1)

    def settle(self) -> None:
        """Let all later work on the device wait for the KV that is under way."""
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
                return  # no rank has stored KV for this layer
            if layer in self._remember:
                placed = placed.moved()
            self._target.place(layer, placed.kv, placed.positions, placed.move)
            if layer in self._remember:
                self._stale[layer] = LayerKV(*(t[:, placed.stale_from :] for t in placed.kv))
        except Exception as error:  # any exception: the other ranks would wait for a rank that stops alone
            failure = error
        if self._target.agree(failure is None):
            return
        damage = self._target.agree(failure is None or isinstance(failure, UnusableSpanError))
        if failure is not None and isinstance(failure, UnusableSpanError) == damage:
            raise failure
        raise UnusableSpanError if damage else OtherRankError

    def stale(self, layer: int, tokens: int) -> LayerKV:
        # The prompt's last token is no candidate if its logits are wanted, though a stored chunk may end with it.
        return LayerKV(*(t[:, :tokens] for t in self._stale.pop(layer)))


def _checks(options: FuseOptions, num_layers: int) -> list[tuple[int, float]]:
    if options.check_layers[-1] >= num_layers:
        raise InputError(
            f"check_layers is {list(options.check_layers)}; this model's KV deviation can be checked at layers 1 to "
            f"{num_layers - 1}."
        )
    return list(zip(options.check_layers, options.widths, strict=True))


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
    """Return the tokens at ``mask``, ``[tokens]`` in host memory: a mask on the device would force a wait for it."""
    if bool(mask.all()):
        return kv
    tokens = sent(mask.nonzero().squeeze(1), kv.k.device)
    return LayerKV(kv.k.index_select(1, tokens), kv.v.index_select(1, tokens))


def _merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b]).sort().values
