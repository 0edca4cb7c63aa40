"""Times attention at selected positions on a CPU against full causal attention: in parts, and masked by blocks.

python lab/benchmarks/attention_blocks.py [--tokens N] [--heads N] [--kv-heads N] [--ratio R] [--threads N] [--repeat N]

``share`` is the share of full attention's scores that the selected queries need: the relative time if only scores took
time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend_rag.engines.transformers.attention import Queries

DIM, CHUNK, QUESTION = 64, 512, 32


def masked_blocks(queries: Queries, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return attention with a mask per block of queries over all keys up to its last query, as in windowed layers."""
    query, key, value = inputs
    groups = query.shape[0] // key.shape[0]
    key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    return queries._attend_masked(query.unflatten(0, (key.shape[0], groups)), key, value, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3104)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokens = options.tokens
    stale = tokens - QUESTION - CHUNK
    chosen = torch.randperm(stale)[: int(options.ratio * stale)].sort().values + CHUNK
    query = torch.randn(tokens, options.heads, DIM).transpose(0, 1)
    key, value = torch.randn(2, options.kv_heads, tokens, DIM)
    gqa = options.heads != options.kv_heads

    def full() -> torch.Tensor:
        return scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=gqa)

    for name, positions in {
        "sparse pass": torch.cat([chosen, torch.arange(tokens - QUESTION, tokens)]),
        "all behind the first chunk": torch.arange(CHUNK, tokens),
    }.items():
        inputs = (query[:, positions], key, value)
        runs: dict[str, Callable[[], object]] = {"full": full}
        for size in (32, 64, 128, 256):
            queries = Queries(positions, block=size)
            runs[f"parts of {size}"] = lambda queries=queries, inputs=inputs: queries.attend(*inputs)
            runs[f"masked blocks of {size}"] = lambda queries=queries, inputs=inputs: masked_blocks(queries, inputs)
        seconds: dict[str, list[float]] = {run: [] for run in runs}
        for number in range(options.repeat + 1):
            for run, function in runs.items():
                begin = time.process_time()
                function()
                if number:  # skip the first round, which warms up
                    seconds[run].append(time.process_time() - begin)
        base = median(seconds.pop("full"))
        share = float((positions + 1).sum()) / (tokens * (tokens + 1) / 2)
        print(f"{name}: {len(positions)} of {tokens} queries, share {share:.3f}")
        print("; ".join(f"{run} {median(times) / base:.3f}" for run, times in seconds.items()), flush=True)


if __name__ == "__main__":
    main()
