"""Tests that what a prompt's tokens are said to have gone through is what the engine did with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.blending.costs import Costs, TierCost
from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.calibrate.why import PromptInspector
from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.rag.fates import PromptFate, prompt_fate
from cacheblend_rag.rag.pipeline import RagPipeline
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_control import AUTO, COMPUTE, chunk_bytes, controlled_engine
from tests.blending.writers import write_writer

pytestmark = pytest.mark.slow

ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with TransformersEngine(prefix_cache=0) as engine:
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


@pytest.mark.parametrize("ratio", [0.0, 0.4])
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


def test_a_first_chunk_that_stands_in_the_prompt_again_has_a_fate_at_each_of_its_places(tmp_path: Path) -> None:
    scene, llama = Scene(), BLENDED["llama"]
    first, second = scene.chunks[:2]
    ids, spans = list(scene.header), []
    for chunk in (first, second, first):
        spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
        ids += [*chunk.token_ids, 7, 8]
    prompt, tokens = TokenizedPrompt((*ids, *scene.question), tuple(spans)), len(first.token_ids)
    write_writer(tmp_path, llama())
    with engine_for(make_model(llama()), scene, writer=tmp_path) as engine:
        engine.precompute(scene.chunks)
        for own, again in (("missing", "reused"), ("exact", "reused"), ("exact", "missing")):
            if again == "missing":  # the writer's alone is evicted
                engine.store.delete(engine.entries.own_key(first.token_ids))
            fate = fate_of(engine, prompt, BlendSettings(ratio=0.3))
            assert [chunk.fate for chunk in fate.chunks] == [own, "reused", again]
            assert fate.missing == tokens * (own, again).count("missing")
            assert fate.text == 3 * 2 + len(scene.question)
            assert fate.exact == len(scene.header) + tokens * (own == "exact")


def test_a_chunk_that_was_sooner_computed_than_loaded_is_recomputed_whole() -> None:
    engine, _ = controlled_engine(1.0)
    engine.costs = Costs(1000, COMPUTE, {"device": TierCost(0.0, chunk_bytes(engine) / 0.1)})
    prompt = Scene().prompt
    done = engine.generate(prompt, ONE, AUTO)
    fate = prompt_fate(engine, prompt, done, BLEND)
    assert 0 < len(done.in_place) < 4
    assert {chunk.id for chunk in fate.chunks if chunk.fate == "recomputed"} == set(done.in_place)
    in_place = sum(chunk.tokens for chunk in fate.chunks if chunk.fate == "recomputed")
    assert fate.recomputed == in_place + done.usage.recomputed_tokens
    text = len(prompt.token_ids) - sum(chunk.tokens for chunk in fate.chunks)
    assert text - len(engine.header_ids) <= fate.text <= text
    assert fate.exact + fate.reused + fate.recomputed + fate.missing + fate.text == len(prompt.token_ids)
