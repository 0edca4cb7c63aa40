"""Tests tuning from end to end, with a reader that knows whether a chunk states an answer, and two layers of the
embedding model. Results of the whole model with the bundled reader: lab/benchmarks/results/tune-retriever-demo.json,
examples/tuned_retriever.ipynb."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from cacheblend_lab import scoring
from cacheblend_lab.scoring import Score
from cacheblend_lab.tuning.candidates import EMBEDDED, LearnedCandidates, StoredCandidates
from cacheblend_lab.tuning.judging import DocstringTask, Gain, gain
from cacheblend_lab.tuning.questions import TuningQuestion, split_questions
from cacheblend_lab.tuning.students import STUDENTS, Both
from cacheblend_lab.tuning.teacher import Teacher
from cacheblend_lab.tuning.training import TrainSettings
from cacheblend_lab.tuning.tune import TuneSettings, tune, verdict
from cacheblend_lab.tuning.world import digest_of, paraphrased_world
from cacheblend_rag.engines.base import Request
from cacheblend_rag.errors import InputError, ModelError, StoreMismatchError
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.embedding import (
    DEFAULT_EMBEDDING,
    RETRIEVER_FILE,
    Embedder,
    load_sentence_transformer,
)
from cacheblend_rag.retrieval.index import ChunkIndex
from tests.conftest import tokenizer_named
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

ENTITIES = 40  # ten chunks and questions each
# Steps are small and many: two layers can surely be improved, and embed in a third of the time of six.
FAST = TuneSettings(TrainSettings(part="adapter", epochs=40, batch=8), candidates=12, answers=2, elsewhere=40)


class Reader(FakeEngine):
    """Gives a high score to an answer in the prompt's chunk, and a low one to any other."""

    can_score = True
    scored = 0
    dies_at = -1

    def scores(self, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
        self.scored += 1
        if self.scored == self.dies_at:
            raise KeyboardInterrupt
        text = " ".join(span.chunk.text for span in request.prompt.spans)
        answers = [self.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
        return [Score((-0.02 if answer in text else -9.0,)) for answer in answers]


@pytest.fixture(autouse=True)
def _scored_by_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_scorer", lambda reader: Reader.scores if reader.can_score else None)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the first two of the packaged embedding model's six layers."""
    model = load_sentence_transformer(DEFAULT_EMBEDDING, "cpu")
    bert = model[0].auto_model
    bert.encoder.layer, bert.config.num_hidden_layers = bert.encoder.layer[:2], 2
    directory = str(tmp_path_factory.mktemp("embedding"))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, embedding: str) -> Path:
    directory = tmp_path_factory.mktemp("world")
    with RagPipeline(Reader(), directory, embedding=embedding) as pipeline:
        for name, chunks in paraphrased_world(pipeline.engine.tokenizer, (7,), ENTITIES).documents.items():
            pipeline.chunks.add(name, digest_of(chunks), chunks)
    return directory


@pytest.fixture
def pipeline(directory: Path) -> Iterator[RagPipeline]:
    with RagPipeline(Reader(), directory) as opened:
        yield opened


@pytest.fixture
def questions() -> list[TuningQuestion]:
    return paraphrased_world(tokenizer_named("byte_level"), (7,), ENTITIES).questions


def recall_at_5(index: ChunkIndex, questions: Sequence[TuningQuestion]) -> float:
    vectors = index.load_embedder().questions([question.text for question in questions])
    hits = [{name for name, _ in index.nearest(vector, 5)} for vector in vectors]
    return float(np.mean([bool(ids & q.relevant) for ids, q in zip(hits, questions, strict=True)]))


def test_a_retriever_tuned_by_its_reader_finds_more_and_is_an_ordinary_model(
    pipeline, questions, embedding, tmp_path
) -> None:
    said: list[str] = []
    generation = pipeline.chunks.generation
    result = tune(pipeline, questions, tmp_path / "out", FAST, say=said.append)
    found = result.held_out["recall_at_5"]
    assert found.sure and found.after > found.before + 0.05, result.why
    assert result.saved == tmp_path / "out"
    assert "questions to judge" in said[0]
    split = split_questions(questions, FAST.seed)
    asked = pipeline.chunks.load_embedder().questions([q.text for q in split.train])
    near = [{name for name, _ in pipeline.chunks.nearest(vector, FAST.candidates)} for vector in asked]
    among = np.mean([bool(names & q.relevant) for names, q in zip(near, split.train, strict=True)])
    assert result.reader["right_chunk_among_candidates"] == among > 0.4 and result.reader["prefers_it"] > 0.8
    assert pipeline.chunks.generation == generation
    assert [point.step for point in result.curve] == sorted(point.step for point in result.curve)
    for values in zip(*((c["prior"], c["posterior"], c["after"]) for c in result.example["candidates"]), strict=True):
        assert sum(values) == pytest.approx(1, abs=1e-4)
    # Plain sentence-transformers gives the vectors of the pipeline, and recall@5 is as reported.
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(result.saved), device="cpu")
    held_out = split.held_out
    with ChunkIndex(pipeline.chunks.directory, query_encoder=result.saved) as index:
        assert recall_at_5(index, held_out) == found.after
        vector = index.load_embedder().question(held_out[0].text)
    assert np.allclose(model.encode_query(held_out[0].text, normalize_embeddings=True), vector, atol=1e-5)
    report = json.loads((result.saved / RETRIEVER_FILE).read_text())
    assert report["embedding"] == embedding and report["recall_at_5"]["after"] == found.after
    assert "recall@5" in (result.saved / "README.md").read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "out.scores.jsonl"]
    with pytest.raises(InputError, match="there already"):
        tune(pipeline, questions, result.saved, FAST)


