"""Tests where the turns of a conversation end in a prompt."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.prompts.prompt import chat_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import turn_ends, turn_lead

TALK = [
    {"role": "user", "content": "Who runs the observatory?"},
    {"role": "assistant", "content": "Ada Brenmoor."},
    {"role": "user", "content": "Who else? Answer me."},
    {"role": "assistant", "content": "\nNobody."},
    {"role": "user", "content": "Why?"},
]


def test_each_turn_ends_where_the_prompt_of_that_turn_ended(any_tokenizer: Any) -> None:
    tokenizer = any_tokenizer
    lead = turn_lead(tokenizer)
    prompts = [
        tokenize(chat_prompt(tokenizer, TALK[:count], ChunkRegistry()), tokenizer, ChunkRegistry()).token_ids
        for count in (1, 3, 5)
    ]
    ends = turn_ends(prompts[-1], lead)
    assert len(ends) == 3
    for prompt, end in zip(prompts, ends, strict=True):
        assert prompt[:end] == prompts[-1][:end]
        assert not tokenizer.decode(prompt[end:]).strip()


def test_without_a_tokenizer_there_are_no_turns() -> None:
    assert turn_lead(None) == ()
    assert turn_ends((1, 2, 3), ()) == ()


def test_every_occurrence_counts_and_an_incomplete_one_does_not() -> None:
    assert turn_ends((1, 1, 2, 3, 1, 2, 1), (1, 2)) == (3, 6)
