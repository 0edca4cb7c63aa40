"""Tests that an outcome records for each chunk how the engine treated the chunk's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.blending.costs import Costs, TierCost
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.calibrate.why import PromptInspector
from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
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
    notes = tmp_path_factory.mktemp("notes") / "ship-logs.md"
    notes.write_text((bundled_corpus() / notes.name).read_text("utf-8")[:4000], encoding="utf-8")
    with RagPipeline(engine, tmp_path_factory.mktemp("store"), chunk_tokens=128, k=4) as pipeline:
        pipeline.index([notes])
        question = next(q.question for q in bundled_questions() if q.source == notes.name)
        return pipeline.prompt(question, pipeline.retrieve(question).hits)[0]


def outcome_of(engine: TransformersEngine, prompt: TokenizedPrompt, settings: BlendSettings) -> PromptOutcome:
    return checked(engine.generate(prompt, ONE, settings), prompt)


def checked(outcome: PromptOutcome, prompt: TokenizedPrompt) -> PromptOutcome:
    """Check that each token of the prompt is counted once."""
    tokens = outcome.tokens_by_fate
    assert sum(tokens.values()) == len(prompt.token_ids)
    assert min(tokens.values()) >= 0
    assert [(chunk.id, chunk.start, chunk.start + chunk.tokens) for chunk in outcome.chunks] == [
        (span.chunk.id, span.start, span.end) for span in prompt.spans
    ]
    assert all(0 <= chunk.computed <= chunk.tokens for chunk in outcome.chunks)
    return outcome


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_the_outcome_counts_as_many_recomputed_tokens_as_the_fusor_recomputes(
    engine: TransformersEngine, prompt: TokenizedPrompt, ratio: float
) -> None:
    settings = BlendSettings(ratio=ratio, policy="static")
    found = outcome_of(engine, prompt, settings)
    assert [chunk.fate for chunk in found.chunks] == ["exact", "reused", "reused", "reused"]
    assert (
        len(PromptInspector(engine, prompt).recomputed(settings))
        == found.tokens_by_fate["recomputed"]
        == round(ratio * sum(s.end - s.start for s in prompt.spans[1:]))
    )
    assert found.tokens_by_fate["exact"] == prompt.spans[0].end
    in_chunks = sum(s.end - s.start for s in prompt.spans)
    assert found.tokens_by_fate["text"] == len(prompt.token_ids) - in_chunks - len(engine.header_ids)


@pytest.mark.parametrize(
    ("settings", "first", "others"),
    [
        (FULL_RECOMPUTE, "recomputed", "recomputed"),
        (PREFIX_CACHING, "exact", "recomputed"),
        (FULL_REUSE, "exact", "reused"),
    ],
)
def test_every_method_reports_its_use_of_stored_kv(
    engine: TransformersEngine, prompt: TokenizedPrompt, settings: BlendSettings, first: str, others: str
) -> None:
    found = outcome_of(engine, prompt, settings)
    assert [chunk.fate for chunk in found.chunks] == [first, *[others] * 3]
    assert (found.tokens_by_fate["recomputed"] > 0) == (settings is not FULL_REUSE)


@pytest.mark.parametrize("which", [0, 2])
def test_a_chunk_without_stored_kv_is_missing_and_stored_for_the_next_prompt(
    engine: TransformersEngine, prompt: TokenizedPrompt, which: int
) -> None:
    gone = prompt.spans[which]
    assert engine.entries.delete(gone.chunk.token_ids)
    found = outcome_of(engine, prompt, BLEND)
    assert [chunk.fate == "missing" for chunk in found.chunks] == [n == which for n in range(4)]
    assert found.tokens_by_fate["missing"] == gone.end - gone.start
    assert found.tokens_by_fate["exact"] == (len(engine.header_ids) if which == 0 else prompt.spans[0].end)
    assert outcome_of(engine, prompt, BLEND).tokens_by_fate["missing"] == 0


def test_a_prompt_without_stored_chunks_is_missing_whole(engine: TransformersEngine, prompt: TokenizedPrompt) -> None:
    for span in prompt.spans:
        engine.entries.delete(span.chunk.token_ids)
    found = outcome_of(engine, prompt, BLEND)
    assert {chunk.fate for chunk in found.chunks} == {"missing"}
    assert found.tokens_by_fate["recomputed"] == found.tokens_by_fate["reused"] == 0


def test_a_first_chunk_repeated_in_the_prompt_has_a_fate_at_each_place(tmp_path: Path) -> None:
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
            if again == "missing":  # the writer's KV alone is evicted
                engine.store.delete(engine.entries.own_key(first.token_ids))
            found = outcome_of(engine, prompt, BlendSettings(ratio=0.3))
            assert [chunk.fate for chunk in found.chunks] == [own, "reused", again]
            assert found.tokens_by_fate["missing"] == tokens * (own, again).count("missing")
            assert found.tokens_by_fate["text"] == 3 * 2 + len(scene.question)
            assert found.tokens_by_fate["exact"] == len(scene.header) + tokens * (own == "exact")


def test_a_chunk_computed_in_place_to_save_time_is_recomputed_whole() -> None:
    engine, _ = controlled_engine(1.0)
    engine.costs = Costs(1000, COMPUTE, {"device": TierCost(0.0, chunk_bytes(engine) / 0.1)})
    prompt = Scene().prompt
    done = engine.generate(prompt, ONE, AUTO)
    tokens = checked(done, prompt).tokens_by_fate
    assert 0 < len(done.in_place) < 4
    in_place = sum(chunk.tokens for chunk in done.chunks if chunk.fate == "recomputed")
    assert tokens["recomputed"] == in_place + done.usage.recomputed_tokens
    text = len(prompt.token_ids) - sum(chunk.tokens for chunk in done.chunks)
    assert text - len(engine.header_ids) <= tokens["text"] <= text


def test_a_chunk_from_the_prefix_cache_is_exact_only_if_computed_exactly() -> None:
    scene, llama = Scene(), BLENDED["llama"]
    with engine_for(make_model(llama()), scene, prefix_cache=1 << 30) as engine:
        engine.precompute(scene.chunks)
        for settings, fates in ((PREFIX_CACHING, {"exact"}), (FULL_REUSE, {"exact", "reused"})):
            engine.reset_prefix_cache()
            first, again = (outcome_of(engine, scene.prompt, settings) for _ in range(2))
            assert {chunk.fate for chunk in again.chunks} <= fates
            assert again.usage.kept_tokens == len(scene.prompt.token_ids) - 1
            assert not any(chunk.computed for chunk in again.chunks)
            assert again.tokens_by_fate["text"] == 1
            assert first.usage.kept_tokens == 0
        assert again.chunks[-1].fate == "reused"