def test_an_encoder_tuned_for_chunks_too_finds_more_after_embedding_the_index_again(
    pipeline, questions, directory, tmp_path, monkeypatch
) -> None:
    # One of forty passages is two points and a half.
    monkeypatch.setattr("cacheblend_lab.tuning.tune.MOST_LOST", 0.5)
    monkeypatch.setattr("cacheblend_lab.tuning.candidates.EMBEDDED", 2)  # a step takes half as long
    monkeypatch.setattr("cacheblend_lab.tuning.candidates.NEAREST", 8)
    monkeypatch.setattr(Both, "rate", lambda student, done: 5e-4)  # one round is enough
    settings = replace(FAST, training=TrainSettings(part="both", epochs=1), candidates=3)
    generation = pipeline.chunks.generation
    result = tune(pipeline, questions, tmp_path / "out", settings)
    found = result.held_out["recall_at_5"]
    assert found.sure and result.documents and result.saved == tmp_path / "out", result.why
    assert 0 < result.settings["kept"] <= 1 and result.settings["training"]["epochs"] == 1
    assert TrainSettings(part="both").rounds == 2, "as many as suit the part"
    assert pipeline.chunks.generation == generation, "only a copy is embedded anew"
    assert "store reembed" in (result.saved / "README.md").read_text()
    with (
        ChunkIndex(directory, query_encoder=result.saved) as index,
        pytest.raises(StoreMismatchError, match="store reembed"),
    ):
        index.load_embedder()
    other = shutil.copytree(directory, tmp_path / "store")
    with ChunkIndex(other) as index:
        before = [chunk.id for chunk in index.chunks()]
        index.rebuild(str(result.saved))
        assert [chunk.id for chunk in index.chunks()] == before, "chunks, and with them their KV, stay"
        held_out = split_questions(questions, FAST.seed).held_out
        assert recall_at_5(index, held_out) == found.after
    with ChunkIndex(other, query_encoder=result.saved) as index:
        assert index.search(held_out[0].text, 5), "naming it again does no harm"


