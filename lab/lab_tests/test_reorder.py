"""Tests the order of chunks for prefix cache hits, and the simulated cache."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.reorder import ReorderedPrompts
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk


def chunk(name, tokens=10):
    return Chunk(name, name, (1,) * tokens)


def chunks(names):
    return [chunk(name) for name in names]


def names(found):
    return "".join(one.id for one in found)


def test_cached_chunks_go_first_and_the_rest_stays_in_retrieval_order():
    prompts = ReorderedPrompts()
    assert names(prompts.order(chunks("abc"))) == "abc"
    prompts.serve(chunks("abc"))
    assert names(prompts.order(chunks("dcba"))) == "abcd"
    assert prompts.count_cached(prompts.order(chunks("dcba"))) == 3
    # Without a there is no prefix: c stood behind it.
    assert names(prompts.order(chunks("dcb"))) == "dcb"
    assert prompts.count_cached(chunks("dcb")) == 0


def test_exact_duplicates_are_dropped():
    assert names(ReorderedPrompts().order(chunks("abacb"))) == "abc"


def test_the_cached_sequence_with_most_tokens_wins_over_the_one_with_most_chunks():
    prompts = ReorderedPrompts()
    big, a, b = chunk("big", 100), chunk("a"), chunk("b")
    prompts.serve([a, b])
    prompts.serve([big])
    assert [one.id for one in prompts.order([a, b, big])] == ["big", "a", "b"]


def test_the_least_recently_used_sequence_loses_its_end_first():
    prompts = ReorderedPrompts(budget=40)
    prompts.serve(chunks("ab"))
    prompts.serve(chunks("cd"))
    prompts.serve(chunks("ab"))
    prompts.serve(chunks("ae"))
    assert prompts.cached_tokens == 40
    assert [prompts.count_cached(chunks(text)) for text in ("ab", "ae", "cd")] == [2, 2, 1]


def test_a_cache_without_room_stores_nothing():
    prompts = ReorderedPrompts(budget=0)
    prompts.serve(chunks("ab"))
    assert prompts.cached_tokens == prompts.count_cached(chunks("ab")) == 0
    with pytest.raises(InputError, match="budget"):
        ReorderedPrompts(-1)


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=4), max_size=12), st.sampled_from([30, 1000]))
def test_every_order_has_each_chunk_once_and_the_longest_cached_prefix(requests, budget):
    prompts = ReorderedPrompts(budget)
    for request in requests:
        wanted = chunks(request)
        got = prompts.order(wanted)
        assert sorted(names(got)) == sorted(set(request))
        best = max(prompts.count_cached(other) for other in permutations(chunks(set(request))))
        assert prompts.count_cached(got) == best
        prompts.serve(got)
        assert prompts.cached_tokens <= budget
