"""The loading controller in the transformers engine leaves logits right. The contract of engines tests the rest."""

from __future__ import annotations

from cacheblend_lab.bench.sweeps import ThrottledStore

from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from tests.blending import reference
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for

AUTO = BlendSettings(ratio="auto", policy="hkvd")
ONE = SamplingParams(max_tokens=1)
COMPUTE = ComputeCost(0.0, 1e-3, 0.0)  # 1 ms a token, so that nothing depends on this machine
SCENE = Scene()


def controlled_engine(bytes_per_s: float, ratio: float = 0.2):
    engine = engine_for(
        make_model(BLENDED["llama"]()), SCENE, ratio=ratio, store=ThrottledStore(1e12), write_back=False
    )
    engine.precompute(SCENE.chunks)
    engine.costs = Costs(engine.num_layers, COMPUTE, {"device": TierCost(0.0, bytes_per_s)})
    seen = []
    engine.on_first_logits = lambda logits: seen.append(logits.clone())
    return engine, seen


def chunk_bytes(engine) -> int:
    return sum(engine.entries.get(chunk.token_ids, engine.num_layers).nbytes for chunk in SCENE.chunks)


def test_a_prompt_on_fast_storage_is_blended_and_the_answer_reports_the_expected_time() -> None:
    engine, seen = controlled_engine(1e12)
    done = engine.generate(SCENE.prompt, ONE, AUTO)
    assert done.mode == "blend"
    assert 0.2 <= done.ratio < 0.3
    assert "stored KV for 4 of 4 chunks (expected in 0.0" in done.reason
    want = reference.blend(make_model(BLENDED["llama"]()), SCENE.header, SCENE.parts(), done.ratio)
    assert (seen[0] - want.logits).abs().max() < 1e-4


def test_nothing_is_loaded_from_a_device_slower_than_computing() -> None:
    engine, seen = controlled_engine(1.0)
    done = engine.generate(SCENE.prompt, ONE, AUTO)
    assert (done.mode, done.usage.reused_tokens, done.policy) == ("prefill", 0, None)
    assert "none of it is used (expected in" in done.reason
    assert done.missing == ()  # nothing is to be written back: all is stored
    assert done.in_place == tuple(chunk.id for chunk in SCENE.chunks)
    full = engine.generate(SCENE.prompt, ONE, BlendSettings(quality="full"))
    assert done.token_ids == full.token_ids
    assert (seen[0] - seen[1]).abs().max() < 1e-5


def test_in_between_some_chunks_are_computed_in_place_as_if_they_were_not_stored() -> None:
    engine, seen = controlled_engine(1.0)
    # All chunks together would take 100 ms to load, and the whole prompt 110 to compute.
    engine.costs = Costs(1000, COMPUTE, {"device": TierCost(0.0, chunk_bytes(engine) / 0.1)})
    done = engine.generate(SCENE.prompt, ONE, AUTO)
    assert done.mode == "blend"
    assert "computed in place, which is sooner than loading them" in done.reason
    in_place = [i for i, chunk in enumerate(SCENE.chunks) if chunk.id in done.in_place]
    assert 0 < len(in_place) < 4
    want = reference.blend(make_model(BLENDED["llama"]()), SCENE.header, SCENE.parts(in_place), done.ratio)
    assert (seen[0] - want.logits).abs().max() < 1e-4


def test_the_times_of_reads_correct_the_costs_of_their_tier() -> None:
    engine, _ = controlled_engine(1e15)
    engine.store.bytes_per_s = chunk_bytes(engine) / 0.05  # reads that are expected to take no time take 50 ms
    for _ in range(12):
        engine.generate(SCENE.prompt, ONE, AUTO)
    assert chunk_bytes(engine) / engine.costs.tiers["device"].bytes_per_s > 1e-8  # at most 4 times as slow, each time
    engine.costs = Costs(engine.num_layers, ComputeCost(0.0, 1e6, 0.0), {})
    engine.generate(SCENE.prompt, ONE, AUTO)
    learnt = chunk_bytes(engine) / engine.costs.tiers["device"].bytes_per_s
    assert 0.025 < learnt < 60.0  # seconds, not another unit; a busy machine only makes reads slower
