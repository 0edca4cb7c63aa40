"""Tests that what a prompt's tokens are said to have gone through is what the engine did with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.lab.inspection import PromptInspector
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.rag.fates import PromptFate, prompt_fate
from cacheblend_rag.rag.pipeline import RagPipeline

pytestmark = pytest.mark.slow

ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with TransformersEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> TokenizedPrompt:
    with RagPipeline(engine, tmp_path_factory.mktemp("store"), k=4) as pipeline:
        pipeline.index([bundled_corpus() / "ship-logs.md"])
        question = next(q.question for q in bundled_questions() if q.source == "ship-logs.md")
        return pipeline.prompt(question, pipeline.retrieve(question).hits)[0]


def fate_of(engine: TransformersEngine, prompt: TokenizedPrompt, settings: BlendSettings) -> PromptFate:
    fate = prompt_fate(engine, prompt, engine.generate(prompt, ONE, settings), settings)
    assert fate.exact + fate.reused + fate.recomputed + fate.missing + fate.text == len(prompt.token_ids)
    assert min(fate.exact, fate.reused, fate.recomputed, fate.missing, fate.text) >= 0
    return fate


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.4, 1.0])
def test_as_many_tokens_of_static_are_recomputed_as_the_fusor_recomputes(
    engine: TransformersEngine, prompt: TokenizedPrompt, ratio: float
) -> None:
    settings = BlendSettings(ratio=ratio, policy="static")
    fate = fate_of(engine, prompt, settings)
    assert [chunk.fate for chunk in fate.chunks] == ["exact", "reused", "reused", "reused"]
    assert (
        len(PromptInspector(engine, prompt).recomputed(settings))
        == fate.recomputed
        == round(ratio * sum(s.end - s.start for s in prompt.spans[1:]))
    )
    assert fate.exact == prompt.spans[0].end
    assert fate.text == len(prompt.token_ids) - sum(s.end - s.start for s in prompt.spans) - len(engine.header_ids)


@pytest.mark.parametrize(
    ("settings", "first", "others"),
    [
        (FULL_RECOMPUTE, "recomputed", "recomputed"),
        (PREFIX_CACHING, "exact", "recomputed"),
        (FULL_REUSE, "exact", "reused"),
        (BLEND, "exact", "reused"),
    ],
)
def test_every_method_says_what_it_does_with_stored_kv(
    engine: TransformersEngine, prompt: TokenizedPrompt, settings: BlendSettings, first: str, others: str
) -> None:
    fate = fate_of(engine, prompt, settings)
    assert [chunk.fate for chunk in fate.chunks] == [first, *[others] * 3]
    assert (fate.recomputed > 0) == (settings is not FULL_REUSE)


@pytest.mark.parametrize("which", [0, 2])
def test_a_chunk_without_stored_kv_is_missing_and_is_there_the_next_time(
    engine: TransformersEngine, prompt: TokenizedPrompt, which: int
) -> None:
    gone = prompt.spans[which]
    assert engine.entries.delete(gone.chunk.token_ids)
    fate = fate_of(engine, prompt, BLEND)
    assert [chunk.fate == "missing" for chunk in fate.chunks] == [n == which for n in range(4)]
    assert fate.missing == gone.end - gone.start
    assert fate.exact == (len(engine.header_ids) if which == 0 else prompt.spans[0].end)
    assert fate_of(engine, prompt, BLEND).missing == 0


def test_a_prompt_of_nothing_stored_is_missing_whole(engine: TransformersEngine, prompt: TokenizedPrompt) -> None:
    for span in prompt.spans:
        engine.entries.delete(span.chunk.token_ids)
    fate = fate_of(engine, prompt, BLEND)
    assert {chunk.fate for chunk in fate.chunks} == {"missing"}
    assert fate.recomputed == fate.reused == 0
