from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.blending.controller import Load, Located
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.prices import GIB, Corpus, Prices, TierPrice, plan_prices, read_prices

MIB = 1 << 20
# Six chunks of 512 tokens, 64 MiB each; a millisecond a token, 15% of which are recomputed: 0.493 s. In 32 layers.
LOAD = Load([Located(512, 64 * MIB, "")] * 6, forced=32, least=0.15)
TIERS = {"ram": TierCost(0.0, 10e9), "disk": TierCost(1e-4, 2e9, 4)}
COSTS = Costs(32, ComputeCost(0.0, 1e-3, 0.0), TIERS)
SIZES = {"none": 64 * MIB, "int8": 16 * MIB}
CORPUS = Corpus(chunks=1000, chunk_bytes=SIZES.__getitem__, prompts=36_000)


def test_a_month_costs_what_is_kept_read_and_computed() -> None:
    prices = Prices(
        {"disk": TierPrice(0.1), "s3": TierPrice(0.02, 0.5, bytes_per_s=1e9, latency_s=0.02, at_once=8)}, 2.0
    )
    plan = plan_prices(LOAD, COSTS, prices, CORPUS)
    s3, disk = plan.tiers
    assert (s3.tier, disk.tier) == ("s3", "disk")
    assert s3.nbytes == 1000 * 64 * MIB
    assert s3.keeping == pytest.approx(62.5 * 0.02)
    assert s3.reading == pytest.approx(36_000 * 6 * 32 / 1e6 * 0.5)
    assert disk.reading == 0 and disk.keeping == pytest.approx(6.25)
    computed = 32 + 0.15 * 6 * 512
    assert disk.recompute_s == pytest.approx(computed * 1e-3)
    assert disk.computing == pytest.approx(36_000 * computed * 1e-3 / 3600 * 2)
    assert disk.load_s == pytest.approx(6 * 32 / 4 * 1e-4 + 384 * MIB / 2e9)
    assert s3.load_s == pytest.approx(6 * 32 / 8 * 0.02 + 384 * MIB / 1e9)
    assert plan.prefill_s == pytest.approx(3.104) and plan.prefill_month == pytest.approx(36_000 * 3.104 / 3600 * 2)
    assert disk.month == pytest.approx(disk.keeping + disk.reading + (disk.computing or 0))


def test_the_cheapest_tier_that_hides_loading_is_named() -> None:
    prices = Prices({"ram": TierPrice(3.0), "disk": TierPrice(0.1), "tape": TierPrice(0.001, bytes_per_s=1e8)})
    plan = plan_prices(LOAD, COSTS, prices, CORPUS)
    assert [tier.tier for tier in plan.tiers] == ["tape", "disk", "ram"]
    assert [tier.delays for tier in plan.tiers] == [True, False, False]
    assert plan.cheapest == "disk" and plan.prefill_month is None
    assert plan.tiers[0].seconds > plan.tiers[1].seconds


def test_reads_that_cost_may_make_a_dear_device_the_cheaper_one() -> None:
    prices = Prices({"disk": TierPrice(0.1), "bucket": TierPrice(0.02, 5.0, bytes_per_s=5e9)})
    assert plan_prices(LOAD, COSTS, prices, CORPUS).cheapest == "disk"
    seldom = Corpus(1e6, SIZES.__getitem__, prompts=10)
    assert plan_prices(LOAD, COSTS, prices, seldom).cheapest == "bucket"


def test_a_codec_is_paid_for_and_loaded_in_its_bytes() -> None:
    packed = plan_prices(LOAD, COSTS, Prices({"disk": TierPrice(0.1, codec="int8")}), CORPUS).tiers[0]
    assert packed.nbytes == 1000 * 16 * MIB and packed.keeping == pytest.approx(62.5 / 4 * 0.1)
    assert packed.load_s == pytest.approx(6 * 32 / 4 * 1e-4 + 96 * MIB / 2e9)
    tape = Prices({"tape": TierPrice(0.001, bytes_per_s=3e8, codec="int8"), "disk": TierPrice(0.1)})
    assert plan_prices(LOAD, COSTS, tape, CORPUS).cheapest == "tape"  # which as it is would take too long


def test_where_nothing_hides_none_is_named() -> None:
    prices = Prices({"tape": TierPrice(0.001, bytes_per_s=1e8)})
    assert plan_prices(LOAD, COSTS, prices, CORPUS).cheapest is None


def test_a_described_tier_is_taken_as_described_and_an_unknown_one_refused() -> None:
    slower = plan_prices(LOAD, COSTS, Prices({"disk": TierPrice(0.1, bytes_per_s=1e8)}), CORPUS).tiers[0]
    assert slower.load_s == pytest.approx(384 * MIB / 1e8)
    with pytest.raises(InputError, match=r"How fast s3 is was not measured \(measured: disk, ram\)"):
        plan_prices(LOAD, COSTS, Prices({"s3": TierPrice(0.02)}), CORPUS)


def test_a_file_of_prices_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text("[compute]\nhour = 2\n[disk]\ngib_month = 0.08\n[s3]\ngib_month = 0.02\nmillion_reads = 0.4\n")
    assert read_prices(file) == Prices({"disk": TierPrice(0.08), "s3": TierPrice(0.02, 0.4)}, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prices"),
        ("[compute]\nhour = 2", "has no prices"),
        ("disk = 3", "has no prices"),
        ("[disk", "Cannot read the prices"),
        ("[disk]\nmillion_reads = 1", "lacks gib_month"),
        ("[disk]\ngib_month = -1", "gib_month must be a number from 0"),
        ('[disk]\ngib_month = "much"', "gib_month must be a number from 0"),
        ("[disk]\ngib_month = 1\nprice = 3", "has price; it takes gib_month, million_reads"),
        ("[disk]\ngib_month = 1\nbytes_per_s = 0", "describes no device"),
        ("[disk]\ngib_month = 1\n[compute]\nday = 3", "takes one price"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_prices(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Cannot read the prices in .*nowhere\.toml"):
        read_prices(tmp_path / "nowhere.toml")


def test_sizes_are_counted_in_gib() -> None:
    plan = plan_prices(LOAD, COSTS, Prices({"disk": TierPrice(1.0)}), Corpus(16, lambda codec: GIB, 0))
    assert plan.tiers[0].keeping == pytest.approx(16.0)
