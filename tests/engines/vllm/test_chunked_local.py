"""Tests that Llama-4, with attention in pieces, is blended within the first piece and prefilled by vLLM beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.settings import BlendSettings
from tests.blending.families import llama4
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import FULL, SHAPE, first_logprobs, with_model

# Pytest runs these tests of ordinary attention with this file's model.
from tests.engines.vllm.test_parity import (  # noqa: F401
    ANSWER,
    SCENE,
    test_a_blend_ranked_without_a_dense_pass_equals_the_reference,
    test_blends_at_other_ratios_equal_the_reference,
    test_ratio_1_is_the_full_prefill,
    test_the_full_prefill_equals_the_models_own_logits,
    test_the_gate_passes,
)

_PIECE = 512  # vLLM requires whole blocks


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    with with_model(llama4(SHAPE, 32, _PIECE), {}, SCENE.header, tmp_path_factory) as made:
        yield made


def test_a_prompt_longer_than_one_piece_is_prefilled_with_the_reason(engine, model) -> None:
    scene = Scene(chunk_tokens=(150, 90, 170, 100), question=9)
    ids = torch.tensor([scene.prompt.token_ids])
    assert len(SCENE.prompt.token_ids) <= _PIECE < ids.shape[1]
    engine.precompute(scene.chunks)
    got = first_logprobs(engine, scene.prompt, BlendSettings(0.15))
    with torch.no_grad():
        torch.testing.assert_close(got, model(ids).logits[0, -1].float().log_softmax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(got, first_logprobs(engine, scene.prompt, FULL), atol=1e-4, rtol=0)
    engine.reset_prefix_cache()
    answer = engine.generate(scene.prompt, ANSWER, BlendSettings(0.15))
    assert answer.mode == "prefill"
    assert f"cut after {_PIECE} tokens" in answer.reason
