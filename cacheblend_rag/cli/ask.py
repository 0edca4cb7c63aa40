"""Runs `cacheblend ask` and `chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.chat import Chat
from cacheblend_rag.cli.citations import explain_lines, reuse_line, source_lines
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_pipeline
from cacheblend_rag.console.groups import CONVERSATION, QuestionOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json

if TYPE_CHECKING:
    from cacheblend_rag.rag.results import RagAnswer


@takes_groups
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    how: QuestionOptions,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say where each chunk's KV came from, what that took, and why it was done so."),
    ] = False,
    namespace: options.Namespace = "default",
    retriever: options.Retriever = None,
    answer_by: options.AnswerBy = "together",
    as_json: options.AsJSON = False,
) -> None:
    """Answer one question from the indexed documents."""
    from cacheblend_rag.rag.pipeline import check_question

    check_question(question)  # before a model is loaded for it
    sampling, settings = how.sampling.params(), how.blend.settings()
    # One prompt reads each chunk's KV once: RAM would be filled with it for nobody.
    ram_budget = 0 if answer_by == "together" else None
    opened = open_pipeline(
        how.model, how.store, how.budgets, namespace=namespace, ram_budget=ram_budget, k=how.k, query_encoder=retriever
    )
    with opened as pipeline:
        if answer_by == "marginal":
            from cacheblend_rag.lab.evaluation.marginal import answer_marginally

            answer: RagAnswer = answer_marginally(pipeline, question, how.k, sampling)
        else:
            answer = pipeline.ask(question, sampling, settings)
    if as_json:
        print_json(answer.to_dict())
        return
    echo(answer.answer)
    echo()
    for line in (*source_lines(answer, question), reuse_line(answer)):
        echo(line)
    if explain:
        echo()
        for line in explain_lines(answer):
            echo(line)


@takes_groups
def chat(how: QuestionOptions = CONVERSATION, retriever: options.Retriever = None) -> None:
    """Answer questions one after another, streaming; one may refer to those before it. /help lists commands."""
    sampling, settings = how.sampling.params(), how.blend.settings()
    with open_pipeline(how.model, how.store, how.budgets, k=how.k, query_encoder=retriever) as pipeline:
        Chat(pipeline, sampling, settings).run(sys.stdin.isatty())
