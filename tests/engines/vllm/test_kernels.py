"""Tests that blends in a real vLLM with the kernels, in Triton's interpreter, equal the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from tests.blending import reference
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import FULL, SHAPE, first_logprobs, run, save_model, start
from tests.engines.vllm.test_parity import chosen_by
from tests.interpreted import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or compiles for this machine's GPU")
SCENE = Scene(chunk_tokens=(50, 40, 61), question=9)


_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_WINDOWS = {"head_dim": 32, "sliding_window": 40, "layer_types": _MIXED}
# With windows this short the deviations at layer 1 are too small.
CHECK = 3


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Yield an engine of Gemma-3 with pages in two groups; the model of test_graphs.py has one group.

    The model is compiled, as on a GPU: vLLM calls attention outside of the compiled code. The pass to the check layer is eager.
    """
    directory = tmp_path_factory.mktemp("model")
    model = save_model(hf.Gemma3TextConfig(**SHAPE, **_WINDOWS), directory)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test sends a function to the worker
        store = tmp_path_factory.mktemp("store")
        with start(directory, store, header=SCENE.header, enforce_eager=False) as engine:
            yield engine, model


def count_launches(worker: Any) -> tuple[int, int]:
    """Return how often the worker has launched each kernel since the last call."""
    from unittest.mock import Mock

    from cacheblend_rag.engines.kernels import attention, place

    for module, name in ((place, "place"), (attention, "attend")):
        if not isinstance(getattr(module, name), Mock):
            setattr(module, name, Mock(wraps=getattr(module, name)))
    counts = place.place.call_count, attention.attend.call_count
    place.place.reset_mock()
    attention.attend.reset_mock()
    return counts


def launches(engine: Any) -> tuple[int, int]:
    found: tuple[int, int] = run(engine, engine.llm.collective_rpc(count_launches))[0]
    return found


def test_blends_with_the_kernels_equal_the_reference(case: tuple[Any, Any]) -> None:
    engine, model = case
    assert engine.gate.passed, engine.gate.reason
    full = first_logprobs(engine, SCENE.prompt, FULL)
    engine.precompute(SCENE.chunks)
    layers = SHAPE["num_hidden_layers"]
    launches(engine)
    for ratio in (0.15, 0.5):
        got = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio, "hkvd", (CHECK,)))
        want = reference.blend(model, SCENE.header, SCENE.parts(), ratio, (CHECK,)).logits.float().log_softmax(-1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert (got - full).abs().max() > 1e-2, "the scene is too easy to tell a blend from a full prefill"
        # The blend places every layer's stored KV once; the front and the selected tokens are scattered, the dense pass is not.
        assert launches(engine) == (layers, 2 * layers)
    _, want = chosen_by(engine, model, "query", SCENE)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(0.3, "query", (CHECK,)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    # The question's pass places every layer's stored KV and attends to it; the front and the selected tokens follow.
    assert launches(engine) == (layers, 3 * layers)
    got = first_logprobs(engine, SCENE.prompt, BlendSettings(1.0, "hkvd", (CHECK,)))
    torch.testing.assert_close(got, full, atol=1e-4, rtol=0)
