"""How many query rows per block make scattered attention fastest on this CPU: ratios to one masked call over all rows.

python benchmarks/attention_blocks.py [--threads N] [--repeat N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

HEADS, KV_HEADS, DIM, TOKENS, CHUNK = 16, 4, 64, 3104, 512


def seconds(run: Callable[[], object], repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    question = torch.arange(TOKENS - 32, TOKENS)
    chosen = torch.randperm(5 * CHUNK)[: int(0.15 * 5 * CHUNK)].sort().values + CHUNK
    for name, positions in {
        "sparse pass": torch.cat([chosen, question]),
        "dense pass": torch.arange(CHUNK, TOKENS - 32),
    }.items():
        rows, end = len(positions), int(positions[-1]) + 1
        q = torch.randn(1, HEADS, rows, DIM)
        k, v = torch.randn(1, KV_HEADS, end, DIM), torch.randn(1, KV_HEADS, end, DIM)
        allowed = (torch.arange(end) <= positions[:, None])[None, None]
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(torch.float32).min)

        def whole(q=q, k=k, v=v, allowed=allowed) -> torch.Tensor:
            groups = HEADS // KV_HEADS
            return sdpa(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=allowed)

        def blocks(size: int, q=q, k=k, v=v, mask=mask, positions=positions, rows=rows) -> None:
            for a in range(0, rows, size):
                b = min(a + size, rows)
                e = int(positions[b - 1]) + 1
                sdpa(q[:, :, a:b], k[:, :, :e], v[:, :, :e], attn_mask=mask[:, :, a:b, :e], enable_gqa=True)

        base = seconds(whole, options.repeat)
        ratios = {size: seconds(lambda s=size: blocks(s), options.repeat) / base for size in (32, 64, 128, 256, 512)}
        print(
            f"{name}: {rows} rows; time relative to one call: " + ", ".join(f"{s} {r:.2f}" for s, r in ratios.items())
        )


if __name__ == "__main__":
    main()
