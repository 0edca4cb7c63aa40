"""Times finding registered chunks in a prompt: ``python benchmarks/match_rate.py [chunks] [prompt characters]``."""

from __future__ import annotations

import random
import statistics
import sys
import time
import tracemalloc

from cacheblend_rag import Chunk, chunk_id
from cacheblend_rag.frameworks import ChunkRegistry


def main(count: int = 100_000, characters: int = 20_000) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length // 6 + 1))[:length].strip()

    bodies = [text(400) for _ in range(count)]
    chunks = [Chunk(chunk_id(body), body, ()) for body in bodies]
    tracemalloc.start()
    begin = time.perf_counter()
    registry = ChunkRegistry(chunks)
    added = time.perf_counter() - begin
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"registered {count} chunks in {added:.2f} s (traced), {size / count:.0f} bytes of index each")
    prompts = {"no chunk": text(characters), "6 chunks": "\n\n".join([*bodies[:6], text(max(0, characters - 2412))])}
    for name, prompt in prompts.items():
        seconds = []
        for _ in range(50):
            begin = time.perf_counter()
            registry.find(prompt)
            seconds.append(time.perf_counter() - begin)
        print(f"{len(prompt)} characters, {name}: median {statistics.median(seconds) * 1e3:.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
