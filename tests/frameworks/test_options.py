"""Options of frameworks' models: other libraries' names are understood, and what is left open is filled in."""

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


def test_a_prompt_is_sent_as_text_where_it_is_nothing_but_text() -> None:
    engine = FakeEngine()
    model = SimpleNamespace(engine=engine, on_miss="warn", **dict.fromkeys(CALL_OPTIONS))
    short = make_chunk(f"Use {engine.tokenizer.eos_token}.", engine.tokenizer)

    def prompt(**named: object) -> str | None:
        message = {"role": "user", "content": f"{short.text} Who?", **named}

        def build() -> BlendPrompt:
            return chat_prompt(engine.tokenizer, [message], engine.registry)

        return ask(model, build, {"max_tokens": 2}, log=RetrievalLog(), run=None).request.prompt.text

    assert short.text in (prompt() or "")
    assert prompt(named=[short]) is None  # what it spells is a document's: a server would read a special token there
