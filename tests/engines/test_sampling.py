"""Tests that decoding options refuse invalid values by name, and that sampling follows the options."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from cacheblend_rag.engines.models import bundled_model_directory
from cacheblend_rag.engines.sampling import SamplingParams, repeats
from cacheblend_rag.engines.transformers.decoding import Sampler, TextStream
from cacheblend_rag.errors import InputError

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", "8"),
    ("max_tokens", True),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", "0.9"),
    ("seed", 1.0),
    ("seed", "1"),
    ("seed", 1 << 63),
    ("stop", "one string"),
    ("stop", (1,)),
    ("stop", None),
    ("logprobs", 21),
    ("logprobs", "3"),
    ("logprobs", 2.0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_the_error_names_an_option_of_a_wrong_value_or_type(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {value!r}".replace("(", r"\(").replace(")", r"\)")):
        SamplingParams(**{name: value})


def test_whole_numbers_are_accepted_for_fractions() -> None:
    assert SamplingParams(temperature=1, top_p=1, stop=["end"]).temperature == 1  # type: ignore[arg-type]


PENALTIES = [
    ("top_k", -1),
    ("top_k", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", "1"),
    ("frequency_penalty", True),
    ("stop_repeating", "yes"),
]


@pytest.mark.parametrize(("name", "value"), PENALTIES)
def test_the_error_names_penalties_and_top_k_that_are_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {value!r}"):
        SamplingParams(**{name: value})


def sampled(steps: list[list[float]], **options: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**options), torch.device("cpu"))
    return [sampler(torch.tensor(logits)) for logits in steps]


def test_penalties_lower_the_logits_of_tokens_in_the_answer() -> None:
    steps = [[1.0, 0.8, 0.0]] * 4
    assert sampled(steps) == [0, 0, 0, 0]
    assert sampled(steps, presence_penalty=0.5) == [0, 1, 0, 0]  # the penalty counts each token once
    assert sampled(steps, frequency_penalty=0.5) == [0, 1, 0, 1]
    assert sampled(steps, frequency_penalty=-1.0) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ([*range(16)] * 2, True),
        ([9, *range(16), *range(16)], True),
        ([*range(15)] * 2, False),  # too short for a repetition
        ([*range(16), 99, *range(16)], False),
        ([*range(16), *range(16), 99], False),
        ([*range(128)] * 2, True),
        ([*range(129)] * 2, False),
        ([7] * 31, False),
        ([7] * 32, True),
        ([], False),
    ],
)
def test_a_passage_that_follows_itself_is_a_repetition(said: list[int], again: bool) -> None:
    assert repeats(said) == again


def test_top_k_samples_only_the_likeliest_tokens() -> None:
    steps = [[3.0, 2.9, 2.8, 2.7]] * 60
    assert set(sampled(steps, temperature=2.0, seed=1)) == {0, 1, 2, 3}
    assert set(sampled(steps, temperature=2.0, seed=1, top_k=2)) == {0, 1}


def test_a_json_schema_may_be_text_or_values_and_invalid_json_is_refused() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    given = (SamplingParams(json_schema=schema), SamplingParams(json_schema=json.dumps(schema)), SamplingParams())
    assert [params.schema() for params in given] == [schema, schema, None]
    with pytest.raises(InputError, match="json_schema is not JSON"):
        SamplingParams(json_schema="{no json").schema()


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["<0x59>", "<0x98>", "▁1887"], ["Y", "", "\ufffd 1887"]),  # tokenizers' own DecodeStream fails here
        (["<0x0A>", "<0xF0>", "<0x9F>", "ued", "▁che"], ["\n", "", "", "\ufffd\ufffdued", " che"]),
        (["<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "ued"], ["\n", "", "", "", "😀", "ued"]),
        (["▁che", "<0xC3>", "<0xA9>", "▁che"], ["che", "", "é", " che"]),
    ],
)
def test_a_text_stream_decodes_byte_tokens_that_are_no_character(tokens: list[str], pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_directory())
    stream = TextStream(tokenizer, ())
    assert [stream.push(tokenizer.convert_tokens_to_ids(token)) for token in tokens] == pieces
