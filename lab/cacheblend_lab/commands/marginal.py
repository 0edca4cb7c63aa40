"""Runs `cacheblend marginal`."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.citations import reuse_line, source_lines
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_pipeline
from cacheblend_rag.console.groups import QuestionOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json


@takes_groups
def marginal(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    how: QuestionOptions,
    namespace: options.Namespace = "default",
    retriever: options.Retriever = None,
    as_json: options.AsJSON = False,
) -> None:
    """Answer a question from each chunk alone, and print the most likely answer over all chunks (REALM, equation 1)."""
    from cacheblend_lab.evaluation.marginal import answer_marginally
    from cacheblend_rag.rag.results import check_question

    check_question(question)  # raises before a model is loaded
    with open_pipeline(
        how.model, how.store, how.budgets, namespace=namespace, k=how.k, query_encoder=retriever
    ) as pipeline:
        answer = answer_marginally(pipeline, question, how.k, how.sampling.params())
    if as_json:
        print_json(answer.to_dict())
        return
    echo(f"{answer.answer}\n")
    for line in (*source_lines(answer, question), reuse_line(answer)):
        echo(line)
