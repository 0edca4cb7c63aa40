"""Runs `cacheblend realm`, which trains REALM as in the paper, at any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cacheblend_lab.commands.realm_options import (
    TRAINING,
    Batch,
    MaskingOptions,
    PretrainOptions,
    Questions,
    RandomSeed,
    Threads,
    given_of,
)
from cacheblend_rag.console import options
from cacheblend_rag.console.groups import takes_groups
from cacheblend_rag.console.output import counted, echo, print_json, progress, table
from cacheblend_rag.homes import from_home

if TYPE_CHECKING:
    from cacheblend_lab.realm.questions import RealmQuestion

realm = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train a retriever by what helps an encoder fill masks and find answers: REALM (arXiv 2002.08909), at any size. "
    "It is the paper's own system, apart from the rest: ask, chat and serve cannot use what it makes. "
    "To tune the retriever that they use, see tune-retriever.",
)


@realm.command()
@takes_groups
def pretrain(
    *,
    corpus: Annotated[
        Path,
        typer.Option(
            help='Documents: a directory, a .jsonl of {"title", "text"}, or a .tsv of id, text and title (DPR\'s).'
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the model; run again to go on.")],
    bert: Annotated[
        str,
        typer.Option(
            help="Directory of a BERT; minilm: the bundled embedding's, 6 layers of 384; tiny: 2 layers of 128, random weights."
        ),
    ] = "tiny",
    masking: MaskingOptions,
    how: PretrainOptions,
    device: options.Device = None,
    threads: Threads = None,
    as_json: options.AsJSON = False,
) -> None:
    """Pre-train: a warm start, then masked spans over retrieved passages, while another process rebuilds the index."""
    from cacheblend_lab.realm.examples import salient_finder
    from cacheblend_lab.realm.model import BUNDLED, TINY, check_device
    from cacheblend_lab.realm.passages import read_corpus
    from cacheblend_lab.realm.presets import pretraining
    from cacheblend_lab.realm.pretrain import pretrain as run

    preset = pretraining(bert if bert in (TINY, BUNDLED) else str(from_home(bert).resolve()))
    settings = replace(
        preset,
        shape=replace(
            preset.shape, **given_of(query_tokens=how.query_tokens, passage_tokens=how.passage_tokens), dtype=how.dtype
        ),
        ict=masking.ict,
        warm_batch=how.warm_batch,
        spans=masking.spans,
        faiss=how.faiss,
        seed=how.seed,
        **given_of(warm_rate=how.warm_rate, batch=how.batch, rate=how.rate, candidates=how.candidates),
        **masking.given,
    )
    where = check_device(device)
    _use_threads(threads, bert)
    finder = salient_finder()[0] if masking.spans == "salient" else "random"
    echo(_SPANS.get(finder, f"Masking what {finder} finds, and dates."), err=True)
    with progress("Pre-training:") as show:
        run(lambda tokenizer, size: read_corpus(from_home(corpus), tokenizer, size), output, settings, where, show)
    _report_run(output, {"spans": finder}, as_json, "cacheblend realm finetune --model")


_SPANS = {
    "patterns": "Masking dates and capitalised names, found by patterns: spaCy with en_core_web_sm is not installed.",
    "random": "Masking random spans.",
}


@realm.command()
def finetune(
    *,
    model: Annotated[Path, typer.Option("--model", "-m", help="What pretrain wrote.")],
    questions: Questions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the model; run again to go on.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps (default: 2000; tiny: 400).", rich_help_panel=TRAINING)
    ] = None,
    batch: Batch = None,
    rate: Annotated[
        float | None, typer.Option(help="Highest learning rate (default: 3e-5; tiny: 1e-3).", rich_help_panel=TRAINING)
    ] = None,
    refresh_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps between renewals of the index, passages' vectors learning, too; 0: they stay, as in the paper.",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Passages read for each question.")] = 5,
    seed: RandomSeed = 0,
    device: options.Device = None,
    threads: Threads = None,
    as_json: options.AsJSON = False,
) -> None:
    """Fine-tune on open questions: train query tower, span reader and, with --refresh-every, the document tower."""
    from cacheblend_lab.realm.finetune import finetune as run
    from cacheblend_lab.realm.model import check_device, read_shape
    from cacheblend_lab.realm.presets import tuning

    where = check_device(device)
    preset = tuning(read_shape(model).random)
    settings = replace(
        preset, refresh_every=refresh_every, k=k, seed=seed, **given_of(steps=steps, batch=batch, rate=rate)
    )
    _use_threads(threads, "tiny" if _is_tiny(model) else "")
    found = _read(questions)
    with progress("Fine-tuning:") as show:
        run(model, found, output, settings, where, show)
    _report_run(output, {"questions": len(found)}, as_json, "cacheblend realm eval --model")


@realm.command("eval")
def evaluate_command(
    *,
    model: Annotated[Path, typer.Option("--model", "-m", help="What finetune wrote.")],
    questions: Questions,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions, the first of the file.")] = None,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Passages read for each question.")] = 5,
    answers: Annotated[
        Path | None, typer.Option(help="File for every question with its answer and scores, as JSON lines.")
    ] = None,
    device: options.Device = None,
    threads: Threads = None,
    as_json: options.AsJSON = False,
) -> None:
    """Measure exact match and recall on a file of questions, with 95% intervals."""
    import json

    from cacheblend_lab.realm.evaluate import evaluate, summary
    from cacheblend_lab.realm.finetune import is_tuned, open_library
    from cacheblend_lab.realm.model import RealmModel, check_device
    from cacheblend_lab.realm.passages import Collator

    where = check_device(device)
    _use_threads(threads, "tiny" if _is_tiny(model) else "")
    asked = _read(questions)[:limit]
    if not is_tuned(model):
        echo("Warning: this model was never fine-tuned, so its answers are random; its recall is what it is.", err=True)
    loaded = RealmModel.load(model).to(where)
    library = open_library(model, loaded)
    with progress("Asking:") as show:
        rows = evaluate(loaded, library, asked, Collator(loaded.tokenizer, where), k, show)
    if answers is not None:
        answers.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    found = summary(rows, [question.group for question in asked])
    if as_json:
        print_json(found)
        return
    echo(f"{found['questions']} questions, {len(library.passages):,} passages, {k} of them read for each\n")
    echo(score_table({"": found}))


@realm.command()
@takes_groups
def demo(
    *,
    seeds: Annotated[
        int, typer.Option(min=1, help="Worlds to train on, one after the other; their questions are pooled.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="The first world.")] = 0,
    bert: Annotated[
        Literal["tiny", "minilm"],
        typer.Option(
            help="Begin with the bundled embedding's BERT, or with random weights: on one core, and it reads badly."
        ),
    ] = "minilm",
    masking: MaskingOptions,
    finetune_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of fine-tuning (default: 300; tiny: 400).", rich_help_panel=TRAINING),
    ] = None,
    finetune_refresh_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps of fine-tuning between renewals of the index; 0: passages' vectors stay (default: 30; tiny: 0).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep the models in this directory, and go on there after a stop."),
    ] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Pre-train and fine-tune a small BERT on fictional worlds, in minutes, and compare with a closed-book reader."""
    from cacheblend_lab.realm.demo import DemoSettings, run_demo
    from cacheblend_lab.realm.presets import demonstration

    _use_threads(None, bert)
    pretraining, tuning = demonstration(bert)
    settings = DemoSettings(
        pretrain=replace(pretraining, spans=masking.spans, ict=masking.ict, **masking.given),
        finetune=replace(tuning, **given_of(steps=finetune_steps, refresh_every=finetune_refresh_every)),
    )
    echo(f"{counted(seeds, 'world')} of {settings.entities} entities, and for each {_DEMO_BERTS[bert]}.", err=True)
    with progress("Training:") as show:
        found = run_demo(range(seed, seed + seeds), settings, output, lambda at, done, of: show(done, of, at))
    if as_json:
        print_json(found)
        return
    _print_demo(found)


