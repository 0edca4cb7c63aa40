"""A quality blends where a blend is clearly faster, counted in tokens of all passes; a ratio or a policy always blends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.blending.controller import GAIN, Choice, choose
from cacheblend_rag.blending.costs import ComputeCost, Computed, Costs
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions, Quality
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV
from tests.blending import reference
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for, random_ids
from tests.blending.reference import Part

ONE = SamplingParams(max_tokens=1)
TOKENS = ComputeCost(0.0, 1.0, 0.0)  # a token takes a second


@pytest.fixture(autouse=True)
def _chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.blending.controller.GAIN", GAIN)


def chosen(plan: BlendPlan, ratio: float = 0.15, compute: ComputeCost = TOKENS, named: str = "query") -> Choice:
    return choose(plan, Costs(4, compute, {}, calibrated=False), FuseOptions(policy(named), ratio, quality="high"))


def plan(front: int, chunks: int, tokens: int, question: int) -> BlendPlan:
    spans = []
    for number in range(chunks):
        kv = ChunkKV((), 0)
        kv.num_tokens, kv.stored_nbytes = tokens, tokens
        start = front + number * tokens
        spans.append(StoredSpan(start, start + tokens, kv, Chunk(str(number), "", (number,) * tokens)))
    return BlendPlan(front + chunks * tokens + question, (), tuple(spans), "stored")


def behind(front: int, scene: Scene) -> tuple[TokenizedPrompt, list[Part]]:
    """A scene's chunks and question behind a text in place of its header, for the engine and for the reference."""
    ids = random_ids(random.Random(5), front)
    spans, parts = [], [Part(list(ids), "text")]
    for chunk in scene.chunks:
        spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
        ids += chunk.token_ids
        parts.append(Part(list(chunk.token_ids), "stale"))
    return TokenizedPrompt((*ids, *scene.question), tuple(spans)), [*parts, Part(scene.question, "text")]


def counting_engine(**options: Any) -> Any:
    engine = engine_for(make_model(BLENDED["llama"]()), Scene(), ranking="now", write_back=False, **options)
    engine.precompute(Scene().chunks)
    engine.costs = Costs(engine.num_layers, TOKENS, {}, calibrated=False)
    return engine


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2000), st.integers(1, 24), st.integers(50, 512), st.integers(10, 2000), st.sampled_from([0.15, 0.5])
)
def test_a_quality_blends_exactly_the_prompts_that_save_a_tenth_of_the_computation(
    front: int, chunks: int, tokens: int, question: int, ratio: float
) -> None:
    found = chosen(plan(front, chunks, tokens, question), ratio)
    whole = front + chunks * tokens + question
    passes = front + question + ratio * chunks * tokens + question  # the front runs once, the question twice
    if found.in_place:
        assert len(found.in_place) == chunks
        assert GAIN * passes > whole
        assert found.expected_s == pytest.approx(whole)
    else:
        assert GAIN * passes <= whole
        assert found.expected_s == pytest.approx(passes)


def test_each_pass_adds_its_fixed_cost() -> None:
    few = plan(0, 2, 50, 10)
    assert not chosen(few).in_place
    assert chosen(few, compute=ComputeCost(100.0, 1.0, 0.0)).in_place
    assert not chosen(few, compute=ComputeCost(100.0, 1.0, 0.0), named="static").in_place, "one pass"


def test_a_dense_pass_counts_its_share_of_the_layers_and_no_front() -> None:
    long = plan(1000, 4, 100, 10)
    assert chosen(long, named="hkvd").expected_s == pytest.approx(1000 + 0.25 * 400 + 60 + 10)


@pytest.mark.parametrize("quality", ["high", "fast"])
def test_a_blend_that_would_not_be_faster_is_skipped_and_the_answer_reports_the_reason(quality: Quality) -> None:
    engine = counting_engine()
    scene = Scene()
    prompt = TokenizedPrompt(
        (*scene.prompt.token_ids, *[9] * 300), scene.prompt.spans[1:]
    )  # 68 of 400 tokens are stored
    seen: list[Any] = []
    engine.on_first_logits = seen.append
    done = engine.generate(prompt, ONE, BlendSettings(quality=quality))
    assert (done.mode, done.usage.reused_tokens, done.missing) == ("prefill", 0, ())
    assert "they are computed, since a blend is expected to take" in done.reason
    assert done.in_place == tuple(span.chunk.id for span in prompt.spans)
    full = engine.generate(prompt, ONE, BlendSettings(quality="full"))
    assert done.token_ids == full.token_ids
    assert (seen[0] - seen[1]).abs().max() < 1e-5
    named = engine.generate(prompt, ONE, BlendSettings(ratio=0.5, policy="query"))
    assert named.mode == "blend", "who says how to blend is obeyed"


