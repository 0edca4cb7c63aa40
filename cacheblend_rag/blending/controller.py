"""Decides which stored KV to load, and how much to recompute meanwhile: the loading controller (paper section 5.1).

Recomputing runs while stored KV loads, so the ratio can rise until recomputing takes as long as loading. If a device is
too slow, computing some of its chunks in place, or the whole prompt, is sooner than loading. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import product

from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan, joined_static
from cacheblend_rag.blending.policies import SelectionPolicy, possible
from cacheblend_rag.blending.settings import FuseOptions, TextRatio

SPENT = 0.05
"""Share of extra time to first token allowed in exchange for more recomputed tokens; users do not notice 5%."""
HICCUP_S = 0.05
"""Seconds that any read may be late: on a busy machine a late read says nothing about the next read."""
GAIN = 1.1
"""Factor by which a blend must be expected to be faster, unless the user asked for a blend."""
_BISECTIONS = 30
_FEW = 6  # up to so many spans, every set of spans is a candidate


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
        return plan.without(unused, plan.reason + self.words)


class Decision:
    """Says how to serve a prompt, and estimates how long that takes.

    Attributes:
        used: For each span, whether its stored KV is used; the other spans are computed in place.
        ratio: Recompute ratio for the used spans that are not exact.
        stale: Number of tokens in the used spans that are not exact.
        load_s: Expected time of loading alone.
    """

    def __init__(self, load: Load, costs: Costs, used: Sequence[bool], ratio: float):
        self._load, self._costs, self.used, self.ratio = load, costs, tuple(used), ratio
        kept = [span for span, use in zip(load.spans, used, strict=True) if use]
        if kept and load.header is not None:
            kept.append(load.header)
        self.stale = sum(span.tokens for span in kept if not span.exact)
        self._placed = sum(span.tokens for span in kept)
        self._in_place = load.tokens - self._placed
        checked = round(load.dense * costs.layers) + 1
        self.load_s, self._first_s, self._checked_s = (_load_s(kept, costs, n) for n in (costs.layers, 1, checked))

    @property
    def blends(self) -> bool:
        """Return whether any stored KV is used."""
        return any(self.used)

    @property
    def compute_s(self) -> float:
        """Return the expected time of computing alone."""
        return sum(self._passes_s())

    @property
    def prefill_s(self) -> float:
        """Return the expected time of an ordinary prefill, for comparison."""
        return self._costs.compute.seconds(self._load.tokens, self._load.context)

    @property
    def seconds(self) -> float:
        """Return the expected time to first token.

        Loading and computing overlap, except for the first layer's loading or the last layer's computation.
        """
        question, dense, sparse = self._passes_s()
        if not self.blends:
            return sparse + min(sparse, self._load.waits_s)
        if question:  # the question's pass reads all layers, so no later pass waits for a load
            seen = max(self._first_s + question, self.load_s + question / self._costs.layers)
            return self._load.waits_s + seen + dense + sparse
        begin = max(dense, self._checked_s) if dense else self._first_s  # a dense pass needs no stale KV until its end
        return self._load.waits_s + max(begin + sparse, self.load_s + sparse / self._costs.layers)

    def _passes_s(self) -> tuple[float, float, float]:
        """Return the seconds of the question's own pass, of the dense pass and of the sparse pass."""
        load, compute, context = self._load, self._costs.compute, self._load.context
        question = dense = apart = 0.0
        front = 0
        if self.stale and 0 < self.ratio < 1 and (load.asked is not None or load.dense):
            front = load.front
            apart = compute.seconds(front, load.before + front)
            if load.asked is not None:
                watched = self._in_place - front + load.asked
                question = compute.seconds(watched, context, watched=watched)
            dense = load.dense * compute.seconds(self._in_place - front + self.stale - load.behind, context)
        chosen = self._in_place - front + self.ratio * self.stale
        return question, dense, apart + compute.seconds(chosen, context, self._placed)

    def raised(self, limit_s: float) -> Decision:
        """Return the decision with the highest ratio whose time to first token is within ``limit_s``."""
        low, high = self._at(self.ratio), self._at(1.0)
        if high.seconds <= limit_s:
            return high
        for _ in range(_BISECTIONS):
            middle = self._at((low.ratio + high.ratio) / 2)
            low, high = (middle, high) if middle.seconds <= limit_s else (low, middle)
        return low

    def _at(self, ratio: float) -> Decision:
        other = copy(self)
        other.ratio = ratio
        return other


def decide(load: Load, costs: Costs) -> Decision:
    """Return how to serve a prompt soonest, recomputing as many tokens as cost hardly any time.

    The candidates are all stored KV; all spans except the ones whose loading costs most for the computing it saves,
    with one more left out each time; no stored KV; and, of few spans, every set. Exact KV alone, or none, is preferred
    to a blend that is hardly sooner. Tiers of unknown cost count as free: loading from them measures their cost.
    """

    def price(index: int) -> float:
        span = load.spans[index]
        spared = span.tokens * (1.0 if span.exact else 1 - load.least)
        return _load_s([span], costs, costs.layers) / spared if spared else float("inf")

    count = len(load.spans)
    order = sorted(range(count), key=price, reverse=True)
    sets: list[Sequence[bool]] = [[index in order[dropped:] for index in range(count)] for dropped in range(count + 1)]
    if count <= _FEW:
        sets += product((True, False), repeat=count)
    found = [Decision(load, costs, used, load.least) for used in sets]
    seconds = {each: each.seconds for each in found}
    limit_s = (1 + SPENT) * min(seconds.values())
    near = [each for each in found if seconds[each] <= limit_s]
    return min(near, key=lambda each: (each.stale > 0, seconds[each])).raised(limit_s)


