"""Tests that vLLM blends a real small model, selected by its name, from KV that transformers has stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.models import SMOLLM2
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from tests.engines.test_smollm2 import NOTES, QUESTION
from tests.engines.vllm.engines import ROOM, start


@pytest.mark.usefixtures("smollm2")
def test_vllm_blends_entries_of_the_transformers_engine_to_the_same_answer(tmp_path: Path) -> None:
    sampling, settings = SamplingParams(max_tokens=16), BlendSettings(ratio=0.3)
    with TransformersEngine(SMOLLM2, device="cpu", store=tmp_path) as engine:
        chunks = [make_chunk(text, engine.tokenizer) for text in NOTES]
        engine.precompute(chunks)
        prompt = rag_prompt(engine.tokenizer, chunks, QUESTION)
        want = engine.generate(prompt, sampling, settings)
        engine.flush()
    options = {
        "max_model_len": 2048,
        "max_logprobs": 20,
        "skip_tokenizer_init": False,
        "kv_cache_memory_bytes": 4 * ROOM,
    }
    with start(SMOLLM2, tmp_path, **options) as served:
        got = served.generate(prompt, sampling, settings)
    assert (got.mode, got.missing, got.token_ids) == (want.mode, (), want.token_ids)
    assert got.usage.recomputed_tokens == want.usage.recomputed_tokens
