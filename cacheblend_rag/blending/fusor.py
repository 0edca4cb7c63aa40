"""The fusor: place → dense pass → select → sparse pass, written once for every engine (paper section 4).

1. *Place*: stored KV goes to its positions, layer by layer, just before the layer is computed.
2. *Dense pass*: all tokens outside the exact prefix run up to the check layer, where fresh KV is compared with stored KV.
3. *Select*: the policy chooses the tokens to recompute; with several check layers the set narrows (gradual filtering).
4. *Sparse pass*: the chosen tokens and everything without stored KV run through all layers, from layer 0.

The passes are the model's own forward at given positions; the causal mask they use is ``kv_position <= query_position``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cacheblend_rag.blending.auto import AutoRatio
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.policies import policy as policy_named
from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy
from cacheblend_rag.blending.reads import DamagedSpanError
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV, join_tokens


class OtherRankError(Exception):
    """Another tensor-parallel rank could not go on, so that none does."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("another rank failed; its log says why")


@dataclass(frozen=True)
class BlendSchedule:
    """At which layers to measure KV deviation, and how many tokens to keep there.

    Attributes:
        check_layers: Ascending layer indices.
        widths: For each check layer, the set's size as a multiple of the recompute ratio; the last is 1.
    """

    check_layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class FuseResult:
    """What a blend did.

    Attributes:
        recomputed: Ascending positions of tokens with stored KV that were recomputed.
        policy: Name of the policy that chose them.
        ratio: The ratio it chose by.
        unranked: Whether static deviations were wanted, for policy or ratio, and a chunk had none.
        computed_tokens: All positions that went through all layers.
        selection_tokens: What choosing them cost besides: tokens of dense passes and of the question's pass, times the share of
            layers they went through.
        load_wait_s: Seconds the computation waited for stored KV.
        loaded_bytes: Bytes of stored KV read.
    """

    recomputed: torch.Tensor
    policy: str
    ratio: float
    unranked: bool
    computed_tokens: int
    selection_tokens: float
    load_wait_s: float
    loaded_bytes: int


def fuse(
    plan: BlendPlan, target: BlendTarget, policy: SelectionPolicy, ratio: float | AutoRatio, schedule: BlendSchedule
) -> FuseResult:
    """Do all of :func:`fuse_stepwise` at once."""
    steps = fuse_stepwise(plan, target, policy, ratio, schedule)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: FuseResult = end.value
            return result


def fuse_stepwise(
    plan: BlendPlan, target: BlendTarget, policy: SelectionPolicy, ratio: float | AutoRatio, schedule: BlendSchedule
) -> Generator[float, None, FuseResult]:
    """Build the KV cache of ``plan``'s prompt in ``target`` and keep the last position's logits there.

    Yields after every segment of a pass what it cost, in tokens times the share of layers they went through, so that an
    engine can do other work in between.

    Args:
        plan: What is stored; must use stored KV.
        target: The model.
        policy: Which tokens to recompute. Where a chunk has no static deviation, one that needs it gives way to the policy it
            names for that.
        ratio: Recompute ratio, of the tokens with stale KV; 0 is full KV reuse, 1 equals the full prefill. Or the rule that
            chooses it by the chunks' static deviations; where one has none, it is the lowest that the rule allows.
        schedule: Check layers, for policies that measure KV deviation.

    Raises:
        DamagedSpanError: Stored KV turned out damaged; the KV cache is unusable and the plan must be made anew.
        OtherRankError: Loading or placing KV failed on another tensor-parallel rank.
        InputError: The policy needs attention, which this model does not show, or a check layer lies outside the model.
    """
    fusor = _Fusor(plan, target, policy, ratio, schedule)
    with fusor.loader:
        yield from fusor.selecting(fusor.watch_question())
        for layer, width in fusor.checks:
            yield from fusor.selecting(fusor.check(layer, width))
        yield from fusor.recompute()
    return fusor.result()


