"""Makes the prompts of a calibration from a file, from documents or from the chunks of a store."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from cacheblend_rag.calibrate.calibration import CalibrationPrompt
from cacheblend_rag.calibrate.metrics import Judge, Metric
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt, rag_header, rag_prompt, tokenize
from cacheblend_rag.prompts.templates import SEPARATOR
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS, split_document
from cacheblend_rag.retrieval.documents import Document, find_documents, load_document
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

_T = TypeVar("_T")
_FIRST_SENTENCE: Final = re.compile(r"[^.!?\n]+")
# Fewer chunks than answers usually use, so that hundreds of prompts are measured in minutes.
_CHUNKS: Final = 4
_ROOM: Final = 256
# Maximum number of tokens of an answer that a metric judges.
_ANSWER: Final = 32
# Number of tokens of the following text that the prompt ends with, and number of tokens after them that are compared.
_LEAD, _FOLLOWS = 16, 32
_MOST_CHUNKS: Final = 1000


def collect_prompts(
    engine: TransformersEngine,
    file: Path | None,
    store: Path | None,
    count: int,
    documents: Path | None = None,
    metric: Metric | None = None,
) -> list[CalibrationPrompt]:
    """Return up to ``count`` prompts, evenly spread over the source.

    - A file: JSON lines of ``{"question", "chunks": [text, ...]}``; without ``chunks`` they are retrieved from
      ``store``.
    - Documents: passages, each behind its preceding chunk and chunks retrieved for it, followed by its own text.
    - A store alone: questions about the first sentences of its own chunks.

    With a metric the questions have right answers: a file's lines with ``"answers"`` beside ``"question"``.

    Raises:
        InputError: The file or the documents cannot be used; the message names the line or directory.
        StoreError: There is no such store.
    """
    if documents is not None:
        return _from_documents(engine, documents, count)
    if file is None:
        assert store is not None, "nothing to calibrate on is given"
        with _open(engine, store) as pipeline:
            return [_retrieved(pipeline, question) for question in _spread(_own_questions(pipeline), count)]
    rows = _spread(_read(file, metric), count)
    if all("chunks" in row for row in rows):
        made = [_given(engine, row) for row in rows]
    elif store is None:
        raise InputError(f"{file} has questions without chunks; give --store to retrieve them from.")
    else:
        with _open(engine, store) as pipeline:
            made = [_given(engine, row) if "chunks" in row else _retrieved(pipeline, row["question"]) for row in rows]
    if metric is None:
        return made
    decode = partial(engine.tokenizer.decode, skip_special_tokens=True)
    judges = [Judge(metric, tuple(row["answers"]), _ANSWER, decode) for row in rows]
    return [replace(prompt, judge=judge) for prompt, judge in zip(made, judges, strict=True)]


def _from_documents(engine: BlendEngine, directory: Path, count: int) -> list[CalibrationPrompt]:
    size = min(DEFAULT_CHUNK_TOKENS, (engine.context_window - _ROOM) // _CHUNKS)
    runs: list[list[Chunk]] = []
    for path in find_documents([directory]).files:
        loaded = load_document(path)
        if isinstance(loaded, Document):
            runs.append(split_document(loaded, engine.tokenizer, size))
        if sum(map(len, runs)) >= _MOST_CHUNKS:
            break
    chunks = [chunk for run in runs for chunk in run]
    behind = [bool(number) for run in runs for number in range(len(run))]
    places = [at for at, chunk in enumerate(chunks) if behind[at] and len(chunk.token_ids) >= _LEAD + _FOLLOWS]
    if not places or len(chunks) < _CHUNKS:
        raise InputError(
            f"{directory} holds {len(chunks)} chunks of up to {size} tokens, of which {len(places)} stand behind another one; "
            f"calibration needs {_CHUNKS} chunks and documents of several."
        )
    embedder = Embedder.load()
    vectors = embedder.texts([chunk.text for chunk in chunks])
    return [_continued(engine, embedder, chunks, vectors, place) for place in _spread(places, count)]


def _continued(
    engine: BlendEngine, embedder: Embedder, chunks: Sequence[Chunk], vectors: Sequence[Any], place: int
) -> CalibrationPrompt:
    """Return the passage at ``place`` behind the chunk before it, which follows the chunks nearest to the passage."""
    passage, before = chunks[place], chunks[place - 1]
    wanted = embedder.question(passage.text)
    distances = [float(np.linalg.norm(windows - wanted, axis=1).min()) for windows in vectors]
    nearest = sorted(range(len(chunks)), key=lambda i: (distances[i], i))
    others = {chunks[i].id: chunks[i] for i in nearest if chunks[i].id not in (passage.id, before.id)}
    shown = [*list(others.values())[: _CHUNKS - 1], before]
    segments: list[str | Chunk] = [rag_header(engine.tokenizer)]
    for chunk in shown:
        segments += [chunk, SEPARATOR]
    prompt = tokenize(BlendPrompt(tuple(segments)), engine.tokenizer, engine.registry)
    ids = passage.token_ids
    return CalibrationPrompt(
        TokenizedPrompt((*prompt.token_ids, *ids[:_LEAD]), prompt.spans), tuple(ids[_LEAD : _LEAD + _FOLLOWS])
    )


def _open(engine: BlendEngine, store: Path) -> RagPipeline:
    if not ChunkIndex.exists(store):
        raise StoreError(f"Nothing is indexed in {store}. Run `cacheblend index FILES --store DIR` first.")
    return RagPipeline(engine, store)


def _retrieved(pipeline: RagPipeline, question: str) -> CalibrationPrompt:
    prompt, _, _ = pipeline.prompt(question, pipeline.retrieve(question).hits)
    return CalibrationPrompt(prompt)


def _given(engine: BlendEngine, row: dict[str, Any]) -> CalibrationPrompt:
    chunks = [make_chunk(text, engine.tokenizer) for text in row["chunks"]]
    prompt = rag_prompt(engine.tokenizer, chunks, row["question"])
    return CalibrationPrompt(tokenize(prompt, engine.tokenizer, engine.registry))


def _own_questions(pipeline: RagPipeline) -> list[str]:
    found = (_FIRST_SENTENCE.search(chunk.text) for chunk in pipeline.chunks.chunks())
    return [f"What else is known about this: {match[0].strip()}?" for match in found if match is not None]


def _read(file: Path, metric: Metric | None) -> list[dict[str, Any]]:
    try:
        # str.splitlines would split at U+2028 and similar characters inside JSON strings.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts {file} cannot be read: {error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = row.get("chunks", [])
            answers = row["answers"] if metric else []
            usable = (
                isinstance(row["question"], str)
                and bool(answers or not metric)
                and all(
                    isinstance(each, list) and all(isinstance(text, str) for text in each) for each in (texts, answers)
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            usable = False
        if not usable:
            right = '"answers": ["..."], ' if metric else ""
            raise InputError(f'{file}, line {number}: write {{"question": "...", {right}"chunks": ["...", "..."]}}.')
        rows.append(row)
    if not rows:
        raise InputError(f"The prompts {file} are empty.")
    return rows


def _spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return at most ``count`` items, evenly spaced, because neighbours are often alike."""
    step = max(1.0, len(items) / count)
    return [items[int(i * step)] for i in range(min(count, len(items)))]
