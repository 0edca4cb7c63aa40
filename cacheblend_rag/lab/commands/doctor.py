"""Runs `cacheblend doctor`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_engine, open_vllm
from cacheblend_rag.console.groups import ModelOptions, takes_groups
from cacheblend_rag.console.output import print_json, status
from cacheblend_rag.lab.commands.doctor_output import print_calibration, print_diagnosis, print_vllm

_CALIBRATION = "Calibration"


@dataclass(frozen=True)
class CalibrationOptions:
    """Groups the options that say what to calibrate on, to which standard, and where the result goes."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Calibrate on these prompts: JSON lines with a "question" and a list of "chunks"; without chunks they are '
            "retrieved from --store (default: generated documents and questions of the bundled model's world).",
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
    agreement: Annotated[
        float,
        typer.Option(
            help="Least agreement with full recompute: share of the answers' tokens; with --documents exp(-KL).",
            rich_help_panel=_CALIBRATION,
        ),
    ] = 0.99
    confidence: Annotated[float, typer.Option(help="With which it must be shown.", rich_help_panel=_CALIBRATION)] = 0.95
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most prompts to calibrate on (default: twice as many as it takes to show the agreement if no token "
            "disagrees, 598 for 99% at 95%; with --documents 40).",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    margin: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps of the ratio above the least that holds, for text and orders of chunks that the prompts do not show.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = 0
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw agreement against compute into this file (.png, .svg, .pdf).", rich_help_panel=_CALIBRATION
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the profile into this model directory instead of the user's files.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None


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
            help="Find the policy, ratio and check layers of least compute that agree with full recompute, and keep the profile.",
        ),
    ] = False,
    wanted: CalibrationOptions,
    engine: options.Engine = "transformers",
    as_json: options.AsJSON = False,
) -> None:
    """Say whether a model is blended, why, how, and what that gains on this machine; or calibrate it."""
    if engine == "vllm":
        _diagnose_vllm(model, store, calibrate, as_json)
        return
    if calibrate:
        _calibrate(model, store, wanted, as_json)
        return
    with open_engine(model) as opened:
        from cacheblend_rag.lab.doctor.diagnose import diagnose

        with status("Examining") as say:
            diagnosis = diagnose(opened, store, say)
    print_json(diagnosis.as_json()) if as_json else print_diagnosis(diagnosis)


def _diagnose_vllm(model: ModelOptions, store: Path | None, calibrate: bool, as_json: bool) -> None:
    from cacheblend_rag.errors import InputError

    for name, given in (("--calibrate", calibrate), ("--store", store is not None)):
        if given:
            raise InputError(f"{name} goes with --engine transformers, whose findings hold for vLLM, too.")
    with tempfile.TemporaryDirectory() as directory, open_vllm(model, Path(directory), None, None) as opened:
        from cacheblend_rag.lab.doctor.diagnose_vllm import diagnose_vllm

        with status("Examining") as say:
            found = diagnose_vllm(opened, say)
    print_json(found.as_json()) if as_json else print_vllm(found)


def _calibrate(model: ModelOptions, store: Path | None, wanted: CalibrationOptions, as_json: bool) -> None:
    from cacheblend_rag.lab.calibration_prompts import collect_prompts
    from cacheblend_rag.lab.doctor import calibrate_engine
    from cacheblend_rag.lab.doctor.plot import check_plot_name, plot_calibration
    from cacheblend_rag.lab.doctor.standard import Standard

    documents, plot = wanted.documents, wanted.plot
    standard = Standard(wanted.agreement, wanted.confidence, "tokens" if documents is None else "likelihood")
    if plot is not None:
        check_plot_name(plot)
    count = wanted.count or standard.usual
    with open_engine(model) as engine, status("Calibrating") as say:
        say("prompts")
        collected = collect_prompts(engine, wanted.prompts, store, count, documents)
        found, file = calibrate_engine(
            engine, collected, wanted.output, say, standard, margin=wanted.margin, everything=plot is not None
        )
    if plot is not None:
        plot_calibration(found, plot)
    print_json({**found.as_json(), "file": str(file)}) if as_json else print_calibration(found, file)
