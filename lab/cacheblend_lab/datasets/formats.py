"""Reads the rows of the supported data sets, and recognises each format by its fields.

The formats are MuSiQue, 2WikiMultihopQA and HotpotQA as published, SQuAD and RGB, SAMSum and MultiNews, LongBench rows
and prompts, the files of CacheBlend's authors (``ctxs``), and plain JSON lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cacheblend_lab.samples import Packing, Sample, Task
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import chunk_id

QA = "Answer the question from the notes with a few words."
SUMMARY = "Read the notes."
SUMMARY_REQUEST = "Write one summary of all the notes."
DIALOGUE = "Summarize each dialogue in a few short sentences, as these examples do."

_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_QUESTION = re.compile(r"(?:\n[^\n]*)?\n+(?:Question|Query):\s*(?P<question>[^\n]+)\s*\nAnswer:\s*$")
_DIALOGUE = re.compile(r"^Dialogue: ", re.MULTILINE)
_SUMMARY_REQUEST = re.compile(r"\s*(?:Write|Give|Provide)\b[^\n]{0,40}\bsummary\b|\s*Summari[sz]e\b", re.IGNORECASE)
_LONGBENCH_SUMMARIES = {"multi_news", "gov_report", "qmsum", "vcsum"}

PLAIN_FORMAT = (
    'A row of your own is {"question": "...", "answers": ["..."], "chunks": ["...", "..."]}, or with "documents" instead of '
    '"chunks" to have them cut and retrieved from.'
)

Row = Mapping[str, Any]


def questions_of(row: Row) -> Iterator[Row]:
    """Yield a row for each question of a SQuAD article, with the article's paragraphs as documents; else the row itself.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has a type other than its format requires.
    """
    if "paragraphs" not in row or "question" in row:
        yield row
        return
    texts = [_passage(row.get("title", ""), paragraph["context"]) for paragraph in row["paragraphs"]]
    for paragraph in row["paragraphs"]:
        for asked in paragraph["qas"]:
            # Version 2 also has questions that the article does not answer.
            answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
            if answers:
                known = {"answers": answers, "documents": texts, "group": str(row.get("title", "")), "instruction": QA}
                yield {"id": asked["id"], "question": asked["question"], **known}


def sample_of(row: Row, name: str) -> Sample | None:
    """Return the sample of a row; None for a question without an answer.

    Raises:
        InputError: The format is unknown.
        KeyError: A field is missing.
        TypeError: A field has a type other than its format requires.
        ValueError: A field has a value that cannot be used.
    """
    for fits, read in _FORMATS:
        if fits(row):
            sample = read(row, str(row.get("id") or row.get("_id") or name))
            return None if sample is None else _checked(sample)
    raise InputError(f"unknown format (fields: {', '.join(map(str, row)) or 'none':.200})")


def _checked(sample: Sample) -> Sample:
    """Return ``sample`` without blank answers and texts; raise if question, answers or texts are missing or no strings."""
    for what, value in (("question", sample.question), ("instruction", sample.instruction)):
        if not isinstance(value, str):
            raise TypeError(f"the {what} is no string but {type(value).__name__}")
    if not sample.question.strip():
        raise ValueError("the question is empty")
    answers = _strings(sample.answers, "an answer")
    if not answers:
        raise ValueError("there is no answer to score with")
    texts = _strings(sample.texts, "a text")
    # Dialogues get their texts from the other rows of the file.
    if not texts and (sample.texts or sample.task != "dialogue"):
        raise ValueError("there is no text to answer from: the context is missing or empty")
    return replace(sample, answers=answers, texts=texts)


def _strings(value: Any, what: str) -> tuple[str, ...]:
    """Return the non-blank strings of a string or a list of strings."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{what} must be a string, found {type(value).__name__}")
    for one in values:
        if not isinstance(one, str):
            raise TypeError(f"{what} must be a string, found {type(one).__name__}")
    return tuple(one for one in values if one.strip())


def _musique(row: Row, name: str) -> Sample | None:
    if row.get("answerable") is False:
        return None
    texts = tuple(_passage(p["title"], p["paragraph_text"]) for p in row["paragraphs"])
    answers = (row["answer"], *_strings(row.get("answer_aliases", ()), "an alias"))
    return Sample(name, row["question"], answers, texts, kind=name.split("__", maxsplit=1)[0][:4], instruction=QA)


def _titled(row: Row, name: str) -> Sample:
    context = row["context"]
    if isinstance(context, Mapping):  # the layout on the Hugging Face hub
        context = list(zip(context["title"], context.get("sentences", context.get("content")), strict=True))
    texts = tuple(_passage(title, " ".join(s.strip() for s in _strings(body, "a text"))) for title, body in context)
    return Sample(name, row["question"], (row["answer"],), texts, kind=str(row.get("type", "")), instruction=QA)


