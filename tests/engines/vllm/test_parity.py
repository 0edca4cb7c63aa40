"""Compare blends in real vLLM with its full prefill and with the independent reference, for several ways to run it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.settings import BlendSettings, TextRange
from cacheblend_rag.calibrate.diagnose import ask_worker
from cacheblend_rag.engines.sampling import SamplingParams
from tests.blending import reference
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits
from tests.engines.vllm.engines import FULL, PIECES, SHAPE, VOCABULARY, first_logprobs, with_model

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2, chunked prefill": (lambda: hf.Qwen2Config(**SHAPE), PIECES),
    # This model is compiled for embeddings, as models that take images are.
    "llama, compiled for embeddings": (
        lambda: hf.LlamaConfig(**SHAPE),
        {"enforce_eager": False, "generated": True, "enable_prompt_embeds": True},
    ),
    "llama, two ranks": (lambda: hf.LlamaConfig(**SHAPE), {"tensor_parallel_size": 2}),
}
# The second runner's kernels are interpreted, so that steps and long prompts are slow.
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
SCENE = Scene(chunk_tokens=(50, 40, 61) if V2 else (150, 90, 170, 61), question=9)
ANSWER = SamplingParams(max_tokens=4 if V2 else 12)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    config, options = CASES[request.param]
    with with_model(config(), options, SCENE.header, tmp_path_factory) as made:
        yield made


def want(model: Any, ratio: float, missing: tuple[int, ...] = ()) -> torch.Tensor:
    return reference.blend(model, SCENE.header, SCENE.parts(missing), ratio).logits.float().log_softmax(-1)


def test_the_worker_reports_its_runner_and_attention(engine) -> None:
    found = ask_worker(engine, "cacheblend_backend")
    assert (found["runner"], found["attention"]) == ("V2" if V2 else "V1", "CPU_ATTN")


def test_the_gate_passes(engine) -> None:
    assert engine.gate.passed, engine.gate.reason


def test_ratio_1_is_the_full_prefill(engine) -> None:
    full = first_logprobs(engine, SCENE.prompt, FULL)
    tokens = engine.generate(SCENE.prompt, ANSWER, FULL).token_ids
    engine.precompute(SCENE.chunks)
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=1.0)), full, atol=1e-4, rtol=0)
    blended = engine.generate(SCENE.prompt, ANSWER, BlendSettings(ratio=1.0))
    assert (blended.mode, blended.token_ids) == ("blend", tokens)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
def test_blends_at_other_ratios_equal_the_reference(engine, model, ratio: float) -> None:
    engine.precompute(SCENE.chunks)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio, "hkvd", (1,)))
    torch.testing.assert_close(got, want(model, ratio), atol=1e-4, rtol=0)
    full = first_logprobs(engine, SCENE.prompt, FULL)
    assert (got - full).abs().max() > 1e-2, "the scene is too easy to tell a blend from a full prefill"


@lru_cache(2)
def scores(
    engine: Any, model: Any, scene: Scene, missing: tuple[int, ...] = ()
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the positions of the stale tokens, ascending, and each policy's scores of them, by the independent reference."""
    static, positions = [], []
    for index, span in enumerate(scene.prompt.spans):
        if index > 0 and index not in missing:
            ids = list(span.chunk.token_ids)
            static.append(reference.static_deviation(model, scene.header, list(engine.probe), ids))
            positions += range(span.start, span.end)
    attention = reference.question_attention(model, scene.header, scene.parts(missing))[positions]
    deviation = torch.cat(static)
    ranked = {"static": deviation, "static-query": deviation.sqrt() * attention, "query": attention}
    return torch.tensor(positions), ranked


def best(policy: str, positions: torch.Tensor, ranked: dict[str, torch.Tensor]) -> list[int]:
    """Return the 30% of the stale tokens that the policy recomputes."""
    order = ranked[policy].argsort(descending=True)[: round(0.3 * len(positions))]
    return positions[order].sort().values.tolist()