def _print_demo(found: dict[str, Any]) -> None:
    for world in found["worlds"]:
        echo(
            f"world {world['seed']}: {world['passages']} passages, {world['train']} questions to learn from, {world['held_out']} "
            f"about other entities to be asked; index up to {world['index']['staleness_max']:.0f} steps old"
        )
    echo(f"\nIn percent, with 95% intervals, over {found['scores']['fine-tuned']['questions']} questions:\n")
    echo(score_table(found["scores"]))
    for name, gain in found["gains"].items():
        what = "exact match" if name == "em" else name
        low, high = (gain[side] for side in ("low", "high"))
        interval = f" [{100 * low:+.1f}, {100 * high:+.1f}]" if low is not None else ""
        echo(f"\n{what}, fine-tuned against {gain['over']}: {100 * gain['mean']:+.1f} points{interval}", nl=False)
    echo("")


_DEMO_BERTS = {
    "tiny": "a BERT of 2 layers of 128: about ten minutes of one CPU core",
    "minilm": "the bundled embedding's BERT, 6 layers of 384: about a quarter of an hour of two CPU cores that have bfloat16",
}


def score_table(found: dict[str, dict[str, Any]]) -> str:
    """Return a table of scores with their intervals: one row per summary, one column per score."""
    names = [
        name for name in dict.fromkeys(name for scores in found.values() for name in scores) if name != "questions"
    ]
    titles = ["", *("exact match" if name == "em" else name for name in names)]
    return table([titles, *([title, *(_share(scores.get(name)) for name in names)] for title, scores in found.items())])


