"""Tests that the examples run on the bundled model and answer correctly."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cacheblend_lab.tuning import tune, world
from langchain_core.documents import Document
from typer.testing import CliRunner

from cacheblend_rag import TransformersEngine, bundled_questions
from cacheblend_rag.cli import app
from langchain_cacheblend import BundledEmbeddings

import notebooks

EXAMPLES = Path(__file__).parents[3] / "examples"


# These parts of the documents answer the examples' questions.
PARTS = {"ship-logs.md": slice(9500), "town-chronicle.md": slice(16_000, None)}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])
    whole = importlib.import_module("langchain_rag").load_documents

    def parts() -> list[Document]:
        named = [(document.metadata["source"], document.page_content) for document in whole()]
        return [Document(text[PARTS[name]], metadata={"source": name}) for name, text in named]

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "load_documents", parts)
        return module

    return load


def test_the_rag_example_answers_from_stored_kv(
    example: Any, engine: TransformersEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    rag = example("langchain_rag")
    answers = rag.main(engine)
    # A small model may miss one question.
    assert len(answers) == 3 and sum(map(right, rag.QUESTIONS, answers)) >= 2
    assert capsys.readouterr().out.count("from stored KV") == len(rag.QUESTIONS)


def test_the_agent_example_reads_its_chunks_from_stored_kv(example: Any, engine: TransformersEngine) -> None:
    agent = example("langchain_agent")
    result = agent.main(engine)
    assert right(agent.QUESTIONS[0], result["answer"])
    assert result["usage"]["input_token_details"]["cache_read"] > 0.8 * result["usage"]["input_tokens"]


def test_celery_workers_open_the_model_by_name_and_answer_from_stored_kv(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_FOLDER", str(tmp_path))
    workers = example("celery_workers")
    answers = workers.main()
    assert len(answers) == 3 and sum(map(right, workers.QUESTIONS, (got["answer"] for got in answers))) >= 2
    assert os.getpid() not in {got["worker"] for got in answers}
    for got in answers:
        assert got["usage"]["input_token_details"]["cache_read"] > 0.8 * got["usage"]["input_tokens"]


def test_the_migrated_chain_answers_like_the_original_and_differs_in_two_places(
    example: Any, engine: TransformersEngine, embedding: BundledEmbeddings
) -> None:
    migrate = example("migrate_existing_chain")
    answers = migrate.main(engine, embedding)
    assert len(answers) == 3 and all(before == after for before, after in answers)
    assert inspect.getsource(migrate.after).count("# <--") == 2


def test_the_notebook_runs_and_answers(real_gain: None, one_engine: None) -> None:
    cells = notebooks.read(EXAMPLES / "langchain_rag.ipynb")
    found = notebooks.values(notebooks.run(cells))
    assert len(found) == len(notebooks.values(cells)) == 6
    question, answer = ast.literal_eval(found[1])
    assert right(question, answer)
    assert ast.literal_eval(found[2])["input_token_details"]["cache_read"] > 1000


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a world of 90 chunks, not 960: improvements may be chance, and are accepted in any case."""
    monkeypatch.setattr(world, "paraphrased_world", partial(world.paraphrased_world, entities=3))
    monkeypatch.setattr(tune, "TuneSettings", partial(tune.TuneSettings, elsewhere=10))
    monkeypatch.setattr(tune, "verdict", lambda *found: (True, "kept"))


def test_the_tuning_notebook_shows_a_better_retriever_and_its_chunks_need_no_new_kv(
    small_world: None, real_gain: None
) -> None:
    cells = notebooks.read(EXAMPLES / "tuned_retriever.ipynb")
    before = [notebooks.printed(cell) for cell in cells]
    assert "better on questions held out, and no worse out of domain" in "".join(before)
    assert "computed=0, present=960" in notebooks.values(cells)[0]
    ran = notebooks.run(cells, cacheblend)
    assert list(map(bool, before)) == [bool(notebooks.printed(cell)) for cell in ran]
    documents, answers = notebooks.values(ran)
    assert documents.startswith("(90,") and "computed=0, present=90," in documents
    question, *answered = ast.literal_eval(answers)
    assert question.endswith("?") and all(answered)


def cacheblend(line: str) -> None:
    """Run the command ``cacheblend ... > FILE 2> FILE`` in this process."""
    name, *arguments, _, out, _, log = shlex.split(line)
    assert name == "cacheblend"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    Path(out).write_text(done.stdout)
    Path(log).write_text(done.stderr)


def right(question: str, answer: str) -> bool:
    return {q.question: q.answer for q in bundled_questions()}[question] == answer.strip()
