"""The examples run, on the bundled model, and say what they should."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from cacheblend_rag import TransformersEngine, bundled_questions
from langchain_cacheblend import BundledEmbeddings

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_rag_example_answers_from_stored_kv(
    example: Any, engine: TransformersEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    rag = example("langchain_rag")
    answers = rag.main(engine)
    # A small model may miss one.
    assert len(answers) == 3 and sum(map(right, rag.QUESTIONS, answers)) >= 2
    assert capsys.readouterr().out.count("from stored KV") == len(rag.QUESTIONS)


def test_the_agent_example_takes_its_chunks_from_stored_kv(example: Any, engine: TransformersEngine) -> None:
    agent = example("langchain_agent")
    result = agent.main(engine)
    assert right(agent.QUESTIONS[0], result["answer"])
    assert result["usage"]["input_token_details"]["cache_read"] > 0.8 * result["usage"]["input_tokens"]


def test_celery_workers_open_the_model_by_name_and_answer_from_what_was_stored(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_FOLDER", str(tmp_path))
    workers = example("celery_workers")
    answers = workers.main()
    assert len(answers) == 3 and sum(map(right, workers.QUESTIONS, (got["answer"] for got in answers))) >= 2
    assert os.getpid() not in {got["worker"] for got in answers}
    for got in answers:
        assert got["usage"]["input_token_details"]["cache_read"] > 0.8 * got["usage"]["input_tokens"]


def test_the_migrated_chain_answers_as_the_one_before_and_differs_in_two_places(
    example: Any, engine: TransformersEngine, embedding: BundledEmbeddings
) -> None:
    migrate = example("migrate_existing_chain")
    answers = migrate.main(engine, embedding)
    assert len(answers) == 3 and all(before == after for before, after in answers)
    assert inspect.getsource(migrate.after).count("# <--") == 2


def test_the_notebook_runs_and_answers() -> None:
    notebook = nbformat.read(EXAMPLES / "langchain_rag.ipynb", as_version=4)
    shown = len(values(notebook))
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    found = values(notebook)
    assert len(found) == shown == 6
    question, answer = ast.literal_eval(found[1])
    assert right(question, answer)
    assert ast.literal_eval(found[2])["input_token_details"]["cache_read"] > 1000


# `cacheblend` in a world of 90 chunks, not 960: what is learned there may be chance, and is kept whatever it is.
SMALL = f"""#!{sys.executable}
from functools import partial
from cacheblend_rag.cli import main
from cacheblend_lab.tuning import tune, world
world.paraphrased_world = partial(world.paraphrased_world, entities=3)
tune.TuneSettings = partial(tune.TuneSettings, elsewhere=10)
tune.verdict = lambda *found: (True, "kept")
main()
"""


def test_the_tuning_notebook_shows_a_better_retriever_and_runs_and_its_chunks_need_no_new_kv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cacheblend").write_text(SMALL)
    (tmp_path / "cacheblend").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    notebook = nbformat.read(EXAMPLES / "tuned_retriever.ipynb", as_version=4)
    before = [printed(cell) for cell in notebook.cells]
    assert "better on questions held out, and no worse out of domain" in "".join(before)
    assert "computed=0, present=960" in values(notebook)[0]
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    assert list(map(bool, before)) == [bool(printed(cell)) for cell in notebook.cells]
    documents, answers = values(notebook)
    assert documents.startswith("(90,") and "computed=0, present=90," in documents
    question, *answered = ast.literal_eval(answers)
    assert question.endswith("?") and all(answered)


def printed(cell: Any) -> str:
    """Return what a cell printed."""
    return "".join(output["text"] for output in cell.get("outputs", ()) if output.get("name") == "stdout")


def right(question: str, answer: str) -> bool:
    return {q.question: q.answer for q in bundled_questions()}[question] == answer.strip()


def values(notebook: Any) -> list[str]:
    """Return what the cells' last expressions gave."""
    found = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["data"]["text/plain"] for output in found if output["output_type"] == "execute_result"]
