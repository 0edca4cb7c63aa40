"""Blending in real vLLM against its own full prefill and against the independent reference, on models of several families."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.auto import TextRange
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from tests.blending import reference
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import FULL, SHAPE, clear, first_logprobs, save_model, start

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # Prompts and passes in pieces of 64 tokens.
    "llama, chunked prefill": (
        lambda: hf.LlamaConfig(**SHAPE),
        {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True},
    ),
    "qwen2": (lambda: hf.Qwen2Config(**SHAPE), {"rank": "now"}),
    "yarn, compiled": (lambda: hf.LlamaConfig(**SHAPE, rope_parameters=_YARN), {"enforce_eager": False}),
    "llama, two ranks": (lambda: hf.LlamaConfig(**SHAPE), {"tensor_parallel_size": 2}),
}
SCENE = Scene(chunk_tokens=(150, 90, 170, 61), question=9)
ANSWER = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    config, options = CASES[request.param]
    # Two ranks on one NUMA node, as on any small machine.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if "tensor_parallel_size" in options else "auto"
    directory = tmp_path_factory.mktemp("model")
    model = save_model(config(), directory)
    with start(directory, tmp_path_factory.mktemp("store"), header=SCENE.header, ram_budget=0, **options) as engine:
        yield engine, model


@pytest.fixture
def engine(case: tuple[Any, Any]) -> Any:
    clear(case[0])
    return case[0]


@pytest.fixture
def model(case: tuple[Any, Any]) -> Any:
    return case[1]


def want(model: Any, ratio: float, missing: tuple[int, ...] = ()) -> torch.Tensor:
    return reference.blend(model, SCENE.header, SCENE.parts(missing), ratio).logits.float().log_softmax(-1)


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
def test_other_ratios_are_the_reference(engine, model, ratio: float) -> None:
    engine.precompute(SCENE.chunks)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=ratio, check_layers=(1,)))
    torch.testing.assert_close(got, want(model, ratio), atol=1e-4, rtol=0)
    full = first_logprobs(engine, SCENE.prompt, FULL)
    assert (got - full).abs().max() > 1e-2, "the scene is too easy to tell a blend from a full prefill"


def test_static_is_the_reference_and_a_chunk_without_a_rank_gets_one_after_its_first_use(engine, model) -> None:
    engine.precompute(SCENE.chunks)
    settings = BlendSettings(0.3, "static", (1,))
    if not engine.entries.has_static(SCENE.chunks[1].token_ids):
        assert engine.generate(SCENE.prompt, ANSWER, settings).policy == "hkvd"
        engine.flush()
        engine.reset_prefix_cache()
    scores, positions = [], []
    for span in SCENE.prompt.spans[1:]:
        ids = list(span.chunk.token_ids)
        scores.append(reference.static_deviation(model, SCENE.header, list(engine.client.probe), ids))
        positions += range(span.start, span.end)
    chosen = torch.tensor(positions)[torch.cat(scores).argsort(descending=True)[: round(0.3 * len(positions))]].tolist()
    expected = reference.blend(model, SCENE.header, SCENE.parts(), 0.3, chosen=sorted(chosen)).logits.log_softmax(-1)
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, settings), expected, atol=1e-4, rtol=0)
    engine.reset_prefix_cache()
    with_query = BlendSettings(0.3, "static-query", (1,))
    torch.testing.assert_close(first_logprobs(engine, SCENE.prompt, with_query), expected, atol=1e-4, rtol=0)
    engine.reset_prefix_cache()
    answer = engine.generate(SCENE.prompt, ANSWER, settings)
    assert (answer.mode, answer.policy, answer.ratio, answer.usage.recomputed_tokens) == (
        "blend",
        "static",
        0.3,
        len(chosen),
    )


def test_auto_is_the_reference_at_the_ratio_that_the_answer_reports(engine, model, monkeypatch) -> None:
    profile = replace(engine.profile, ratio=0.05, text=TextRange(0.5, 0.0))
    monkeypatch.setattr(engine, "profile", profile)
    monkeypatch.setattr(engine.client, "profile", profile)
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
        scores.append(reference.static_deviation(model, SCENE.header, list(engine.client.probe), ids))
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


def test_chunks_behind_a_missing_one_are_reused(engine, model) -> None:
    engine.precompute([chunk for i, chunk in enumerate(SCENE.chunks) if i != 1])
    settings = BlendSettings(ratio=0.15, check_layers=(1,))
    got = first_logprobs(engine, SCENE.prompt, settings)
    torch.testing.assert_close(got, want(model, 0.15, missing=(1,)), atol=1e-4, rtol=0)


def test_forgotten_chunks_leave_nothing_in_the_store(engine) -> None:
    engine.precompute(SCENE.chunks)
    header = len({entry.key for entry in engine.store.entries()} & set(engine.client.entries.keys(())))
    ranks = engine.client.llm.vllm_config.parallel_config.tensor_parallel_size
    assert header == ranks
    assert engine.forget([chunk.id for chunk in SCENE.chunks]) == ranks * len(SCENE.chunks)
    assert len(list(engine.store.entries())) == header
    assert engine.generate(SCENE.prompt, ANSWER).missing == tuple(chunk.id for chunk in SCENE.chunks)


@given(st.sets(st.integers(0, 200)).map(sorted), st.integers(1, 20), st.integers(1, 5))
def test_segments_are_whole_in_order_and_within_both_limits(positions, max_tokens: int, max_runs: int) -> None:
    from cacheblend_rag.engines.vllm.paged import cut

    parts = [part.tolist() for part in cut(torch.tensor(positions), max_tokens, max_runs)]
    assert [p for part in parts for p in part] == positions
    for part, behind in zip_longest(parts, parts[1:]):
        runs = 1 + sum(b != a + 1 for a, b in pairwise(part))
        assert 0 < len(part) <= max_tokens
        assert runs <= max_runs
        assert behind is None or len(part) == max_tokens or (runs == max_runs and behind[0] != part[-1] + 1)


def test_full_prefill_is_the_models_own(engine, model) -> None:
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
