"""A follow-up question is searched for and answered in the context of the earlier turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.rag.results import Turn
from tests.conftest import tokenizer_named
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

TOPICS = ("lighthouse", "bakery", "orchestra", "glacier", "printing press", "vineyard", "railway station", "submarine")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RagPipeline]:
    """Make a pipeline over one document for each topic."""
    for topic in TOPICS:
        (tmp_path / f"{topic}.txt").write_text(
            f"This note is about the {topic}. The {topic} was restored by its friends."
        )

    def make(k: int = 2, window: int = 100_000) -> RagPipeline:
        pipeline = RagPipeline(FakeEngine(window=window), tmp_path / "store", k=k, chunk_tokens=200)
        pipeline.index(sorted(tmp_path.glob("*.txt")))
        return pipeline

    return make


def found(pipeline: RagPipeline, question: str, history: list[Turn]) -> set[str]:
    return {Path(hit.path).stem for hit in pipeline.retrieve(question, history).hits}


def test_a_follow_up_is_searched_for_together_with_the_turn_before(make: Callable[..., RagPipeline]) -> None:
    with make() as pipeline:
        follow_up = "And who restored it, and when did they do so?"
        told = [Turn("Tell me about the glacier.", "The glacier is blue.")]
        assert "glacier" in found(pipeline, follow_up, told)
        other = [Turn("Tell me about the submarine.", "The submarine is yellow.")]
        assert "submarine" in found(pipeline, follow_up, other)
        assert found(pipeline, follow_up, told) != found(pipeline, follow_up, other)


def test_a_change_of_topic_finds_the_new_topic(make: Callable[..., RagPipeline]) -> None:
    with make() as pipeline:
        told = [Turn("Tell me about the glacier.", "The glacier is blue.")]
        assert "bakery" in found(pipeline, "And what of the bakery?", told)


def test_retrieval_finds_each_chunk_once_and_at_most_k(make: Callable[..., RagPipeline]) -> None:
    with make(k=3) as pipeline:
        hits = pipeline.retrieve("the glacier", [Turn("the glacier", "blue")]).hits
        assert len(hits) == len({hit.chunk.id for hit in hits}) == 3


def test_the_next_prompt_begins_with_the_last_one_if_no_new_chunk_is_found(
    make: Callable[..., RagPipeline],
) -> None:
    with make(k=3) as pipeline:
        first = pipeline.retrieve("the glacier").hits
        prompt, hits, _ = pipeline.prompt("the glacier", first)
        said = Turn("the glacier", "It is blue.", hits)
        with_less = pipeline.retrieve("the glacier", [Turn("the glacier", "the glacier", hits)])
        assert {hit.chunk.id for hit in with_less.hits} == {hit.chunk.id for hit in hits}
        before = prompt.token_ids
        behind = pipeline.prompt("Why?", with_less.hits, history=[said])[0].token_ids
        assert behind[: len(before)] == before  # a prefix cache has the conversation up to here


def test_the_oldest_turns_are_left_out_first_and_then_sources(make: Callable[..., RagPipeline]) -> None:
    turns = [Turn(f"Question number {n}?", f"Answer number {n}.") for n in range(6)]
    with make(k=3) as pipeline:
        hits = pipeline.retrieve("the glacier").hits
        sampling = SamplingParams(max_tokens=8)
        whole = len(pipeline.prompt("Why?", hits, sampling, turns)[0].token_ids)
        bare = len(pipeline.prompt("Why?", hits, sampling)[0].token_ids)
        pipeline.engine.context_window = (whole + bare) // 2
        prompt, kept, notes = pipeline.prompt("Why?", hits, sampling, turns)
        text = pipeline.engine.tokenizer.decode(prompt.token_ids)
        assert "number 5" in text and "number 0" not in text and len(kept) == 3
        assert len(notes) == 1 and "of 6 earlier questions left out" in notes[0]
        pipeline.engine.context_window = bare
        _, kept, notes = pipeline.prompt("Why?", hits, sampling, turns)
        assert len(kept) == 2 and notes[0].startswith("6 of 6 earlier") and notes[1].startswith("1 of 3 sources")
        pipeline.engine.context_window = 12
        with pytest.raises(PromptTooLongError):
            pipeline.prompt("Why?", hits, sampling, turns)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_chatml", "metaspace_without_system_role"])
def test_turns_stand_between_chunks_and_question_as_the_template_renders_them(kind: str) -> None:
    tokenizer = tokenizer_named(kind)
    prompt = rag_prompt(tokenizer, [], "Who?", history=[("When?", "In 1911."), ("Where?", "On a hill.")])
    text = "".join(str(segment) for segment in prompt.segments)
    places = [
        text.index(each) for each in ("Question: When?", "In 1911.", "Question: Where?", "On a hill.", "Question: Who?")
    ]
    assert places == sorted(places)
    assert text.count("Answer from the notes.") == 1


def test_removing_a_document_removes_its_kv(make: Callable[..., RagPipeline]) -> None:
    with make() as pipeline:
        before = pipeline.engine.store.stats().entries
        path = next(document.path for document in pipeline.chunks.documents() if "bakery" in document.path)
        pipeline.remove(path)
        assert pipeline.engine.store.stats().entries == before - 1
        assert path not in {document.path for document in pipeline.chunks.documents()}
        assert len(pipeline.engine.registry) == len(TOPICS) - 1
