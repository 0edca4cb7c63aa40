"""Runs `cacheblend eval` and `cacheblend figures`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_engine, open_vllm, with_model
from cacheblend_rag.console.groups import BlendOptions, ModelOptions, takes_groups
from cacheblend_rag.console.output import counted, echo, print_json, progress, seconds, table
from cacheblend_rag.engines.models import BUNDLED_MODEL, SMOLLM2
from cacheblend_rag.homes import from_home

if TYPE_CHECKING:
    from cacheblend_lab.evaluation.evaluate import EvalResult, EvalSettings
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.engines.transformers import TransformersEngine

_DATA = "Data set"
_STORE_BYTES = 2 << 30
_SKIPPED_SHOWN = 3

Out = Annotated[
    Path,
    typer.Option(help="Directory for answers, numbers and report; a later run of the same settings goes on there."),
]


@dataclass(frozen=True)
class EvalOptions:
    """Groups the options that choose the model, the data set and the blend to evaluate."""

    engine: options.Engine = "transformers"
    model: ModelOptions = field(default_factory=ModelOptions)
    dataset: Annotated[
        str,
        typer.Option(
            help="demo, musique, 2wikimqa, hotpotqa, samsum, multi_news, or a file of any of their formats, of LongBench's, or "
            'of JSON lines {"question", "answers", "chunks" or "documents"}.',
            rich_help_panel=_DATA,
        ),
    ] = "demo"
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your copy of the named data set: its file, or a directory that holds it (default: $CACHEBLEND_DATA).",
            rich_help_panel=_DATA,
        ),
    ] = None
    limit: Annotated[int, typer.Option(min=1, help="Most questions.", rich_help_panel=_DATA)] = 200
    seed: Annotated[int, typer.Option(help="Draws questions, examples and demo documents.", rich_help_panel=_DATA)] = 0
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Only these kinds of questions, separated by commas (demo: single, cross, two_hop, two_hop_cross, nickname, "
            "table, unit, alias, comparison; the first four by default, with any other the chunks hold lists and units, too).",
            rich_help_panel=_DATA,
        ),
    ] = None
    k: options.K = 6
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Most tokens in a chunk.", rich_help_panel=_DATA)] = 512
    retriever: options.Retriever = None
    blend: BlendOptions = field(default_factory=BlendOptions)

    @cached_property
    def chosen(self) -> ModelOptions:
        """Return the model's options with a model filled in: the bundled model for the demo data set, else SmolLM2."""
        return with_model(self.model, otherwise=BUNDLED_MODEL if self.dataset == "demo" else SMOLLM2)

    def settings(self, max_tokens: int | None = None, **more: Any) -> EvalSettings:
        """Return the options as an `EvalSettings`, with ``more`` as further fields of it.

        Raises:
            InputError: A value is out of range, or the data set does not exist.
        """
        from cacheblend_lab.datasets import file_of
        from cacheblend_lab.evaluation.evaluate import EvalSettings
        from cacheblend_lab.evaluation.prepare import Preparation

        file_of(self.dataset, self.data)  # raises before a model is loaded
        return EvalSettings(
            self.dataset,
            self.data,
            blend=self.blend.settings(),
            limit=self.limit,
            seed=self.seed,
            kinds=None if self.kinds is None else _split_names(self.kinds),
            preparation=Preparation(
                self.k,
                self.chunk_tokens,
                max_tokens=max_tokens,
                query_encoder=None if self.retriever is None else str(from_home(self.retriever)),
            ),
            **more,
        )

    def open(self) -> TransformersEngine:
        """Load the model, with a store in RAM.

        Raises:
            InputError: The chosen engine is not the transformers engine.
        """
        from cacheblend_rag.errors import InputError
        from cacheblend_rag.store import MemoryStore

        if self.engine != "transformers":
            raise InputError("This command looks inside the model, which only --engine transformers shows.")
        return open_engine(self.chosen, MemoryStore(_STORE_BYTES))

    @contextmanager
    def open_for(self, settings: EvalSettings) -> Iterator[BlendEngine]:
        """Load the model on the chosen engine, with the header of the data set's prompts and an empty store."""
        if self.engine == "transformers":
            with self.open() as engine:
                yield engine
            return
        from cacheblend_lab.evaluation.evaluate import header_of

        with (
            tempfile.TemporaryDirectory(prefix="cacheblend-eval-") as name,
            open_vllm(self.chosen, Path(name), _STORE_BYTES, None, partial(header_of, settings)) as served,
        ):
            yield served


