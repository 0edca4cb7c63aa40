"""Runs `cacheblend learn`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.groups import takes_groups
from cacheblend_rag.console.output import echo, print_json, table
from cacheblend_rag.engines.models import SMOLLM2


@dataclass(frozen=True)
class LearningOptions:
    """Holds the options for training a writer."""

    minutes: Annotated[float | None, typer.Option(min=0.01, help="How long to train (default: 30).")] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for so many steps instead; a run can then be repeated exactly.")
    ] = None
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA.")] = 16
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4
    recomputed: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the steps that blend at 15%, as the writer will be used.")
    ] = 0.5
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a batch (default: 16,384 on a GPU, 1,536 on a CPU).")
    ] = None
    own_answers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Questions that the model answers itself beforehand (default: 6,000 on a GPU, else 0)."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Draws what is held out, and every prompt.")] = 0


@takes_groups
def learn_command(
    *,
    documents: Annotated[
        list[Path], typer.Option(help="Files and directories to learn from, of the types that `index` reads.")
    ],
    out: Annotated[Path, typer.Option(help="A new directory for the writer.")],
    questions: Annotated[
        list[Path] | None, typer.Option(help="Files of questions with their passages, as `eval` reads them.")
    ] = None,
    how: LearningOptions,
    start: Annotated[
        Path | None,
        typer.Option(help="A writer of this model to go on from, with these documents say (default: none)."),
    ] = None,
    note: Annotated[str, typer.Option(help="What the writer's card says of the texts, such as their licences.")] = "",
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.DType = None,
    as_json: options.AsJSON = False,
) -> None:
    """Train a KV writer for a model, which computes chunk KV that fits any context. The model's weights do not change.

    The model's own full prefill is the teacher, and no labels are needed. The writer is saved only if it brings the
    output on held-out prompts closer to full recompute. Ctrl-C loses a minute at most: the same command resumes the
    training.
    """
    from cacheblend_lab.learn.learn import Sizes, learn
    from cacheblend_lab.learn.training import LearnSettings
    from cacheblend_rag.engines.models import dtype_named

    minutes = 30 if how.minutes is None and how.steps is None else how.minutes
    settings = LearnSettings(minutes, how.steps, how.rank, how.rate, recomputed=how.recomputed, seed=how.seed)
    trained, saved = learn(
        model or SMOLLM2,
        out,
        documents,
        questions or (),
        settings,
        Sizes(batch_tokens=how.batch_tokens, answers=how.own_answers),
        device=device,
        dtype=dtype_named(dtype) if dtype else None,
        start=start,
        note=note,
        say=lambda line: echo(line, err=True),
    )
    if as_json:
        print_json({"saved": None if saved is None else str(saved), "ratios": list(settings.ratios), **asdict(trained)})
        return
    after = trained.before if trained.best is None else trained.best.kl
    rows = [["recomputed", "held-out KL before", "after"]]
    for ratio, one, other in zip(settings.ratios, trained.before, after, strict=True):
        rows.append([f"{ratio:.0%}", f"{one:.4f}", f"{other:.4f}"])
    echo(table(rows))
    echo(f"\n{f'The writer is in {saved}: give it as --writer' if saved else 'Not better, not saved'}")