def chosen_by(
    engine: Any, model: Any, policy: str, scene: Scene = SCENE, missing: tuple[int, ...] = ()
) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that the policy recomputes, and the reference's log-probabilities after it."""
    chosen = best(policy, *scores(engine, model, scene, missing))
    done = reference.blend(model, scene.header, scene.parts(missing), 0.3, chosen=chosen)
    return chosen, done.logits.log_softmax(-1)


def rank(engine: Any, scene: Scene, missing: tuple[int, ...] = ()) -> None:
    """Store the chunks with their static deviations, except the missing ones."""
    before, engine.ranking = engine.ranking, "now"
    engine.precompute([chunk for index, chunk in enumerate(scene.chunks) if index not in missing])
    engine.ranking = before


@pytest.mark.parametrize("policy", ["static", "static-query", "query"])
def test_a_blend_ranked_without_a_dense_pass_equals_the_reference(engine, model, policy: str) -> None:
    rank(engine, SCENE)
    chosen, expected = chosen_by(engine, model, policy)
    another = best("static" if policy != "static" else "query", *scores(engine, model, SCENE, ()))
    assert chosen != another, "the scene is too easy"
    settings = BlendSettings(0.3, policy, (1,))
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, settings), expected, atol=1e-4, rtol=0)
    engine.reset_prefix_cache()
    answer = engine.generate(SCENE.prompt, ANSWER, settings)
    got = (answer.mode, answer.policy, answer.ratio, answer.usage.recomputed_tokens)
    assert got == ("blend", policy, 0.3, len(chosen))


def test_the_questions_ranking_skips_chunks_that_must_be_computed(engine, model) -> None:
    rank(engine, SCENE, missing=(2,))
    _, expected = chosen_by(engine, model, "static-query", missing=(2,))
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(0.3, "static-query", (1,)))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_each_question_selects_different_tokens(engine, model) -> None:
    other = Scene(chunk_tokens=(150, 90, 170, 61), question=9)
    other.question = [3 + (7 * token) % (VOCABULARY - 3) for token in SCENE.question]
    rank(engine, SCENE)
    settings = BlendSettings(0.3, "static-query", (1,))
    for scene in (SCENE, other):
        chosen, expected = chosen_by(engine, model, "static-query", scene)
        torch.testing.assert_close(first_logprobs(engine, scene.prompt, settings), expected, atol=1e-4, rtol=0)
    assert chosen != best("static-query", *scores(engine, model, SCENE, ())), "the questions are too much alike to tell"


def test_the_policy_hybrid_selects_as_in_the_transformers_engine(engine, model) -> None:
    engine.precompute(SCENE.chunks)
    settings = BlendSettings(0.3, "hybrid", (1,))
    other = engine_for(model, SCENE)
    other.precompute(SCENE.chunks)
    logits, chosen, _ = blended_logits(other, SCENE, settings)
    got = first_logprobs(engine, SCENE.prompt, settings)
    torch.testing.assert_close(got, logits.float().log_softmax(-1), atol=1e-4, rtol=0)
    engine.reset_prefix_cache()
    assert engine.generate(SCENE.prompt, ANSWER, settings).usage.recomputed_tokens == len(chosen)


def test_a_chunk_without_a_rank_is_ranked_after_its_first_use(engine) -> None:
    before, engine.ranking = engine.ranking, "lazy"
    engine.precompute(SCENE.chunks)
    settings = BlendSettings(0.3, "static", (1,))
    assert engine.generate(SCENE.prompt, ANSWER, settings).policy == "hkvd"
    engine.flush()
    engine.reset_prefix_cache()
    assert engine.generate(SCENE.prompt, ANSWER, settings).policy == "static"
    engine.ranking = before


