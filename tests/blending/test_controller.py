"""The loading controller against every possible choice, on costs made up by hypothesis."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
import torch
from cacheblend_lab.bench.controller import ControllerSettings, bench_controller, simulate, simulate_one
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blending.controller import SPENT, Decision, Load, Located, choose, decide
from cacheblend_rag.blending.costs import ComputeCost, Computed, Costs, MeasuredCost, TierCost
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions, TextRatio
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store.events import TierReads
from cacheblend_rag.store.kv import ChunkKV

COMPUTE = ComputeCost(0.0, 1e-4, 0.0)  # 0.1 ms a token
SHARE = st.floats(0.01, 0.6)


def costs(layers: int = 32, **rates: float) -> Costs:
    """Costs of tiers without latency, in bytes per second."""
    return Costs(layers, COMPUTE, {name: TierCost(0.0, rate) for name, rate in rates.items()})


def chunks(*tiers: str, tokens: int = 500, nbytes: int = 1000) -> list[Located]:
    """Chunks in these tiers, the first of them exact; a token has two bytes."""
    return [Located(tokens, nbytes, tier, exact=i == 0) for i, tier in enumerate(tiers)]


def test_fast_storage_leads_to_the_lowest_ratio_plus_a_small_allowance() -> None:
    load = Load(chunks(*["ram"] * 5), forced=50, least=0.1)
    found = decide(load, costs(ram=1e9))
    assert all(found.used)
    # 50 + 10% of 2000 tokens take 25 ms; SPENT allows 5% more.
    assert found.ratio == pytest.approx((250 * (1 + SPENT) - 50) / 2000, rel=1e-3)
    assert found.seconds < 0.027 < found.prefill_s == pytest.approx(0.255)


def test_the_ratio_rises_until_recomputing_takes_as_long_as_loading() -> None:
    load = Load(chunks("disk", "disk"), forced=50, least=0.1)
    found = decide(load, costs(1000, disk=2000 / 0.04))  # 40 ms to load, 10 ms to recompute the lowest ratio
    assert all(found.used)  # computing the second chunk in place would take 55 ms
    assert found.load_s == pytest.approx(0.04)
    assert found.compute_s == pytest.approx(found.load_s, rel=1.1 * SPENT)
    assert 0.69 < found.ratio < 0.75


def test_some_of_many_slow_chunks_are_computed_while_the_rest_are_loaded() -> None:
    found = decide(Load(chunks(*["disk"] * 5), 50, 0.1), costs(1000, disk=5000 / 0.1))
    assert found.used == (True, False, True, True, True)  # the exact chunk spares the most
    assert found.seconds < 0.1 == pytest.approx(costs(1000, disk=5000 / 0.1).tiers["disk"].seconds(5000, 5))


def test_the_ratio_never_falls_below_the_least_that_the_model_needs() -> None:
    for rate in np.geomspace(1e2, 1e9, 15):
        found = decide(Load(chunks(*["disk"] * 5), 50, least=0.2), costs(disk=float(rate)))
        assert 0.2 <= found.ratio <= 1


def test_the_controller_loads_nothing_from_a_device_slower_than_computing() -> None:
    found = decide(Load(chunks(*["disk"] * 5), 50, 0.1), costs(disk=100.0))
    assert not found.blends
    assert found.seconds == pytest.approx(found.prefill_s)


def test_chunks_on_a_slow_device_are_computed_while_those_in_ram_are_used() -> None:
    found = decide(Load(chunks("ram", "disk", "ram", "ram", "ram"), 50, 0.1), costs(ram=1e9, disk=1e3))
    assert found.used == (True, False, True, True, True)


def test_a_dense_pass_makes_a_blend_more_expensive() -> None:
    spans, known = chunks(*["ram"] * 5), costs(ram=1e9)
    with_pass = decide(Load(spans, 50, 0.1, dense=0.5), known)
    assert with_pass.compute_s == pytest.approx(0.5 * 0.205 + decide(Load(spans, 50, 0.1), known).compute_s, rel=0.3)


def test_a_policy_that_watches_the_question_pays_for_an_extra_pass_behind_all_layers() -> None:
    known = Costs(4, COMPUTE, {"ram": TierCost(0.0, 1e12), "disk": TierCost(0.0, 2000 / 0.04)})
    plan = planned(("ram", 10), ("ram", 10))
    asked, unasked = choose(plan, known, auto(0.1, "static-query")), choose(plan, known, auto(0.1))
    # The 10 tokens of the question run once more; tokens that an engine computes behind a blend do, too.
    assert asked.expected_s == pytest.approx(COMPUTE.seconds(20 + 200 * asked.ratio, 0), rel=0.01)
    assert unasked.expected_s == pytest.approx(COMPUTE.seconds(10 + 200 * unasked.ratio, 0), rel=0.01)
    further = choose(replace(plan, behind=30), known, auto(0.1, "static-query"))
    assert further.expected_s == pytest.approx(COMPUTE.seconds(50 + 200 * further.ratio, 0), rel=0.01)
    # No token is chosen before all KV is there: only the question's last layer hides loading.
    slow = Decision(Load(chunks("disk", "disk"), 50, 0.1, asked=0), known, [True, True], 0.1)
    assert slow.seconds == pytest.approx(0.04 + COMPUTE.seconds(50, 0) / 4 + COMPUTE.seconds(100, 0), rel=0.01)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.sampled_from(["ram", "nvme", "net"]), st.booleans()), min_size=1, max_size=6
    ),
    st.integers(1, 400),
    SHARE,
    st.sampled_from([0.0, 0.0, 0.25]),
    st.tuples(*(st.floats(4, 10),) * 3),
    st.floats(0, 1e-3),
    st.integers(8, 80),
    st.sampled_from([0.0, 1e-6, 1e-5]),
)
def test_no_alternative_choice_is_much_faster(parts, forced, least, dense, rates, latency, layers, placed_s) -> None:
    known = Costs(
        layers,
        ComputeCost(1e-4, 2e-5, 1e-9, placed_s),
        {
            name: TierCost(latency, 10.0**rate, 1 << 20)
            for name, rate in zip(("ram", "nvme", "net"), rates, strict=True)
        },
    )
    load = Load([Located(n, n * 1000, tier, exact) for n, tier, exact in parts], forced, least, dense=dense)
    found = decide(load, known)
    took = simulate_one(load, known, found.used, found.ratio)
    every = np.array(list(product((False, True), repeat=len(parts))))
    best = float(simulate(load, known, every, np.array([[least]])).min())
    # A chunk is used whole or not at all; a formula makes the choice, and simulated events time it.
    assert took <= 1.25 * best
    assert least <= found.ratio <= 1


def test_the_bench_grid_stays_within_a_tenth_of_the_best() -> None:
    for ratio, dense in ((0.05, 0), (0.15, 2)):
        found = bench_controller(ControllerSettings(ratio=ratio, dense=dense, bandwidths=4, chunks=(1, 4, 16)))
        assert found["worst_regret"] <= 1.1
        assert {p["used"] == 0 for p in found["points"]} == {True, False}  # slow devices are unused


def test_simulated_times_are_the_sum_of_reads_and_computation() -> None:
    known = Costs(2, ComputeCost(0.0, 0.01, 0.0), {"disk": TierCost(0.5, 100.0)})
    load = Load([Located(10, 400, "disk"), Located(10, 400, "disk")], 10, 0.0)
    # Each layer takes two reads one after the other, 1 s, and 400 bytes, 4 s. Then come 10 tokens at 5 ms a layer.
    assert simulate_one(load, known, (True, True), 0.0) == pytest.approx(5 + 5 + 0.05)
    assert simulate_one(load, known, (True, False), 0.0) == pytest.approx(2.5 + 2.5 + 0.1)
    assert simulate_one(load, known, (False, False), 0.0) == pytest.approx(0.3)


def test_parallel_reads_wait_for_their_first_bytes_together() -> None:
    tier = TierCost(0.1, 1000.0, at_once=4)
    waits = [tier.seconds(0, reads) for reads in (0, 1, 4, 5, 9)]
    assert waits == pytest.approx([0.0, 0.1, 0.1, 0.2, 0.3])
    assert tier.seconds(500, 5) == pytest.approx(0.7)


def test_observations_move_the_costs_to_the_measured_times() -> None:
    known = costs(disk=1e6)
    for _ in range(40):
        reads = {"disk": TierReads(1000, 1, 1000 / 2e5), "new": TierReads(1000, 1, 0.5)}
        known = known.after(MeasuredCost((Computed(100, 1000, 0.03),), reads, waited_s=1.0))
    assert known.tiers["disk"].bytes_per_s == pytest.approx(2e5, rel=0.01)
    assert known.compute.seconds(100, 1000) == pytest.approx(0.03, rel=0.01)
    assert known.tiers["new"].bytes_per_s == pytest.approx(2000)


def test_reads_that_delayed_no_prompt_do_not_raise_the_cost_of_their_device() -> None:
    known = costs(disk=1e6)
    for _ in range(40):
        known = known.loaded("disk", TierReads(1000, 1, 0.5), 0.0)  # 500 times as long, beside a long computation
    assert known.tiers["disk"].bytes_per_s == 1e6
    waited = known.loaded("disk", TierReads(1000, 1, 0.5), 1e-3)  # a millisecond more than expected
    assert waited.tiers["disk"].bytes_per_s == pytest.approx(1e6 / 1.2)
    faster = known.loaded("disk", TierReads(1000, 1, 1e-4), 0.0)
    assert faster.tiers["disk"].bytes_per_s > 1e6


def test_placing_stored_kv_adds_to_the_expected_time() -> None:
    known = Costs(2, ComputeCost(0.0, 0.01, 0.0, 0.002), {"disk": TierCost(0.0, 1e12)})
    assert known.compute.seconds(10, 100, 50) == pytest.approx(0.2)
    load = Load([Located(100, 400, "disk")], 10, 0.0)
    assert decide(load, known).used == (True,)
    assert Decision(load, known, [True], 0.0).seconds == pytest.approx(0.3)
    assert simulate_one(load, known, (True,), 0.0) == pytest.approx(0.3)
    dear = replace(known, compute=replace(known.compute, per_placed_s=0.02))  # placing costs more than computing
    assert decide(load, dear).used == (False,)
    assert dear.compute.scaled(2).per_placed_s == 0.04


def test_one_very_slow_read_changes_the_costs_little() -> None:
    hour = TierReads(1000, 1, 3600.0)
    known = costs(disk=1e6).loaded("disk", hour, 3600.0).computed(Computed(100, 1000, 3600.0))
    assert known.tiers["disk"].bytes_per_s > 0.6e6
    assert known.compute.per_token_s < 1.7e-4


def test_the_first_prompt_replaces_the_costs_of_a_gate_that_stalled() -> None:
    stalled = Costs(12, COMPUTE.scaled(200.0), {}, calibrated=False)
    after = stalled.computed(Computed(100, 1000, COMPUTE.seconds(100, 1000)))
    assert after.compute.per_token_s == pytest.approx(COMPUTE.per_token_s)
    late = Computed(100, 1000, 2 * COMPUTE.seconds(100, 1000))
    assert after.computed(late).compute.per_token_s == pytest.approx(1.5 * COMPUTE.per_token_s)
    for _ in range(20):
        after = after.computed(Computed(100, 1000, COMPUTE.seconds(100, 1000)))
    assert after.computed(late).compute.per_token_s == pytest.approx(1.2 * COMPUTE.per_token_s, rel=0.01)


@pytest.mark.parametrize("busy", [1.0, 30.0])
def test_a_prefill_is_expected_at_the_speed_of_the_passes_that_it_is_compared_with(busy: float) -> None:
    known = Costs(12, COMPUTE, {}, calibrated=False)
    ran = Computed(100, 1000, busy * COMPUTE.seconds(100, 1000))
    assert known.prefill_s(1000, 1000, [ran]) == pytest.approx(busy * COMPUTE.seconds(1000, 1000))
    assert known.prefill_s(1000, 1000, []) == COMPUTE.seconds(1000, 1000), "nothing was measured"


def test_costs_survive_json() -> None:
    known = Costs(12, ComputeCost(0.1, 0.2, 0.3), {"disk": TierCost(0.01, 1e9, 4)})
    assert Costs.from_json(asdict(known)) == known
    for broken in ({}, {"layers": 1, "compute": {}, "tiers": {}}, {"layers": 1, "compute": 3, "tiers": []}):
        with pytest.raises(InputError, match="store calibrate"):
            Costs.from_json(broken)


class Ranked(ChunkKV):
    """An entry of ``tokens`` with only a size, a tier and the number of deviating tokens."""

    def __init__(self, tier: str, tokens: int, deviate: int | None):
        static = None if deviate is None else (torch.arange(tokens) < deviate).float()
        super().__init__((), 0, tier, static)
        self.num_tokens, self.stored_nbytes = tokens, 1000 * tokens


def planned(*parts: tuple[str, int | None]) -> BlendPlan:
    """A prompt of chunks of 100 tokens and a question of 10, given each chunk's tier and how many of its tokens deviate."""
    made = [Chunk(str(i), "", tuple(range(i, i + 100))) for i in range(len(parts))]
    kv = [Ranked(tier, 100, deviate) for tier, deviate in parts]
    spans = tuple(StoredSpan(100 * i, 100 * i + 100, kv[i], chunk) for i, chunk in enumerate(made))
    return BlendPlan(100 * len(parts) + 10, (), spans, "")


