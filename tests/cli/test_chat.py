"""The conversation of `chat`, with a pipeline that does what the test says."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.cli.chat import Chat, reuse_line, source_lines
from cacheblend_rag.engines.results import Generation, Timings, Usage
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.rag.results import RagAnswer, RagEvent, Source

SOURCES = (
    Source("c2", "/docs/ships.txt", 3, 0.5, "Her cargo is grain."),
    Source("c1", "/docs/ships.txt", 1, None, "The Proud Gull."),
)


def answer(mode: str = "blend") -> RagAnswer:
    usage = Usage(
        prompt_tokens=2968, reused_tokens=2560, recomputed_tokens=384, computed_tokens=408, completion_tokens=2
    )
    generation = Generation(
        "grain", (1, 2), "stop", mode, "stored KV for 6 of 6 chunks", usage, Timings(0.0, 0.21, 0.3)
    )
    return RagAnswer("grain", SOURCES, generation, 0.01, notes=("1 of 7 sources left out",))


class Pipeline:
    """Streams what a function of the question yields."""

    def __init__(self, stream: Callable[[str], Iterator[RagEvent]]):
        self.stream = lambda question, sampling, settings: stream(question)


def converse(monkeypatch: pytest.MonkeyPatch, stream: Callable[[str], Iterator[RagEvent]], *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    Chat(Pipeline(stream), SamplingParams(), BlendSettings()).run(interactive=False)


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
    assert "1. two" in out  # the stopped answer is no part of the history


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
    assert reuse_line(answer()) == "blend: 2,560 tokens reused, 384 recomputed, 24 new; first token 210 ms"
    assert reuse_line(answer("prefill")).startswith("prefill (stored KV for 6 of 6 chunks): 408 tokens computed")


def test_sources_are_one_line_a_document_with_chunks_in_order_and_notes():
    assert source_lines(answer()) == ["source: ships.txt, chunk 1, 3", "note: 1 of 7 sources left out"]
