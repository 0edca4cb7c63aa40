"""The loading controller against every choice there is, on costs made up by hypothesis."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.bench.controller import ControllerSettings, bench_controller, simulate, simulate_one
from cacheblend_rag.blending.controller import SPENT, Load, Located, cheapest_tier, decide
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.errors import InputError

COMPUTE = ComputeCost(0.0, 1e-4, 0.0)  # 0.1 ms a token
SHARE = st.floats(0.01, 0.6)


def costs(layers: int = 32, **rates: float) -> Costs:
    """Costs of tiers without latency, in bytes per second."""
    return Costs(layers, COMPUTE, {name: TierCost(0.0, rate) for name, rate in rates.items()})


def chunks(*tiers: str, tokens: int = 500, nbytes: int = 1000) -> list[Located]:
    """Chunks in these tiers, the first of them exact; a token has two bytes."""
    return [Located(tokens, nbytes, tier, exact=i == 0) for i, tier in enumerate(tiers)]


def test_with_fast_storage_the_lowest_ratio_is_recomputed_and_a_little_more() -> None:
    load = Load(chunks(*["ram"] * 5), forced=50, least=0.1)
    found = decide(load, costs(ram=1e9))
    assert all(found.used)
    # 50 + 10% of 2000 tokens take 25 ms; SPENT allows 5% more.
    assert found.ratio == pytest.approx((250 * (1 + SPENT) - 50) / 2000, rel=1e-3)
    assert found.seconds < 0.027 < found.prefill_s == pytest.approx(0.255)


def test_where_loading_decides_the_ratio_rises_until_recomputing_takes_as_long() -> None:
    load = Load(chunks("disk", "disk"), forced=50, least=0.1)
    found = decide(load, costs(1000, disk=2000 / 0.04))  # 40 ms to load, 10 ms to recompute the lowest ratio
    assert all(found.used)  # computing the second chunk in place would take 55 ms
    assert found.load_s == pytest.approx(0.04)
    assert found.compute_s == pytest.approx(found.load_s, rel=1.1 * SPENT)
    assert 0.69 < found.ratio < 0.75


def test_of_many_slow_chunks_some_are_computed_while_the_others_are_loaded() -> None:
    found = decide(Load(chunks(*["disk"] * 5), 50, 0.1), costs(1000, disk=5000 / 0.1))
    assert found.used == (True, False, True, True, True)  # the exact one spares the most
    assert found.seconds < 0.1 == pytest.approx(costs(1000, disk=5000 / 0.1).tiers["disk"].seconds(5000, 5))


def test_no_ratio_is_below_what_the_model_needs_or_above_what_helps() -> None:
    for rate in np.geomspace(1e2, 1e9, 15):
        found = decide(Load(chunks(*["disk"] * 5), 50, least=0.2, most=0.4), costs(disk=float(rate)))
        assert 0.2 <= found.ratio <= 0.4


def test_a_device_slower_than_computing_is_left_alone() -> None:
    found = decide(Load(chunks(*["disk"] * 5), 50, 0.1), costs(disk=100.0))
    assert not found.blends
    assert found.seconds == pytest.approx(found.prefill_s)


def test_chunks_on_a_slow_device_are_computed_while_those_in_ram_are_used() -> None:
    found = decide(Load(chunks("ram", "disk", "ram", "ram", "ram"), 50, 0.1), costs(ram=1e9, disk=1e3))
    assert found.used == (True, False, True, True, True)


def test_a_dense_pass_makes_a_blend_dearer() -> None:
    spans, known = chunks(*["ram"] * 5), costs(ram=1e9)
    with_pass = decide(Load(spans, 50, 0.1, dense=0.5), known)
    assert with_pass.compute_s == pytest.approx(0.5 * 0.205 + decide(Load(spans, 50, 0.1), known).compute_s, rel=0.3)


def test_the_cheapest_device_that_adds_no_delay_is_named() -> None:
    load = Load(chunks(*["anywhere"] * 5), 50, 0.1)  # 5000 bytes; 25 ms of recomputing
    known = costs(ram=1e9, nvme=5000 / 0.02, disk=5000 / 0.03, tape=1.0)
    prices = {"ram": 8.0, "nvme": 2.0, "disk": 1.0, "tape": 0.1}
    assert cheapest_tier(load, known, prices) == "nvme"
    assert cheapest_tier(Load(load.spans, 50, 0.2), known, prices) == "disk"  # more to recompute hides more
    assert cheapest_tier(load, known, {"tape": 0.1}) is None


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
)
def test_no_other_choice_is_much_sooner(parts, forced, least, dense, rates, latency, layers) -> None:
    known = Costs(
        layers,
        ComputeCost(1e-4, 2e-5, 1e-9),
        {
            name: TierCost(latency, 10.0**rate, 1 << 20)
            for name, rate in zip(("ram", "nvme", "net"), rates, strict=True)
        },
    )
    load = Load([Located(n, n * 1000, tier, exact) for n, tier, exact in parts], forced, least, dense=dense)
    found = decide(load, known)
    took = simulate_one(load, known, found.used, found.ratio)
    every = np.array(list(product((False, True), repeat=len(parts))))
    best = float(simulate(load, known, every, np.full(len(every), least)).min())
    # A chunk is used whole or not at all, and what is chosen by a formula is timed by events.
    assert took <= 1.25 * best
    assert least <= found.ratio <= 1


def test_the_bench_grid_stays_within_a_tenth_of_the_best() -> None:
    for ratio, dense in ((0.05, 0), (0.15, 2)):
        found = bench_controller(ControllerSettings(ratio=ratio, dense=dense, bandwidths=4, chunks=(1, 4, 16)))
        assert found["worst_regret"] <= 1.1
        assert {p["used"] == 0 for p in found["points"]} == {True, False}  # slow devices are left, fast ones used


def test_the_simulation_adds_up() -> None:
    known = Costs(2, ComputeCost(0.0, 0.01, 0.0), {"disk": TierCost(0.5, 100.0)})
    load = Load([Located(10, 400, "disk"), Located(10, 400, "disk")], 10, 0.0)
    # Each layer: two reads one after the other, 1 s, and 400 bytes, 4 s. Then 10 tokens at 5 ms a layer.
    assert simulate_one(load, known, (True, True), 0.0) == pytest.approx(5 + 5 + 0.05)
    assert simulate_one(load, known, (True, False), 0.0) == pytest.approx(2.5 + 2.5 + 0.1)
    assert simulate_one(load, known, (False, False), 0.0) == pytest.approx(0.3)


def test_observations_move_the_costs_to_what_the_machine_takes() -> None:
    known = costs(disk=1e6)
    for _ in range(40):
        known = known.loaded("disk", 1000, 1, 1000 / 2e5).computed(100, 1000, 0.03).loaded("new", 1000, 1, 0.5)
    assert known.tiers["disk"].bytes_per_s == pytest.approx(2e5, rel=0.01)
    assert known.compute.seconds(100, 1000) == pytest.approx(0.03, rel=0.01)
    assert known.tiers["new"].bytes_per_s == pytest.approx(2000)


def test_one_hiccup_changes_little() -> None:
    known = costs(disk=1e6).loaded("disk", 1000, 1, 3600.0).computed(100, 1000, 3600.0)
    assert known.tiers["disk"].bytes_per_s > 0.6e6
    assert known.compute.per_token_s < 1.7e-4


def test_costs_survive_being_written_down() -> None:
    known = Costs(12, ComputeCost(0.1, 0.2, 0.3), {"disk": TierCost(0.01, 1e9, 4)})
    assert Costs.from_json(known.to_json()) == known
    for broken in ({}, {"layers": 1, "compute": {}, "tiers": {}}, {"layers": 1, "compute": 3, "tiers": []}):
        with pytest.raises(InputError, match="store calibrate"):
            Costs.from_json(broken)


@pytest.mark.parametrize("make", [lambda: TierCost(-1, 1), lambda: TierCost(0, 0), lambda: ComputeCost(0, 0, 0)])
def test_numbers_that_no_machine_has_are_refused(make) -> None:
    with pytest.raises(InputError):
        make()
