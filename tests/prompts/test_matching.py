from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.prompts import matching
from cacheblend_rag.prompts.matching import OPENINGS, PromptHashes, TextTable, signatures_of

SHORT, MIDDLE, LONG = OPENINGS
# Lengths lie around every opening's, and many texts share openings.
TEXTS = st.builds(
    lambda head, length, tail: (head * length)[:length] + tail,
    st.sampled_from(["a", "ab", "-", "The harbour is old. "]),
    st.sampled_from([SHORT - 1, SHORT, MIDDLE - 1, MIDDLE, MIDDLE + 9, LONG - 1, LONG, LONG + 1]),
    st.text(alphabet="ab🎉", max_size=4),
)


def table_of(texts: list[str]) -> TextTable:
    return TextTable().with_more(signatures_of(texts), np.arange(len(texts)))


def found(table: TextTable, prompt: str) -> list[tuple[int, int, int]]:
    return [tuple(candidate)[:3] for candidate in table.candidates(PromptHashes(prompt)).tolist()]


def naively(texts: list[str], prompt: str) -> list[tuple[int, int, int]]:
    return sorted(
        (
            (at, len(text), number)
            for at in range(len(prompt))
            for number, text in enumerate(texts)
            if len(text) >= SHORT and prompt.startswith(text, at)
        ),
        key=lambda one: (one[0], -one[1], one[2]),
    )


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, max_size=6), around=st.lists(st.text(alphabet="ab-", max_size=20), min_size=7, max_size=7))
def test_candidates_are_the_texts_in_the_prompt_in_order(texts: list[str], around: list[str]) -> None:
    prompt = "".join(part for pair in zip(around, [*texts, ""], strict=False) for part in pair)
    assert found(table_of(texts), prompt) == naively(texts, prompt)


@settings(max_examples=60)
@given(texts=st.lists(st.text(max_size=40), max_size=5), data=st.data())
def test_the_hash_of_a_part_does_not_depend_on_its_surroundings(texts: list[str], data: st.DataObject) -> None:
    joined = "".join(texts)
    begin = data.draw(st.integers(0, len(joined)))
    end = data.draw(st.integers(begin, len(joined)))
    part = np.array([begin]), np.array([end])
    alone = PromptHashes(joined[begin:end])
    assert PromptHashes(joined).of(*part) == alone.of(np.array([0]), np.array([end - begin]))
    assert signatures_of(texts).tolist() == [signatures_of([text])[0].tolist() for text in texts]


def test_a_table_grown_entry_by_entry_finds_as_much_as_a_table_made_at_once(monkeypatch) -> None:
    monkeypatch.setattr(matching, "_SMALL", 4)
    texts = [f"Entry {number:03d} of the harbour log, in full." for number in range(60)]
    signatures = signatures_of(texts)
    table = TextTable()
    for number in range(len(texts)):
        table = table.with_more(signatures[number : number + 1], np.array([number]))
    prompt = " ".join(texts[::3])
    assert table.size == 60
    assert found(table, prompt) == found(table_of(texts), prompt) == naively(texts, prompt)


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """Count the texts compared with positions of prompts."""
    counts: list[int] = []
    original = matching._Shelf._compared

    def counting(self, prompt, at, first, count):
        counts.append(int(count.sum()))
        return original(self, prompt, at, first, count)

    monkeypatch.setattr(matching._Shelf, "_compared", counting)
    return counts


def test_a_repeated_beginning_is_compared_with_texts_a_limited_number_of_times(
    monkeypatch, compared: list[int]
) -> None:
    monkeypatch.setattr(matching, "_MAX_PAIRS", 5_000)
    head = "a" * 1024
    crowd = [f"{head} page {number}" for number in range(1_000)]
    own = "The harbour's own note, which begins like no other."
    prompt = f"{'a' * 20_000} {own} {head} page 7"
    assert len(crowd) in [number for _, _, number in found(table_of([*crowd, own]), prompt)]
    assert 0 < sum(compared) <= 5_000
    monkeypatch.setattr(matching, "_MAX_PAIRS", 1 << 40)
    crowd = crowd[:20]
    assert found(table_of([*crowd, own]), prompt) == naively([*crowd, own], prompt)


def test_a_repeated_short_opening_is_not_compared_if_the_longer_opening_differs(
    compared: list[int],
) -> None:
    head = "Copyright (c) 20"
    texts = [head + f" page {number} " + "x" * (200 + number) for number in range(500)]
    assert found(table_of(texts), head * 2_000) == []
    assert sum(compared) == 0
