"""Runs `cacheblend ask` and `chat`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.chat import Chat
from cacheblend_rag.cli.citations import explain_lines, marked_lines, reuse_line, source_lines
from cacheblend_rag.cli.resident import Held, ResidentPipeline, nearest_in
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_pipeline
from cacheblend_rag.console.groups import CONVERSATION, QuestionOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json
from cacheblend_rag.store.files import DEFAULT_NAME

if TYPE_CHECKING:
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.rag.results import RagAnswer
    from cacheblend_rag.retrieval.hit import Hit


@takes_groups
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    how: QuestionOptions,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show where each chunk's KV came from, how long loading took, and why the engine chose this mode.",
        ),
    ] = False,
    namespace: options.Namespace = "default",
    retriever: options.Retriever = None,
    as_json: options.AsJSON = False,
) -> None:
    """Answer one question from the indexed documents."""
    from cacheblend_rag.rag.results import check_question

    check_question(question)  # before a model is loaded
    sampling, settings = how.sampling.params(), how.blend.settings()
    # One prompt reads each chunk's KV once, so a RAM tier would gain nothing.
    with _pipeline(how, namespace, retriever, ram_budget=0) as pipeline:
        answer = pipeline.ask(question, sampling, settings)
        sentence = _nearest(pipeline, question, answer)
    if as_json:
        print_json({**answer.to_dict(), "nearest": sentence and _nearest_facts(answer.sources[0], *sentence)})
        return
    echo(answer.answer)
    echo()
    if sentence is not None:
        for line in marked_lines(answer.sources[0], sentence):
            echo(line)
        echo()
    for line in (*source_lines(answer, question), reuse_line(answer)):
        echo(line)
    if explain:
        echo()
        for line in explain_lines(answer):
            echo(line)


@takes_groups
def chat(how: QuestionOptions = CONVERSATION, retriever: options.Retriever = None) -> None:
    """Answer questions in a conversation, streaming; a question may refer to earlier ones. /help lists commands."""
    sampling, settings = how.sampling.params(), how.blend.settings()
    with _pipeline(how, DEFAULT_NAME, retriever) as pipeline:
        Chat(pipeline, sampling, settings).run(sys.stdin.isatty())


def _nearest(pipeline: RagPipeline | ResidentPipeline, question: str, answer: RagAnswer) -> tuple[int, int] | None:
    """Return the begin and end of the sentence nearest to the question in the most relevant source, if there is one."""
    if not answer.sources:
        return None
    text = answer.sources[0].text
    if isinstance(pipeline, ResidentPipeline):
        return pipeline.nearest(question, text)
    return nearest_in(pipeline, question, text)


def _nearest_facts(source: Hit, begin: int, end: int) -> dict[str, Any]:
    return {"id": source.id, "begin": begin, "end": end, "text": source.text[begin:end]}


def _own_pipeline(
    how: QuestionOptions, namespace: str, retriever: Path | None, ram_budget: int | None = None
) -> AbstractContextManager[RagPipeline]:
    """Open a pipeline in this process."""
    return open_pipeline(
        how.model,
        how.store,
        how.budgets,
        namespace=namespace,
        ram_budget=ram_budget,
        k=how.k,
        query_encoder=retriever,
    )


def _pipeline(
    how: QuestionOptions, namespace: str, retriever: Path | None, ram_budget: int | None = None
) -> AbstractContextManager[RagPipeline | ResidentPipeline]:
    """Return a pipeline in the process that keeps the model loaded, if possible, else a pipeline in this process."""
    own = partial(_own_pipeline, how, namespace, retriever, ram_budget)
    held = Held.by(how, namespace, retriever)
    return own() if held is None else ResidentPipeline(held, how.k, own)