def _load_s(spans: Sequence[Located], costs: Costs, layers: int) -> float:
    """Return the seconds until the first ``layers`` layers of ``spans`` are loaded. Tiers are read one by one."""
    total = 0.0
    for tier in {span.tier for span in spans} & set(costs.tiers):
        there = [span for span in spans if span.tier == tier]
        nbytes = sum(span.nbytes for span in there) * layers / costs.layers
        total += costs.tiers[tier].seconds(nbytes, len(there) * layers)
    return total


def controlled(costs: Costs | None, options: FuseOptions) -> Costs | None:
    """Return the costs by which to :func:`choose` for a prompt with ``options``.

    Return None where the controller decides nothing: the request says how to blend, or the costs are unknown.
    """
    if costs is not None and (costs.calibrated if options.auto else options.quality in ("high", "fast")):
        return costs
    return None


def needs_static(options: FuseOptions) -> bool:
    """Return whether :func:`choose` needs the chunks' static deviations."""
    return options.auto and (options.policy.needs_static or isinstance(options.ratio, TextRatio))


def choose(plan: BlendPlan, costs: Costs, options: FuseOptions, waits_s: float = 0.0) -> Choice:
    """Return which stored KV of ``plan`` to use, and the lowest ratio to blend by.

    Positions before the plan's start cost nothing. If the controller may choose the ratio, the choice is the one of the
    soonest first token; for a quality, to use all stored chunks or the exact prefix alone.

    Args:
        plan: Plan of the prompt.
        costs: Result of :func:`controlled`.
        options: Decisions about the prompt's blend; a rule for the ratio computes the ratio from the used chunks.
        waits_s: See :class:`Load`.
    """
    return (_soonest if options.auto else _blend_or_not)(plan, costs, options, waits_s)


def _soonest(plan: BlendPlan, costs: Costs, options: FuseOptions, waits_s: float) -> Choice:
    spans, wanted, ratio = _chunks_of(plan), options.policy, options.ratio
    ranked = plan.candidates if needs_static(options) else ()
    static = {span.start: span.static_deviation() for span in ranked}
    chosen = possible(wanted, all(each is not None for each in static.values()), True)
    more = chosen.effort / wanted.effort

    def least(used: Sequence[bool]) -> float:
        if not isinstance(ratio, TextRatio):
            return min(1.0, more * ratio)
        kept = [static[s.start] for s, use in zip(spans, used, strict=True) if use and s.start in static]
        # If a chunk has no static deviation, the blend cannot compute the ratio from the text either.
        return min(1.0, more * (ratio.least if (joined := joined_static(kept)) is None else ratio.choose(joined)))

    load = _load(plan, costs, options, chosen, least([True] * len(spans)), waits_s)
    found = decide(load, costs)
    while (needed := least(found.used)) > found.ratio:  # the remaining chunks may need a higher ratio
        load = replace(load, least=needed)
        found = decide(load, costs)
    at_hand = [use and span.tier == "ram" for span, use in zip(load.spans, found.used, strict=True)]
    most_wait_s = found.load_s + max(HICCUP_S, Decision(load, costs, at_hand, found.ratio).seconds)
    in_place = frozenset(span.end for span, use in zip(spans, found.used, strict=True) if not use)
    what = ""
    if in_place and found.blends:
        what = f"; {len(in_place)} of them computed in place, which is sooner than loading them"
    elif in_place:
        what = "; none of it is used"
    words = f"{what} (expected in {found.seconds:.3g} s, an ordinary prefill in {found.prefill_s:.3g} s)"
    return Choice(in_place, found.ratio / more, words, found.seconds, most_wait_s)


def _blend_or_not(plan: BlendPlan, costs: Costs, options: FuseOptions, waits_s: float) -> Choice:
    """Return whether to blend all stored chunks, or to use the exact prefix alone and compute the rest.

    Blend only if the blend is expected to be faster by the factor :data:`GAIN`: a blend costs accuracy, the exact
    prefix does not.
    """
    ratio = options.ratio
    assert not isinstance(ratio, TextRatio)  # only the controller computes a ratio by a rule
    load = _load(plan, costs, options, options.policy, ratio, waits_s)
    seconds = Decision(load, costs, [True] * len(load.spans), ratio).seconds
    without_s = Decision(load, costs, [span.exact for span in load.spans], ratio).seconds
    if not plan.stale or GAIN * seconds <= without_s:
        return Choice(frozenset(), ratio, "", seconds)
    words = (
        f"; they are computed, since a blend is expected to take {seconds:.3g} s and computing them {without_s:.3g} s"
    )
    return Choice(frozenset(span.end for span in plan.stale), ratio, words, without_s)


def _load(
    plan: BlendPlan, costs: Costs, options: FuseOptions, chosen: SelectionPolicy, least: float, waits_s: float
) -> Load:
    """Return a plan as the controller sees it if the policy ``chosen`` selects."""
    spans = _chunks_of(plan)
    return Load(
        [_located(span, span in plan.exact) for span in spans],
        plan.num_tokens - plan.start - plan.stored_tokens,
        least,
        options.check_layers[0] / costs.layers if chosen.needs_deviation else 0.0,
        plan.behind if chosen.needs_attention else None,
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
    return [span for span in plan.spans if span.chunk is not None]
