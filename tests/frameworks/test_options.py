"""Tests that options of frameworks' models accept other libraries' names, and that open options have defaults."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.frameworks.asking import CALL_OPTIONS, ask, sampling_of, with_usual_names
from cacheblend_rag.frameworks.retrieved import RetrievalLog
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, chat_prompt
from tests.fake_engine import FakeEngine


def test_other_names_of_options_are_accepted_and_duplicates_are_refused() -> None:
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


def test_the_default_max_tokens_is_512_or_the_rest_of_the_window() -> None:
    assert [sampling_of({}, room).max_tokens for room in (4000, 100, -3)] == [512, 100, 1]
    assert sampling_of({"stop": "end", "max_tokens": 3, "seed": None}, 100) == SamplingParams(3, stop=("end",))


def test_a_prompt_is_sent_as_text_only_if_it_has_no_special_tokens_in_documents() -> None:
    engine = FakeEngine()
    model = SimpleNamespace(engine=engine, on_miss="warn", **dict.fromkeys(CALL_OPTIONS))
    short = make_chunk(f"Use {engine.tokenizer.eos_token}.", engine.tokenizer)

    def prompt(**named: object) -> str | None:
        message = {"role": "user", "content": f"{short.text} Who?", **named}

        def build() -> BlendPrompt:
            return chat_prompt(engine.tokenizer, [message], engine.registry)

        return ask(model, build, {"max_tokens": 2}, log=RetrievalLog(), run=None).request.prompt.text

    assert short.text in (prompt() or "")
    assert prompt(named=[short]) is None  # a server would read the document's text as a special token
