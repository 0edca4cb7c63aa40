"""Write and blend KV of tiers with codecs in vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.gate import CODEC_LIMIT
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.store import DiskStore
from tests.blending import reference
from tests.blending.prompts import Scene, engine_for, entries_of
from tests.blending.test_parity import blended_logits
from tests.engines.vllm.engines import SHAPE, first_logprobs, save_model, start

SCENE = Scene(chunk_tokens=(120, 90, 150, 110))
REUSE = BlendSettings(ratio=0.0)


@pytest.mark.vllm
def test_a_blend_from_an_int8_tier_equals_the_reference_and_the_other_engine(tmp_path: Path) -> None:
    model = save_model(hf.Qwen3Config(**SHAPE, head_dim=32), tmp_path / "model")
    both = f"file://{tmp_path}/exact,file://{tmp_path}/kv?codec=int8"
    with start(tmp_path / "model", both, header=SCENE.header) as engine:
        assert engine.precompute(SCENE.chunks).failed == {}
        want = reference.reuse_int8(model, SCENE.parts(), entries_of(engine, DiskStore(tmp_path / "exact"), SCENE))
    want = want.float().log_softmax(-1)
    store = f"ram://16MiB?codec=int8,file://{tmp_path}/kv?codec=int8"
    with start(tmp_path / "model", store, header=SCENE.header) as engine:
        assert engine.gate.passed, engine.gate.reason
        assert 0 < engine.gate.codecs["int8"] < CODEC_LIMIT
        got = first_logprobs(engine, SCENE.prompt, REUSE)
        engine.reset_prefix_cache()
        again = first_logprobs(engine, SCENE.prompt, REUSE)  # from RAM, to which the entries have moved
        assert engine.generate(SCENE.prompt, SamplingParams(max_tokens=2), REUSE).mode == "blend"
        engine.reset_prefix_cache()
        exact = engine.generate(SCENE.prompt, SamplingParams(max_tokens=2), BlendSettings(quality="exact"))
        assert (exact.usage.reused_tokens, exact.missing) == (0, ())
        assert "int8, which is not exact" in exact.reason
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(again, want, atol=1e-4, rtol=0)
    with engine_for(tmp_path / "model", SCENE, store=store) as other:
        near = blended_logits(other, SCENE, REUSE)[0].float().log_softmax(-1)
    torch.testing.assert_close(near, want, atol=1e-4, rtol=0)
