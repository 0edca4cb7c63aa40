"""Tests the conversation of `chat`, with a pipeline that each test controls."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from cacheblend_rag.blending.outcome import Mode, PromptOutcome, Usage
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.cli.chat import Chat
from cacheblend_rag.cli.citations import marked_lines, reuse_line, snippet, source_lines
from cacheblend_rag.engines.results import Generation, Timings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.results import RagAnswer, RagEvent, Turn
from cacheblend_rag.retrieval.index import Hit

SOURCES = (
    Hit(Chunk("c2", "Her cargo is grain.", ()), 0.5, "/docs/ships.txt", 3),
    Hit(Chunk("c1", "The Proud Gull.", (), {"page": 3, "last_page": 4}), None, "/docs/log.pdf", 1),
)


def answer(mode: Mode = "blend") -> RagAnswer:
    usage = Usage(
        prompt_tokens=2968, reused_tokens=2560, recomputed_tokens=384, computed_tokens=408, completion_tokens=2
    )
    outcome = PromptOutcome(mode, "stored KV for 6 of 6 chunks", usage)
    generation = Generation.of(outcome, "grain", (1, 2), "stop", Timings(0.21, 0.3))
    return RagAnswer("grain", SOURCES, generation, 0.01, notes=("1 of 7 sources left out",))


class Pipeline:
    """Streams the events that a function of the question yields."""

    def __init__(self, stream: Callable[[str], Iterator[RagEvent]]):
        self.histories: list[Sequence[Turn]] = []
        self._stream = stream

    def stream(
        self, question: str, sampling: SamplingParams, settings: BlendSettings, history: Sequence[Turn]
    ) -> Iterator[RagEvent]:
        self.histories.append(history)
        return self._stream(question)


def converse(monkeypatch: pytest.MonkeyPatch, stream: Callable[[str], Iterator[RagEvent]], *lines: str) -> Pipeline:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    pipeline = Pipeline(stream)
    Chat(pipeline, SamplingParams(), BlendSettings()).run(interactive=False)
    return pipeline


def test_an_interrupt_stops_the_answer_and_not_the_conversation(monkeypatch, capsys):
    def stream(question: str) -> Iterator[RagEvent]:
        yield RagEvent(f"answer to {question}")
        if question == "one":
            raise KeyboardInterrupt
        yield RagEvent("", answer=answer())

    converse(monkeypatch, stream, "one", "two", "/history")
    out = capsys.readouterr().out
    assert "answer to one\n  (stopped)\n" in out
    assert "answer to two" in out
    assert "1. two" in out  # the history does not contain the stopped answer


def test_pieces_are_printed_as_they_come(monkeypatch, capsys):
    seen: list[str] = []

    def stream(question: str) -> Iterator[RagEvent]:
        yield RagEvent("gra")
        seen.append(capsys.readouterr().out)
        yield RagEvent("in", answer=answer())

    converse(monkeypatch, stream, "What?")
    assert seen == ["gra"]


def test_the_end_of_input_ends_the_conversation(monkeypatch, capsys):
    converse(monkeypatch, lambda question: iter(()), "")
    assert capsys.readouterr().out == ""


def test_the_reuse_line_counts_every_prompt_token_once():
    assert (
        reuse_line(answer()) == "blend: 2,560 tokens reused, 384 recomputed, 24 new; first token 210 ms; not calibrated"
    )
    assert reuse_line(answer("prefill")).startswith("prefill (stored KV for 6 of 6 chunks): 408 tokens computed")


def test_a_question_is_sent_with_the_answered_questions_since_new(monkeypatch, capsys):
    def stream(question: str) -> Iterator[RagEvent]:
        if question == "stop":
            raise KeyboardInterrupt
        yield RagEvent("", answer=answer())

    pipeline = converse(monkeypatch, stream, "Who led it?", "stop", "And where was she born?", "/new", "Alone?")
    turns = [[(turn.question, turn.answer) for turn in history] for history in pipeline.histories]
    first = ("Who led it?", "grain")
    assert turns == [[], [first], [first], []]


def test_source_lines_show_page_score_and_the_relevant_sentence():
    assert source_lines(answer(), "What is her cargo?") == [
        "[1] ships.txt (score 0.50): “Her cargo is grain.”",
        "[2] log.pdf, pages 3-4 (came along): “The Proud Gull.”",
        "note: 1 of 7 sources left out",
    ]


def test_the_sources_command_prints_whole_chunks_with_their_pages(monkeypatch, capsys):
    converse(monkeypatch, lambda question: iter([RagEvent("", answer=answer())]), "What?", "/sources")
    assert "[2] log.pdf, pages 3-4 (/docs/log.pdf)\n    The Proud Gull.\n" in capsys.readouterr().out


def test_a_snippet_is_the_sentence_that_shares_most_words_cut_between_words():
    text = (
        "Nothing to see here.\n\nTravel above 500 euros is approved by the head of the department. "
        + "More words. " * 20
    )
    found = snippet(text, "Who approves travel above 500 euros?", 60)
    assert found == "“… Travel above 500 euros is approved by the head of the…”"
    assert snippet("One line\nand another.", "") == "“One line and another.”"


def test_a_snippet_quotes_the_characters_of_its_source():
    text = 'Set out in the notes.  Install 2.37.1 from ../docs/a.md, e.g. with pip!\nThen "ask" ... or not?  Yes.'
    assert snippet(text, "install pip", 200) == (
        '“… Install 2.37.1 from ../docs/a.md, e.g. with pip! Then "ask" ... or not? Yes.”'
    )
    for about in ("", "notes", "2.37.1 docs", "ask", "yes"):
        quoted = snippet(text, about, 200).strip("“”").removeprefix("… ")
        assert quoted in " ".join(text.split()), about
    assert snippet(" \n ", "x") == "“”"


def test_a_marked_sentence_is_shown_with_its_surrounding_text():
    text = "Far away. " * 30 + "Near before. The\nanswer. Near after." + " Far away." * 30
    begin = text.index("The\nanswer.")
    heading, *lines = marked_lines(replace(SOURCES[1], chunk=Chunk("c", text, ())), (begin, begin + 11))
    assert heading == "Nearest to the question, in [1] log.pdf:"
    shown = " ".join(line.strip() for line in lines)
    assert "Near before. >> The answer. << Near after." in shown
    assert shown.startswith("… ") and shown.endswith(" …")
    assert all(len(line) <= 100 for line in lines)