def test_chunks_embedded_in_a_step_are_as_near_to_a_question_as_stored_ones(pipeline, questions) -> None:
    embedder = pipeline.chunks.load_embedder()
    few = questions[:12]
    vectors = embedder.questions([q.text for q in few])
    with Teacher(pipeline.engine, pipeline.chunks, pipeline.instruction, EMBEDDED) as teacher:
        judged = teacher.judge(few, vectors, lambda done, total, at: None)
    student = STUDENTS["both"](embedder.model)
    student.model.eval()
    rows, asked = torch.arange(len(few)), torch.from_numpy(vectors)
    learned = LearnedCandidates(judged, pipeline.chunks, embedder, student, seed=0)
    stored = StoredCandidates(judged, pipeline.chunks, embedder, torch.device("cpu"))
    relevance, reader = learned.of(rows, asked)
    expected, logprobs = stored.of(rows, asked)
    liked = 0
    for row in range(len(few)):
        likely = reader[row] > reader[row, 0]  # column 0 is the null document
        wanted = logprobs[row] > logprobs[row, -1]
        liked += int(wanted.sum())
        assert torch.allclose(relevance[row][likely].sort().values, expected[row][wanted].sort().values, atol=1e-5)
        assert torch.allclose(relevance[row, 0], expected[row, -1], atol=1e-5)
    assert liked >= 3
    relevance.sum().backward()
    assert all(weight.grad is not None for name, weight in student.model.named_parameters() if "pooler" not in name)


@pytest.mark.parametrize("part", STUDENTS)
def test_an_encoder_stepped_all_the_way_back_is_unchanged(pipeline, part) -> None:
    embedder = pipeline.chunks.load_embedder()
    student = STUDENTS[part](embedder.model)
    start = student.state()
    before = student.vectors(["Who leads it?"])
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    moved = student.vectors(["Who leads it?"])
    student.step_back(start, 0.5)
    half = student.vectors(["Who leads it?"])
    assert np.abs(moved - before).max() > np.abs(half - before).max() > 1e-3
    student.step_back(start, 1.0)
    assert np.allclose(student.vectors(["Who leads it?"]), before, atol=1e-6)


def test_the_guard_questions_of_tuning_differ_from_the_judging_ones(pipeline) -> None:
    embedder = pipeline.chunks.load_embedder()
    judges, guards = DocstringTask(embedder, 40), DocstringTask(embedder, 40, others=True)
    assert len(guards.questions) == 40 and not set(judges.questions) & set(guards.questions)


def test_tuning_with_shuffled_answers_saves_nothing(pipeline, questions, tmp_path) -> None:
    answers = [question.answers for question in questions]
    Random(1).shuffle(answers)
    shuffled = [replace(question, answers=other) for question, other in zip(questions, answers, strict=True)]
    result = tune(pipeline, shuffled, tmp_path / "out", replace(FAST, answers=0))
    assert result.saved is None and "not better, not saved" in result.why
    assert [each.name for each in tmp_path.iterdir()] == ["out.scores.jsonl"]


def test_an_interrupted_run_loses_at_most_one_question(pipeline, questions, tmp_path) -> None:
    split = split_questions(questions, 0)
    asked = split.train[:10]
    vectors = pipeline.chunks.load_embedder().questions([q.text for q in asked])
    file = tmp_path / "scores.jsonl"
    reader, quiet = pipeline.engine, lambda done, total, at: None

    def judge() -> list:
        with Teacher(reader, pipeline.chunks, pipeline.instruction, 5, file) as teacher:
            return teacher.judge(asked, vectors, quiet)

    each = 5 + 1  # the candidates and the null document
    reader.dies_at = 6 * each + 2
    with pytest.raises(KeyboardInterrupt):
        judge()
    with file.open("a") as torn:
        torn.write('{"id": "half a li')
    reader.scored, reader.dies_at = 0, -1
    judged = judge()
    assert reader.scored == 4 * each
    assert judge() == judged and reader.scored == 4 * each
    for one in judged:
        right = [name for name in one.chunks if one.question.answers[0] in pipeline.chunks.chunk(name).text]
        assert {name for name, p in zip(one.chunks, one.logprobs, strict=False) if p > -1} == set(right)
        assert one.logprobs[-1] < -1


