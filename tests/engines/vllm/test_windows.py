"""Test models with sliding windows in real vLLM, shorter and longer than chunks, with and without its hybrid cache manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import read_whole
from tests.blending import reference
from tests.blending.prompts import Scene, engine_for
from tests.engines.vllm.engines import FULL, PIECES, SHAPE, concurrently, first_logprobs, run, with_model

# Pytest runs these tests of ordinary attention with the models of this file.
from tests.engines.vllm.test_parity import (  # noqa: F401
    ANSWER,
    SCENE,
    test_a_blend_ranked_without_a_dense_pass_equals_the_reference,
    test_chunks_behind_a_missing_chunk_are_reused,
    test_ratio_1_is_the_full_prefill,
    test_the_full_prefill_equals_the_models_own_logits,
    test_the_gate_passes,
    test_the_questions_ranking_skips_chunks_that_must_be_computed,
)

_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_SHORT = {"head_dim": 32, "sliding_window": 40, "layer_types": _MIXED}
# Prompts and passes run in pieces; the blocks hold the pages of two prompts while they are blended.
_PIECES = {**PIECES, "num_gpu_blocks_override": 26}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3, chunked prefill": (lambda: hf.Gemma3TextConfig(**SHAPE, **_SHORT), _PIECES),
    "gemma2, no hybrid manager": (
        lambda: hf.Gemma2Config(**SHAPE, **_SHORT),
        {"disable_hybrid_kv_cache_manager": True},
    ),
    # vLLM gives every other layer a window and ignores the config.
    "gpt-oss, sinks and experts": (
        lambda: hf.GptOssConfig(**SHAPE, **_SHORT | {"layer_types": None}, num_local_experts=4, num_experts_per_tok=2),
        {},
    ),
    "mistral, window longer than a chunk": (lambda: hf.MistralConfig(**SHAPE, sliding_window=200), {}),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    config, options = CASES[request.param]
    with with_model(config(), options, SCENE.header, tmp_path_factory) as made:
        assert made[0].llm.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is (
            "disable_hybrid_kv_cache_manager" in options
        )
        yield made


def test_the_gate_checks_kv_past_a_window(engine) -> None:
    assert "exact KV from other positions, past a window" in engine.gate.errors


# With windows shorter than a chunk, tokens far inside have no deviation at layer 1: rounding would choose half of them.
@pytest.mark.parametrize(("ratio", "check"), [(0.0, 1), (0.15, 1), (0.15, 3), (0.5, 3)])
def test_blends_at_every_ratio_equal_the_reference(engine, model, ratio: float, check: int) -> None:
    engine.precompute(SCENE.chunks)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio, "hkvd", (check,)))
    expected = reference.blend(model, SCENE.header, SCENE.parts(), ratio, (check,)).logits.float().log_softmax(-1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    full = first_logprobs(engine, SCENE.prompt, FULL)
    assert (got - full).abs().max() > 1e-2, "the scene is too easy to tell a blend from a full prefill"


@pytest.mark.parametrize("rank", ["off", "now"])
def test_stored_kv_equals_that_of_the_transformers_engine(engine, model, rank: str) -> None:
    """The second round finds the prompts in vLLM's prefix cache, without the pages before their windows."""
    theirs = engine_for(model, SCENE, ranking=rank)
    theirs.precompute(SCENE.chunks)
    before, engine.ranking = engine.ranking, rank
    for _ in range(2):
        report = engine.precompute(SCENE.chunks)
        assert (report.computed, report.failed) == (len(SCENE.chunks), {})
        for chunk in SCENE.chunks:
            got, want = (read_whole(e.entries.get(chunk.token_ids, engine.num_layers, 2)) for e in (engine, theirs))
            for a, b in zip(got.layers, want.layers, strict=True):
                torch.testing.assert_close(a.k, b.k, atol=1e-4, rtol=0)
                torch.testing.assert_close(a.v, b.v, atol=1e-4, rtol=0)
            assert (got.static_deviation() is not None) == (rank == "now")
        for entry in list(engine.store.entries()):
            engine.store.delete(entry.key)
    engine.ranking = before


def test_lent_pages_are_returned_after_a_blend(engine) -> None:
    engine.precompute(SCENE.chunks)
    for ratio in (0.1, 0.4):
        assert engine.generate(SCENE.prompt, ANSWER, BlendSettings(ratio=ratio)).mode == "blend"
    # vLLM empties its prefix cache only when no block is in use.
    assert run(engine, engine.llm.reset_prefix_cache())


def test_concurrent_requests_do_not_mix_when_pages_are_scarce(engine) -> None:
    engine.precompute(SCENE.chunks)
    kinds = [FULL, BlendSettings(ratio=1.0), BlendSettings(ratio=0.15), BlendSettings(0.0, "full-reuse")]
    asked = []
    for turn in range(2):  # the chunks in two orders, so that the prompts have different KV
        scene = Scene(question=9)
        scene.header, scene.chunks = SCENE.header, [*SCENE.chunks[turn:], *SCENE.chunks[:turn]]
        asked.append(scene.prompt)
    jobs = [(prompt, settings) for settings in kinds for prompt in asked]
    engine._write_back = False
    try:
        alone = []
        for prompt, settings in jobs:
            alone.append(engine.generate(prompt, ANSWER, settings).token_ids)
            engine.reset_prefix_cache()

        async def ask(prompt: TokenizedPrompt, settings: BlendSettings) -> tuple[str, tuple[int, ...]]:
            async for event in engine.events(engine.request(prompt, ANSWER, settings)):
                last = event.generation
            return last.mode, last.token_ids

        got = concurrently(engine, [lambda p=p, s=s: ask(p, s) for p, s in jobs])
    finally:
        engine._write_back = True
    assert [mode for mode, _ in got] == ["prefill"] * 2 + ["blend"] * 6
    assert [ids for _, ids in got] == alone


def test_blended_blocks_never_serve_an_exact_request(engine) -> None:
    engine.precompute(SCENE.chunks)
    exact = first_logprobs(engine, SCENE.prompt, FULL)
    engine.generate(SCENE.prompt, ANSWER, BlendSettings(ratio=0.0))
    cached = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=1.0))
    torch.testing.assert_close(cached, exact, atol=1e-4, rtol=0)


def test_a_repeated_blend_is_served_from_the_prefix_cache(engine) -> None:
    engine.precompute(SCENE.chunks)
    settings = BlendSettings(ratio=0.0)
    first, again = (engine.generate(SCENE.prompt, ANSWER, settings) for _ in range(2))
    assert (again.mode, first.mode) == ("blend", "blend")
    assert again.usage.prompt_tokens == again.usage.reused_tokens + again.usage.computed_tokens
