"""Makes a retrieval task out of domain: finding the rest of a docstring in Python's standard library by its first line.

The docstrings need no download, and are real English on other subjects than the user's documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from random import Random
from typing import Any, Final

import numpy as np

from cacheblend_lab.tuning.judging import DEPTH, Texts, Vectors
from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.embedding import Embedder

_MODULES: Final = (
    "argparse asyncio collections configparser contextlib csv datetime decimal difflib email.message fractions "
    "ftplib functools heapq http.client imaplib inspect io ipaddress json logging mailbox os pathlib pickle "
    "random re shutil smtplib socket sqlite3 statistics string subprocess tarfile tempfile textwrap threading "
    "tokenize unittest urllib.parse uuid wave xml.dom.minidom zipfile "
)
_SHORTEST: Final = 80
_LONGEST: Final = 400  # characters; enough to distinguish the passages
_FEWEST_WORDS: Final = 4


class DocstringTask:
    """Holds passages, and one question for each passage.

    Attributes:
        questions: First lines of the docstrings, in the order of the passages.
    """

    def __init__(self, embedder: Embedder, count: int, others: bool = False):
        """Draw and embed ``count`` passages; ``others`` draws up to ``count`` different ones.

        Raises:
            InputError: Python runs without docstrings (``-OO``).
        """
        pairs = _pairs()
        if len(pairs) < count:
            raise InputError(
                "Python runs without its docstrings (-OO), which the out-of-domain check is made of; run it without -OO."
            )
        drawn = Random(0).sample(sorted(pairs.items()), count)
        if others:
            rest = sorted(pairs.items() - set(drawn))
            drawn = Random(1).sample(rest, min(count, len(rest)))
        self.questions = [question for question, _ in drawn]
        self._texts = Texts(embedder.texts([passage for _, passage in drawn]))

    def ranks(self, vectors: Vectors) -> list[int]:
        """Return the rank of each question's passage, 0 beyond :data:`DEPTH`; ``vectors`` are ``[questions, dim]``."""
        scores = self._texts.similarity(vectors)
        own = np.diagonal(scores)[:, None]
        found = 1 + (scores > own).sum(1)
        return [int(rank) if rank <= DEPTH else 0 for rank in found]


@cache
def _pairs() -> dict[str, str]:
    """Return the rest of docstrings by their first lines; short docstrings and ambiguous first lines are left out."""
    found: dict[str, str | None] = {}
    for owner in {id(owner): owner for owner in _owners()}.values():
        first, _, rest = (inspect.getdoc(owner) or "").partition("\n\n")
        first, rest = " ".join(first.split()), rest.strip()[:_LONGEST]
        if len(first.split()) >= _FEWEST_WORDS and len(rest) >= _SHORTEST:
            found[first] = rest if found.get(first, rest) == rest else None
    return {first: rest for first, rest in found.items() if rest is not None}


def _owners() -> Iterator[Any]:
    for name in _MODULES.split():
        module = import_module(name)
        for _, value in inspect.getmembers(module, lambda v: inspect.isroutine(v) or inspect.isclass(v)):
            yield value
            if inspect.isclass(value):
                yield from (member for label, member in inspect.getmembers(value, inspect.isroutine) if label[0] != "_")
