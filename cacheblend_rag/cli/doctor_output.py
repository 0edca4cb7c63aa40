"""Prints what `cacheblend doctor` found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.console.output import echo, seconds, size, table

if TYPE_CHECKING:
    from cacheblend_rag.calibrate.calibration import Calibration

Found = dict[str, Any]


def print_diagnosis(found: Found) -> None:
    """Print the diagnosis of a model."""
    lines = _model_lines(found)
    lines += [
        ("KV codecs", f"{name}: moves predictions by {kl:.1e} nats (allowed {found['codec_limit']:.0e})")
        for name, kl in found["codecs"].items()
    ]
    chosen = f"policy {found['policy']}, ratio {found['ratio']:.0%}, check layers {_join(found['check_layers'])}"
    how = "do not blend: prefix caching" if found["reuse"] == "prefix" else chosen
    lines.append(("profile", f"{how} ({found['profile_origin']})"))
    if found["calibrated"]:
        lines.append(("", str(found["calibrated"].get("why", ""))))
    if found["writer"] is not None:
        lines.append(("KV writer", found["writer"]))
    if found["kv_bytes_per_token"] is not None:
        lines.append(("KV", f"{size(found['kv_bytes_per_token'])} a token"))
    lines += [("loading", f"{tier}: {cost['bytes_per_s'] / 1e9:.1f} GB/s") for tier, cost in found["tiers"].items()]
    for tier, cost in found["estimates"].items():
        times = f"blend {seconds(cost['blend_s'])} ({cost['full_s'] / cost['blend_s']:.1f}x), loading {seconds(cost['load_s'])}"
        lines.append(("estimate", f"KV in {tier}: full recompute {seconds(cost['full_s'])}, {times}"))
    if found["estimates"]:
        note = "of a prompt of 6 chunks of 512 tokens; computed, not measured: `cacheblend bench ttft` measures"
        lines.append(("", note))
    _print_lines(lines)


def print_vllm(found: Found) -> None:
    """Print the diagnosis of `doctor --engine vllm`."""
    lines = [
        *_model_lines(found),
        ("vLLM", f"{found['vllm']}, model runner {found['runner']}, attention {found['attention']}"),
        ("engine step", f"at most {found['step_tokens']:,} tokens of {found['step_sequences']:,} sequences"),
    ]
    if (cost := found["cost"]) is not None:
        lines.append(("measured", f"a prompt of {cost['prompt_tokens']:,} tokens (6 chunks): first token after"))
        lines.append(("", f"full recompute {seconds(cost['full_s'])}, blend {seconds(cost['blend_s'])}"))
        lines += [
            ("of a blend", f"{kind} pass: {tokens:,.0f} tokens through all layers, {seconds(took)}")
            for kind, (tokens, took) in cost["passes"].items()
            if kind != "prefill"
        ]
        lines.append(("of a blend", f"waiting for stored KV: {seconds(cost['load_s'])}"))
    _print_lines(lines)


def _model_lines(found: Found) -> list[tuple[str, str]]:
    """Return lines on the model, the parity gate, and the tokens of a prompt."""
    lines = [
        ("model", f"{found['model']} ({found['layers']} layers, {found['dtype']}, {found['device']})"),
        ("fingerprint", found["fingerprint"]),
        ("context window", f"{found['context_window']:,} tokens"),
        ("blended", "yes" if found["blended"] else f"no: {found['reason']}"),
    ]
    lines += [
        ("parity gate", f"{name}: off by {error:.1e} standard deviations (allowed {found['gate_limit']:.0e})")
        for name, error in found["gate_errors"].items()
    ]
    if found["plain_joins"] is not None:
        same = "those of the whole text in one piece"
        other = f"at some edges of chunks not {same}: this tokenizer joins what stands on both sides"
        lines.append(("prompt's tokens", same if found["plain_joins"] else other))
    return lines


def _print_lines(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    previous = ""
    for name, text in lines:
        echo(f"{'' if name == previous else name:{width}}  {text}")
        previous = name


def print_calibration(found: Calibration, file: Path) -> None:
    """Print the measurements and the choice of `doctor --calibrate`."""
    standard, everyone = found.standard, f"{found.prompts} of {found.prompts}"
    what = {"likelihood": "exp(-KL)", "tokens": "agreement"}.get(standard.by, f"{standard.metric} kept")
    echo(
        f"{found.prompts} prompts, {found.tokens} tokens compared; each bound of {what} with full recompute holds with "
        f"{standard.confidence:.4g} confidence.\n"
    )
    rows = [["candidate", "compute", what, "bounds", "KL", "prompts"]]
    rows += [
        [
            each.name,
            f"{each.compute:.1%}",
            f"{each.agreement.value:.2%}",
            f"{each.agreement.low:.2%} to {each.agreement.high:.2%}",
            f"{each.kl:.4f}",
            f"{each.prompts} of {found.prompts}",
        ]
        for each in found.measured
    ]
    if standard.bits is not None:
        near = [f"weights of {standard.bits} bits", "100.0%", f"{standard.agreement:.2%}", ""]
        rows.append([*near, f"{standard.most_kl:.4f}", everyone])
    echo(table(rows))
    echo(f"\n{found.why[0].upper()}{found.why[1:]}.")
    profile = found.profile
    how = "prefix caching, no blend"
    if found.chosen is not None:
        how = f"policy {profile.policy}, ratio {profile.ratio:.0%}, check layers {_join(profile.check_layers)}"
    echo(f"Profile: {how}{'' if found.verdict != 'not shown' else ' (not shown)'}, written to {file}")


def _join(values: Any) -> str:
    return ", ".join(map(str, values))