class _Fusor:
    """One blend, step by step. ``keep`` says of each candidate whether it is still to be recomputed."""

    def __init__(
        self,
        plan: BlendPlan,
        target: BlendTarget,
        policy: SelectionPolicy,
        ratio: float | AutoRatio,
        schedule: BlendSchedule,
    ):
        wants_static = policy.needs_static or isinstance(ratio, AutoRatio)
        self._candidates = _candidates(plan, target.device, wants_static)
        # Where one rank cannot read a static deviation, none may use it: all must select the same tokens.
        self._unranked = wants_static and not target.agree(self._candidates.static is not None)
        if isinstance(ratio, AutoRatio):
            static = None if self._unranked else self._candidates.static
            ratio = ratio.least if static is None else ratio.choose(static)
        if self._unranked and policy.needs_static:
            policy = policy_named(policy.without_static)
        self._target, self._policy, self._ratio = target, policy, ratio
        self._forced = _forced(plan, self._candidates.positions, target.device)
        # Where the engine itself computes the question, its attention is wanted all the same.
        self._behind = torch.arange(plan.num_tokens, plan.num_tokens + plan.behind, device=target.device)
        total = len(self._candidates.positions)
        self._count = round(ratio * total)
        undecided = 0 < self._count < total
        self._watches = policy.needs_attention and undecided
        self.checks = _checks(schedule, target.num_layers) if policy.needs_deviation and undecided else []
        if self._watches or self.checks:
            self._keep = torch.ones(total, dtype=torch.bool, device=target.device)
        else:
            self._keep = _select_unmeasured(policy, self._candidates, self._count)
        all_recomputed = bool(self._keep.all()) and not (self._watches or self.checks)
        self.loader = LayerLoader(
            plan.exact,
            () if all_recomputed else plan.stale,
            target.rope,
            target.num_layers,
            target.device,
            # Below the first check layer the dense pass computes every token; the question's pass reads all layers.
            stale_from_layer=self.checks[0][0] if self.checks and not self._watches else 0,
        )
        self._placer = _Placer(self.loader, target, {layer for layer, _ in self.checks})
        self._computed, self._selection = 0, 0.0

    def selecting(self, steps: Iterator[float]) -> Iterator[float]:
        """Take ``steps``, and add up what they cost."""
        for cost in steps:
            self._selection += cost
            yield cost

    def watch_question(self) -> Generator[float, None, None]:
        """Measure the question's attention over stored KV, if the policy needs it; select, if nothing else is needed."""
        if not self._watches:
            return
        # Text between the chunks is run, too: without it the question would attend to slots that nothing was written to.
        between = int((self._forced <= self._candidates.positions[-1]).sum())
        asked = torch.cat([self._forced, self._behind])
        seen = yield from self._target.attention(asked, self._placer.before_layer, between)
        attention = self._target.all_reduce(seen)[self._candidates.positions]
        self._candidates = replace(self._candidates, attention=attention)
        if not self.checks:
            self._keep = self._policy.select(self._candidates, self._count)

    def check(self, layer: int, width: float) -> Generator[float, None, None]:
        """Dense pass of what is kept so far up to ``layer``; keep ``width`` times the ratio, of the highest KV deviation."""
        running = _subset(self._candidates, self._keep)
        between = self._forced[self._forced < self._candidates.positions[-1]]
        positions = _merge(running.positions, between)
        parts = []
        for segment in self._target.segments(positions):
            part = self._target.forward(segment, self._placer.before_layer, stop_layer=layer)
            assert part is not None
            parts.append(part)
            yield len(segment) * layer / self._target.num_layers
        fresh = _tokens_at(join_tokens(parts), torch.isin(positions, running.positions))
        stale = _tokens_at(self._placer.stale(layer), self._keep.nonzero().squeeze(1))
        deviation = self._target.all_reduce(kv_deviation(fresh, stale))
        wanted = min(round(self._ratio * width * len(self._candidates.positions)), len(running.positions))
        chosen = self._policy.select(replace(running, deviation=deviation), wanted)
        kept = self._keep.nonzero().squeeze(1)[chosen]
        self._keep = torch.zeros_like(self._keep)
        self._keep[kept] = True

    def recompute(self) -> Generator[float, None, None]:
        """Sparse pass of the chosen tokens and the forced set through all layers."""
        positions = _merge(self._recomputed, self._forced)
        for segment in self._target.segments(positions):
            self._target.forward(segment, self._placer.before_layer)
            yield len(segment)
        self._placer.before_layer(
            self._target.num_layers - 1
        )  # where nothing is computed, KV must be placed all the same
        self._computed = len(positions)

    @property
    def _recomputed(self) -> torch.Tensor:
        return self._candidates.positions[self._keep]

    def result(self) -> FuseResult:
        """Return what was done."""
        chosen = self._recomputed, self._policy.name, self._ratio, self._unranked
        return FuseResult(*chosen, self._computed, self._selection, self.loader.wait_s, self.loader.loaded_bytes)


