"""Runs `cacheblend tune-retriever`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_pipeline, store_directory, with_model
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, progress, table
from cacheblend_rag.demo.bundle import demo_store_name
from cacheblend_rag.engines.models import BUNDLED_MODEL
from cacheblend_rag.homes import from_home

if TYPE_CHECKING:
    from cacheblend_lab.tuning.card import TuneResult
    from cacheblend_lab.tuning.questions import TuningQuestion
    from cacheblend_rag.console.output import Show
    from cacheblend_rag.rag.pipeline import RagPipeline

_DEMO_WORLDS = 3  # pooled, to have enough names
_SHOWN_ROWS = 3
_SHOWN_TEXT = 90


@dataclass(frozen=True)
class TuningOptions:
    """Holds the options for tuning and for judging the result."""

    loss: Annotated[
        Literal["marginal", "kl", "infonce"],
        typer.Option(
            help="REALM's marginal likelihood, KL to the reader's preference, or contrast with the best chunk."
        ),
    ] = "marginal"
    part: Annotated[
        Literal["adapter", "tower", "both"],
        typer.Option(
            help="Tune one layer behind the query encoder, all of it, or what embeds the chunks, too: finds most, takes longest, "
            "and the index is embedded again (`store reembed`)."
        ),
    ] = "adapter"
    candidates: Annotated[int, typer.Option(min=2, help="Chunks that the model judges for each question.")] = 16
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Most rounds over the questions (default: 20; both: 2).")
    ] = None
    answers: Annotated[
        int, typer.Option(min=0, help="Most held-out questions to answer before and after; 0 for none.")
    ] = 200
    seed: Annotated[
        int, typer.Option(min=0, help="Draws the split, the order of questions, what is generated, and --demo's world.")
    ] = 0


@takes_groups
def tune_retriever(
    *,
    store: options.Store = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of {"question", "answers"}, or a file of LlamaIndex\'s EmbeddingQAFinetuneDataset.'
        ),
    ] = None,
    generate: Annotated[
        int | None, typer.Option(min=40, help="Let the model write so many questions from the indexed chunks instead.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="The whole of it on a bundled world, with a store of its own.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="A new directory for the query encoder (default: STORE-retriever).")
    ] = None,
    how: TuningOptions,
    model: EngineOptions,
    budgets: BudgetOptions,
    as_json: options.AsJSON = False,
) -> None:
    """Tune the retriever to find the chunks that help the model answer. No chunk, vector or KV in the store changes.

    The model judges the candidate chunks over their stored KV. The tuned retriever is saved only if it is better on
    held-out questions and no worse elsewhere. Ctrl-C loses no judgement: the same command resumes the run.
    """
    from cacheblend_lab.rows import read_rows
    from cacheblend_lab.tuning.saving import check_free
    from cacheblend_rag.errors import InputError

    if [questions is not None, generate is not None, demo].count(True) != 1:
        raise InputError("Give one of --questions FILE, --generate N and --demo.")
    directory = _demo_directory(store, model.device, how.seed) if demo else store_directory(store)
    target = from_home(output or directory.with_name(f"{directory.name}-retriever"))
    if demo and output is None and store is None:
        shutil.rmtree(target, ignore_errors=True)  # the output of an earlier demonstration
    if questions is not None:
        read_rows(from_home(questions))  # raises for an unusable file before a model is loaded
    check_free(target)
    chosen = with_model(model, directory, BUNDLED_MODEL) if demo else model
    with open_pipeline(chosen, directory, budgets, must_exist=not demo) as pipeline:
        from cacheblend_lab.tuning.training import TrainSettings
        from cacheblend_lab.tuning.tune import TuneSettings, tune

        settings = TuneSettings(
            TrainSettings(how.loss, how.part, how.epochs, seed=how.seed), how.candidates, how.seed, how.answers
        )
        with progress("Tuning") as show:
            asked = _questions(pipeline, questions, generate, how.seed, show)
            result = tune(
                pipeline,
                asked,
                target,
                settings,
                lambda name: lambda done, total, at: show(done, total, f"({name.lower()})"),
                lambda text: echo(text, err=True),
            )
    print_json(result.to_dict()) if as_json else _print(result)


def _demo_directory(store: Path | None, device: str | None, seed: int) -> Path:
    name = f"{demo_store_name(device)}-tuning"
    return store or store_directory(None).parent / (f"{name}-{seed}" if seed else name)


def _questions(
    pipeline: RagPipeline, file: Path | None, generate: int | None, seed: int, show: Show
) -> list[TuningQuestion]:
    from cacheblend_lab.tuning.questions import generate_questions, read_questions

    if file is not None:
        read = read_questions(file, pipeline.chunks)
        for row in read.skipped[:_SHOWN_ROWS]:
            echo(f"Skipped {row}", err=True)
        if len(read.skipped) > _SHOWN_ROWS:
            echo(f"Skipped {len(read.skipped) - _SHOWN_ROWS} more rows", err=True)
        return read.questions
    if generate is None:
        return _make_demo(pipeline, seed, show)
    written = generate_questions(
        pipeline, generate, seed, lambda done, total, at: show(done, total, f"(generating, {at})")
    )
    echo(
        f"Of {written.tried} questions written {len(written.questions)} came back: {written.empty} were no question, "
        f"{written.unanswered} had no answer, {written.lost} did not find their chunk or their answer again",
        err=True,
    )
    return written.questions


def _make_demo(pipeline: RagPipeline, seed: int, show: Show) -> list[TuningQuestion]:
    """Index the demonstration's documents that are not indexed yet, and return the demonstration's questions."""
    from cacheblend_lab.tuning.world import digest_of, paraphrased_world
    from cacheblend_rag.errors import InputError

    first = _DEMO_WORLDS * seed
    world = paraphrased_world(pipeline.engine.tokenizer, range(first, first + _DEMO_WORLDS))
    if any(document.path not in world.documents for document in pipeline.chunks.documents()):
        raise InputError(
            f"{pipeline.chunks.directory} holds other documents than the demonstration's; name an empty directory."
        )
    for number, (name, chunks) in enumerate(world.documents.items()):
        show(number, len(world.documents), "(indexing)")
        if pipeline.chunks.digest_of(name) != digest_of(chunks):
            pipeline.chunks.add(name, digest_of(chunks), chunks)
        pipeline.engine.precompute(chunks)
    return world.questions


def _print(result: TuneResult) -> None:
    from cacheblend_lab.tuning.card import rows_of

    counts = result.questions
    echo(
        f"{counts['train']} questions learned from, {counts['dev']} to stop by, {counts['held_out']} held out; "
        f"{result.settings['chunks']:,} chunks\n"
        f"A right chunk is among the candidates of {result.reader['right_chunk_among_candidates']:.0%}; the model "
        f"({result.settings['reader']}) likes it best for {result.reader['prefers_it']:.0%} of these\n"
    )
    echo(table(rows_of(result)))
    shown = result.example
    echo(f"\nWhat the model found useful for: {shown['question']}\n")
    rows = [["chunk", "p before", "useful", "p after"]]
    ranked = sorted(shown["candidates"], key=lambda each: -max(each["prior"], each["posterior"]))[:4]
    for each in ranked:
        text = " ".join(each["text"].split()) or "(no chunk)"
        short = text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…"
        rows.append([short, *(f"{each[name]:.1%}" for name in ("prior", "posterior", "after"))])
    echo(table(rows))
    echo(f"\n{result.why[0].upper()}{result.why[1:]}.")
    if result.saved is not None:
        command, option = ("store reembed", "--embedding") if result.documents else ("ask QUESTION", "--retriever")
        echo(f"\nUse it:  cacheblend {command} --store {result.settings['store']} {option} {result.saved}")
