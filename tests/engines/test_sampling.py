"""Decoding options: what cannot be served is refused by name when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag.engines.sampling import SamplingParams
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
    ("stop", "one string"),
    ("stop", (1,)),
    ("stop", None),
    ("logprobs", 21),
    ("logprobs", "3"),
    ("logprobs", 2.0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_or_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {value!r}".replace("(", r"\(").replace(")", r"\)")):
        SamplingParams(**{name: value})


def test_whole_numbers_will_do_for_fractions() -> None:
    assert SamplingParams(temperature=1, top_p=1, stop=["end"]).temperature == 1  # type: ignore[arg-type]
