"""Holds the options that several commands of `cacheblend bench` take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cacheblend_rag.console.engines import with_model
from cacheblend_rag.console.groups import ModelOptions

if TYPE_CHECKING:
    from cacheblend_lab.bench import BenchModel
    from cacheblend_rag.frameworks.sharing import EngineName

METHOD_NAMES = {"full": "full recompute", "prefix": "prefix caching", "reuse": "full KV reuse", "blend": "blend"}

KV = Annotated[
    Literal["ram", "int8", "disk"], typer.Option(help="Where the chunks' KV is kept; int8 is RAM, of half the bytes.")
]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Directory on the disk to measure, for --kv disk (default: a temporary one)."),
]
Chunks = Annotated[int, typer.Option(min=1, help="Number of chunks.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens in the question.")]
Repeat = Annotated[int, typer.Option(min=1, help="Timed rounds; each runs every method once.")]
RandomSeed = Annotated[int, typer.Option(help="Of the random tokens.")]


@dataclass(frozen=True)
class BenchOptions:
    """Holds the options that choose the model of a benchmark."""

    random_weights: Annotated[
        str | None,
        typer.Option(
            help="Random weights of a shape instead of a model: llama:LAYERSxHIDDEN, llama-3.1-8b, mistral-7b.",
            rich_help_panel="Model",
        ),
    ] = None
    model: ModelOptions = field(default_factory=ModelOptions)

    def choice(self, engine: EngineName = "transformers") -> BenchModel:
        """Return the options as a `BenchModel`.

        Raises:
            InputError: The options contradict each other.
        """
        from cacheblend_lab.bench import BenchModel

        chosen = self.model if self.random_weights else with_model(self.model)
        return BenchModel(random_weights=self.random_weights, engine=engine, **vars(chosen))
