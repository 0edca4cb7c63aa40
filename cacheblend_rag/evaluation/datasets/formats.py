"""Rows of the data sets in use, told apart by their fields.

MuSiQue, 2WikiMultihopQA and HotpotQA as published, SAMSum and MultiNews, LongBench rows and prompts, and plain JSON lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cacheblend_rag.errors import InputError
from cacheblend_rag.evaluation.samples import Packing, Sample, Task

QA = "Answer the question from the notes with a few words."
SUMMARY = "Read the notes."
SUMMARY_REQUEST = "Write one summary of all the notes."
DIALOGUE = "Summarize each dialogue in a few short sentences, as these examples do."

_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_QUESTION = re.compile(r"(?:\n[^\n]*)?\n+(?:Question|Query):\s*(?P<question>[^\n]+)\s*\nAnswer:\s*$")
_DIALOGUE = re.compile(r"^Dialogue: ", re.MULTILINE)
_LONGBENCH_SUMMARIES = {"multi_news", "gov_report", "qmsum", "vcsum"}

Row = Mapping[str, Any]


def sample_of(row: Row, name: str) -> Sample | None:
    """Return the sample of a row; None for a question that has no answer.

    Args:
        row: The row.
        name: What to call it if it has no id of its own.

    Raises:
        InputError: No known format.
        KeyError: A field is missing.
        TypeError: A field is not what its format says.
        ValueError: Likewise.
    """
    for fits, read in _FORMATS:
        if fits(row):
            return read(row, str(row.get("id") or row.get("_id") or name))
    raise InputError(
        f"unknown format (fields: {', '.join(map(str, row))}). Write "
        '{"question": "...", "answers": ["..."], "chunks": ["...", "..."]}, or "documents" instead of "chunks" to have them '
        "cut and retrieved from."
    )


def _musique(row: Row, name: str) -> Sample | None:
    if row.get("answerable") is False:
        return None
    texts = tuple(f"{p['title']}\n{p['paragraph_text']}" for p in row["paragraphs"])
    answers = (row["answer"], *row.get("answer_aliases", ()))
    return Sample(name, row["question"], answers, texts, kind=name.split("__", maxsplit=1)[0][:4], instruction=QA)


def _titled(row: Row, name: str) -> Sample:
    context = row["context"]
    if isinstance(context, Mapping):  # as the Hugging Face hub has it
        context = list(zip(context["title"], context.get("sentences", context.get("content")), strict=True))
    texts = tuple(f"{title}\n{' '.join(s.strip() for s in sentences)}" for title, sentences in context)
    return Sample(name, row["question"], (row["answer"],), texts, kind=str(row.get("type", "")), instruction=QA)


def _dialogue(row: Row, name: str) -> Sample:
    dialogue = row.get("dialogue", row.get("context"))
    summary = row.get("summary", row.get("response"))
    return Sample(name, _clean(dialogue), (_clean(summary),), (), "pack", "dialogue", instruction=DIALOGUE)


def _multi_news(row: Row, name: str) -> Sample:
    texts = tuple(text.strip() for text in _clean(row["document"]).split("|||||") if text.strip())
    return Sample(
        name, SUMMARY_REQUEST, (row["summary"].strip().lstrip("– "),), texts, task="summary", instruction=SUMMARY
    )


def _longbench(row: Row, name: str) -> Sample:
    kind = row["dataset"].removesuffix("_e")
    context = _clean(row["context"])
    if kind == "samsum":
        question = _clean(row["input"]).removeprefix("Dialogue:").rsplit("\nSummary:", 1)[0].strip()
        return _few_shot(name, question, tuple(row["answers"]), context)
    if kind in _LONGBENCH_SUMMARIES:
        question = row["input"].strip() or SUMMARY_REQUEST
        return _long(name, question, tuple(row["answers"]), context, "summary", SUMMARY)
    return _long(name, row["input"], tuple(row["answers"]), context, "qa", QA)


def _longbench_prompt(row: Row, name: str) -> Sample:
    # The first paragraph tells the model what to do; we have our own words for that.
    prompt, gold = _clean(row["origin_prompt"]).partition("\n\n")[2], tuple(row["gold"])
    asked = _QUESTION.search(prompt)
    if asked is not None:
        return _long(name, asked["question"], gold, prompt[: asked.start()], "qa", QA)
    if "Dialogue: " in prompt and prompt.rstrip().endswith("Summary:"):
        context, _, last = prompt.rpartition("Dialogue: ")
        return _few_shot(name, last.rsplit("\nSummary:", 1)[0].strip(), gold, context)
    context, _, request = prompt.rpartition("\n\n\n") if "\n\n\n" in prompt else prompt.rpartition("\n\n")
    if "summary" not in request.lower() or "paragraph" in request.lower():
        raise ValueError("a LongBench prompt of an unknown kind; known are questions, SAMSum, and summaries")
    return _long(name, SUMMARY_REQUEST, gold, context, "summary", SUMMARY)


def _long(name: str, question: str, answers: tuple[str, ...], context: str, task: Task, instruction: str) -> Sample:
    parts = _PASSAGE.split(context)
    texts = tuple(text.strip() for text in (parts[1:] or parts) if text.strip())
    return Sample(name, question, answers, texts, task=task, instruction=instruction)


def _few_shot(name: str, question: str, answers: tuple[str, ...], context: str) -> Sample:
    examples = tuple(f"Dialogue: {text.strip()}" for text in _DIALOGUE.split(context)[1:] if text.strip())
    return Sample(name, dialogue_request(question), answers, examples, "pack", "dialogue", instruction=DIALOGUE)


def dialogue_request(dialogue: str) -> str:
    """Return what stands behind the examples."""
    return f"Summarize this dialogue.\nDialogue: {dialogue}"


def dialogue_example(dialogue: str, summary: str) -> str:
    """Return one few-shot example."""
    return f"Dialogue: {dialogue}\nSummary: {summary}"


def _plain(row: Row, name: str) -> Sample:
    answers = row.get("answers", row.get("answer"))
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    texts = row["chunks"] if "chunks" in row else row.get("documents", row.get("context"))
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    if not all(isinstance(text, str) for text in (row["question"], *answers, *texts)) or not answers:
        raise ValueError("question, answers and texts must be strings, and there must be an answer")
    task = row.get("task", "qa")
    if task not in ("qa", "summary", "dialogue"):
        raise ValueError(f"task {task!r} is not qa, summary or dialogue")
    extra = {"instruction": row["instruction"]} if "instruction" in row else {}
    packing: Packing = "ready" if "chunks" in row else "split"
    return Sample(name, row["question"], answers, texts, packing, task, row.get("kind", ""), **extra)


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").replace("NEWLINE_CHAR", "\n")


def _has(*fields: str) -> Callable[[Row], bool]:
    return lambda row: all(field in row for field in fields)


# The first that fits reads the row.
_FORMATS: tuple[tuple[Callable[[Row], bool], Callable[[Row, str], Sample | None]], ...] = (
    (_has("paragraphs", "question", "answer"), _musique),
    (lambda row: _has("question", "answer", "context")(row) and not isinstance(row["context"], str), _titled),
    (_has("origin_prompt", "gold"), _longbench_prompt),
    (_has("input", "context", "answers", "dataset"), _longbench),
    (_has("dialogue", "summary"), _dialogue),
    (_has("document", "summary"), _multi_news),
    (_has("context", "response"), _dialogue),
    (
        lambda row: (
            "question" in row
            and ("answers" in row or "answer" in row)
            and any(field in row for field in ("chunks", "documents", "context"))
        ),
        _plain,
    ),
)