def auto(ratio: float | TextRatio, named: str = "static") -> FuseOptions:
    """Return the options of a request for the controller's ratio, with KV deviation measured at layer 2."""
    return FuseOptions(policy(named), ratio, (2,), auto=True)


def test_the_ratio_follows_from_the_loaded_chunks_and_not_from_those_computed_in_place() -> None:
    known = Costs(8, COMPUTE, {"ram": TierCost(0, 1e12), "disk": TierCost(0, 1e3)})
    rule = TextRatio(0.1, 0.0)
    every = choose(planned(("ram", 40), ("ram", 10)), known, auto(rule))
    assert every.in_place == frozenset()
    assert every.ratio == pytest.approx(0.25 * (1 + SPENT), rel=0.02)  # 50 of 200
    few = choose(planned(("ram", 10), ("disk", 90)), known, auto(rule))  # the disk takes 100 s
    assert few.in_place == {200}
    assert few.expected_s == pytest.approx((10 + 100 + 100 * few.ratio) * COMPUTE.per_token_s)
    many = choose(planned(("ram", 55), ("disk", 5)), known, auto(rule))  # 60 of 200, and 55 of the 100 loaded tokens
    assert many.in_place == {200}
    assert many.ratio >= 0.55
    assert many.expected_s == pytest.approx((10 + 100 + 100 * many.ratio) * COMPUTE.per_token_s)


