"""Options of frameworks' models: other libraries' names are understood, and what is left open is filled in."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.frameworks.asking import sampling_of, with_usual_names


def test_other_names_for_the_same_are_understood_and_not_given_twice() -> None:
    assert with_usual_names({"max_completion_tokens": 5, "stop_sequences": ["x"], "request_timeout": 3, "seed": 1}) == {
        "max_tokens": 5,
        "stop": ["x"],
        "timeout": 3,
        "seed": 1,
    }
    assert with_usual_names({"logprobs": True, "top_logprobs": 3}) == {"logprobs": 3}
    assert with_usual_names({"logprobs": False}) == {"logprobs": None}
    with pytest.raises(InputError, match="max_completion_tokens and max_tokens are the same"):
        with_usual_names({"max_completion_tokens": 5, "max_tokens": 5})
    with pytest.raises(InputError, match="logprobs=True"):
        with_usual_names({"top_logprobs": 3})


def test_an_answer_is_512_tokens_long_at_most_or_what_the_window_leaves() -> None:
    assert [sampling_of({}, room).max_tokens for room in (4000, 100, -3)] == [512, 100, 1]
    assert sampling_of({"stop": "end", "max_tokens": 3, "seed": None}, 100) == SamplingParams(3, stop=("end",))
