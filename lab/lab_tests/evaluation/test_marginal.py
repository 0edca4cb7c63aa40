"""Tests answers by the sum over chunks, each alone in its prompt."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import transformers as hf

from cacheblend_lab.evaluation.marginal import TEMPERATURE, answer_marginally, marginalise
from cacheblend_lab.evaluation.methods import MarginalMethod
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_lab.samples import Sample
from cacheblend_lab.spelling import answer_ids
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.rag.pipeline import RagPipeline
from tests.blending.families import _BASE, make_model
from tests.conftest import CHATML, NO_SYSTEM, THINKS, byte_level, metaspace, tokenizer_named
from tests.engines.contract import TEXTS
from tests.fake_engine import FakeEngine

SHORT = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    config = hf.Qwen3Config(
        **{**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}, head_dim=16
    )
    return TransformersEngine(make_model(config), tokenizer=tokenizer_named("byte_level"), device="cpu")


def test_each_answer_is_weighted_by_the_definition(engine: TransformersEngine) -> None:
    import torch

    chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS[:3]]
    engine.precompute(chunks)
    prompts = [rag_prompt(engine.tokenizer, [chunk], "Who?") for chunk in chunks]
    prior = [0.5, 0.3, 0.2]
    found = marginalise(engine, prompts, prior, SHORT)
    assert len(found.candidates) == len({done.text.strip() for done in found.generations})
    for answer, probability in found.candidates:
        want = 0.0
        for weight, prompt in zip(prior, prompts, strict=True):
            asked, said = engine.tokenize(prompt).token_ids, answer_ids(engine.tokenizer, answer)
            with torch.no_grad():
                rows = (
                    engine.runner.model(torch.tensor([[*asked, *said]])).logits[0, len(asked) - 1 : -1].log_softmax(-1)
                )
            want += weight * math.exp(sum(float(row[token]) for row, token in zip(rows, said, strict=True)))
        assert probability == pytest.approx(want, rel=1e-3)
    assert [p for _, p in found.candidates] == sorted((p for _, p in found.candidates), reverse=True)
    assert found.generation.text.strip() == found.best == found.candidates[0][0]


def test_weighing_tokens_are_counted(engine: TransformersEngine) -> None:
    chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS[:3]]
    engine.precompute(chunks)
    ran: list[int] = []
    norm = engine.runner.model.model.norm  # this module sees each token computed through all layers
    seen = norm.register_forward_hook(lambda _module, inputs, _out: ran.append(inputs[0].shape[1]))
    try:
        found = marginalise(
            engine, [rag_prompt(engine.tokenizer, [chunk], "Who?") for chunk in chunks], [0.5, 0.3, 0.2], SHORT
        )
    finally:
        seen.remove()
    decoded = sum(done.usage.completion_tokens - 1 for done in found.generations)
    prefilled = sum(done.usage.computed_tokens for done in found.generations)
    assert sum(ran) == prefilled + decoded + found.weighing_tokens


@pytest.mark.slow
def test_a_pipeline_answers_from_each_chunk_alone(engine: TransformersEngine, tmp_path: Path) -> None:
    with RagPipeline(engine, tmp_path) as pipeline:
        with pytest.raises(InputError, match="Nothing is indexed"):
            answer_marginally(pipeline, "Who?")
        chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS]
        pipeline.chunks.add("a.md", "1", chunks)
        engine.precompute(chunks)
        answer = answer_marginally(pipeline, "Who runs the observatory?", k=3, sampling=SHORT)
        hits = pipeline.chunks.search("Who runs the observatory?", 3)
        assert [source.id for source in answer.sources] == [hit.chunk.id for hit in hits]
        ratio = answer.priors[0] / answer.priors[1]
        assert ratio == pytest.approx(math.exp((hits[0].score - hits[1].score) / TEMPERATURE))
        assert sum(answer.priors) == pytest.approx(1)
        shown = answer.to_dict()
        assert shown["answer"] == shown["candidates"][0]["answer"]
        assert [source["prior"] for source in shown["sources"]] == list(answer.priors)
        assert answer.generation.usage.reused_tokens >= len(engine.header_ids)
        with pytest.raises(InputError, match="question is empty"):
            answer_marginally(pipeline, " ")


def test_an_engine_without_scoring_is_refused() -> None:
    engine = FakeEngine()
    prompt = rag_prompt(engine.tokenizer, [], "Who?")
    with pytest.raises(InputError, match="cannot score"):
        marginalise(engine, [prompt], [1.0], SHORT)


# Thoughts stand before the last answer.
THOUGHT = THINKS.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("tokenizer", "lead"),
    [(byte_level(), " "), (byte_level(CHATML), ""), (metaspace(NO_SYSTEM), ""), (byte_level(THOUGHT), "")],
    ids=["plain", "chatml", "no system role", "thinks unless told"],
)
def test_the_tokens_of_an_answer_are_those_written_by_the_template_plus_the_end_token(tokenizer, lead: str) -> None:
    ids = answer_ids(tokenizer, "Ada Brenmoor")
    assert ids[-1] == tokenizer.eos_token_id
    assert ids[:-1] == tuple(tokenizer(lead + "Ada Brenmoor", add_special_tokens=False)["input_ids"])
    spelled = answer_ids(tokenizer, "a<eos>b")
    assert spelled.count(tokenizer.eos_token_id) == 1, "an answer must not smuggle in the end"


def test_evaluation_reuses_each_chunk_of_a_kv_writer() -> None:
    config = hf.Qwen3Config(
        **{**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}, head_dim=16
    )
    with TransformersEngine(
        make_model(config), tokenizer=tokenizer_named("byte_level"), device="cpu", writer="probe"
    ) as engine:
        sample = Sample("s", "Who?", ("x",), tuple(TEXTS[:3]), "ready")
        set_header(engine, [sample])
        case = Preparer(engine, Preparation(max_tokens=5)).case(sample)
        engine.precompute(case.chunks)
        reply = MarginalMethod().reply(engine, case)
        assert reply.reused_tokens == 3 * len(engine.header_ids) + sum(len(chunk.token_ids) for chunk in case.chunks)
