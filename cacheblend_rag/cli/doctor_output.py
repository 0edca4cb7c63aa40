"""Prints what `cacheblend doctor` found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.console.output import echo, seconds, size, table

if TYPE_CHECKING:
    from cacheblend_rag.calibrate.calibration import Calibration
    from cacheblend_rag.calibrate.diagnose import Diagnosis
    from cacheblend_rag.calibrate.diagnose_vllm import VLLMDiagnosis


def print_diagnosis(found: Diagnosis) -> None:
    """Print the diagnosis of a model."""
    lines: list[tuple[str, str]] = [
        ("model", f"{found.model} ({found.layers} layers, {found.dtype}, {found.device})"),
        ("fingerprint", found.fingerprint),
        ("context window", f"{found.context_window:,} tokens"),
        *_gate_lines(found),
    ]
    if found.first_token_kl is not None:
        lines.append(("", f"a 15% blend of random tokens diverges by {found.first_token_kl:.3f} nats (judges nothing)"))
    lines += [
        ("KV codecs", f"{name}: moves predictions by {kl:.1e} nats (allowed {found.codec_limit:.0e})")
        for name, kl in found.codecs.items()
    ]
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
    if found.writer is not None:
        lines.append(("KV writer", found.writer))
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
    _print_lines(lines)


def _gate_lines(found: Diagnosis | VLLMDiagnosis) -> list[tuple[str, str]]:
    """Return lines on blending, the parity gate, and whether a prompt's tokens equal those of its text in one piece."""
    lines = [("blended", "yes" if found.blended else f"no: {found.reason}")]
    lines += [
        ("parity gate", f"{name}: off by {error:.1e} standard deviations (allowed {found.gate_limit:.0e})")
        for name, error in found.gate_errors.items()
    ]
    if found.plain_joins is not None:
        same = "those of the whole text in one piece"
        other = f"at some edges of chunks not {same}: this tokenizer joins what stands on both sides"
        lines.append(("prompt's tokens", same if found.plain_joins else other))
    return lines


def _print_lines(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    previous = ""
    for name, text in lines:
        echo(f"{'' if name == previous else name:{width}}  {text}")
        previous = name


def print_vllm(found: VLLMDiagnosis) -> None:
    """Print the diagnosis of `doctor --engine vllm`."""
    lines = [
        ("model", f"{found.model} ({found.layers} layers, {found.dtype}, {found.device})"),
        ("fingerprint", found.fingerprint),
        ("vLLM", f"{found.vllm}, model runner {found.runner}, attention {found.attention}"),
        ("context window", f"{found.context_window:,} tokens"),
        ("engine step", f"at most {found.step_tokens:,} tokens of {found.step_sequences:,} sequences"),
        *_gate_lines(found),
    ]
    if (cost := found.cost) is not None:
        lines.append(("measured", f"a prompt of {cost.prompt_tokens:,} tokens (6 chunks): first token after"))
        lines.append(("", f"full recompute {seconds(cost.full_s)}, blend {seconds(cost.blend_s)}"))
        lines += [
            ("of a blend", f"{kind} pass: {tokens:,.0f} tokens through all layers, {seconds(took)}")
            for kind, (tokens, took) in cost.passes.items()
            if kind != "prefill"
        ]
        lines.append(("of a blend", f"waiting for stored KV: {seconds(cost.load_s)}"))
    _print_lines(lines)


def print_calibration(found: Calibration, file: Path) -> None:
    """Print the measurements and the choice of `doctor --calibrate`."""
    what = {"likelihood": "exp(-KL)", "tokens": "agreement"}.get(found.standard.by, f"{found.standard.metric} kept")
    echo(
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
    if (bits := found.standard.bits) is not None:
        near = (
            f"{found.standard.agreement:.2%}",
            "",
            f"{found.standard.most_kl:.4f}",
            f"{found.prompts} of {found.prompts}",
        )
        rows.append([f"weights of {bits} bits", "", "-", "100.0%", *near])
    echo(table(rows))
    if found.layers:
        echo("\nKV deviation of each layer against that of all layers, on the first prompts:")
        rows = [["check layer", "same tokens", "rank correlation", "tokens that deviate", ""]]
        rows += [
            [str(x.layer), f"{x.overlap:.0%}", f"{x.spearman:.2f}", f"{x.visible:.0%}", "tried" if x.offered else ""]
            for x in found.layers
        ]
        echo(table(rows))
    echo(f"\n{found.why[0].upper()}{found.why[1:]}.")
    profile = found.profile
    how = "prefix caching, no blend"
    if found.chosen is not None:
        layers = _join_numbers(profile.check_layers)
        how = f"policy {profile.policy}, ratio {profile.ratio:.0%}, check layers {layers}"
    echo(f"Profile: {how}{'' if found.verdict != 'not shown' else ' (not shown)'}, written to {file}")
    if found.stopped:
        echo("What was measured is kept: the same command goes on.")


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
