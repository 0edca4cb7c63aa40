"""Reads questions with answers in their published formats: NQ-open, WebQuestions, CuratedTREC, plain JSON lines."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cacheblend_lab.rows import read_rows
from cacheblend_rag.calibrate.metrics import exact_match
from cacheblend_rag.errors import InputError

# Stanford's WebQuestions writes answers as (list (description "Jazmyn Bieber") (description "..."))
_DESCRIPTION = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()"]+))\)')
_REGEX_FLAGS = re.IGNORECASE | re.UNICODE | re.MULTILINE
_FORMATS = (
    'Known are JSON lines of {"question", "answer" or "answers"} (NQ-open), WebQuestions with qText or utterance, and '
    "CuratedTREC's and DPR's tab-separated files."
)


@dataclass(frozen=True)
class RealmQuestion:
    """Holds a question.

    Attributes:
        passages: Numbers of the passages that answer the question; empty if unknown.
        group: Group of questions that are not independent of each other; may be empty.
    """

    text: str
    answers: tuple[str, ...]
    regex: bool = False
    passages: tuple[int, ...] = ()
    group: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return a pattern that finds an answer in a text; answers other than regular expressions match whole words."""
        if self.regex:
            return re.compile("|".join(f"(?:{answer})" for answer in self.answers), _REGEX_FLAGS)
        escaped = (r"\s+".join(map(re.escape, answer.split())) for answer in self.answers)
        return re.compile("|".join(rf"(?<!\w){answer}(?!\w)" for answer in escaped), _REGEX_FLAGS)

    def right(self, answer: str) -> float:
        """Return 1 for a right answer, else 0: by SQuAD's exact match, or by a match at the start as in DrQA."""
        if self.regex:
            return float(any(re.match(pattern, answer, _REGEX_FLAGS) for pattern in self.answers))
        return exact_match(answer, self.answers)


@dataclass(frozen=True)
class RealmQuestionFile:
    """Holds a file's questions."""

    questions: list[RealmQuestion]
    skipped: list[str]


def read_questions(path: Path) -> RealmQuestionFile:
    """Read questions; report each row that cannot be used as skipped.

    Raises:
        InputError: The file cannot be read, or none of its rows can be used.
    """
    found = RealmQuestionFile([], [])
    rows = _table(path) if path.suffix.lower() in {".tsv", ".csv", ".txt"} else _json(path, found)
    for where, row in rows:
        try:
            question = _question(row)
            _ = question.pattern
        except (KeyError, TypeError, ValueError, SyntaxError, re.error) as error:
            said = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            found.skipped.append(f"{where}: {said}")
            continue
        found.questions.append(question)
    if not found.questions:
        raise InputError(f"{path} holds no question that can be used ({'; '.join(found.skipped[:3])}). {_FORMATS}")
    return found


def _json(path: Path, found: RealmQuestionFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    read = read_rows(path)
    found.skipped.extend(f"{row.where}: {row.why}" for row in read.skipped)
    yield from read.rows


def _table(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if any(row):
                    yield f"line {number}", row
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def _question(row: Mapping[str, Any] | list[str]) -> RealmQuestion:
    if isinstance(row, list):
        return _columns(row)
    for key in ("question", "qText", "utterance"):
        if key in row:
            break
    else:
        raise KeyError("question")
    given = row["targetValue"] if "targetValue" in row else row.get("answers", row.get("answer"))
    if isinstance(given, str) and "targetValue" in row:
        given = [quoted or bare for quoted, bare in _DESCRIPTION.findall(given)]
    if isinstance(given, str):
        given = [given]
    return _checked(row[key], given, bool(row.get("regex", False)))


def _columns(row: list[str]) -> RealmQuestion:
    """Read a line of CuratedTREC (id, kind, question, expression), or of DPR (question, list of answers)."""
    if len(row) >= 4:
        return _checked(row[2], [row[3].strip()], True)
    if len(row) == 2:
        given = row[1].strip()
        # DPR quotes a field that contains quotes, as CSV does.
        if len(given) > 1 and given[0] == given[-1] == '"':
            given = given[1:-1].replace('""', '"')
        listed = ast.literal_eval(given) if given.startswith("[") else [given]
        return _checked(row[0], listed, False)
    raise ValueError(f"{len(row)} columns, where 4 (CuratedTREC) or 2 (DPR) are known")


def _checked(text: Any, answers: Any, regex: bool) -> RealmQuestion:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the question is no text")
    if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("the answers are no list of texts")
    kept = tuple(answer.strip() for answer in answers if answer.strip())
    if not kept:
        raise ValueError("there is no answer")
    return RealmQuestion(text.strip(), kept, regex)
