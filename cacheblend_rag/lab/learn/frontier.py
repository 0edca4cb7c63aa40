"""Measures how near blends come to full recompute with a writer and without: KL and agreement against compute, many at once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from cacheblend_rag.engines.transformers.attention import watched
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.compared import ANSWER_TOKENS
from cacheblend_rag.lab.learn.answers import greedy
from cacheblend_rag.lab.learn.blend import (
    BatchBlender,
    BatchLayout,
    PromptBatch,
    StoredBatch,
    count_of,
    deviation,
    divergences,
)
from cacheblend_rag.lab.learn.lesson import Lesson
from cacheblend_rag.lab.stats.intervals import mean_interval

RATIOS: Final = (0.0, 0.05, 0.15, 0.3, 0.5)
POLICIES: Final = ("static", "query", "static-query")
PLAIN, WRITTEN, FIRST_EXACT = "as it is", "written", "written, first chunk exact"


@dataclass(frozen=True)
class FrontierPrompt:
    """Holds a prompt of token ids.

    Attributes:
        data: The name of its data set.
        header: What its chunks are computed behind.
        spans: Start and end of each chunk.
        ids: Its tokens.
        group: Prompts of one group share their texts.
    """

    data: str
    header: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    ids: tuple[int, ...]
    group: str = ""


@dataclass(frozen=True)
class Measured:
    """Holds one blend of one prompt.

    Attributes:
        data: The data set.
        group: The prompt's.
        written: :data:`PLAIN`, :data:`WRITTEN` or :data:`FIRST_EXACT`.
        policy: What chose the tokens.
        ratio: Share of the stale tokens that was recomputed.
        kl: Mean KL over the answer's tokens, in nats.
        agrees: Share of them with the same likeliest token.
        whole: Whether all of them have it.
        compute: Share of the prompt's tokens that was computed, the question's ranking pass included.
    """

    data: str
    group: str
    written: str
    policy: str
    ratio: float
    kl: float
    agrees: float
    whole: float
    compute: float


def write_prompts(file: Path, prompts: Sequence[FrontierPrompt]) -> None:
    """Write prompts as compressed JSON lines, for a machine without the retrieval model."""
    with gzip.open(file, "wt", encoding="utf-8") as out:
        for each in prompts:
            out.write(json.dumps([each.data, each.header, each.spans, each.ids, each.group]) + "\n")


def read_prompts(file: Path, most: int | None = None) -> list[FrontierPrompt]:
    """Read what :func:`write_prompts` wrote, at most so many of each data set."""
    found: list[FrontierPrompt] = []
    counts: dict[str, int] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            data, header, spans, ids, group = json.loads(line)
            counts[data] = counts.get(data, 0) + 1
            if most is None or counts[data] <= most:
                found.append(FrontierPrompt(data, tuple(header), tuple(map(tuple, spans)), tuple(ids), group))
    if not found:
        raise InputError(f"{file} holds no prompts.")
    return found


@torch.no_grad()
def measure_frontier(
    lesson: Lesson,
    prompts: Sequence[FrontierPrompt],
    probe: Sequence[int],
    ends: frozenset[int],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
    ratios: Sequence[float] = RATIOS,
    policies: Sequence[str] = POLICIES,
) -> list[Measured]:
    """Blend every prompt at every ratio with each policy, with the writer and without.

    Without a writer the first chunk is exact, as the engines have it; with one every chunk is stale. Beside it stands what it
    would be if the first chunk were stored as the model writes it, too.

    Args:
        lesson: Model and writer; without a writer (None) only the model's own KV is measured.
        prompts: What to measure on.
        probe: What chunks are ranked behind.
        ends: Tokens that end an answer.
        batch_tokens: Most tokens of prompts that are answered at once.
        progress: Told how many prompts are done.
        ratios: Shares of the stale tokens to recompute; 0 is measured in any case.
        policies: Of :data:`POLICIES`.
    """
    some = [ratio for ratio in ratios if ratio]
    answers = greedy(lesson.blender.model, [each.ids for each in prompts], ANSWER_TOKENS, ends, batch_tokens)
    found: list[Measured] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with lesson.autocast():
            found += _FrontierRun(lesson, prompt, answer, probe, some, policies).measure()
        if progress is not None:
            progress(number + 1)
    return found


class _FrontierRun:
    def __init__(
        self,
        lesson: Lesson,
        prompt: FrontierPrompt,
        answer: Sequence[int],
        probe: Sequence[int],
        ratios: Sequence[float],
        policies: Sequence[str],
    ):
        self._lesson, self._prompt, self._probe = lesson, prompt, probe
        self._ratios, self._policies = ratios, policies
        self._ranks = bool(ratios) and any("static" in name for name in policies)
        self._blender: BatchBlender = lesson.blender
        self._ids = torch.tensor([[*prompt.ids, *answer[:-1]]], device=self._blender.device)
        self._watched = len(answer)
        self._truth, _ = self._blender.prefill(self._batch(0))

    def _batch(self, exact: int, rows: int = 1) -> PromptBatch:
        prompt = self._prompt
        layout = BatchLayout(prompt.header, prompt.spans, self._ids.shape[1], self._watched, exact)
        ids = self._ids.expand(rows, -1)
        return PromptBatch(layout, ids, torch.ones(rows, self._watched, device=ids.device))

    def measure(self) -> Iterator[Measured]:
        model, writing = self._blender.model, self._lesson.writing
        # Chunks that do not start behind the header have no exact first one.
        exact = int(self._prompt.spans[0][0] == len(self._prompt.header))
        plain, static = self._written_by(model)
        yield from self._blends(PLAIN, exact, plain, static)
        if writing is None:
            return
        written, ranked = self._written_by(writing)
        yield from self._blends(WRITTEN, 0, written, ranked)
        if exact:
            width = len(plain.positions) // len(self._prompt.spans)
            sides = [
                [torch.cat([one[:, :, :width], other[:, :, width:]], 2) for one, other in zip(*pair, strict=True)]
                for pair in zip(plain[:2], written[:2], strict=True)
            ]
            mixed = StoredBatch(sides[0], sides[1], plain.positions)
            yield from self._blends(FIRST_EXACT, exact, mixed, ranked)

    def _written_by(self, model: Any) -> tuple[StoredBatch, torch.Tensor]:
        """Return what a model writes, and its static deviation, ``[1, stored]``: 0 where that is not asked for."""
        alone = self._blender.write(model, self._batch(0))
        if not self._ranks:
            return alone, torch.zeros(1, len(alone.positions), device=self._ids.device)
        behind = self._blender.write(model, self._batch(0), self._probe)
        return alone, deviation(alone, behind, len(self._prompt.spans))

    def _blends(self, written: str, exact: int, stored: StoredBatch, static: torch.Tensor) -> Iterator[Measured]:
        reused, attention = self._reuse(exact, stored)
        layout = self._batch(exact).layout
        forced = len(self._prompt.ids) - len(layout.header) - sum(end - start for start, end in layout.spans)
        yield self._measured(written, "none", 0.0, reused[0], forced)
        scores = {"static": static, "query": attention, "static-query": static.sqrt() * attention}
        runs = [(name, ratio) for name in self._policies for ratio in self._ratios]
        if not runs:
            return
        counts = [count_of(layout, ratio) for _, ratio in runs]
        rows = torch.cat([scores[name] for name, _ in runs])
        logits = self._blender.blend(self._batch(exact, len(runs)), stored, rows, counts)
        for (name, ratio), count, each in zip(runs, counts, logits, strict=True):
            ranking = forced if "query" in name else 0
            yield self._measured(written, name, ratio, each, forced + count + ranking)

    def _reuse(self, exact: int, stored: StoredBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of full reuse, and the question's attention to stored tokens, ``[1, stored]``."""
        layout = self._batch(exact).layout
        first, count = len(layout.header), len(stored.positions)
        asked = len(self._prompt.ids) - layout.spans[-1][1]
        seen = torch.zeros(count, device=self._ids.device)

        def watch(_layer: int, weights: torch.Tensor) -> None:
            # Behind the last chunk stand the question and, teacher-forced, its answer, which is not asked yet.
            answer = self._watched - 1
            question = weights[:, weights.shape[1] - answer - asked : weights.shape[1] - answer, first : first + count]
            seen.add_(question.float().mean((0, 1)))

        self._blender.header_kv(layout.header)  # whose own attention is not meant
        with watched(watch):
            logits = self._blender.blend(self._batch(exact), stored)
        return logits, seen[None] / self._blender.num_layers

    def _measured(self, written: str, policy: str, ratio: float, logits: torch.Tensor, computed: int) -> Measured:
        kl = divergences(self._truth, logits[None])[0]
        agrees = self._truth[0].argmax(-1) == logits.argmax(-1)
        numbers = torch.stack([kl.mean(), agrees.float().mean(), agrees.all().float()])
        mean, share, whole = numbers.tolist()
        compute = computed / len(self._prompt.ids)
        return Measured(self._prompt.data, self._prompt.group, written, policy, ratio, mean, share, whole, compute)