def test_auto_equals_the_reference_at_the_reported_ratio(engine, model, monkeypatch) -> None:
    profile = replace(engine.profile, ratio=0.05, text=TextRange(0.5, 0.0))
    monkeypatch.setattr(engine, "profile", profile)
    settings = BlendSettings("auto", "static", (1,))
    engine.precompute(SCENE.chunks)
    if not engine.entries.has_static(SCENE.chunks[1].token_ids):
        assert engine.generate(SCENE.prompt, ANSWER, settings).ratio == 0.05
        engine.flush()
        engine.reset_prefix_cache()
    answer = engine.generate(SCENE.prompt, ANSWER, settings)
    scores, positions = [], []
    for span in SCENE.prompt.spans[1:]:
        ids = list(span.chunk.token_ids)
        scores.append(reference.static_deviation(model, SCENE.header, list(engine.probe), ids))
        positions += range(span.start, span.end)
    static = torch.cat(scores)
    count = answer.usage.recomputed_tokens
    assert answer.ratio == pytest.approx(count / len(positions))
    ranked = static.sort(descending=True).values
    assert float(ranked[count:].sum() / ranked.sum()) <= 0.5 < float(ranked[count - 1 :].sum() / ranked.sum())
    chosen = sorted(torch.tensor(positions)[static.argsort(descending=True)[:count]].tolist())
    expected = reference.blend(model, SCENE.header, SCENE.parts(), answer.ratio, chosen=chosen).logits.log_softmax(-1)
    engine.reset_prefix_cache()
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, settings), expected, atol=1e-4, rtol=0)


AUTO = BlendSettings("auto", "hkvd", (1,))
PER_TOKEN_S = 1e-2  # so slow that no read is late


def controlled(engine: Any, monkeypatch: pytest.MonkeyPatch, load_s: float, layers: int = SHAPE["num_hidden_layers"]):
    """Ask with costs by which loading all chunks takes ``load_s`` and computing takes 10 ms a token."""
    engine.precompute(SCENE.chunks)
    nbytes = sum(engine.entries.entry(chunk.token_ids).nbytes for chunk in SCENE.chunks)
    known = Costs(layers, ComputeCost(0.0, PER_TOKEN_S, 0.0), {"disk": TierCost(0.0, nbytes / load_s)})
    monkeypatch.setattr(engine, "costs", known)
    monkeypatch.setattr(engine, "profile", replace(engine.profile, ratio=0.15))  # less than loading hides
    answer = engine.generate(SCENE.prompt, ANSWER, AUTO)
    monkeypatch.setattr(engine, "costs", known)
    engine.reset_prefix_cache()
    return answer, first_logprobs(engine, SCENE.prompt, AUTO)


def test_the_controller_blends_at_the_profiles_ratio_from_fast_storage(engine, model, monkeypatch) -> None:
    answer, got = controlled(engine, monkeypatch, load_s=0.2)
    assert (answer.mode, answer.in_place) == ("blend", ())
    assert engine.profile.ratio <= answer.ratio < 0.2
    assert "stored KV for 4 of 4 chunks (expected in " in answer.reason
    prefill_s = PER_TOKEN_S * len(SCENE.prompt.token_ids)
    assert f", an ordinary prefill in {prefill_s:.3g} s)" in answer.reason
    torch.testing.assert_close(got, want(model, answer.ratio), atol=1e-4, rtol=0)


def test_the_controller_recomputes_more_tokens_while_loading_is_slow(engine, model, monkeypatch) -> None:
    answer, got = controlled(engine, monkeypatch, load_s=1.5)
    assert (answer.mode, answer.in_place) == ("blend", ())
    assert 0.2 < answer.ratio < 0.3
    torch.testing.assert_close(got, want(model, answer.ratio), atol=1e-4, rtol=0)


def test_every_rank_computes_chunks_in_place_that_are_expensive_to_load(engine, model, monkeypatch) -> None:
    answer, got = controlled(engine, monkeypatch, load_s=4.5, layers=1000)
    assert answer.mode == "blend"
    assert "computed in place, which is sooner than loading them" in answer.reason
    in_place = tuple(i for i, chunk in enumerate(SCENE.chunks) if chunk.id in answer.in_place)
    assert 0 < len(in_place) < 4
    assert answer.missing == ()
    assert {chunk.id for chunk in answer.chunks if chunk.load} == {c.id for c in SCENE.chunks} - set(answer.in_place)
    torch.testing.assert_close(got, want(model, answer.ratio, in_place), atol=1e-4, rtol=0)


