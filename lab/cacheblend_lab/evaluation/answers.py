"""Answers a data set by several methods, interleaved, and writes every answer to a file immediately."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from cacheblend_lab.evaluation.method import InTurn, Method, Reply
from cacheblend_lab.evaluation.prepare import Preparer
from cacheblend_lab.measure import take_turns
from cacheblend_lab.metrics import f1_of_tokens, rouge_l
from cacheblend_lab.samples import EvalCase, Sample
from cacheblend_rag.blending.gate import first_token_kl
from cacheblend_rag.calibrate.metrics import exact_match, f1
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.prompts.chunk import encoder_for
from cacheblend_rag.store.base import Closing

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]


class AnswersFile(Closing):
    """Stores answers as JSON lines: a header with the settings, then one line per case and method.

    An interrupted run resumes: answers with the same settings are not computed again.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        """Open ``path`` (None holds the answers in memory) and read the answers in it.

        Raises:
            InputError: The file holds answers with other settings, or no answers.
        """
        self.rows: list[Row] = []
        self._file: IO[str] | None = None
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # convert the settings as a later read does
        if path.exists() and path.stat().st_size:
            self.rows = _read(path, settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or not path.stat().st_size
        self._file = path.open("a", encoding="utf-8")
        if fresh:
            self._write({"settings": settings})

    def done(self, compared: bool) -> set[tuple[str, str]]:
        """Return case ids and method keys that are answered and, if ``compared``, compared with full recompute."""
        return {(row["id"], row["key"]) for row in self.rows if not compared or row["agrees_with_full"] is not None}

    def add(self, rows: Sequence[Row]) -> None:
        """Append answers."""
        for row in rows:
            self.rows.append(row)
            self._write(row)

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _read(path: Path, settings: dict[str, Any]) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    kept = text[: text.rfind("\n") + 1]
    if kept != text:  # the last line is incomplete, because the run was killed
        path.write_text(kept, encoding="utf-8")
    try:
        # str.splitlines would split at U+2028 and similar characters inside JSON strings.
        header, *rows = [json.loads(line) for line in kept.split("\n")[:-1]]
        found = header["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not hold answers of this command; choose another file.") from error
    if found != settings:
        differing = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
        raise InputError(
            f"{path} holds answers of a run with other settings ({', '.join(differing)}); choose another file or delete it."
        )
    return rows


@dataclass(frozen=True)
class AnsweredCase:
    """Holds all answers of a run.

    Attributes:
        rows: A row per sample and method, in the order of samples and methods.
        skipped: Samples without a prompt, with the reason.
    """

    rows: list[Row]
    skipped: list[tuple[Sample, str]]


def answer_all(
    engine: BlendEngine,
    preparer: Preparer,
    samples: Sequence[Sample],
    methods: Sequence[Method],
    answers: AnswersFile,
    progress: Progress | None = None,
) -> AnsweredCase:
    """Answer every sample by every method; rows of an interrupted run are reused, samples without a prompt are skipped.

    The chunks of a sample are precomputed first (indexing is not part of a TTFT). The methods of a sample take turns in
    going first, so that a busy or throttling machine slows all methods alike. One answer per method is computed first
    without a result, to warm up the libraries.

    The engine's header must be the samples' header (:func:`~cacheblend_lab.evaluation.prepare.set_header`).

    First-token KL and agreement compare with full recompute, of the chunks in their own order; they exist only if full
    recompute is among the methods.

    Raises:
        InputError: No sample has a prompt.
    """
    say = progress or (lambda done, total, at: None)
    in_turn = [method for method in methods if isinstance(method, InTurn)]
    cases = _Cases(preparer, keep=bool(in_turn))
    if in_turn:
        every = [case for sample in samples if (case := cases.get(sample)) is not None]
        for one in in_turn:
            one.begin(every)
    done = answers.done(compared=any(method.name == "full" for method in methods))
    warm = False
    for number, sample in enumerate(samples):
        say(number, len(samples), sample.id)
        if all((sample.id, method.key) in done for method in methods):
            continue
        case = cases.get(sample)
        if case is None:
            continue
        engine.precompute(case.chunks)
        engine.precompute_first(case.chunks[:1])
        if not warm:
            for method in methods:
                method.reply(engine, case)
            warm = True
        # Every method answers again, even if some answers exist: the comparison needs their logits.
        replies = {m.name: m.reply(engine, case) for m in take_turns(methods, number)}
        new = [m for m in methods if (sample.id, m.key) not in done]
        answers.add([_row(engine, case, method, replies) for method in new])
    say(len(samples), len(samples), "")
    rows = _in_order(answers.rows, samples, methods)
    if not rows:
        raise InputError(f"None of the {len(samples)} questions can be asked: {next(iter(cases.skipped.values()))[1]}")
    return AnsweredCase(rows, list(cases.skipped.values()))


def _in_order(rows: Sequence[Row], samples: Sequence[Sample], methods: Sequence[Method]) -> list[Row]:
    """Return the rows of these samples and methods, in the order of samples and methods."""
    wanted = {sample.id: number for number, sample in enumerate(samples)}
    order = {method.key: number for number, method in enumerate(methods)}
    # The later of two rows with one key wins: it was answered again, to be compared with full recompute.
    kept = {(row["id"], row["key"]): row for row in rows if row["id"] in wanted and row["key"] in order}
    # Names may have changed between runs, so that a row's method name follows from its key.
    names = {method.key: method.name for method in methods}
    named = [{**row, "method": names[row["key"]]} for row in kept.values()]
    return sorted(named, key=lambda row: (wanted[row["id"]], order[row["key"]]))


class _Cases:
    """Makes the prompts of samples, each once if ``keep``."""

    def __init__(self, preparer: Preparer, keep: bool):
        self.skipped: dict[str, tuple[Sample, str]] = {}
        self._preparer, self._keep = preparer, keep
        self._made: dict[str, EvalCase] = {}

    def get(self, sample: Sample) -> EvalCase | None:
        if sample.id in self.skipped:
            return None
        if sample.id in self._made:
            return self._made[sample.id]
        try:
            case = self._preparer.case(sample)
        except (InputError, PromptTooLongError) as error:
            self.skipped[sample.id] = (sample, str(error))
            return None
        if self._keep:
            self._made[sample.id] = case
        return case


def _row(engine: BlendEngine, case: EvalCase, method: Method, replies: dict[str, Reply]) -> Row:
    sample, reply, full = case.sample, replies[method.name], replies.get("full")
    answer = reply.text if sample.task == "summary" else reply.text.split("\n")[0].strip()
    kl = None
    if full is not None and full.first_logits is not None and reply.first_logits is not None:
        kl = first_token_kl(_host(full.first_logits), _host(reply.first_logits))
    return {
        "id": sample.id,
        "key": method.key,
        "method": method.name,
        "kind": sample.kind,
        "group": sample.group,
        "task": sample.task,
        "question": sample.question,
        "answers": list(sample.answers),
        "answer": answer,
        "text": reply.text,
        "em": exact_match(answer, sample.answers),
        "f1": f1(answer, sample.answers),
        "f1_model_tokens": f1_of_tokens(answer, sample.answers, encoder_for(engine.tokenizer).document),
        "rouge_l": rouge_l(answer, sample.answers),
        "first_token_kl": kl,
        "agrees_with_full": None if full is None else reply.text == full.text,
        "agrees_with_reordered_full": None if reply.reordered_full is None else reply.text == reply.reordered_full,
        "ttft_s": reply.ttft_s,
        "total_s": reply.total_s,
        "load_s": reply.load_s,
        "prompt_tokens": reply.prompt_tokens,
        "computed_tokens": reply.computed_tokens,
        "selection_tokens": reply.selection_tokens,
        "reused_tokens": reply.reused_tokens,
        "background_tokens": reply.background_tokens,
        "mode": reply.mode,
        "chunks": [chunk.id for chunk in (case.chunks if reply.chunks is None else reply.chunks)],
        "left_out": case.left_out,
    }


def _host(logits: torch.Tensor) -> torch.Tensor:
    return logits.detach().cpu()
