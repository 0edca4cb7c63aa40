"""Decides which stored KV to load, and how much to recompute meanwhile: the loading controller (paper section 5.1).

Recomputing runs while stored KV loads, so the ratio can rise until recomputing takes as long as loading. If a device is
too slow, computing some of its chunks in place, or the whole prompt, is sooner than loading. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod
from typing import Self

from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan, joined_static
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import FuseOptions, ResolvedSettings, TextRatio, raised

SPENT = 0.05
"""Share of extra time to first token allowed in exchange for more recomputed tokens; users do not notice 5%."""
HICCUP_S = 0.05
"""Seconds that any read may be late: on a busy machine a late read says nothing about the next read."""
GAIN = 1.1
"""Factor by which a blend must be expected to be faster, unless the user asked for a blend."""
_BISECTIONS = 30
_MOST_CHOICES = 256


@dataclass(frozen=True)
class Located:
    """Says where the KV of one stored span of a prompt lies.

    Attributes:
        tokens: Number of tokens in the span.
        nbytes: Size of the stored KV of these tokens.
        tier: Name of the tier that holds the KV.
        exact: Whether the KV was computed in this very context, so that no token of the span is recomputed.
    """

    tokens: int
    nbytes: int
    tier: str
    exact: bool = False


@dataclass(frozen=True)
class Load:
    """Describes a prompt as the controller sees it.

    Attributes:
        spans: Stored spans, in the prompt's order.
        forced: Number of tokens without stored KV.
        least: Lowest ratio: the ratio that the model needs for good answers.
        most: Highest ratio that still helps.
        dense: Share of the layers that a dense pass of all stale tokens goes through; 0 without a dense pass.
        asked: Number of tokens behind the blend that the question's own pass runs besides the tokens without KV; None
            for a policy without such a pass.
        before: Number of tokens in front of all spans that have KV already (an engine's own prefix cache).
        waits_s: Seconds until a blend can begin, because other blends run first. An ordinary prefill takes turns with
            them.
        behind: Number of ``forced`` tokens behind the last chunk; a dense pass leaves them out.
        header: Header that chunks are computed behind, if its KV is stored. It is used with any chunk, and never alone.
        front: Number of ``forced`` tokens in front of the first stale span; no measuring pass runs them again.
    """

    spans: Sequence[Located]
    forced: int
    least: float
    most: float = 1.0
    dense: float = 0.0
    asked: int | None = None
    before: int = 0
    waits_s: float = 0.0
    behind: int = 0
    header: Located | None = None
    front: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens that have no KV yet."""
        header = 0 if self.header is None else self.header.tokens
        return self.forced + header + sum(span.tokens for span in self.spans)

    @property
    def context(self) -> int:
        """Return the length of the prompt."""
        return self.before + self.tokens


@dataclass(frozen=True)
class Decision:
    """Says how to serve a prompt.

    Attributes:
        used: For each span, whether its stored KV is used; the other spans are computed in place.
        ratio: Recompute ratio for the used spans that are not exact.
        seconds: Expected time to first token.
        load_s: Expected time of loading alone.
        compute_s: Expected time of computing alone.
        prefill_s: Expected time of an ordinary prefill, for comparison.
    """

    used: tuple[bool, ...]
    ratio: float
    seconds: float
    load_s: float
    compute_s: float
    prefill_s: float

    @property
    def blends(self) -> bool:
        """Return whether any stored KV is used."""
        return any(self.used)


@dataclass(frozen=True)
class Terms:
    """Holds the controller's inputs besides a prompt's plan; they travel with a request to the process that plans.

    Attributes:
        costs: Current costs of the model and the tiers.
        dense: See :class:`Load`.
        asks: Whether the policy measures the question's attention in a pass of its own.
        dense_unranked: Value of ``dense`` for the policy that chooses when a chunk has no static deviation; None if
            that is the same policy.
        asks_unranked: Value of ``asks`` for that other policy.
        more_unranked: Factor by which that other policy raises the ratio.
    """

    costs: Costs
    dense: float
    asks: bool = False
    dense_unranked: float | None = None
    asks_unranked: bool = False
    more_unranked: float = 1.0

    @classmethod
    def of(cls, costs: Costs | None, profile: ModelProfile, settings: ResolvedSettings, num_layers: int) -> Self | None:
        """Return the terms of a blend by ``settings`` of a model with ``profile``.

        Return None where the controller decides nothing: the settings say how to blend, or the costs are unknown.
        """
        if costs is None or not (costs.calibrated if settings.ratio == "auto" else settings.only_if_sooner):
            return None
        first = policy(settings.policy)
        dense = profile.dense_share(first, num_layers, settings.check_layers)
        if not first.needs_static or settings.ratio != "auto":  # a fixed ratio does not depend on the chunks
            return cls(costs, dense, first.needs_attention)
        second = policy(first.without_static)
        unranked = profile.dense_share(second, num_layers, settings.check_layers)
        more = second.effort / first.effort
        return cls(costs, dense, first.needs_attention, unranked, second.needs_attention, more)

    def wants_static(self, ratio: float | TextRatio) -> bool:
        """Return whether :func:`control` needs the chunks' static deviations."""
        return self.dense_unranked is not None or isinstance(ratio, TextRatio)


@dataclass(frozen=True)
class Choice:
    """Holds the controller's decision about a prompt, for the engine that blends the prompt.

    Attributes:
        in_place: End positions of the stored chunks that are computed in place.
        ratio: Lowest ratio to blend the other chunks by.
        words: Decision and expected times, appended to the plan's reason.
        expected_s: Expected time to first token.
        most_wait_s: Longest total wait for stored KV before it is computed in place: the expected loading time plus the
            time of doing without that KV. So waiting costs at most twice the necessary time.
    """

    in_place: frozenset[int]
    ratio: float
    words: str
    expected_s: float
    most_wait_s: float | None = None

    def applied_to(self, plan: BlendPlan) -> BlendPlan:
        """Return the plan that follows the decision and states it in its reason."""
        unused = [span for span in _chunks_of(plan) if span.end in self.in_place]
        return (
            plan.without(unused, plan.reason + self.words) if unused else replace(plan, reason=plan.reason + self.words)
        )

    def limits(self, options: FuseOptions) -> FuseOptions:
        """Return ``options`` with the ratio raised to the decision's and with its longest wait."""
        return replace(options, ratio=raised(options.ratio, self.ratio), most_wait_s=self.most_wait_s)


def decide(load: Load, costs: Costs) -> Decision:
    """Return how to serve a prompt soonest; among nearly equal choices, the choice that leaves the fewest tokens stale.

    The candidates are: all stored KV; all spans except the ones whose loading costs most for the computing it saves,
    with one more left out each time; no stored KV; and, for few spans, every number of spans from each tier. Tiers of
    unknown cost count as free: loading from them measures their cost.
    """
    arms = [Arm(load, costs, used) for used in _choices(load, costs)]
    limit = (1 + SPENT) * min(arm.seconds(load.least) for arm in arms)
    ratios = {arm: arm.highest_ratio(limit) for arm in arms if arm.seconds(load.least) <= limit}
    best = min(ratios, key=lambda arm: (arm.stale(ratios[arm]), arm.seconds(load.least)))
    ratio = ratios[best]
    prefill = costs.compute.seconds(load.tokens, load.context)
    return Decision(best.used, ratio, best.seconds(ratio), best.load_s, best.compute_s(ratio), prefill)


def choose(
    plan: BlendPlan, terms: Terms, settings: ResolvedSettings, ratio: float | TextRatio, waits_s: float = 0.0
) -> Choice:
    """Return the choice of :func:`control` for a ratio of ``"auto"``, and of :func:`blend_or_not` for a quality."""
    if settings.ratio == "auto":
        return control(plan, terms, ratio, waits_s)
    return blend_or_not(plan, terms, settings.ratio, waits_s)


def control(plan: BlendPlan, terms: Terms, ratio: float | TextRatio, waits_s: float = 0.0) -> Choice:
    """Return which stored KV of ``plan`` gives the soonest first token, and the lowest ratio to blend by.

    Positions before the plan's start cost nothing. ``ratio`` is the lowest ratio that the model needs, or the rule that
    computes it from the used chunks; ``waits_s``: see :class:`Load`.
    """
    spans = _chunks_of(plan)
    wanted = plan.candidates if terms.wants_static(ratio) else ()
    static = {span.start: span.static_deviation() for span in wanted}
    more = 1.0
    if terms.dense_unranked is not None and any(each is None for each in static.values()):
        more = terms.more_unranked
        terms = replace(terms, dense=terms.dense_unranked, asks=terms.asks_unranked)

    def least(used: Sequence[bool]) -> float:
        if not isinstance(ratio, TextRatio):
            return min(1.0, more * ratio)
        kept = [static[s.start] for s, use in zip(spans, used, strict=True) if use and s.start in static]
        # If a chunk has no static deviation, the blend cannot compute the ratio from the text either.
        return min(1.0, more * (ratio.least if (joined := joined_static(kept)) is None else ratio.choose(joined)))

    load = _load(plan, terms, least([True] * len(spans)), waits_s)
    found = decide(load, terms.costs)
    while (needed := least(found.used)) > found.ratio:  # the remaining chunks may need a higher ratio
        load = replace(load, least=needed)
        found = decide(load, terms.costs)
    at_hand = tuple(use and span.tier == "ram" for span, use in zip(load.spans, found.used, strict=True))
    most_wait_s = found.load_s + max(HICCUP_S, Arm(load, terms.costs, at_hand).seconds(found.ratio))
    expected = f"expected in {found.seconds:.3g} s, an ordinary prefill in {found.prefill_s:.3g} s"
    if all(found.used):
        return Choice(frozenset(), found.ratio / more, f" ({expected})", found.seconds, most_wait_s)
    in_place = frozenset(span.end for span, use in zip(spans, found.used, strict=True) if not use)
    what = (
        f"{len(in_place)} of them computed in place, which is sooner than loading them"
        if found.blends
        else "none of it is used"
    )
    return Choice(in_place, found.ratio / more, f"; {what} ({expected})", found.seconds, most_wait_s)


def blend_or_not(plan: BlendPlan, terms: Terms, ratio: float, waits_s: float = 0.0) -> Choice:
    """Return whether to blend all stored chunks by ``ratio``, or to use the exact prefix alone and compute the rest.

    Blend only if the blend is expected to be faster by the factor :data:`GAIN`: a blend costs accuracy, the exact
    prefix does not.
    """
    load = _load(plan, terms, ratio, waits_s)
    blend, exact = (
        Arm(load, terms.costs, used)
        for used in (tuple(True for _ in load.spans), tuple(span.exact for span in load.spans))
    )
    seconds, without_s = blend.seconds(ratio), exact.seconds(ratio)
    if not plan.stale or GAIN * seconds <= without_s:
        return Choice(frozenset(), ratio, "", seconds)
    words = (
        f"; they are computed, since a blend is expected to take {seconds:.3g} s and computing them {without_s:.3g} s"
    )
    return Choice(frozenset(span.end for span in plan.stale), ratio, words, without_s)


def _load(plan: BlendPlan, terms: Terms, least: float, waits_s: float) -> Load:
    """Return a plan as the controller sees it."""
    spans = _chunks_of(plan)
    return Load(
        [_located(span, span in plan.exact) for span in spans],
        plan.num_tokens - plan.start - plan.stored_tokens,
        least,
        1.0,
        terms.dense,
        plan.behind if terms.asks else None,
        plan.start,
        waits_s,
        plan.num_tokens - max((span.end for span in spans), default=plan.start),
        next((_located(span, True) for span in plan.exact if span.chunk is None), None),
        plan.stale[0].start - plan.exact_tokens if plan.stale else 0,
    )


def _located(span: StoredSpan, exact: bool) -> Located:
    tokens, kv = span.end - span.start, span.kv
    return Located(tokens, kv.stored_nbytes * tokens // kv.num_tokens, kv.tier, exact)


def _chunks_of(plan: BlendPlan) -> list[StoredSpan]:
    return [span for span in (*plan.exact, *plan.stale) if span.chunk is not None]


class Arm:
    """Estimates the times of a prompt that uses the stored KV of some spans and computes the other spans."""

    def __init__(self, load: Load, costs: Costs, used: tuple[bool, ...]):
        self._load, self._costs, self.used = load, costs, used
        kept = [span for span, use in zip(load.spans, used, strict=True) if use]
        if kept and load.header is not None:
            kept.append(load.header)
        self._stale = sum(span.tokens for span in kept if not span.exact)
        self._placed = sum(span.tokens for span in kept)
        self._in_place = load.tokens - self._placed
        self._checked = self._in_place + self._stale - load.behind
        checked = round(load.dense * costs.layers) + 1
        self.load_s, self._first_s, self._checked_s = (_load_s(kept, costs, n) for n in (costs.layers, 1, checked))

    def stale(self, ratio: float) -> float:
        """Return how many tokens stay stale at ``ratio``."""
        return (1 - ratio) * self._stale

    def compute_s(self, ratio: float) -> float:
        """Return the seconds of computing alone."""
        return sum(self._passes_s(ratio))

    def seconds(self, ratio: float) -> float:
        """Return the time to first token.

        Loading and computing overlap, except for the first layer's loading or the last layer's computation.
        """
        question, dense, sparse = self._passes_s(ratio)
        if not any(self.used):
            return sparse + min(sparse, self._load.waits_s)
        if question:  # the question's pass reads all layers, so no later pass waits for a load
            seen = max(self._first_s + question, self.load_s + question / self._costs.layers)
            return self._load.waits_s + seen + dense + sparse
        begin = max(dense, self._checked_s) if dense else self._first_s  # a dense pass needs no stale KV until its end
        return self._load.waits_s + max(begin + sparse, self.load_s + sparse / self._costs.layers)

    def _passes_s(self, ratio: float) -> tuple[float, float, float]:
        """Return the seconds of the question's own pass, of the dense pass and of the sparse pass."""
        compute, context, asked = self._costs.compute, self._load.context, self._load.asked
        question = dense = apart = 0.0
        front = 0
        if self._stale and 0 < ratio < 1 and (asked is not None or self._load.dense):
            front = self._load.front
            apart = compute.seconds(front, self._load.before + front)
            question = 0.0 if asked is None else compute.seconds(self._in_place - front + asked, context)
            dense = self._load.dense * compute.seconds(self._checked - front, context)
        chosen = self._in_place - front + ratio * self._stale
        return question, dense, apart + compute.seconds(chosen, context, self._placed)

    def highest_ratio(self, limit: float) -> float:
        """Return the highest allowed ratio whose time to first token is within ``limit`` seconds."""
        low, high = self._load.least, max(self._load.least, self._load.most)
        if self.seconds(high) <= limit:
            return high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) <= limit else (low, middle)
        return low


def _load_s(spans: Sequence[Located], costs: Costs, layers: int) -> float:
    """Return the seconds until the first ``layers`` layers of ``spans`` are loaded. Tiers are read one by one."""
    total = 0.0
    for tier in {span.tier for span in spans} & set(costs.tiers):
        there = [span for span in spans if span.tier == tier]
        nbytes = sum(span.nbytes for span in there) * layers / costs.layers
        total += costs.tiers[tier].seconds(nbytes, len(there) * layers)
    return total


def _choices(load: Load, costs: Costs) -> list[tuple[bool, ...]]:
    """Return the sets of spans to try: all, one less each time by price, none; for few spans any number of a kind."""

    def price(index: int) -> float:
        span = load.spans[index]
        spared = span.tokens * (1.0 if span.exact else 1 - load.least)
        return _load_s([span], costs, costs.layers) / spared if spared else float("inf")

    every = range(len(load.spans))
    order = sorted(every, key=price, reverse=True)
    used = [set(order[dropped:]) for dropped in range(len(order) + 1)]
    parts = _parts_of_kinds(load.spans)
    if prod(map(len, parts)) <= _MOST_CHOICES:
        used += [set(chain.from_iterable(choice)) for choice in product(*parts)]
    return list(dict.fromkeys(tuple(i in chosen for i in every) for chosen in used))


def _parts_of_kinds(spans: Sequence[Located]) -> list[list[list[int]]]:
    """Return the subsets to try for each kind (tier, exact or not): the longest or the shortest spans of the kind."""
    kinds: dict[tuple[str, bool], list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda i: spans[i].tokens):
        kinds.setdefault((spans[index].tier, spans[index].exact), []).append(index)
    return [
        [members[first:] for first in range(len(members) + 1)] + [members[:end] for end in range(1, len(members))]
        for members in kinds.values()
    ]
