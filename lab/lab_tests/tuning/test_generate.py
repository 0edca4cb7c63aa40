"""Tests the filtering of questions written by the reader itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_lab.tuning.questions import REQUEST, generate_questions
from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.engines.results import Generation, StreamEvent, Timings
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.rag.pipeline import RagPipeline
from tests.conftest import CHATML, byte_level
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

FACTS = {
    "The brig carries copper from the north.": ("What does the brig carry?", "copper"),
    "Oda Fenwick is the mayor of the town.": ("Who is the mayor of the town?", "Oda Fenwick"),
    "Bread is baked before dawn by the miller.": ("When is the bread baked?", "before dawn"),
    "The tower has nine bells and one clock.": ("How many bells has the tower?", "nine"),
}


class Writer(FakeEngine):
    """Writes a fixed question about each chunk, and answers a question if its chunk is in the prompt."""

    forgets = ""
    mumbles = ""

    def stream(self, prompt, sampling=None, settings=None) -> Iterator[StreamEvent]:
        if isinstance(prompt, TokenizedPrompt):
            chunks = [span.chunk.text for span in prompt.spans]
            edges = [0, *(edge for span in prompt.spans for edge in (span.start, span.end)), len(prompt.token_ids)]
            between = zip(edges[::2], edges[1::2], strict=True)
            rest = "".join(self.tokenizer.decode(prompt.token_ids[a:b]) for a, b in between)
        else:
            chunks = [part.text for part in prompt.segments if isinstance(part, Chunk)]
            rest = "".join(part for part in prompt.segments if isinstance(part, str))
        asked = next((text for text, (question, _) in FACTS.items() if question in rest), None)
        if asked is None:
            said = "Hm?" if chunks[0] == self.mumbles else f" {FACTS[chunks[0]][0]}"
        else:
            said = (
                FACTS[asked][1]
                if asked in chunks and not (asked == self.forgets and len(chunks) > 1)
                else "nobody knows"
            )
        done = Generation.of(PromptOutcome("prefill", "", Usage(1, 0, 0, 1)), said, (1,), "stop", Timings(0, 0))
        self.asked_for = REQUEST in rest
        yield StreamEvent(said, done)


@pytest.fixture(params=[None, CHATML], ids=["goes on", "follows requests"])
def pipeline(request, tmp_path: Path) -> Iterator[RagPipeline]:
    engine = Writer(tokenizer=byte_level(request.param))
    with RagPipeline(engine, tmp_path, k=3, follow=0) as opened:
        for number, text in enumerate(FACTS):
            opened.chunks.add(f"{number}.md", text, [make_chunk(text, engine.tokenizer)])
        yield opened


def quiet(done: float, total: int, at: str) -> None:
    pass


def test_questions_that_find_their_chunk_and_answer_again_are_accepted(pipeline: RagPipeline) -> None:
    found = generate_questions(pipeline, 4, 0, quiet)
    chunks = {chunk.text: chunk.id for chunk in pipeline.chunks.chunks()}
    for question in found.questions:
        text = next(text for text, (asked, _) in FACTS.items() if asked == question.text)
        assert (question.answers, question.relevant) == ((FACTS[text][1],), {chunks[text]})
    assert len({question.text for question in found.questions}) == len(found.questions) >= 3
    assert found.tried == len(found.questions) + found.empty + found.unanswered + found.lost
    assert generate_questions(pipeline, 4, 0, quiet) == found


def test_questions_without_a_repeated_answer_and_texts_without_a_question_are_left_out(pipeline: RagPipeline) -> None:
    pipeline.engine.forgets, pipeline.engine.mumbles = list(FACTS)[:2]
    found = generate_questions(pipeline, 2, 0, quiet)
    assert {question.text for question in found.questions} == {asked for asked, _ in list(FACTS.values())[2:]}
    assert found.lost or found.empty


def test_a_model_that_writes_no_questions_is_an_error(pipeline: RagPipeline) -> None:
    for text in FACTS:
        pipeline.remove(f"{list(FACTS).index(text)}.md")
    with pytest.raises(InputError, match="Nothing is indexed"):
        generate_questions(pipeline, 4, 0, quiet)
    only = next(iter(FACTS))
    pipeline.chunks.add("0.md", only, [make_chunk(only, pipeline.engine.tokenizer)])
    pipeline.engine.mumbles = only
    with pytest.raises(InputError, match=r"0 came back .* were no question"):
        generate_questions(pipeline, 4, 0, quiet)
