"""`cacheblend doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.app import app
from cacheblend_rag.cli.engines import open_engine
from cacheblend_rag.cli.groups import ModelOptions, takes_groups
from cacheblend_rag.cli.output import print_json, seconds, size, status, table

if TYPE_CHECKING:
    from cacheblend_rag.doctor.calibration import Calibration
    from cacheblend_rag.doctor.diagnose import Diagnosis

_CALIBRATION = "Calibration"
_LEAST_PROMPTS, _DOCUMENT_PROMPTS = 12, 40


@dataclass(frozen=True)
class CalibrationOptions:
    """What to calibrate on, to which standard, and where the result goes."""

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
            help="Most prompts to calibrate on (default: as many as it takes to show the agreement if no token disagrees, 299 "
            "for 99% at 95%; with --documents 40).",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
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


@app.command()
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
    as_json: options.AsJSON = False,
) -> None:
    """Say whether a model is blended, why, how, and what that gains on this machine; or calibrate it."""
    if calibrate:
        _calibrate(model, store, wanted, as_json)
        return
    with open_engine(model) as engine:
        from cacheblend_rag.doctor.diagnose import diagnose

        with status("Examining") as say:
            diagnosis = diagnose(engine, store, say)
    print_json(diagnosis.as_json()) if as_json else _print_diagnosis(diagnosis)


def _calibrate(model: ModelOptions, store: Path | None, wanted: CalibrationOptions, as_json: bool) -> None:
    from cacheblend_rag.doctor import calibrate_engine, collect_prompts
    from cacheblend_rag.doctor.plot import check_plot_name, plot_calibration
    from cacheblend_rag.doctor.standard import Standard

    documents, plot = wanted.documents, wanted.plot
    standard = Standard(wanted.agreement, wanted.confidence, "tokens" if documents is None else "likelihood")
    if plot is not None:
        check_plot_name(plot)
    count = wanted.count or (max(_LEAST_PROMPTS, standard.needed) if documents is None else _DOCUMENT_PROMPTS)
    with open_engine(model) as engine, status("Calibrating") as say:
        say("prompts")
        collected = collect_prompts(engine, wanted.prompts, store, count, documents)
        found, file = calibrate_engine(engine, collected, wanted.output, say, standard, everything=plot is not None)
    if plot is not None:
        plot_calibration(found, plot)
    print_json({**found.as_json(), "file": str(file)}) if as_json else _print_calibration(found, file)


def _print_diagnosis(found: Diagnosis) -> None:
    lines: list[tuple[str, str]] = [
        ("model", f"{found.model} ({found.layers} layers, {found.dtype}, {found.device})"),
        ("fingerprint", found.fingerprint),
        ("context window", f"{found.context_window:,} tokens"),
        ("blended", "yes" if found.blended else f"no: {found.reason}"),
    ]
    lines += [
        ("parity gate", f"{name}: off by {error:.1e} standard deviations (allowed {found.gate_tolerance:.0e})")
        for name, error in found.gate_errors.items()
    ]
    if found.first_token_kl is not None:
        lines.append(("", f"a 15% blend of random tokens diverges by {found.first_token_kl:.3f} nats (judges nothing)"))
    lines += [
        ("rotation", f"layers {_ranges(group.layers)}: {_layout(group.layout)}, RoPE table {group.table}")
        for group in found.rotation
    ]
    lines.append(
        (
            "profile",
            f"{'do not blend: prefix caching' if found.reuse == 'prefix' else _blend(found)} ({found.profile_origin})",
        )
    )
    if found.calibrated:
        lines.append(("", str(found.calibrated.get("why", ""))))
    if found.kv_bytes_per_token is not None:
        lines.append(("KV", f"{size(found.kv_bytes_per_token)} a token"))
    lines += [(name, f"{rate / 1e9:.1f} GB/s") for name, rate in found.bandwidth.items()]
    lines += [
        ("prefill", f"{tokens:,} tokens in {seconds(took)}, {1000 * took / tokens:.3f} ms a token")
        for tokens, took in found.prefill_s.items()
    ]
    if found.estimate is not None:
        cost = found.estimate
        lines.append(
            (
                "estimate",
                f"a prompt of {cost.prompt_tokens:,} tokens (6 chunks of 512): full recompute {seconds(cost.full_s)}, "
                f"blend {seconds(cost.blend_s)} ({cost.full_s / cost.blend_s:.1f}x; loading alone {seconds(cost.load_s)})",
            )
        )
        lines.append(("", "computed from the figures above, not measured; `cacheblend bench ttft` measures"))
    width = max(len(name) for name, _ in lines)
    previous = ""
    for name, text in lines:
        typer.echo(f"{'' if name == previous else name:{width}}  {text}")
        previous = name


def _print_calibration(found: Calibration, file: Path) -> None:
    what = "exp(-KL)" if found.standard.by == "likelihood" else "agreement"
    typer.echo(
        f"{found.prompts} prompts, {found.tokens} tokens compared; each bound of {what} with full recompute holds with "
        f"{found.standard.confidence:.4g} confidence.\n"
    )
    rows = [["policy", "ratio", "check layers", "compute", what, "bounds", "KL", "prompts"]]
    rows += [
        [
            each.policy if each.ratio else "full KV reuse",
            f"{each.ratio:.0%}",
            _join_numbers(each.check_layers) or "-",
            f"{each.compute:.1%}",
            f"{each.agreement.value:.2%}",
            f"{each.agreement.low:.2%} to {each.agreement.high:.2%}",
            f"{each.kl:.4f}",
            f"{each.prompts} of {found.prompts}",
        ]
        for each in found.measured
    ]
    typer.echo(table(rows))
    typer.echo("\nKV deviation of each layer against that of all layers, on the first prompts:")
    rows = [["check layer", "same tokens", "rank correlation", "tokens that deviate", ""]]
    rows += [
        [str(x.layer), f"{x.overlap:.0%}", f"{x.spearman:.2f}", f"{x.visible:.0%}", "tried" if x.offered else ""]
        for x in found.layers
    ]
    typer.echo(table(rows))
    typer.echo(f"\n{found.why[0].upper()}{found.why[1:]}.")
    profile = found.profile
    how = "prefix caching, no blend"
    if found.chosen is not None:
        layers = _join_numbers(profile.check_layers)
        how = f"policy {profile.policy}, ratio {profile.ratio:.0%}, check layers {layers}"
    typer.echo(f"Profile: {how}{'' if found.verdict != 'not shown' else ' (not shown)'}, written to {file}")


def _blend(found: Diagnosis) -> str:
    return f"policy {found.policy}, ratio {found.ratio:.0%}, check layers {_join_numbers(found.check_layers)}"


def _layout(layout: str) -> str:
    return {"half": "halves paired (NeoX)", "interleaved": "neighbours paired", "none": "no rotation"}[layout]


def _join_numbers(values: Any) -> str:
    return ", ".join(map(str, values))


def _ranges(layers: tuple[int, ...]) -> str:
    """Return ``0-2, 5`` for 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
