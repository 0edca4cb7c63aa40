"""What an earlier prompt's KV may serve: the tokens in common, as far as they were made in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag.blending.options import blend_terms
from cacheblend_rag.blending.plan import Origin, common_tokens, origins
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import ResolvedSettings

HEADER = 2
IDS = tuple(range(40))
SPANS = [(2, 8), (9, 14), (20, 26)]
ENDS = (17, 30)


def made(**changes: Any) -> tuple[Origin, ...]:
    settings = ResolvedSettings(changes.get("ratio", 0.15), changes.get("policy", "hkvd"), (1,), "chunks")
    spans, ids, ends = (changes.get(name, value) for name, value in (("spans", SPANS), ("ids", IDS), ("ends", ENDS)))
    terms = blend_terms(settings, ModelProfile().options(settings))
    return origins(spans, ids, ends, HEADER, terms, changes.get("watches", False))


def test_each_turn_with_chunks_has_an_origin_at_its_first_chunk_or_at_the_header_in_front_of_it() -> None:
    assert [origin.start for origin in made()] == [0, 20]
    assert [origin.start for origin in made(spans=SPANS[1:])] == [9, 20]
    assert made(spans=[]) == ()


def test_a_prompt_that_goes_on_has_the_origins_of_the_one_before() -> None:
    first = made(spans=SPANS[:2], ids=IDS[:17], ends=ENDS[:1])
    assert first == made()[:1]
    assert common_tokens(IDS[:19], first, IDS, made()) == 19


@pytest.mark.parametrize(
    "other",
    [{"ratio": 0.2}, {"policy": "random"}, {"spans": [(2, 8), (20, 26)]}, {"spans": [(2, 8), (10, 14), (20, 26)]}],
)
def test_nothing_is_common_from_where_it_was_made_otherwise(other: dict[str, Any]) -> None:
    assert common_tokens(IDS, made(), IDS, made(**other)) == 0


def test_what_differs_in_a_later_turn_leaves_the_earlier_ones() -> None:
    assert common_tokens(IDS, made(), IDS, made(spans=[*SPANS[:2], (21, 26)])) == 20
    assert common_tokens(IDS, made(), IDS, made(spans=SPANS[:2])) == 20


def test_exact_kv_serves_a_blended_prompt_up_to_its_first_chunk() -> None:
    assert common_tokens(IDS, (), IDS, made(spans=SPANS[1:])) == 9
    assert common_tokens(IDS, (), IDS, made()) == 0


def test_other_words_count_where_they_select_and_only_within_their_turn() -> None:
    asked = (*IDS[:15], 99, *IDS[16:])
    later = (*IDS[:32], 99, *IDS[33:])
    assert [a == b for a, b in zip(made(), made(ids=asked), strict=True)] == [True, True]
    watched = made(watches=True)
    assert [a == b for a, b in zip(watched, made(watches=True, ids=asked), strict=True)] == [False, True]
    assert watched == made(watches=True, ids=later)
    assert common_tokens(IDS, watched, asked, made(watches=True, ids=asked)) == 0
    assert common_tokens(IDS, watched, later, watched) == 32


def test_tokens_in_common_are_counted_to_the_last() -> None:
    for common in range(len(IDS) + 1):
        assert common_tokens(IDS, (), (*IDS[:common], 99), ()) == common
