"""Counts the scores that attention of selected tokens computes on a GPU: with runs as requests, or with shared tiles.

python lab/benchmarks/attention_tiles.py [--chunks N] [--chunk N]
    [--question N] [--heads N] [--kv-heads N] [--dim N] [--run TOKENS]

No GPU is needed, and no time is measured. A tile computes all scores of its rows (queries times the heads that share a
KV head) with whole blocks of keys up to its last query's position; ``x`` is the computed scores divided by the visible
scores. "Runs as requests" counts tiles of FlashAttention 3 for heads of 128 (128 rows, 128 keys, a group's heads
packed); "scattered" counts the tiles of this project's kernel. Selections are random, with runs of ``--run`` tokens on
average, and include the question.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

FA_ROWS, FA_KEYS = 128, 128


def selection(tokens: int, first: int, ratio: float, run: float, question: int) -> torch.Tensor:
    """Return ascending positions: a share ``ratio`` from ``first`` on, in runs of about ``run``, and the question."""
    generator = torch.Generator().manual_seed(0)
    stale = tokens - question - first
    leave = 1 / run  # probability that a run ends after a token
    enter = ratio * leave / (1 - ratio)
    chosen, inside = [], False
    for position, chance in enumerate(torch.rand(stale, generator=generator).tolist(), first):
        inside = chance >= leave if inside else chance < enter
        chosen += [position] * inside
    return torch.tensor([*chosen, *range(tokens - question, tokens)])


@dataclass
class Work:
    """Counts the tiles, and the scores that they compute, for one KV head."""

    tiles: int = 0
    scores: int = 0

    def add(self, rows: int, visible: int, tile_rows: int, tile_keys: int) -> None:
        """Count the tiles of ``rows`` rows that see at most ``visible`` keys."""
        tiles = -(-rows // tile_rows)
        self.tiles += tiles
        self.scores += tiles * tile_rows * -(-visible // tile_keys) * tile_keys


def as_runs(positions: torch.Tensor, group: int) -> tuple[Work, int]:
    """Return the work with each run of neighbours as a request, and the number of runs."""
    work, at = Work(), positions.tolist()
    begin = runs = 0
    for index in range(1, len(at) + 1):
        if index < len(at) and at[index] == at[index - 1] + 1:
            continue
        runs += 1
        per_tile = FA_ROWS // group  # a tile reads keys up to its own last query
        for first in range(begin, index, per_tile):
            last = min(first + per_tile, index) - 1
            work.add(1, at[last] + 1, FA_ROWS, FA_KEYS)
        begin = index
    return work, runs


def scattered(positions: torch.Tensor, group: int, dim: int) -> Work:
    """Return the work of this project's kernel, whose tiles share scattered tokens."""
    from cacheblend_rag.engines.kernels.attention import tile

    work, at = Work(), positions.tolist()
    rows, keys, _ = tile(torch.bfloat16, group, dim)
    for begin in range(0, len(at), rows // group):
        work.add(rows, at[min(begin + rows // group, len(at)) - 1] + 1, rows, keys)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--question", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--run", type=float, default=1.5)
    options = parser.parse_args()
    tokens, group = options.chunks * options.chunk + options.question, options.heads // options.kv_heads
    print(
        f"{tokens} tokens, {group} heads to a KV head; tiles for one KV head, and scores computed for each visible one\n"
    )
    print("                     tokens   runs   runs as requests    scattered   ours/runs")
    for name, ratio, run in (
        ("static, 15%", 0.15, options.run),
        ("static, 5%", 0.05, options.run),
        ("runs of 8, 15%", 0.15, 8.0),
        ("runs of 16, 15%", 0.15, 16.0),
        ("runs of 32, 15%", 0.15, 32.0),
        ("full prefill", 1.0, 0.0),
    ):
        full = ratio == 1.0
        positions = torch.arange(tokens) if full else selection(tokens, options.chunk, ratio, run, options.question)
        visible = group * int((positions + 1).sum())
        requests, runs = as_runs(positions, group)
        ours = scattered(positions, group, options.dim)
        print(
            f"{name:<20} {len(positions):>6} {runs:>6} {requests.tiles:>8} {requests.scores / visible:>8.1f}x"
            f"{ours.tiles:>8} {ours.scores / visible:>6.2f}x {ours.scores / requests.scores:>9.2f}"
        )


if __name__ == "__main__":
    main()
