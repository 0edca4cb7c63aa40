"""Holds the options that the commands of `cacheblend realm` take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

TRAINING = "Training"

Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (default: all; 1 for a tiny BERT).")]
Questions = Annotated[
    Path,
    typer.Option(
        "--questions",
        "-q",
        help='JSON lines of {"question", "answers"}, or a file of NQ-open, WebQuestions or CuratedTREC as it is published.',
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Sentences or questions in a step (default: 16; tiny: 12).", rich_help_panel=TRAINING),
]
RandomSeed = Annotated[int, typer.Option(help="Of all that is drawn.", rich_help_panel=TRAINING)]


@dataclass(frozen=True)
class MaskingOptions:
    """Holds the options for masking and for the numbers of steps."""

    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps of masked spans over retrieved passages (default: 5000; demo and tiny: 60).",
            rich_help_panel=TRAINING,
        ),
    ] = None
    warm_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps of the warm start (default: 2000; tiny: 400; demo of minilm: 150).",
            rich_help_panel=TRAINING,
        ),
    ] = None
    refresh_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps between renewals of the index; 0: never (default: 500; tiny: 20).",
            rich_help_panel=TRAINING,
        ),
    ] = None
    spans: Annotated[
        Literal["salient", "random"],
        typer.Option(
            help="What is masked: names and dates, or any words (the paper's ablation).", rich_help_panel=TRAINING
        ),
    ] = "salient"
    ict: Annotated[
        bool, typer.Option("--ict/--no-ict", help="Begin with the inverse cloze task.", rich_help_panel=TRAINING)
    ] = True

    @property
    def given(self) -> dict[str, Any]:
        """Return the numbers of steps that the user gave, by name."""
        return given_of(warm_steps=self.warm_steps, steps=self.steps, refresh_every=self.refresh_every)


@dataclass(frozen=True)
class PretrainOptions:
    """Holds the options for the sizes of the model and of a pre-training step."""

    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Passages retrieved for a sentence, besides the null document (default: 7; tiny: 3)."),
    ] = None
    batch: Batch = None
    rate: Annotated[
        float | None, typer.Option(help="Highest learning rate (default: 3e-5; tiny: 1e-4).", rich_help_panel=TRAINING)
    ] = None
    warm_batch: Annotated[
        int, typer.Option(min=2, help="Sentences in a step of the warm start.", rich_help_panel=TRAINING)
    ] = 64
    warm_rate: Annotated[
        float | None,
        typer.Option(
            help="Highest learning rate of the warm start (default: 1e-4; tiny: 2e-3).", rich_help_panel=TRAINING
        ),
    ] = None
    passage_tokens: Annotated[
        int | None, typer.Option(min=16, help="Most word pieces of a passage (default: 288; tiny: 48).")
    ] = None
    query_tokens: Annotated[
        int | None,
        typer.Option(min=8, help="Most word pieces of a question or a masked sentence (default: 64; tiny: 32)."),
    ] = None
    faiss: Annotated[str, typer.Option(help="Kind of index, in FAISS's words; Flat is exact.")] = "Flat"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="What BERT's matrices are multiplied in, here and whenever this model is used."),
    ] = "float32"
    seed: RandomSeed = 0


def given_of(**values: Any) -> dict[str, Any]:
    """Return the options whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}