def kv_deviation(fresh: LayerKV, stale: LayerKV) -> torch.Tensor:
    """Return the KV deviation ``[tokens]``: squared L2 distance of keys plus that of values, summed over KV heads, in fp32."""
    k = (fresh.k.float() - stale.k.float()).square().sum((0, 2))
    v = (fresh.v.float() - stale.v.float()).square().sum((0, 2))
    return k + v


class _Placer:
    """Places each layer once, when the first pass reaches it; later passes find it as the earlier ones left it."""

    def __init__(self, loader: LayerLoader, target: BlendTarget, remember: set[int]):
        self._loader, self._target, self._remember = loader, target, remember
        self._next = 0
        self._stale: dict[int, LayerKV] = {}

    def before_layer(self, layer: int) -> None:
        while self._next <= layer:
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        failure: Exception | None = None
        try:
            placed = self._loader.layer(layer)
            if placed is None:
                return  # nothing is stored for it, on no rank
            self._target.place(layer, placed.kv, placed.positions)
            if layer in self._remember:
                self._stale[layer] = LayerKV(*(t[:, placed.stale_from :] for t in placed.kv))
        except Exception as error:  # whatever it is: a rank that went alone would leave the others waiting for it
            failure = error
        if self._target.agree(failure is None):
            return
        damage = self._target.agree(failure is None or isinstance(failure, DamagedSpanError))
        if failure is not None and isinstance(failure, DamagedSpanError) == damage:
            raise failure
        raise DamagedSpanError(None) if damage else OtherRankError

    def stale(self, layer: int) -> LayerKV:
        return self._stale.pop(layer)


def _checks(schedule: BlendSchedule, num_layers: int) -> list[tuple[int, float]]:
    # A check at layer 0 would always see zero: its KV depends on the token and its position alone.
    if not schedule.check_layers or not all(0 < layer < num_layers for layer in schedule.check_layers):
        raise InputError(
            f"check_layers is {list(schedule.check_layers)}; this model's KV deviation can be checked at layers 1 to "
            f"{num_layers - 1}."
        )
    return list(zip(schedule.check_layers, schedule.widths, strict=True))


def _candidates(plan: BlendPlan, device: torch.device, with_static: bool) -> Candidates:
    """Return every token with stale KV; where logits are wanted the last token is none, since it must be computed."""
    last = plan.num_tokens - plan.needs_logits
    parts = [(i, s.start, min(s.end, last)) for i, s in enumerate(plan.stale)]
    static = [s.static_deviation() if with_static else None for s in plan.stale]
    known = [values[: b - a].to(device) for values, (_, a, b) in zip(static, parts, strict=True) if values is not None]
    return Candidates(
        _cat([torch.arange(a, b, device=device) for _, a, b in parts], device),
        _cat([torch.full((b - a,), i, device=device) for i, a, b in parts], device),
        _cat([torch.arange(b - a, device=device) for _, a, b in parts], device),
        static=None if len(known) < len(parts) else torch.cat([torch.zeros(0, device=device), *known]),
    )


def _forced(plan: BlendPlan, candidates: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the positions that are neither exact nor candidates: text, missing chunks, the question."""
    every = torch.arange(plan.exact_tokens, plan.num_tokens, device=device)
    return every[~torch.isin(every, candidates)]


def _select_unmeasured(policy: SelectionPolicy, candidates: Candidates, count: int) -> torch.Tensor:
    if not (policy.needs_deviation or policy.needs_attention):
        return policy.select(candidates, count)
    return torch.full_like(candidates.positions, count > 0, dtype=torch.bool)


def _subset(candidates: Candidates, keep: torch.Tensor) -> Candidates:
    attention = None if candidates.attention is None else candidates.attention[keep]
    static = None if candidates.static is None else candidates.static[keep]
    positions, chunk, offset = candidates.positions[keep], candidates.chunk[keep], candidates.offset[keep]
    return Candidates(positions, chunk, offset, attention=attention, static=static)


def _tokens_at(kv: LayerKV, tokens: torch.Tensor) -> LayerKV:
    return LayerKV(kv.k[:, tokens], kv.v[:, tokens])


def _merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b]).sort().values


def _cat(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64, device=device)
