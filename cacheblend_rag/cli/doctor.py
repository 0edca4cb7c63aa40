"""Runs `cacheblend doctor`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cacheblend_rag.cli.doctor_output import print_calibration, print_diagnosis, print_vllm
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_engine, open_vllm, with_model
from cacheblend_rag.console.groups import ModelOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, progress, status
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.calibrate.standard import Standard

_CALIBRATION = "Calibration"


@dataclass(frozen=True)
class CalibrationOptions:
    """Groups the options of a calibration: its prompts, its standard, and its output."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Calibrate on these prompts: JSON lines with a "question" and a list of "chunks"; without chunks they are '
            "retrieved from --store.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    documents: Annotated[
        Path | None,
        typer.Option(
            help="Calibrate on the text in this directory, without questions: by the KL of its own text, given chunks of it.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    as_near_as: Annotated[
        Literal["8-bit", "6-bit", "4-bit", "f1", "em"] | None,
        typer.Option(
            help="Standard that a blend must reach: as near to full recompute as the same model with weights "
            "of so many bits, by KL on the same prompts (default: 6-bit); or an equal score by a metric, "
            "for --prompts with answers.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    agreement: Annotated[
        float | None,
        typer.Option(
            help="Minimum agreement with full recompute instead, such as 0.99: the share of equal answer "
            "tokens; with --documents, exp(-KL). For a metric: 1 minus the accepted loss of score "
            "(default: 0.95, a loss of five points).",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    confidence: Annotated[
        float,
        typer.Option(help="Confidence level of the result, from 0.5 to below 1.", rich_help_panel=_CALIBRATION),
    ] = 0.95
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of prompts to measure (default: 40; with --agreement 0.99 up to 598). With "
            "fewer than half of the default, the result is marked as not shown.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Measure half as many prompts (20), the least that a result can rest on, and leave out the policy hkvd.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = False
    margin: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps of the ratio above the least that holds, for text and orders of chunks that the prompts do not show.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = 0
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the profile into this model directory instead of the user's files.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError if options contradict each other, before a model is loaded."""
        near = self.as_near_as or ""
        by_bits = near.endswith("-bit")
        for names, both in (
            ("--quick or --count", self.quick and self.count is not None),
            ("--as-near-as or --agreement", by_bits and self.agreement is not None),
            ("--prompts or --documents", self.prompts is not None and self.documents is not None),
        ):
            if both:
                raise InputError(f"Give {names}, not both.")
        if near and not by_bits and self.prompts is None:
            raise InputError(
                f"--as-near-as {near} needs questions with right answers; give a file of them with --prompts."
            )


@takes_groups
def doctor(
    *,
    model: ModelOptions,
    store: Annotated[
        Path | None,
        typer.Option("--store", "-s", help="Also measure this store's disk, or calibrate on its documents."),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help=(
                "Find the policy, ratio and check layers of least compute that come near enough to full "
                "recompute, and save them as the model's profile."
            ),
        ),
    ] = False,
    wanted: CalibrationOptions,
    engine: options.Engine = "transformers",
    as_json: options.AsJSON = False,
) -> None:
    """Report whether, why and how a model is blended, and what blending gains on this machine; or calibrate the model."""
    given = [
        f"--{each.name.replace('_', '-')}" for each in fields(wanted) if getattr(wanted, each.name) != each.default
    ]
    if given and not calibrate:
        raise InputError(f"{', '.join(given)}: only with --calibrate.")
    wanted.check()
    if calibrate and not (store or wanted.prompts or wanted.documents):
        raise InputError("Give what to calibrate on: --documents DIR, --store DIR or --prompts FILE.")
    store = None if store is None else index_directory(store, "default")
    model = with_model(model, store)
    if engine == "vllm":
        _diagnose_vllm(model, store, calibrate, as_json)
        return
    if calibrate:
        _calibrate(model, store, wanted, as_json)
        return
    with open_engine(model) as opened:
        from cacheblend_rag.calibrate.diagnose import diagnose

        with status("Examining") as say:
            diagnosis = diagnose(opened, store, say)
    print_json(diagnosis) if as_json else print_diagnosis(diagnosis)


def _diagnose_vllm(model: ModelOptions, store: Path | None, calibrate: bool, as_json: bool) -> None:
    for name, given in (("--calibrate", calibrate), ("--store", store is not None)):
        if given:
            raise InputError(f"{name} goes with --engine transformers, whose findings hold for vLLM, too.")
    with tempfile.TemporaryDirectory() as directory, open_vllm(model, Path(directory), None, None, None) as opened:
        from cacheblend_rag.calibrate.diagnose import diagnose_vllm

        with status("Examining") as say:
            found = diagnose_vllm(opened, say)
    print_json(found) if as_json else print_vllm(found)


def _calibrate(model: ModelOptions, store: Path | None, wanted: CalibrationOptions, as_json: bool) -> None:
    from cacheblend_rag.calibrate import calibrate_engine
    from cacheblend_rag.calibrate.calibration import independent
    from cacheblend_rag.calibrate.prompts import collect_prompts

    standard = _standard(wanted)
    count = wanted.count or (standard.needed if wanted.quick else standard.usual)
    with open_engine(model) as engine, progress("Calibrating:") as show:
        show(0, 1, "prompts")
        collected = collect_prompts(engine, wanted.prompts, store, count, wanted.documents, standard.metric)
        _say_if_few(independent(collected), standard.needed, wanted.count)
        try:
            found, file = calibrate_engine(
                engine, collected, wanted.output, show, standard,
                margin=wanted.margin, by_deviation=not wanted.quick,
            )  # fmt: skip
        except KeyboardInterrupt:
            echo("Stopped. What was measured is kept: the same command goes on.", err=True)
            raise
    print_json({**asdict(found), "file": str(file)}) if as_json else print_calibration(found, file)


def _say_if_few(prompts: int, needed: int, count: int | None) -> None:
    """Warn on stderr, before anything is measured, if the prompts are too few to prove a result."""
    if prompts >= needed:
        return
    advice = "add documents, or prompts about other chunks"
    if count is not None and count < needed:
        advice = f"give --count {needed} or more"
    echo(
        f"Too few prompts: {prompts} without common chunks, where {needed} can show that a blend is near enough. What is found "
        f"on these will be marked as not shown. For a result to rely on stop now (Ctrl-C), and {advice}.",
        err=True,
    )


def _standard(wanted: CalibrationOptions) -> Standard:
    from cacheblend_rag.calibrate.standard import Standard

    near = wanted.as_near_as
    if near is not None and not near.endswith("-bit"):
        return Standard.as_good_by("f1" if near == "f1" else "em", wanted.agreement, wanted.confidence)
    if wanted.agreement is None:
        return Standard.as_near_as(int((near or "6-bit").removesuffix("-bit")), wanted.confidence)
    return Standard(wanted.agreement, wanted.confidence, "tokens" if wanted.documents is None else "likelihood")
