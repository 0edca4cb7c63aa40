"""The precision that GPUs compute in, in real vLLM: the gate passes, and a blend is as far from the reference as a prefill is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.gate import TOLERANCE
from cacheblend_rag.blending.settings import BlendSettings
from tests.blending import reference
from tests.engines.vllm.engines import FULL, SHAPE, first_logprobs, save_model, start
from tests.engines.vllm.test_parity import SCENE, chosen_by, rank

_CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SHAPE),
    "gemma3": lambda: hf.Gemma3TextConfig(**SHAPE, head_dim=32, sliding_window=200),
}


@pytest.fixture(scope="module", params=list(_CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    directory = tmp_path_factory.mktemp("model")
    model = save_model(_CONFIGS[request.param](), directory)
    # The reference computes in fp32, with the weights that vLLM has.
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    store = tmp_path_factory.mktemp("store")
    with start(directory, store, header=SCENE.header, ram_budget=0, dtype="bfloat16") as engine:
        yield engine, model


def test_the_gate_passes_by_far(engine) -> None:
    assert engine.gate.passed, engine.gate.reason
    assert 0 < max(engine.gate.errors.values()) < TOLERANCE[torch.bfloat16] / 2


def test_a_blend_is_off_by_no_more_than_rounding_is(engine, model) -> None:
    ids = torch.tensor([SCENE.prompt.token_ids])
    with torch.no_grad():
        exact = model(ids).logits[0, -1].log_softmax(-1)
    rounding = (first_logprobs(engine, SCENE.prompt, FULL) - exact).square().mean().sqrt()
    rank(engine, SCENE)
    for ratio, policy in ((0.0, "hkvd"), (1.0, "hkvd"), (0.3, "static")):
        # Which tokens deviate most would be rounding's choice here, where it is a close one: ranks of the stored KV are not.
        chosen = chosen_by(engine, model, policy)[0] if policy == "static" else None
        done = reference.blend(model, SCENE.header, SCENE.parts(), ratio, chosen=chosen)
        got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio, policy, (1,)))
        error = (got - done.logits.log_softmax(-1)).square().mean().sqrt()
        assert error < 2 * rounding
