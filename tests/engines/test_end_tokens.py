"""Tests which tokens end an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cacheblend_rag.engines.models import end_tokens


def named(token: object) -> SimpleNamespace:
    return SimpleNamespace(eos_token_id=token)


@pytest.mark.parametrize(
    ("config", "generation_config", "tokenizer", "want"),
    [
        (named(None), named(None), named(7), {7}),
        (named(2), named([2, 5]), named(7), {2, 5, 7}),
        (named(2), {"eos_token_id": [5]}, None, {2, 5}),
        (named([1, 2]), {}, named(None), {1, 2}),
        (None, None, None, set()),
        (named(0), None, None, {0}),
    ],
)
def test_every_named_token_ends_an_answer(config, generation_config, tokenizer, want):
    assert end_tokens(config, generation_config, tokenizer) == want
