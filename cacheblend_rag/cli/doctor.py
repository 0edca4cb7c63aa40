"""`cacheblend doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.app import app
from cacheblend_rag.cli.engines import open_engine
from cacheblend_rag.cli.groups import ModelOptions, takes_groups
from cacheblend_rag.cli.output import print_json, seconds, size, status, table

if TYPE_CHECKING:
    from cacheblend_rag.blending.calibration.rules import Calibration
    from cacheblend_rag.doctor.diagnose import Diagnosis


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
            "--calibrate", help="Measure which check layers and ratio this model needs, and keep the profile."
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Calibrate on these prompts: JSON lines with a "question" and a list of "chunks"; without chunks they are '
            "retrieved from --store (default: the bundled corpus and questions)."
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Most prompts to calibrate on.")] = 12,
    output: Annotated[
        Path | None, typer.Option(help="Write the profile into this model directory instead of the user's files.")
    ] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Say whether a model is blended, why, how, and what that gains on this machine; or calibrate it."""
    with open_engine(model) as engine:
        if calibrate:
            from cacheblend_rag.doctor import calibrate_engine, collect_prompts

            with status("Calibrating") as say:
                say("prompts")
                found, file = calibrate_engine(engine, collect_prompts(engine, prompts, store, count), output, say)
            print_json({**found.as_json(), "file": str(file)}) if as_json else _print_calibration(found, file)
            return
        from cacheblend_rag.doctor.diagnose import diagnose

        with status("Examining") as say:
            diagnosis = diagnose(engine, store, say)
    print_json(diagnosis.as_json()) if as_json else _print_diagnosis(diagnosis)


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
            f"check layers {_join_numbers(found.check_layers)}, ratio {found.ratio:.0%} ({found.profile_origin})",
        )
    )
    if found.calibrated:
        lines.append(("", str(found.calibrated.get("why", ""))))
    if found.kv_bytes_per_token is not None:
        lines.append(("KV", f"{size(found.kv_bytes_per_token)} a token"))
    lines += [(name, f"{rate / 1e9:.1f} GB/s") for name, rate in found.bandwidth.items()]
    lines += [
        ("prefill", f"{tokens:,} tokens in {seconds(took)}, {1000 * took / tokens:.3f} ms a token")
        for tokens, took in found.prefill.measured_s.items()
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
    kl = found.kl
    typer.echo(
        f"KL divergence from the full prefill over the answers' first tokens, {found.prompts} prompts, at 15%:\n"
        f"full KV reuse {kl['none']:.4f}, random selection {kl['random']:.4f}, all-layer oracle {kl['oracle']:.4f}\n"
    )
    rows = [["check layer", "overlap with oracle", "rank correlation", "KL of the blend"]]
    rows += [
        [str(x.layer), f"{x.overlap:.0%}", f"{x.spearman:.2f}", "-" if x.kl is None else f"{x.kl:.4f}"]
        for x in found.layers
    ]
    typer.echo(table(rows))
    pairs = [(schedule, value) for schedule, value in found.schedules if len(schedule.check_layers) > 1]
    for schedule, value in pairs:
        widths = " then ".join(f"{width:g}x" for width in schedule.widths)
        typer.echo(f"layers {_join_numbers(schedule.check_layers)} ({widths} the ratio): {value:.4f}")
    if found.ratios:
        typer.echo(f"\nwith check layers {_join_numbers(found.profile.check_layers)}:")
        typer.echo(
            table([["ratio", "KL"], *([f"{ratio:.0%}", f"{value:.4f}"] for ratio, value in found.ratios.items())])
        )
    if found.ranked:
        typer.echo("\nranked at indexing, no dense pass:")
        rows = [["ratio", *(f"KL by {name}" for name in found.ranked)]]
        for ratio in next(iter(found.ranked.values())):
            rows.append([f"{ratio:.0%}", *(f"{kl[ratio]:.4f}" for kl in found.ranked.values())])
        typer.echo(table(rows))
    typer.echo(f"\n{found.why[0].upper()}{found.why[1:]}.")
    typer.echo(
        f"Profile: policy {found.profile.policy}, ratio {found.profile.ratio:.0%}, check layers "
        f"{_join_numbers(found.profile.check_layers)}, written to {file}"
    )


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