def test_a_chunk_without_static_deviation_is_costed_with_the_policy_that_replaces_static() -> None:
    known = Costs(8, COMPUTE, {"ram": TierCost(0, 1e12)})
    ranked, unranked = (choose(planned(("ram", 10), ("ram", n)), known, auto(0.1)) for n in (10, None))
    assert ranked.expected_s == pytest.approx(COMPUTE.seconds(10 + 200 * ranked.ratio, 0), rel=0.01)
    tokens = 10 + 0.25 * 200 + 2 * 200 * unranked.ratio  # the policy that takes over needs twice as many
    assert unranked.expected_s == pytest.approx(COMPUTE.seconds(tokens, 0), rel=0.01)
    assert choose(planned(("ram", 90), ("ram", None)), known, auto(TextRatio(0.1, 0.0))).ratio < 0.2


def test_a_ratio_is_reported_for_the_requested_policy_though_its_replacement_needs_more_tokens() -> None:
    known = Costs(8, COMPUTE, {"ram": TierCost(0, 1e12), "disk": TierCost(0, 1e3)})
    for tier, used in (("ram", 200), ("disk", 100)):  # the disk takes 100 s: its chunk is computed in place
        found = choose(planned(("ram", 10), (tier, None)), known, auto(0.1))
        assert 0.1 <= found.ratio < 0.15
        tokens = 210 - used + 0.25 * 200 + 2 * used * found.ratio
        assert found.expected_s == pytest.approx(COMPUTE.seconds(tokens, 0), rel=0.01)