def _share(score: dict[str, float] | None) -> str:
    if score is None:
        return "-"
    return f"{100 * score['mean']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def _read(questions: Path) -> list[RealmQuestion]:
    from cacheblend_lab.realm.questions import read_questions

    found = read_questions(from_home(questions))
    for skipped in found.skipped[:3]:
        echo(f"Skipped {questions.name}, {skipped}", err=True)
    if len(found.skipped) > 3:
        echo(f"Skipped {len(found.skipped) - 3} more rows.", err=True)
    return found.questions


def _is_tiny(model: Path) -> bool:
    import json

    try:
        return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]) <= 128
    except (OSError, ValueError, KeyError):
        return False


def _use_threads(threads: int | None, bert: str) -> None:
    """Set the number of torch threads; a tiny BERT defaults to one thread, since a second thread slows it down."""
    import torch

    if threads is not None or bert == "tiny":
        torch.set_num_threads(threads or 1)


def _report_run(output: Path, more: dict[str, Any], as_json: bool, then: str) -> None:
    from cacheblend_lab.realm.renewal import PASSAGES
    from cacheblend_lab.realm.runs import plot_staleness, staleness

    with (output / PASSAGES).open("rb") as file:
        found = {"output": str(output), "passages": sum(1 for _ in file), **more, **staleness(output)}
    picture = plot_staleness(output) if found.get("staleness_max") is not None else None
    if as_json:
        print_json(found | ({"plot": str(picture)} if picture else {}))
        return
    steps = f"{found['steps']:,} steps, last loss {found['loss']:.3f}" if "loss" in found else "no step was taken"
    echo(f"{found['passages']:,} passages; {steps}")
    if found.get("staleness_max") is not None:
        echo(
            f"staleness of the index: mean {found['staleness_mean']:.0f} steps, most {found['staleness_max']:.0f}; renewed "
            f"{found['refreshes']} times" + (f"; drawn in {picture}" if picture else "")
        )
    echo(f"\nNext: {then} {output} --questions FILE")
