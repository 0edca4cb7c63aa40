"""A small engine that answers nonsense, and rows in the format of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import LlamaConfig

from cacheblend_rag.engines.transformers import TransformersEngine
from tests.blending.families import make_model
from tests.conftest import byte_level


@pytest.fixture(scope="package")
def engine() -> Iterator[TransformersEngine]:
    """Make a random Llama with weights large enough for attention to matter."""
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=1,
    )
    with TransformersEngine(make_model(config), tokenizer=tokenizer) as made:
        assert made.gate.passed
        yield made
