"""The contract of engines with a loading controller. Subclass it beside `EngineContract`, whose fixtures it uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.settings import BlendSettings, TextRange
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk

SHORT = SamplingParams(max_tokens=12)
AUTO = BlendSettings(ratio="auto", policy="hkvd", check_layers=(1,))
TIERS = ("ram", "disk")
PER_TOKEN_S = 1e-2  # so slow that no result depends on this machine, and no read is late


def stored_bytes(engine: BlendEngine, chunks: list[Chunk]) -> int:
    assert engine.entries is not None
    found = [engine.entries.entry(chunk.token_ids) for chunk in chunks]
    return sum(entry.nbytes for entry in found if entry is not None)


def reckon(engine: Any, chunks: list[Chunk], load_share: float, layers: int | None = None) -> Costs:
    """Give the engine costs by which loading all chunks takes ``load_share`` of the time that computing them takes."""
    compute_s = PER_TOKEN_S * sum(len(chunk.token_ids) for chunk in chunks)
    tier = TierCost(0.0, stored_bytes(engine, chunks) / (load_share * compute_s))
    engine.costs = Costs(layers or engine.num_layers, ComputeCost(0.0, PER_TOKEN_S, 0.0), dict.fromkeys(TIERS, tier))
    return engine.costs


class ControllerContract:
    def test_auto_blends_from_fast_storage_and_reports_the_expected_times(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        reckon(engine, chunks, 0.01)
        done = engine.generate(prompt, SHORT, AUTO)
        assert (done.mode, done.in_place) == ("blend", ())
        assert engine.profile.ratio <= done.ratio < engine.profile.ratio + 0.1
        assert "stored KV for 4 of 4 chunks (expected in 0." in done.reason
        prefill_s = PER_TOKEN_S * len(engine.tokenize(prompt).token_ids)
        assert f"(expected in {done.expected_s:.3g} s, an ordinary prefill in {prefill_s:.3g} s)" in done.reason
        assert done.prefill_s > 0, "at the speed of the prompt's own passes"
        given = engine.generate(prompt, SHORT, BlendSettings(done.ratio, "hkvd", (1,)))
        assert given.token_ids == done.token_ids
        assert given.usage == done.usage

    def test_auto_prefills_when_storage_is_slower_than_computing(self, engine, chunks, prompt) -> None:
        full = engine.generate(prompt, SHORT, BlendSettings(quality="full"))
        engine.precompute(chunks)
        reckon(engine, chunks, 1000.0)
        done = engine.generate(prompt, SHORT, AUTO)
        assert (done.mode, done.usage.reused_tokens, done.policy) == ("prefill", 0, None)
        assert "none of it is used (expected in" in done.reason
        assert done.in_place == tuple(chunk.id for chunk in chunks)
        assert done.missing == ()  # all chunks are stored: none is to be written back
        assert done.token_ids == full.token_ids

    def test_in_between_some_chunks_are_computed_in_place_as_if_they_were_not_stored(
        self, engine, chunks, prompt
    ) -> None:
        engine.precompute(chunks)
        reckon(engine, chunks, 0.9, layers=1000)
        done = engine.generate(prompt, SHORT, AUTO)
        assert done.mode == "blend"
        assert "computed in place, which is sooner than loading them" in done.reason
        assert 0 < len(done.in_place) < 4
        assert {chunk.id for chunk in done.chunks if chunk.load} == {c.id for c in chunks} - set(done.in_place)
        engine.forget(done.in_place)
        missing = engine.generate(prompt, SHORT, BlendSettings(done.ratio, "hkvd", (1,)))
        assert set(missing.missing) == set(done.in_place)
        assert missing.token_ids == done.token_ids
        assert missing.usage == done.usage

    def test_the_expected_time_counts_the_ratio_that_the_text_needs(self, engine, chunks, prompt, monkeypatch) -> None:
        profile = replace(engine.profile, ratio=0.05, text=TextRange(0.3, 0.0))
        for holder in (engine, getattr(engine, "client", engine)):
            monkeypatch.setattr(holder, "profile", profile)
        auto = BlendSettings("auto", "static", (1,))
        monkeypatch.setattr(engine, "ranking", "now")
        engine.precompute(chunks)
        reckon(engine, chunks, 1e-6)
        done = engine.generate(prompt, SHORT, auto)
        assert (done.mode, done.policy) == ("blend", "static")
        assert done.ratio > 0.2
        assert done.expected_s == pytest.approx(PER_TOKEN_S * done.usage.computed_tokens, rel=0.02)

    def test_the_expected_time_for_chunks_without_a_rank_counts_the_dense_pass(
        self, engine, chunks, prompt, monkeypatch
    ) -> None:
        for holder in (engine, getattr(engine, "client", engine)):
            monkeypatch.setattr(holder, "profile", replace(engine.profile, ratio=0.05, text=TextRange(0.3, 0.0)))
        monkeypatch.setattr(engine, "ranking", "off")
        engine.forget(chunks)
        engine.precompute(chunks)
        reckon(engine, chunks, 1e-6)
        done = engine.generate(prompt, SHORT, BlendSettings("auto", "static", (1,)))
        assert done.policy == "hkvd"
        tokens = done.usage.computed_tokens + done.usage.selection_tokens
        assert done.expected_s == pytest.approx(PER_TOKEN_S * tokens, rel=0.03)

    def test_a_requests_ratio_overrides_the_controller(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        reckon(engine, chunks, 1000.0)
        done = engine.generate(prompt, SHORT, BlendSettings(ratio=0.3))
        assert (done.mode, done.ratio, done.in_place) == ("blend", 0.3, ())
        assert "expected" not in done.reason
        assert done.expected_s is None

    def test_auto_without_costs_needs_a_text_range(self, engine, prompt) -> None:
        engine.costs = None
        with pytest.raises(InputError, match="cacheblend store calibrate"):
            engine.generate(prompt, SHORT, AUTO)

    def test_measured_prompts_correct_the_estimated_compute_cost(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        engine.costs = Costs(engine.num_layers, ComputeCost(0.0, 3600.0, 0.0), {})  # an hour a token
        for _ in range(3):
            engine.reset_prefix_cache()
            engine.generate(prompt, SHORT, AUTO)
        assert engine.costs.compute.per_token_s < 3600.0 * 0.86**2
