"""The examples run, on the bundled model, and say what they should."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from cacheblend_rag import TransformersEngine
from cacheblend_rag.demo.bundle import bundled_questions
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
    want = {question.question: question.answer for question in bundled_questions()}
    assert rag.main(engine) == [want[question] for question in rag.QUESTIONS]
    assert capsys.readouterr().out.count("from stored KV") == len(rag.QUESTIONS)


def test_the_agent_example_takes_its_chunks_from_stored_kv(example: Any, engine: TransformersEngine) -> None:
    result = example("langchain_agent").main(engine)
    assert result["answer"] == "Celia Ulvik"
    assert result["usage"]["input_token_details"]["cache_read"] > 0.8 * result["usage"]["input_tokens"]


def test_the_migrated_chain_answers_as_the_one_before_and_differs_in_two_places(
    example: Any, engine: TransformersEngine, embedding: BundledEmbeddings
) -> None:
    migrate = example("migrate_existing_chain")
    answers = migrate.main(engine, embedding)
    assert len(answers) == 3 and all(before == after for before, after in answers)
    assert inspect.getsource(migrate.after).count("# <--") == 2


def test_the_notebook_runs_and_gives_the_outputs_it_shows() -> None:
    notebook = nbformat.read(EXAMPLES / "langchain_rag.ipynb", as_version=4)
    shown = outputs(notebook)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert outputs(notebook) == shown
    assert len(shown) == 5


def outputs(notebook: Any) -> list[str]:
    """Return what the cells' last expressions gave; printed timings are left out."""
    found = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["data"]["text/plain"] for output in found if output["output_type"] == "execute_result"]
