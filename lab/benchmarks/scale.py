"""Measures the cost of a million registered chunks without a model: `python lab/benchmarks/scale.py --chunks N --json`.

Chunks of 2,000 characters are registered in a server's file of chunks. Then a separate process opens the file, as a
server does when it starts, and is measured; its memory is what the operating system counts without the file's pages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from cacheblend_rag import Chunk, chunk_id
from cacheblend_rag.prompts.chunk import pack_ids
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.registered import RegisteredChunks

MODEL = "a model"
HEADER = "Copyright (c) 2026 by the harbour office. All rights reserved.\n\n"
CHARACTERS, TOKENS = 2_000, 512
BATCH = 5_000


def texts(count: int) -> Iterator[str]:
    """Yield distinct texts; one text in ten begins with a common header."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    library = " ".join(draw.choices(words, k=2_000_000))
    for number in range(count):
        begin = draw.randrange(len(library) - CHARACTERS)
        body = library[begin : begin + CHARACTERS - draw.randint(0, 400)].strip()
        yield (HEADER if number % 10 == 0 else "") + f"{body} {number}"


def fill(directory: Path, count: int) -> None:
    """Register ``count`` chunks in ``directory``."""
    ids = pack_ids(np.random.default_rng(0).integers(0, 100_000, TOKENS).tolist())
    kept = RegisteredChunks(directory, MODEL)
    batch: list[Chunk] = []
    for number, text in enumerate(texts(count), 1):
        batch.append(Chunk(chunk_id(text), text, ids, {"source": "book.pdf", "page": number}))
        if len(batch) == BATCH or number == count:
            kept.add(batch)
            batch = []
    kept.close()


def resident_bytes() -> int:
    """Return the resident memory of the process, without pages of files, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def median_ms(call: Callable[[], object], times: int = 20) -> float:
    """Return the median time of a call, in milliseconds."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e3


def measure(directory: Path) -> dict[str, float]:
    """Open the chunks that :func:`fill` registered, and return memory and times."""
    kept = RegisteredChunks(directory, MODEL)
    before = resident_bytes()
    begin = time.perf_counter()
    registry = ChunkRegistry()
    registry.attach(kept)
    start = time.perf_counter() - begin
    count = len(registry)
    known = registry.named_after("8", 6)
    prompt = "Answer from the notes.\n\n" + "\n\n".join(chunk.text for chunk in known)
    assert [piece for piece in registry.find(prompt) if isinstance(piece, Chunk)] == known
    other = RegisteredChunks(directory, MODEL)
    written = Chunk(chunk_id("new"), "A chunk that another process has registered.", (1, 2, 3))

    followed = []
    for _ in range(20):
        other.remove([written.id])
        other.add([written])
        begin = time.perf_counter()
        registry.follow()
        followed.append(time.perf_counter() - begin)

    return {
        "chunks": count,
        "bytes_per_chunk": round((resident_bytes() - before) / count, 1),
        "start_s": round(start, 3),
        "match_ms": round(median_ms(lambda: registry.find(prompt)), 3),
        "match_characters": len(prompt),
        "adversarial_ms": round(median_ms(lambda: registry.find((HEADER * 3_200)[:200_000]), 5), 3),
        "foreign_write_ms": round(statistics.median(followed) * 1e3, 3),
        "get_ms": round(median_ms(lambda: registry.get(known[0].id)), 3),
        "page_ms": round(median_ms(lambda: registry.named_after(known[0].id, 100)), 3),
    }


def main() -> None:
    """Fill a directory, measure in a fresh process, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="kept and used again (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.directory)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.directory or Path(temporary)
        if RegisteredChunks(directory, MODEL).count() != given.chunks:
            fill(directory, given.chunks)
        command = [sys.executable, __file__, "--measure", "--directory", str(directory)]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print(json.dumps(result) if given.json else "\n".join(f"{name:>22}  {value:,}" for name, value in result.items()))


if __name__ == "__main__":
    main()