@takes_groups
def evaluate_command(
    *,
    what: EvalOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="full, prefix, reuse, blend, map_reduce, map_rerank, langchain_map_reduce, langchain_map_rerank, reorder "
            "(chunks in an order that a prefix cache hits), reorder+blend, marginal (each chunk alone, summed), and further "
            "blends as POLICY@RATIO or POLICY@RATIO@LAYERS (sink@0.1, hkvd@0.15@1+3); separated by commas.",
        ),
    ] = "full,prefix,reuse,blend",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer (default: 32; summaries 96 and 256).")
    ] = None,
    out: Out = Path("report"),
    as_json: options.AsJSON = False,
) -> None:
    """Answer a data set by several methods; report quality, time to first token and compute, with 95% intervals."""
    settings = what.settings(max_tokens, methods=_split_names(methods))
    with what.open_for(settings) as engine:
        from cacheblend_lab.evaluation.evaluate import evaluate
        from cacheblend_lab.evaluation.report import write_report

        with progress("Evaluating") as show:
            result = evaluate(engine, settings, out, show)
    assert result.answers_file is not None
    numbers = result.answers_file.with_name(result.answers_file.name.replace("answers-", "eval-"))
    numbers.with_suffix(".json").write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
    page = write_report(numbers.with_suffix(".html"), result)
    if as_json:
        print_json({**result.as_json(), "report_file": str(page)})
        return
    _print_result(result)
    if not result.settings["files"]:
        echo()
    echo(f"answers  {result.answers_file}\nreport   {page}")


_FEWER = EvalOptions(limit=40)


@takes_groups
def figures(
    what: EvalOptions = _FEWER,
    only: Annotated[
        str | None, typer.Option(help="Figures of the paper to make, as 2,6,12-17 (default: all there are).")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed rounds of each point of figures 15 and 17.")] = 3,
    out: Out = Path("report"),
    as_json: options.AsJSON = False,
) -> None:
    """Make the paper's figures for a model: PNG, SVG and CSV of each, and an HTML page. A rerun resumes the work."""
    settings = what.settings()
    with what.open() as engine:
        from cacheblend_lab.evaluation.figures import FigureContext, make_figures, parse_numbers

        with progress("Figures") as show:
            page = make_figures(FigureContext(engine, settings, out, repeat), parse_numbers(only), show)
    print_json({"report_file": str(page)}) if as_json else echo(str(page))


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print_result(result: EvalResult) -> None:
    settings = result.settings
    echo(
        f"{settings['model']} on {counted(settings['questions'], 'question')} of {Path(settings['dataset']).name}, "
        f"up to {settings['k']} chunks of {settings['chunk_tokens']} tokens, {settings['dtype']} on {settings['device']}; "
        "means with 95% intervals (- where there is none)\n"
    )
    echo(table(_rows(result.summary["methods"], result.labels)))
    for kind, found in result.summary.get("kinds", {}).items():
        count = next(iter(found.values()))["n"]
        echo(f"\n{kind or 'no kind'}, {counted(count, 'question')}\n")
        echo(table(_rows(found, result.labels)))
    _print_skipped(result)


def _print_skipped(result: EvalResult) -> None:
    for name, digest in result.settings["files"].items():
        echo(f"\ndata     {name}  {digest}")
    if result.skipped:
        count = len(result.skipped)
        echo(f"skipped  {count} row{'s' if count > 1 else ''} that cannot be used; the report names all")
        for row in result.skipped[:_SKIPPED_SHOWN]:
            echo(f"         {row}")


def _rows(methods: dict[str, Any], labels: dict[str, str]) -> list[list[str]]:
    reordered = any(found["agreement_with_reordered_full"] is not None for found in methods.values())
    own_order = ["of its own order"] if reordered else []
    head = [
        "",
        "EM",
        "F1",
        "Rouge-L",
        "agrees with full",
        *own_order,
        "first-token KL",
        "TTFT median",
        "p90",
        "computed",
        "all compute",
    ]
    rows = [head]
    for name, found in methods.items():
        # A terminal has room for some intervals only; the report holds all of them.
        cells = [_with_interval(found, "em"), f"{found['f1']:.1%}", f"{found['rouge_l']:.1%}"]
        cells.append(_with_interval(found, "agreement_with_full"))
        if reordered:
            cells.append(_with_interval(found, "agreement_with_reordered_full"))
        kl = found["first_token_kl"]
        ttft = found["ttft_s"]
        rows.append(
            [
                labels[name],
                *cells,
                "-" if kl is None else f"{kl:.3g}",
                seconds(ttft["median"]),
                seconds(ttft["p90"]),
                f"{found['computed_tokens']:,.0f}",
                f"{found['compute_share']:.1%}",
            ]
        )
    return rows


def _with_interval(found: dict[str, Any], key: str) -> str:
    if found[key] is None:
        return "-"
    interval = found["intervals_95"][key]
    ends = "-" if interval is None else f"{interval[0]:.1%}, {interval[1]:.1%}"
    return f"{found[key]:.1%} [{ends}]"
