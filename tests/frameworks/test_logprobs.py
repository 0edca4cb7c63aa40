"""Tests that log-probabilities in OpenAI's form have each token's text, for tokenizers of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheblend_rag.engines.models import bundled_model_directory
from cacheblend_rag.engines.results import TokenLogprob
from cacheblend_rag.frameworks.asking import openai_logprobs


def bundled() -> Any:
    """Return a tokenizer whose words begin with their space, with tokens for single bytes."""
    return AutoTokenizer.from_pretrained(bundled_model_directory())


def of_bytes() -> Any:
    """Return a tokenizer of bytes only, as GPT-2's would be without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bundled": bundled(), "of bytes": of_bytes()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30))
def test_tokens_and_bytes_join_to_the_answer(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    answer = tokenizer.decode(ids)
    content = openai_logprobs([TokenLogprob(token, -1.0, ((token, -1.0),)) for token in ids], tokenizer)
    assert len(content) == len(ids)
    assert "".join(each["token"] for each in content) == answer
    assert b"".join(bytes(each["bytes"] or ()) for each in content) == answer.encode()
    for each in content:
        assert each["top_logprobs"] == [{name: each[name] for name in ("token", "logprob", "bytes")}]


def test_an_alternative_token_has_the_text_that_it_would_have_in_the_answer() -> None:
    tokenizer = TOKENIZERS["bundled"]
    swift, heron, colon = (tokenizer(word, add_special_tokens=False).input_ids[-1] for word in ("Swift", "Heron", "x:"))
    first, second = openai_logprobs(
        [TokenLogprob(swift, -0.1, ((swift, -0.1),)), TokenLogprob(heron, -0.5, ((heron, -0.5), (colon, -1.0)))],
        tokenizer,
    )
    assert first["token"] == "Swift"
    assert [each["token"] for each in second["top_logprobs"]] == [" Heron", ":"]
    assert second["top_logprobs"][1]["bytes"] == list(b":")
