"""Tests that the ends of a conversation's turns are found in a prompt."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.prompts.prompt import chat_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import turn_ends, turn_lead
from tests.conftest import byte_level

TALK = [
    {"role": "user", "content": "Who runs the observatory?"},
    {"role": "assistant", "content": "Ada Brenmoor."},
    {"role": "user", "content": "Who else? Answer me."},
    {"role": "assistant", "content": "\nNobody."},
    {"role": "user", "content": "Why?"},
]


# This template follows gpt-oss's: the kind of an answer stands before a finished answer, and in no prompt for a new
# one.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' %} final{% endif %}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def test_each_turn_ends_where_its_prompt_ended(any_tokenizer: Any) -> None:
    _ends_where_the_prompts_did(any_tokenizer)


def test_text_before_finished_answers_is_no_part_of_the_prompts_for_them() -> None:
    _ends_where_the_prompts_did(byte_level(CHANNELS))


def _ends_where_the_prompts_did(tokenizer: Any) -> None:
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


def test_prompts_without_a_tokenizer_have_no_turns() -> None:
    assert turn_lead(None) == ()
    assert turn_ends((1, 2, 3), ()) == ()


def test_every_complete_lead_counts_as_a_turn_and_an_incomplete_one_does_not() -> None:
    assert turn_ends((1, 1, 2, 3, 1, 2, 1), (1, 2)) == (3, 6)
