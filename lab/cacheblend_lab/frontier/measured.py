"""Holds measurements of blends, in a file with a JSON line for each prompt; computes means with intervals and a table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from cacheblend_lab.intervals import mean_interval

PLAIN, BEHIND, WRITTEN, RECOMPUTED = "as it is", "behind the probe", "by the writer", "full recompute"
"""Kinds of chunk KV: the model's own behind the header, the model's own behind the probe, the writer's, no KV."""

# Every blend is compared with the 6-bit weights; blends at ratio _SMALL are also compared with ratio _LARGE.
_STANDARD: Final = (RECOMPUTED, "6-bit", 1.0)
_SMALL, _LARGE = 0.15, 0.5
_NUMBERS = ("kl", "agrees", "whole", "gold_change")


@dataclass(frozen=True)
class Measured:
    """Holds one blend of one prompt, or its full recompute by other weights.

    Attributes:
        data: Name of the data set.
        prompt: Key of the prompt.
        group: Group of the prompt.
        kv: Kind of chunk KV that was blended, or ``"full recompute"``.
        policy: The policy that chose the tokens, or the weights that computed all tokens.
        ratio: Share of the stale tokens that was recomputed.
        kl: Mean KL over the answer's tokens, in nats.
        agrees: Share of the answer's tokens with the same likeliest token.
        whole: Whether all of the answer's tokens have the same likeliest token.
        compute: Share of the prompt's tokens that was computed through all layers, with dense pass and the question's
            pass.
        gold: Log-likelihood of the right answer, mean over its tokens, in nats; None if no right answer is known.
        gold_change: ``gold`` minus full recompute's log-likelihood of the right answer.
    """

    data: str
    prompt: str
    group: str
    kv: str
    policy: str
    ratio: float
    kl: float
    agrees: float
    whole: float
    compute: float
    gold: float | None = None
    gold_change: float | None = None


def append_measured(file: Path, found: Iterable[Measured]) -> None:
    """Append the measurements of one prompt to a file, as one line."""
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" + json.dumps([asdict(each) for each in found]))


def read_measured(files: Iterable[Path]) -> list[Measured]:
    """Read measurements, each once even if it is in several lines or files; incomplete lines of a killed run are left out."""
    found: dict[tuple[object, ...], Measured] = {}
    for file in files:
        for line in _text_of(file).split("\n") if file.exists() else ():
            try:
                read = [Measured(**each) for each in json.loads(line)]
            except json.JSONDecodeError:
                continue
            for each in read:
                found.setdefault(_measured_of(each), each)
    return list(found.values())


def _measured_of(each: Measured) -> tuple[object, ...]:
    """Return the identity of a measurement: prompt, KV, policy and ratio; draws in one file may share prompts."""
    return each.data, each.prompt, each.kv, each.policy, each.ratio


def _text_of(file: Path) -> str:
    raw = file.read_bytes()
    return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")


def summarise(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return a row for each data set (and ``"all"``), KV, policy and ratio: means with 95% intervals."""
    rows: dict[tuple[str, str, str, float], list[Measured]] = {}
    for each in found:
        for data in (each.data, "all"):
            rows.setdefault((data, each.kv, each.policy, each.ratio), []).append(each)
    table = []
    for (data, kv, policy, ratio), values in sorted(rows.items()):
        row: dict[str, Any] = {"data": data, "kv": kv, "policy": policy, "ratio": ratio, "prompts": len(values)}
        row["compute"] = fmean(each.compute for each in values)
        for name in _NUMBERS:
            known = [each for each in values if getattr(each, name) is not None]
            numbers = [float(getattr(each, name)) for each in known]
            groups = [f"{each.data} {each.group}" if each.group else "" for each in known]
            row[name] = fmean(numbers) if numbers else None
            row[f"{name}_interval"] = mean_interval(numbers, groups) if numbers else None
        table.append(row)
    return table


def differences(found: Sequence[Measured]) -> list[Measured]:
    """Return each blend's differences from other blends of the same prompt, to be summarised; ``kv`` names both blends.

    Every blend is compared with weights of 6 bits. A blend of KV behind the probe, or by a writer, is also compared
    with the same policy and ratio over the model's own KV; at ratio 15% also with ratio 50%, and full reuse also with
    `static-query` at 15%.
    """
    known = {_measured_of(each): each for each in found}
    made = []
    for each in found:
        against = [_STANDARD] if each.kv != RECOMPUTED else []
        if each.kv in (BEHIND, WRITTEN):
            against.append((PLAIN, each.policy, each.ratio))
            against += [(PLAIN, each.policy, _LARGE)] if each.ratio == _SMALL else []
            against += [(PLAIN, "static-query", _SMALL)] if not each.ratio else []
        for kv, policy, ratio in against:
            if (other := known.get((each.data, each.prompt, kv, policy, ratio))) is not None:
                pairs = {name: (getattr(each, name), getattr(other, name)) for name in ("compute", *_NUMBERS)}
                less: dict[str, Any] = {
                    name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()
                }
                made.append(replace(each, kv=f"{each.kv}, less {kv}, {policy} {ratio:.0%}", gold=None, **less))
    return made


def table_of(rows: Sequence[dict[str, Any]], sign: str = "") -> str:
    """Return the summary as a Markdown table; differences are written with the ``sign`` ``"+"``."""
    lines = [
        "| data | kv | policy | ratio | compute | KL | tokens agree | whole answers | gold answer, nats a token | n |",
        "|---|---|---|" + "---:|" * 7,
    ]
    for row in rows:
        cells = [row["data"], row["kv"], row["policy"], f"{row['ratio']:.0%}", f"{row['compute']:{sign}.0%}"]
        how = (f"{sign}.4f", f"{sign}.3f", f"{sign}.2f", "+.3f")
        cells += [_cell(row, name, form) for name, form in zip(_NUMBERS, how, strict=True)]
        lines.append(f"| {' | '.join([*cells, str(row['prompts'])])} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], name: str, how: str) -> str:
    if row[name] is None:
        return ""
    interval = row[f"{name}_interval"]
    between = "" if interval is None else f" [{interval[0]:{how}}, {interval[1]:{how}}]"
    return f"{row[name]:{how}}{between}"