def _rgb(row: Row, name: str) -> Sample:
    # An answer of several parts is a list; each part is a text or a list of alternative texts.
    parts = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    ways = [_strings(part, "an answer") for part in parts]
    answers = ways[0] if len(ways) == 1 else (" ".join(way[0] for way in ways),)
    texts = tuple(text for given in (*row["positive"], *row["negative"]) for text in _strings(given, "a text"))
    return Sample(name, row["query"], answers, texts, instruction=QA)


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
        return _few_shot(name, question, _strings(row["answers"], "an answer"), context)
    if kind in _LONGBENCH_SUMMARIES:
        question = row["input"].strip() or SUMMARY_REQUEST
        return _long(name, question, _strings(row["answers"], "an answer"), context, "summary", SUMMARY)
    return _long(name, row["input"], _strings(row["answers"], "an answer"), context, "qa", QA)


def _longbench_prompt(row: Row, name: str) -> Sample:
    # The first paragraph is the instruction, which is replaced.
    prompt, gold = _clean(row["origin_prompt"]).partition("\n\n")[2], _strings(row["gold"], "an answer")
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
    """Return the text behind the few-shot examples, which asks for the dialogue's summary."""
    return f"Summarize this dialogue.\nDialogue: {dialogue}"


def dialogue_example(dialogue: str, summary: str) -> str:
    """Return one few-shot example."""
    return f"Dialogue: {dialogue}\nSummary: {summary}"


def _contexts(row: Row, name: str) -> Sample:
    """Read the layout of CacheBlend's authors, of DPR and of FiD: retrieved passages, each a chunk."""
    answers = row["answers"]
    if isinstance(answers, (list, tuple)):  # the authors' 2WikiMultihopQA has nested lists of answers
        answers = tuple(one for answer in answers for one in _strings(answer, "an answer"))
    question, ctxs = row["question"], row["ctxs"]
    bodies = [_strings(passage["text"], "a text") for passage in ctxs]
    if bodies and all(body and body[0].lstrip().startswith("Dialogue:") for body in bodies):
        # The passages are few-shot examples, and the question is a dialogue followed by an empty "Summary:".
        dialogue = question.strip().removeprefix("Dialogue:").rsplit("\nSummary:", 1)[0].strip()
        texts = tuple(text.strip() for body in bodies for text in body)
        return Sample(name, dialogue_request(dialogue), answers, texts, "ready", "dialogue", instruction=DIALOGUE)
    texts = tuple(_passage(passage.get("title") or "", passage["text"]) for passage in ctxs)
    if _SUMMARY_REQUEST.match(question):
        return Sample(name, question, answers, texts, "ready", "summary", instruction=SUMMARY)
    return Sample(name, question, answers, texts, "ready", instruction=QA)


def _passage(title: Any, text: Any) -> str:
    """Return a passage below its title; return an empty string for a title without text, which cannot answer anything."""
    body = "\n".join(_strings(text, "a text"))
    heading = "".join(_strings(title, "a title"))
    return f"{heading}\n{body}" if heading and body else body


def _plain(row: Row, name: str) -> Sample:
    answers = _strings(row.get("answers", row.get("answer")), "an answer")
    given = row["chunks"] if "chunks" in row else row.get("documents", row.get("context"))
    texts = _strings(given, "a text")
    task = row.get("task", "qa")
    if task not in ("qa", "summary", "dialogue"):
        raise ValueError(f"task {task!r} is not qa, summary or dialogue")
    if not texts:
        raise ValueError("there is no text to answer from: the context is missing or empty")
    extra = {"instruction": row["instruction"]} if "instruction" in row else {}
    # Questions about the same texts are not independent.
    group = str(row.get("group") or chunk_id("\0".join(texts)))
    packing: Packing = "ready" if "chunks" in row else "split"
    return Sample(name, row["question"], answers, texts, packing, task, str(row.get("kind", "")), group, **extra)


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").replace("NEWLINE_CHAR", "\n")


def _has(*fields: str) -> Callable[[Row], bool]:
    return lambda row: all(field in row for field in fields)


# The first format whose fields match reads the row.
_FORMATS: tuple[tuple[Callable[[Row], bool], Callable[[Row, str], Sample | None]], ...] = (
    (_has("paragraphs", "question", "answer"), _musique),
    (lambda row: _has("question", "answer", "context")(row) and not isinstance(row["context"], str), _titled),
    (_has("ctxs", "question", "answers"), _contexts),
    (_has("query", "answer", "positive", "negative"), _rgb),
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
