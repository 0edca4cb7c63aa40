"""Compare blends of more model families in real vLLM with the full prefill and the independent reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers as hf

from tests.engines.vllm.engines import PIECES, SHAPE, with_model

# Pytest runs these tests, which depend on the model, with the models of this file.
from tests.engines.vllm.test_parity import (  # noqa: F401
    SCENE,
    test_a_blend_ranked_without_a_dense_pass_equals_the_reference,
    test_blended_blocks_never_serve_an_exact_request,
    test_blends_at_other_ratios_equal_the_reference,
    test_chunks_behind_a_missing_chunk_are_reused,
    test_ratio_1_is_the_full_prefill,
    test_the_full_prefill_equals_the_models_own_logits,
    test_the_gate_passes,
    test_the_worker_reports_its_runner_and_attention,
)

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64}
# This model has a soft cap on scores, which the transformers engine cannot watch, and no window.
_CAPPED = {
    "head_dim": 32,
    "attn_logit_softcapping": 1.0,
    "layer_types": ["full_attention"] * SHAPE["num_hidden_layers"],
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (lambda: hf.Qwen3Config(**SHAPE, head_dim=32), {}),
    "gemma2, capped": (lambda: hf.Gemma2Config(**SHAPE, **_CAPPED), {}),
    "yarn, compiled, chunked prefill": (
        lambda: hf.LlamaConfig(**SHAPE, rope_parameters=_YARN),
        {"enforce_eager": False, **PIECES},
    ),
    "mixtral": (lambda: hf.MixtralConfig(**SHAPE, num_local_experts=4), {}),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    config, options = CASES[request.param]
    with with_model(config(), options, SCENE.header, tmp_path_factory) as made:
        yield made
