"""Parses files which nobody vouches for, in a process that has limits, no secrets, and can be killed.

:mod:`~cacheblend_rag.retrieval.isolation` starts it. On its standard input come, again and again, a line of JSON
(:class:`Task`) and the bytes of a file; on its standard output goes a line of JSON for each: the text and what is known of it,
or why there is none.
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
"""How files are parsed that are more than text, by suffix."""

OUT_OF_MEMORY: Final = 3
"""Exit code of a process that had no memory left for a file."""
_MOST_WARNINGS, _LONGEST_WARNING = 20, 500


class Task(NamedTuple):
    """Limits what a file of a type among :data:`PARSERS` may take: seconds of computing, and bytes of address space."""

    suffix: str
    nbytes: int
    cpu_s: int
    memory: int


class _Warnings(logging.Handler):
    """Keeps what is logged, for the process that asked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.kept) < _MOST_WARNINGS:
            self.kept.append(record.getMessage()[:_LONGEST_WARNING])


def main() -> None:
    """Parse files until there are no more."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand among the answers
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing here has a file to write
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
            os._exit(OUT_OF_MEMORY)  # what is left of the memory is not to be relied on
        answers.write(encoded + b"\n")
        answers.flush()
        warnings.kept = []


def _limit(task: Task) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    for kind, most in ((resource.RLIMIT_CPU, used + task.cpu_s), (resource.RLIMIT_AS, task.memory)):
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # macOS knows no limit of the address space
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _parsed(task: Task, data: bytes) -> dict[str, Any]:
    try:
        text, metadata = PARSERS[task.suffix](data)
    except UnusableFileError as error:
        return {"reason": str(error), "blank": error.blank}
    return {"text": text, "metadata": metadata}


if __name__ == "__main__":
    main()
