"""The record of a prompt's outcome: a new fact reaches every reader, and no reader names the facts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, get_args

import pytest

from cacheblend_rag.blending.outcome import Fate, PromptOutcome
from cacheblend_rag.engines.results import Generation, Timings
from cacheblend_rag.engines.spans import reuse_attributes
from cacheblend_rag.errors import InputError
from tests.outcomes import differing, filled


def test_every_fact_survives_json_and_processes() -> None:
    outcome = filled()
    assert PromptOutcome.from_params(json.loads(json.dumps(outcome.to_params()))) == outcome


def test_an_answer_has_every_fact_and_its_own_count_of_tokens() -> None:
    outcome = filled()
    done = Generation.of(outcome, "Ada", (1, 2), "stop", Timings(0.1, 0.2))
    assert done.usage.completion_tokens == 2
    assert differing(done, outcome) == {"usage"}
    assert {**done.facts, "usage": None} == {**outcome.facts, "usage": None}


def test_a_span_records_every_number_and_word_but_no_chunk_id() -> None:
    outcome = filled()
    told = reuse_attributes(outcome)
    for name, fact in outcome.facts.items():
        if isinstance(fact, (str, int, float)):
            assert told[f"cacheblend.{name}"] == fact
    fates = Counter(chunk.fate for chunk in outcome.chunks)
    assert {name: told[f"cacheblend.chunks.{name}"] for name in get_args(Fate)} == {
        name: fates[name] for name in get_args(Fate)
    }
    assert set(outcome.facts["usage"].values()) <= set(told.values())
    assert (told["cacheblend.tier.disk.bytes"], told["cacheblend.tier.ram.bytes"]) == (10, 3)
    assert "chunk" not in str(list(told.values()))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"mood": "good"}, "mood"),
        ({"ratio": "a tenth"}, "ratio"),
        ({"mode": "guess"}, "mode"),
        ({"reused_tokens": None}, "reused_tokens"),
        ({"chunks": [{"id": "a"}]}, r"chunks\.0\.start"),
    ],
)
def test_an_unreadable_report_is_refused_and_its_wrong_fact_is_named(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=rf"malformed: .*{why}"):
        PromptOutcome.from_params(filled().to_params() | wrong)


@pytest.mark.parametrize("wrong", [None, 3, [{}], {}])
def test_values_that_are_no_report_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="malformed"):
        PromptOutcome.from_params(wrong)
