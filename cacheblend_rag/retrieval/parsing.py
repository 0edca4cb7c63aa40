"""Parses untrusted files in a process that has limits, has no secrets, and can be killed.

:mod:`~cacheblend_rag.retrieval.isolation` starts the process. The process reads a line of JSON (:class:`Task`) and the
bytes of a file from its standard input, again and again. For each file, the process writes a line of JSON to its
standard output: the text and metadata, or the reason why the file has no text.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from cacheblend_rag.retrieval.extraction import UnusableFileError, html_text, pdf_text
from cacheblend_rag.retrieval.formats import json_text, slides_text, table_text, word_text

PARSERS: Final[dict[str, Callable[[bytes], tuple[str, dict[str, Any]]]]] = {
    **dict.fromkeys((".html", ".htm"), html_text),
    **dict.fromkeys((".csv", ".tsv"), table_text),
    **dict.fromkeys((".json", ".jsonl"), json_text),
    ".pdf": pdf_text,
    ".docx": word_text,
    ".pptx": slides_text,
}
"""Functions that parse files other than plain text, by suffix."""

OUT_OF_MEMORY: Final = 3
"""Exit code of a process that ran out of memory."""
_MOST_WARNINGS, _LONGEST_WARNING = 20, 500


class Task(NamedTuple):
    """Describes a file to parse: suffix in :data:`PARSERS`, size, and limits of CPU seconds and address space."""

    suffix: str
    nbytes: int
    cpu_s: int
    memory: int


class _Warnings(logging.Handler):
    """Collects logged warnings for the parent process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.kept) < _MOST_WARNINGS:
            self.kept.append(record.getMessage()[:_LONGEST_WARNING])


def main() -> None:
    """Parse files until standard input ends."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with the answers
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # parsers write no files
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings = _Warnings()
    logging.basicConfig(handlers=[warnings])
    while line := tasks.readline():
        task = Task(**json.loads(line))
        _limit(task)
        try:
            answer = _parsed(task, tasks.read(task.nbytes))
            encoded = json.dumps({**answer, "warnings": warnings.kept}).encode()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # without free memory the process is unreliable
        answers.write(encoded + b"\n")
        answers.flush()
        warnings.kept = []


def _limit(task: Task) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    for kind, most in ((resource.RLIMIT_CPU, used + task.cpu_s), (resource.RLIMIT_AS, task.memory)):
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _parsed(task: Task, data: bytes) -> dict[str, Any]:
    try:
        text, metadata = PARSERS[task.suffix](data)
    except UnusableFileError as error:
        return {"reason": str(error), "blank": error.blank}
    return {"text": text, "metadata": metadata}


if __name__ == "__main__":
    main()
