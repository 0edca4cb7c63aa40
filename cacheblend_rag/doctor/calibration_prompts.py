"""Where calibration's prompts come from: a file, the user's documents, or the bundled corpus."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt, rag_prompt, tokenize
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.index import ChunkIndex

_T = TypeVar("_T")
_FIRST_SENTENCE = re.compile(r"[^.!?\n]+")


def collect_prompts(engine: BlendEngine, file: Path | None, store: Path | None, count: int) -> list[TokenizedPrompt]:
    """Return up to ``count`` prompts, evenly spread over what there is.

    - A file: JSON lines of ``{"question", "chunks": [text, ...]}``; without ``chunks`` they are retrieved from ``store``.
    - A store alone: questions about the first sentences of its own chunks.
    - Neither: the bundled corpus and its questions.

    Raises:
        InputError: The file cannot be used; the message names the line.
        StoreError: There is no such store.
    """
    if file is None:
        with _documents(engine, store) as pipeline:
            questions = [q.question for q in bundled_questions()] if store is None else _own_questions(pipeline)
            return [_retrieved(pipeline, question) for question in _spread(questions, count)]
    rows = _spread(_read(file), count)
    if all("chunks" in row for row in rows):
        return [_given(engine, row) for row in rows]
    if store is None:
        raise InputError(f"{file} has questions without chunks; give --store to retrieve them from.")
    with _documents(engine, store) as pipeline:
        return [_given(engine, row) if "chunks" in row else _retrieved(pipeline, row["question"]) for row in rows]


@contextmanager
def _documents(engine: BlendEngine, store: Path | None) -> Iterator[RagPipeline]:
    if store is not None and not ChunkIndex.exists(store):
        raise StoreError(f"Nothing is indexed in {store}. Run `cacheblend index FILES --store DIR` first.")
    with tempfile.TemporaryDirectory() as temporary, RagPipeline(engine, store or temporary) as pipeline:
        if store is None:
            pipeline.index([bundled_corpus()])
        yield pipeline


def _retrieved(pipeline: RagPipeline, question: str) -> TokenizedPrompt:
    prompt, _, _ = pipeline.prompt(question, pipeline.retrieve(question).hits)
    return tokenize(prompt, pipeline.engine.tokenizer, pipeline.engine.registry)


def _given(engine: BlendEngine, row: dict[str, Any]) -> TokenizedPrompt:
    chunks = [make_chunk(text, engine.tokenizer) for text in row["chunks"]]
    return tokenize(rag_prompt(engine.tokenizer, chunks, row["question"]), engine.tokenizer, engine.registry)


def _own_questions(pipeline: RagPipeline) -> list[str]:
    found = (_FIRST_SENTENCE.search(chunk.text) for chunk in pipeline.chunks.chunks())
    return [f"What else is known about this: {match[0].strip()}?" for match in found if match is not None]


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts {file} cannot be read: {error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = row.get("chunks", [])
            usable = (
                isinstance(row["question"], str) and isinstance(texts, list) and all(isinstance(t, str) for t in texts)
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            usable = False
        if not usable:
            raise InputError(f'{file}, line {number}: write {{"question": "...", "chunks": ["...", "..."]}}.')
        rows.append(row)
    if not rows:
        raise InputError(f"The prompts {file} are empty.")
    return rows


def _spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return at most ``count`` items, evenly spaced: neighbours are often of one kind."""
    step = max(1.0, len(items) / count)
    return [items[int(i * step)] for i in range(min(count, len(items)))]
