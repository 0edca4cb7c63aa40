"""Measures recall of packed vectors on real text: `python benchmarks/packed_recall.py PASSAGES QUESTIONS`.

PASSAGES is a JSON list of objects with a "text"; QUESTIONS are JSON lines, or a list, of objects with a "question". A real index
is packed from 100,000 vectors on; this one whatever its size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend_rag import Chunk, chunk_id
from cacheblend_rag.lab.stats.intervals import share_interval
from cacheblend_rag.retrieval import search
from cacheblend_rag.retrieval.index import ChunkIndex, IndexConfig
from cacheblend_rag.store.kv import ModelFingerprint

K = 10


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list, or JSON lines."""
    text = path.read_text("utf-8")
    return list(json.loads(text)) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Index the passages, ask before and after packing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passages", type=Path)
    parser.add_argument("questions", type=Path)
    given = parser.parse_args()
    search.PACKED_FROM = 1
    texts = dict.fromkeys(row["text"] for row in rows(given.passages) if row["text"].strip())
    questions = list(dict.fromkeys(row["question"] for row in rows(given.questions)))
    with tempfile.TemporaryDirectory() as directory:
        index = ChunkIndex.open(directory, IndexConfig(ModelFingerprint("ab" * 16, "none"), (1,), 512, 0))
        index.add("/passages", "d", [Chunk(chunk_id(text), text, (1,)) for text in texts])
        asked = [index.load_embedder().question(question) for question in questions]
        exact = [index.nearest(vector, K) for vector in asked]
        packed = index.pack()
        found = [index.nearest(vector, K) for vector in asked]
        lists, probes = index._search._packed.nlist, index._search._packed.nprobe
        index.close()
    hits = [float(name in dict(got)) for want, got in zip(exact, found, strict=True) for name, _ in want]
    low, high = share_interval(hits, [question for question in questions for _ in range(K)])
    print(
        f"{packed:,} vectors of {len(texts):,} passages in {lists} lists, {probes} of them read; {len(questions):,} questions"
    )
    print(f"recall@{K}: {np.mean(hits):.1%} [{low:.1%}, {high:.1%}]")
    print(
        f"similarity of the {K}th: {np.mean([want[-1][1] - got[-1][1] for want, got in zip(exact, found, strict=True)]):.5f} less"
    )


if __name__ == "__main__":
    main()