@pytest.mark.parametrize("make", [lambda: TierCost(-1, 1), lambda: TierCost(0, 0), lambda: ComputeCost(0, 0, 0)])
def test_impossible_costs_are_refused(make) -> None:
    with pytest.raises(InputError):
        make()


MIXED = st.lists(
    st.tuples(st.integers(1, 900), st.sampled_from(["ram", "disk"]), st.booleans()), min_size=1, max_size=6
)


@given(MIXED, st.integers(1, 400), SHARE, st.floats(0, 2), st.floats(4, 9))
def test_a_blend_waits_for_earlier_requests_and_a_prefill_takes_turns_with_them(
    parts, forced, least, waits, rate
) -> None:
    known = Costs(8, ComputeCost(1e-4, 2e-5, 1e-9), {"ram": TierCost(0, 1e10), "disk": TierCost(1e-3, 10.0**rate)})
    load = Load([Located(n, n * 1000, tier, exact) for n, tier, exact in parts], forced, least)
    alone, found = decide(load, known), decide(replace(load, waits_s=waits), known)
    prefill = alone.prefill_s + min(alone.prefill_s, waits)
    assert found.seconds <= 1.05 * min(alone.seconds + waits, prefill) * (1 + 1e-9)
    if not found.blends:
        assert found.seconds == pytest.approx(prefill)
    else:
        took = simulate_one(load, known, found.used, found.ratio)
        assert found.seconds - waits == pytest.approx(took, rel=0.2)


@given(MIXED, st.integers(1, 400), SHARE, st.integers(0, 5000))
def test_tokens_in_the_prefix_cache_count_as_context_only(parts, forced, least, before) -> None:
    known = Costs(8, ComputeCost(1e-4, 2e-5, 1e-9), {"ram": TierCost(0, 1e10), "disk": TierCost(1e-3, 1e6)})
    load = Load([Located(n, n * 1000, tier, exact) for n, tier, exact in parts], forced, least)
    # Attending to a longer context raises the cost of each token accordingly.
    dearer = replace(known, compute=ComputeCost(1e-4, 2e-5 + 1e-9 * before, 1e-9))
    with_prefix, without = decide(replace(load, before=before), known), decide(load, dearer)
    assert with_prefix.used == without.used
    assert with_prefix.ratio == pytest.approx(without.ratio, abs=1e-6)
    assert with_prefix.seconds == pytest.approx(without.seconds)
    assert with_prefix.prefill_s == pytest.approx(without.prefill_s)