@pytest.mark.parametrize("wrong", [1.0, 1e3, 1e-3])
def test_a_blend_reports_the_time_of_a_prefill_at_the_measured_speed_despite_wrong_costs(wrong: float) -> None:
    engine = counting_engine()
    engine.costs = replace(engine.costs, compute=TOKENS.scaled(wrong))
    prompt = Scene(chunk_tokens=(24, 17, 31, 20), question=3, gap=0).prompt
    done = engine.generate(prompt, ONE, BlendSettings(quality="fast"))
    assert done.mode == "blend"
    passes = done.usage.computed_tokens + done.usage.selection_tokens
    took = engine.costs.compute.seconds(passes, len(prompt.token_ids))
    assert done.prefill_s / took == pytest.approx(len(prompt.token_ids) / passes)
    assert done.prefill_s >= GAIN * took > 0
    assert took <= done.timings.ttft_s


def test_all_passes_and_the_measured_attention_of_a_blend_are_counted_at_their_cost() -> None:
    engine = counting_engine()
    known = ComputeCost(5.0, 1.0, 0.01)
    engine.costs = replace(engine.costs, compute=known)
    prompt = Scene(chunk_tokens=(24, 17, 31, 20), question=3, gap=0).prompt
    done = engine.generate(prompt, ONE, BlendSettings(quality="fast"))
    assert (done.mode, done.policy) == ("blend", "static-query")
    context = len(prompt.token_ids)
    own = Computed(done.usage.computed_tokens + 3, context, 0.0, passes=2, watched=3)
    assert done.usage.selection_tokens == 3
    assert known.expected(own) == pytest.approx(2 * 5 + own.tokens + 0.01 * context * (own.tokens + 3 * 3))
    took = engine.costs.compute.expected(own)
    assert done.prefill_s / took == pytest.approx(known.seconds(context, context) / known.expected(own))
    assert done.expected_s == pytest.approx(known.expected(own), rel=0.02)  # the number of chosen tokens is rounded


def test_a_loaded_engine_knows_the_costs_of_its_passes() -> None:
    engine = engine_for(make_model(BLENDED["llama"]()), Scene())
    assert not engine.costs.calibrated
    assert not engine.controlled, "ratio='auto' is the loading controller's, which wants measured tiers"
    assert engine.costs.compute.fixed_s >= 0
    assert engine.costs.compute.per_token_s > 0


@pytest.mark.parametrize("policy", ["query", "static-query", "hkvd", "hybrid", "static"])
@pytest.mark.parametrize("front", [1, 40])
def test_a_blend_behind_another_front_equals_the_reference(policy: str, front: int) -> None:
    engine = counting_engine()
    seen: list[Any] = []
    engine.on_first_logits = seen.append
    prompt, parts = behind(front, Scene())
    done = engine.generate(prompt, ONE, BlendSettings(ratio=0.4, policy=policy, check_layers=(1,)))
    assert done.usage.kept_tokens == 0
    question, stale = len(Scene().question), sum(len(chunk.token_ids) for chunk in Scene().chunks)
    assert done.usage.computed_tokens == front + question + done.usage.recomputed_tokens
    assert done.usage.selection_tokens <= question + stale, "the front is run once"
    model = make_model(BLENDED["llama"]())
    recomputed = sorted(engine_chosen(engine, prompt, policy))
    want = reference.blend(model, Scene().header, parts, 0.4, chosen=recomputed)
    assert (seen[0] - want.logits).abs().max() < 1e-4


def engine_chosen(engine: Any, prompt: TokenizedPrompt, policy: str) -> list[int]:
    """Return the positions that a blend recomputes, by a second run of the fusor."""
    from cacheblend_rag.blending.fusor import fuse
    from cacheblend_rag.engines.transformers.engine import planned
    from cacheblend_rag.engines.transformers.target import TransformersTarget

    request = engine.request(prompt, ONE, BlendSettings(ratio=0.4, policy=policy, check_layers=(1,)))
    target = TransformersTarget(engine.runner, engine.rope, prompt.token_ids)
    return fuse(planned(engine, request), target, request.options).recomputed.tolist()
