"""Tests that costs for the loading controller are fitted and saved."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from cacheblend_rag.blending.controller import Decision, Load, Located
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.profile import load_costs, save_costs
from cacheblend_rag.calibrate.costs import estimate, fit_compute, measure_costs, measure_remote
from cacheblend_rag.store import open_store, record_tiers
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for


@pytest.fixture(autouse=True)
def _less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure bandwidths with 16 MiB, not 256."""
    monkeypatch.setattr("cacheblend_rag.calibrate.costs._BLOCK", 16 << 20)


@pytest.mark.parametrize(
    "cost", [ComputeCost(0.01, 1e-3, 1e-6), ComputeCost(0.0, 1e-3, 0.0), ComputeCost(0.5, 0.0, 1e-6)]
)
def test_a_fit_recovers_the_cost_behind_the_times(cost: ComputeCost) -> None:
    fitted = fit_compute({n: cost.seconds(n, n) for n in (32, 256, 1024)})
    for tokens, context in ((100, 1000), (512, 512), (32, 4096)):
        assert fitted.seconds(tokens, context) == pytest.approx(cost.seconds(tokens, context), rel=1e-3)


def test_a_negative_part_of_a_fit_is_left_out() -> None:
    fitted = fit_compute({32: 0.05, 256: 0.3, 1024: 0.9})  # a longer prompt takes less time for each token
    assert fitted.per_pair_s == 0
    assert fitted.seconds(256, 256) == pytest.approx(0.3, rel=0.3)


def test_a_fit_works_for_a_model_so_small_that_length_does_not_matter() -> None:
    fitted = fit_compute({3: 0.0031, 31: 0.0024, 127: 0.0022})
    assert fitted.per_token_s == fitted.per_pair_s == 0
    assert fitted.seconds(100, 100) == pytest.approx(0.0025, rel=0.1)


@pytest.mark.slow
def test_measured_costs_are_saved_by_model_and_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    engine = engine_for(make_model(BLENDED["llama"]()), Scene())
    found = measure_costs(engine, tmp_path)
    assert (found.layers, set(found.tiers)) == (engine.num_layers, {"ram", "disk"})
    assert found.tiers["disk"].latency_s > 0
    assert found.compute.seconds(512, 512) >= found.compute.seconds(1, 512) > 0  # tiny models may hide the length
    digest = engine.fingerprint.digest
    assert load_costs(digest, "cpu") is None
    file = save_costs(found, digest, "cpu")
    assert load_costs(digest, "cpu") == found
    assert load_costs(digest, "cuda:0") is None
    file.write_text('{"layers": 3}', encoding="utf-8")
    assert load_costs(digest, "cpu") is None  # the log has the reason


def test_remote_tiers_are_measured_by_name_and_left_unchanged(tmp_path, redis_url: str) -> None:
    record_tiers(tmp_path, f"ram://,{redis_url}?timeout=30s")
    engine = engine_for(make_model(BLENDED["llama"]()), Scene())
    found = measure_costs(engine, tmp_path)
    assert set(found.tiers) == {"ram", "redis"}
    redis = found.tiers["redis"]
    assert redis.latency_s > 0
    assert redis.at_once > 1
    assert list(open_store(redis_url).entries()) == []


def test_a_tier_that_does_not_answer_has_no_cost(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert measure_remote(open_store(f"redis://127.0.0.1:{port}").tiers[0]) is None


def test_costs_of_a_device_do_not_replace_those_of_another_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    known = {
        name: Costs(4, ComputeCost(0, rate, 0), {"ram": TierCost(0, 1)})
        for name, rate in (("cpu", 1.0), ("cuda:1", 2.0))
    }
    for name, costs in known.items():
        save_costs(costs, "abc", name)
    assert {name: load_costs("abc", name) for name in known} == known


def test_an_unmeasured_engine_starts_with_the_costs_of_the_embedded_engine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    embedded, own = (Costs(4, ComputeCost(0, rate, 0), {"ram": TierCost(0, 1)}) for rate in (1.0, 2.0))
    assert load_costs("abc", "cuda", "vllm") is None
    save_costs(embedded, "abc", "cuda:0")
    assert load_costs("abc", "cuda", "vllm") == embedded
    save_costs(own, "abc", "cuda", "vllm")
    assert load_costs("abc", "cuda", "vllm") == own
    assert load_costs("abc", "cuda:0") == embedded


def test_the_estimate_equals_the_loading_controllers_expectation() -> None:
    compute, layers = ComputeCost(0.02, 1e-5, 1e-9), 32
    tiers = {"ram": TierCost(0.0, 1e10), "disk": TierCost(1e-4, 1e9)}
    spans = [Located(512, 512 << 17, "", exact=not number) for number in range(6)]
    for asked in (None, 0):  # a policy that watches the question runs it once more
        load = Load(spans, 32, 0.5, asked=asked)
        for tier, found in estimate(load, Costs(layers, compute, tiers)).items():
            placed = replace(load, spans=[replace(span, tier=tier) for span in spans])
            blend = Decision(placed, Costs(layers, compute, tiers), [True] * 6, 0.5)
            assert (found.blend_s, found.load_s) == (blend.seconds, blend.load_s)
            assert found.full_s == compute.seconds(3104, 3104)
        assert blend.load_s == pytest.approx(6 * 512 * (1 << 17) / 1e9 + 6 * layers * 1e-4)