def test_questions_with_known_chunks_need_no_answer(pipeline, questions, tmp_path) -> None:
    known = [replace(question, answers=()) for question in questions]
    pipeline.engine.can_score = False
    settings = replace(FAST, training=TrainSettings(epochs=12))
    result = tune(pipeline, known, tmp_path / "out", settings)
    assert result.held_out["recall_at_5"].difference > 0
    assert "em" not in result.held_out and pipeline.engine.scored == 0
    with pytest.raises(InputError, match="cannot score"):
        tune(pipeline, questions, tmp_path / "other", FAST)


@pytest.mark.parametrize(("loss", "part"), [("kl", "adapter"), ("marginal", "tower"), ("infonce", "both")])
def test_each_loss_and_part_learns_its_examples(pipeline, questions, part, loss, monkeypatch) -> None:
    from cacheblend_lab.tuning.training import train

    monkeypatch.setattr("cacheblend_lab.tuning.candidates.NEAREST", 8)
    monkeypatch.setattr(Both, "rate", lambda student, done: 1e-4)  # one round is enough
    few = questions[:30]
    embedder = pipeline.chunks.load_embedder()
    before = embedder.questions([q.text for q in few])
    with Teacher(pipeline.engine, pipeline.chunks, pipeline.instruction, 8) as teacher:
        judged = teacher.judge(few, before, lambda done, total, at: None)
    student = STUDENTS[part](embedder.model)
    assert np.allclose(student.vectors([q.text for q in few]), before, atol=1e-5)
    settings = TrainSettings(loss, part, epochs={"adapter": 4, "tower": 2, "both": 1}[part], patience=20, batch=10)
    curve = train(student, judged, few, pipeline.chunks, embedder, settings, lambda done, total, at: None)
    assert max(point.mrr for point in curve) > curve[0].mrr + 0.03
    assert np.allclose(embedder.questions([q.text for q in few]), before, atol=1e-6), (
        "the index's own model has changed"
    )


def test_the_verdict_requires_a_significant_gain_and_no_loss_elsewhere() -> None:
    sure, chance = Gain(0.7, 0.8, 0.03, 0.17), Gain(0.7, 0.8, -0.01, 0.2)
    same, loses = Gain(0.9, 0.891, -0.03, 0.01), Gain(0.9, 0.88, -0.03, 0.0)
    assert verdict(sure, same)[0]
    assert not verdict(chance, same)[0]
    assert verdict(sure, Gain(299 / 400, 295 / 400, -0.03, 0.01))[0], "a point is no more than a point"
    assert not verdict(sure, loses)[0] and "out of domain" in verdict(sure, loses)[1]
    groups = [str(n) for n in range(20)]
    better = gain([0.0] * 20, [1.0] * 15 + [0.0] * 5, groups)
    assert better.sure and better.low < 0.75 < better.high
    assert not gain([0.0] * 20, [0.0] * 20, groups).sure
    assert not gain([0.0] * 4, [1.0] * 4, groups[:4]).sure, "four questions prove nothing"


def test_a_missing_retriever_or_one_for_another_embedding_model_is_refused(pipeline, tmp_path) -> None:
    embedder = pipeline.chunks.load_embedder()
    with pytest.raises(ModelError, match="tune-retriever"):
        embedder.asked_by(tmp_path / "missing")
    (tmp_path / RETRIEVER_FILE).write_text('{"embedding": "other"}')
    with pytest.raises(StoreMismatchError, match="tuned for the embedding model other"):
        embedder.asked_by(tmp_path)
    (tmp_path / RETRIEVER_FILE).write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        embedder.asked_by(tmp_path)
    with pytest.raises(InputError, match="open already"):
        RagPipeline(pipeline.engine, pipeline.chunks, query_encoder=tmp_path)
    assert isinstance(embedder, Embedder)