def test_a_prompt_is_prefilled_if_storage_is_slower_than_computing(engine, model, monkeypatch) -> None:
    answer, got = controlled(engine, monkeypatch, load_s=3600.0)
    assert (answer.mode, answer.usage.reused_tokens, answer.policy, answer.loads) == ("prefill", 0, None, ())
    assert "none of it is used (expected in" in answer.reason
    assert answer.in_place == tuple(chunk.id for chunk in SCENE.chunks)
    assert answer.missing == ()
    torch.testing.assert_close(got, first_logprobs(engine, SCENE.prompt, FULL), atol=1e-4, rtol=0)


def test_chunks_behind_a_missing_chunk_are_reused(engine, model) -> None:
    engine.precompute([chunk for i, chunk in enumerate(SCENE.chunks) if i != 1])
    settings = BlendSettings(0.15, "hkvd", (1,))
    got = first_logprobs(engine, SCENE.prompt, settings)
    torch.testing.assert_close(got, want(model, 0.15, missing=(1,)), atol=1e-4, rtol=0)


def test_forgotten_chunks_leave_no_entries_in_the_store(engine) -> None:
    engine.precompute(SCENE.chunks)
    header = len({entry.key for entry in engine.store.entries()} & set(engine.entries.keys(())))
    ranks = engine.llm.vllm_config.parallel_config.tensor_parallel_size
    assert header == ranks
    assert engine.forget([chunk.id for chunk in SCENE.chunks]) == ranks * len(SCENE.chunks)
    assert len(list(engine.store.entries())) == header
    assert engine.generate(SCENE.prompt, ANSWER).missing == tuple(chunk.id for chunk in SCENE.chunks)


@given(st.sets(st.integers(0, 200)).map(sorted), st.integers(1, 20), st.integers(1, 5))
def test_segments_cover_all_positions_in_order_within_both_limits(positions, max_tokens: int, max_runs: int) -> None:
    from cacheblend_rag.engines.vllm.pages import first_part

    rest, parts = torch.tensor(positions, dtype=torch.int64), []
    while len(rest):
        parts.append(first_part(rest, max_tokens, max_runs).tolist())
        rest = rest[len(parts[-1]) :]
    assert [p for part in parts for p in part] == positions
    for part, behind in zip_longest(parts, parts[1:]):
        runs = 1 + sum(b != a + 1 for a, b in pairwise(part))
        assert 0 < len(part) <= max_tokens
        assert runs <= max_runs
        assert behind is None or len(part) == max_tokens or (runs == max_runs and behind[0] != part[-1] + 1)


def test_the_full_prefill_equals_the_models_own_logits(engine, model) -> None:
    ids = torch.tensor([SCENE.prompt.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, -1].float()
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, FULL), logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_blended_blocks_never_serve_an_exact_request(engine) -> None:
    full = engine.generate(SCENE.prompt, ANSWER, FULL).token_ids
    engine.precompute(SCENE.chunks)
    reuse = BlendSettings(ratio=0.0)
    blended = engine.generate(SCENE.prompt, ANSWER, reuse)
    exact = first_logprobs(engine, SCENE.prompt, FULL)
    cached = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=1.0))
    torch.testing.assert_close(cached, exact, atol=1e-4, rtol=0)
    assert engine.generate(SCENE.prompt, ANSWER, BlendSettings(ratio=1.0)).token_ids == full
    again = engine.generate(SCENE.prompt, ANSWER, reuse)
    assert again.token_ids == blended.token_ids


def test_doctor_reports_the_passes_and_times_of_a_blend(engine) -> None:
    from cacheblend_rag.calibrate.diagnose import diagnose_vllm

    found = diagnose_vllm(engine)
    assert (found["blended"], found["device"], found["layers"]) == (True, "cpu", SHAPE["num_hidden_layers"])
    cost = found["cost"]
    stale = 5 * (cost["prompt_tokens"] - len(engine.header_ids) - 32) // 6
    tokens = {kind: done for kind, (done, _) in cost["passes"].items() if kind != "prefill"}
    assert tokens == {"question": pytest.approx(32), "sparse": pytest.approx(round(0.5 * stale))}
    assert cost["full_s"] > 0 < cost["blend_s"]
