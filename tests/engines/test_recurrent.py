"""Tests that models with recurrent layers load the exact prefix from a snapshot and compute the rest of the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.store import open_store
from tests.blending.families import EXACT_PREFIX, make_model
from tests.blending.prompts import Scene, engine_for

GREEDY = SamplingParams(max_tokens=8, logprobs=1)


def engine_of(family: str, scene: Scene, **options: Any) -> Any:
    with pytest.warns(UserWarning, match="served by prefix caching of header and first chunk"):
        return engine_for(make_model(EXACT_PREFIX[family]()), scene, **options)


def prefix_tokens(scene: Scene) -> int:
    return len(scene.header) + len(scene.chunks[0].token_ids)


def answered(engine: Any, scene: Scene, settings: BlendSettings | None = None) -> Any:
    """Return the answer, and assert that the model without a cache gives its tokens and their logprobs."""
    answer = engine.generate(scene.prompt, GREEDY, settings)
    tokens = list(answer.token_ids)
    with torch.no_grad():
        ids = torch.tensor([[*scene.prompt.token_ids, *tokens]])
        want = engine.runner.model(input_ids=ids, use_cache=False).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
    assert len(tokens) >= 4
    assert tokens == want.argmax(-1).tolist()
    assert [x.logprob for x in answer.logprobs] == pytest.approx(want.max(-1).values.tolist(), abs=1e-4)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("family", EXACT_PREFIX)
def test_header_and_first_chunk_come_from_a_snapshot_and_the_answer_equals_the_full_prefill(family: str) -> None:
    scene = Scene()
    engine = engine_of(family, scene)
    report = engine.precompute(scene.chunks)
    assert (report.computed, report.failed) == (len(scene.chunks), {})
    plain = answered(engine, scene, FULL_RECOMPUTE)
    assert (plain.mode, plain.usage.reused_tokens) == ("prefill", 0)
    for _ in range(2):  # continuing from a snapshot does not change it
        reused = answered(engine, scene)
        assert reused.mode == "blend"
        assert reused.usage.reused_tokens == prefix_tokens(scene)
        assert "not blended" in reused.reason


def test_a_first_chunk_without_a_snapshot_is_computed_in_place_and_stored() -> None:
    scene = Scene()
    engine = engine_of("lfm2", scene)
    engine.precompute(scene.chunks[1:])
    first, second = answered(engine, scene), answered(engine, scene)
    assert (first.mode, first.missing) == ("prefill", (scene.chunks[0].id,))
    assert second.usage.reused_tokens == prefix_tokens(scene)


def test_a_prompt_without_a_header_reuses_the_first_chunk_only() -> None:
    scene = Scene(header=0)
    engine = engine_of("granite4", scene)
    engine.precompute(scene.chunks)
    assert answered(engine, scene).usage.reused_tokens == prefix_tokens(scene)


@pytest.mark.slow
def test_a_chunk_that_ends_the_prompt_is_computed_since_a_state_cannot_be_cut() -> None:
    scene = Scene(chunk_tokens=(24,), gap=0, question=0)
    engine = engine_of("qwen3_next", scene)
    engine.precompute(scene.chunks)
    assert answered(engine, scene).usage.reused_tokens == len(scene.header)


@pytest.mark.parametrize("where", [0.2, 0.9])
def test_a_snapshot_damaged_on_disk_is_a_miss(tmp_path: Path, where: float) -> None:
    scene = Scene()
    engine = engine_of("falcon_h1", scene, store=open_store(tmp_path, ram_budget=1), write_back=False)
    engine.precompute(scene.chunks[:1])
    assert answered(engine, scene).usage.reused_tokens == prefix_tokens(scene)
    (file,) = tmp_path.glob(f"kv/*/{engine.entries.own_key(scene.chunks[0].token_ids)}.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[int(where * len(damaged))] ^= 1
    file.write_bytes(damaged)
    got = answered(engine, scene)
    assert (got.mode, got.usage.reused_tokens) == ("prefill", 0)