def summarise(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return a row for each data set (``"all"`` for all of them), writer, policy and ratio: means with 95% intervals."""
    rows: dict[tuple[str, str, str, float], list[Measured]] = {}
    for each in found:
        for data in (each.data, "all"):
            rows.setdefault((data, each.written, each.policy, each.ratio), []).append(each)
    table = []
    for (data, written, policy, ratio), values in sorted(rows.items()):
        groups = [f"{each.data} {each.group}" if each.group else "" for each in values]
        row: dict[str, Any] = {"data": data, "kv": written, "policy": policy, "ratio": ratio, "prompts": len(values)}
        row["compute"] = fmean(each.compute for each in values)
        for name in ("kl", "agrees", "whole"):
            numbers = [float(getattr(each, name)) for each in values]
            row[name] = fmean(numbers)
            row[f"{name}_interval"] = mean_interval(numbers, groups)
        table.append(row)
    return table


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as a Markdown table."""
    lines = [
        "| data | kv | policy | ratio | compute | KL | tokens agree | whole answers | n |",
        "|---|---|---|" + "---:|" * 6,
    ]
    for row in rows:
        cells = [row["data"], row["kv"], row["policy"], f"{row['ratio']:.0%}", f"{row['compute']:.0%}"]
        cells += [_cell(row, "kl", ".4f"), _cell(row, "agrees", ".3f"), _cell(row, "whole", ".2f"), str(row["prompts"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], name: str, how: str) -> str:
    interval = row[f"{name}_interval"]
    between = "" if interval is None else f" [{interval[0]:{how}}, {interval[1]:{how}}]"
    return f"{row[name]:{how}}{between}"
