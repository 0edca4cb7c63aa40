"""An index with a small stand-in for the embedding model, and programs that other processes run on it in the tests."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np

from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.retrieval.embedding import Embedder, Vectors
from cacheblend_rag.retrieval.index import ChunkIndex, IndexConfig
from cacheblend_rag.store.kv import ModelFingerprint
from tests.store.workers import NOBODY

CONFIG = IndexConfig(ModelFingerprint("ab" * 16, "small-model"), (1, 2, 3), 64, 0, "words")


class WordEmbedder(Embedder):
    """Counts words: each text gets one vector, a text with "|" one vector for each part."""

    def __init__(self, name: str):
        super().__init__(name, None)

    def texts(self, texts: Sequence[str]) -> list[Vectors]:
        return [np.stack([self.question(part) for part in text.split("|")]) for text in texts]

    def question(self, text: str) -> Vectors:
        vector = np.full(32 if self.name == "words" else 48, 1e-3, np.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % len(vector)] += 1
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def load(name: str = "words", device: str | None = None) -> WordEmbedder:
    return WordEmbedder(name)


def chunk(text: str, source: str = "", start: int = 0) -> Chunk:
    ids = tuple(zlib.crc32(word.encode()) % 50_000 for word in text.split())
    return Chunk(chunk_id(text), text, ids, {"source": source, "start": start, "end": start + len(text)})


def chunks(*texts: str) -> list[Chunk]:
    return [chunk(text, start=10 * number) for number, text in enumerate(texts)]


def add_many(connection: Connection, directory: Path, prefix: str, count: int) -> None:
    """Add documents that share a chunk with the documents of every other process."""
    with patch.object(Embedder, "load", load), ChunkIndex(directory, CONFIG) as index:
        for number in range(count):
            index.add(f"/{prefix}{number}", "d", chunks(f"own text {prefix} {number}", "shared by all"))
            connection.send(number)


def replace_and_die(connection: Connection, directory: Path, statement: int) -> None:
    """Replace document /a, killed just before the ``statement``-th statement; send "done" if there are fewer."""
    with patch.object(Embedder, "load", load), ChunkIndex(directory, CONFIG) as index:
        seen = 0

        def count(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen == statement:
                os.kill(os.getpid(), signal.SIGKILL)

        database: sqlite3.Connection = index.db
        database.set_trace_callback(count)
        index.add("/a", "new", chunks("new one", "kept in both", "new two"))
        database.set_trace_callback(None)
        connection.send("done")


def read_only(connection: Connection, directory: Path) -> None:
    """Search and try to change an index as a user without write permission."""
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with patch.object(Embedder, "load", load):
        try:
            with ChunkIndex(directory, CONFIG) as index:
                found = [hit.chunk.text for hit in index.search("blue anchor", 1)]
                try:
                    index.add("/b", "d", chunks("another"))
                    refusal = ""
                except StoreError as error:
                    refusal = str(error)
                connection.send((found, refusal))
                connection.recv()
                connection.send([hit.chunk.text for hit in index.search("green bottle", 1)])
        except StoreError as error:
            connection.send(([], str(error)))
