"""Tests the sentence nearest to a question, and the source that contains an answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.passages import nearest_sentence, said_by, sentences, with_marks

TRAVEL = (
    "# Travel\n\nEvery trip is booked by the office.  The head of the department approves a trip above 800 euros.\n"
    "Below that nobody need be asked. Version 2.37.1 of these rules holds."
)


def cut(text: str) -> list[str]:
    return [text[a:b] for a, b in sentences(text)]


def test_sentences_and_lines_are_split_as_a_reader_would() -> None:
    assert cut(TRAVEL) == [
        "# Travel",
        "Every trip is booked by the office.",
        "The head of the department approves a trip above 800 euros.",
        "Below that nobody need be asked.",
        "Version 2.37.1 of these rules holds.",
    ]
    assert cut("") == cut(" \n ") == []


@given(st.text("ab.!? \n\t", max_size=40))
def test_sentences_contain_every_character_except_white_space_in_order(text: str) -> None:
    found = list(sentences(text))
    assert "".join("".join(cut(text)).split()) == "".join(text.split())
    assert all(a < b and text[a:b] == text[a:b].strip() for a, b in found)
    assert [edge for span in found for edge in span] == sorted(edge for span in found for edge in span)


def test_a_line_break_within_a_paragraph_ends_no_sentence_but_a_list_item_does() -> None:
    assert cut("The harbour lies\nbelow the hill.\n- rye\n- wheat\n1. One\n2) Two\n| a | b |\n| 1 | 2 |\n\nOver") == [
        *(
            "The harbour lies\nbelow the hill.",
            "- rye",
            "- wheat",
            "1. One",
            "2) Two",
            "| a | b |",
            "| 1 | 2 |",
            "Over",
        ),
    ]


def test_the_nearest_sentence_is_no_heading_even_with_the_words_of_the_question() -> None:
    text = "# Director of the observatory\n\nIt was founded in 1911. The observatory's director is Ada Brenmoor."
    embedder = Embedder.load()
    span = nearest_sentence(text, "Who is the director of the observatory?", embedder)
    assert span is not None and text[slice(*span)].endswith("Ada Brenmoor.")
    assert nearest_sentence("# Rye\n\nWheat", "Who?", embedder) in ((0, 5), (7, 12))


def test_the_nearest_sentence_is_chosen_by_meaning() -> None:
    embedder = Embedder.load()
    span = nearest_sentence(TRAVEL, "Who has to give permission for an expensive journey?", embedder)
    assert span is not None and TRAVEL[slice(*span)] == "The head of the department approves a trip above 800 euros."
    assert nearest_sentence("One.", "Who?", embedder) == (0, 4)
    assert nearest_sentence(" ", "Who?", embedder) is None


def test_a_sentence_is_marked_with_its_source_and_unsupported_sentences_stay_unmarked() -> None:
    sources = ["The harbour lies below the Marlow observatory.", TRAVEL]
    question = "Who must approve a trip above 800 euros?"
    answer = "The head of the department must approve the trip. I like the harbour of Lisbon."
    marked, (said,) = with_marks(answer, question, sources)
    assert marked == "The head of the department must approve the trip. [2] I like the harbour of Lisbon."
    assert sources[said.text][said.start : said.end].startswith("The head of the department approves")
    code = "```\nthe head of the department\n```"
    assert with_marks(code, question, sources) == (code, ())


def test_a_source_sentence_is_chosen_by_the_question_among_equal_matches() -> None:
    text = "The lamps are yellow. The sky is blue. The delivery carts are yellow. The yellow sun is far."
    said = said_by("yellow", "What colour are the delivery carts of the brewery?", ["Yellow bread.", text])
    assert said is not None and text[said.start : said.end] == "The delivery carts are yellow."


def test_words_of_the_question_alone_match_no_source() -> None:
    question = "Who approves a trip above 800 euros?"
    assert said_by("Somebody approves a trip above 800 euros.", question, [TRAVEL]) is None
    assert said_by("Yes.", question, [TRAVEL]) is None
    first = said_by("The department.", question, [TRAVEL, TRAVEL])
    assert first is not None and first.text == 0


@given(st.text("ab.? \n[1]", max_size=40), st.lists(st.text("ab. ", max_size=20), max_size=3))
def test_an_answer_without_its_marks_is_unchanged(answer: str, sources: list[str]) -> None:
    assert with_marks(answer, "", sources)[0].replace(" [1]", "").replace(" [2]", "").replace(" [3]", "") == (
        answer.replace(" [1]", "").replace(" [2]", "").replace(" [3]", "")
    )
