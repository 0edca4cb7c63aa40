"""Compare the kernel that adds up attention weights with their definition in double precision."""

from __future__ import annotations

import pytest
import torch

from tests.engines.kernels.pages import scattered

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-5, torch.bfloat16: 1e-5}


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "groups", "dim", "window"),
    [
        (torch.float32, 2, 4, 32, None),
        (torch.float16, 1, 7, 16, 20),
        (torch.bfloat16, 3, 1, 24, None),
        (torch.float32, 3, 1, 24, 20),
        (torch.bfloat16, 2, 4, 32, 20),
    ],
)
def test_the_kernel_adds_up_attention_weights_by_each_querys_share(
    device: str, dtype: torch.dtype, kv_heads: int, groups: int, dim: int, window: int | None
) -> None:
    from cacheblend_rag.engines.kernels.attention import add_shares, attend

    generator = torch.Generator().manual_seed(dim)
    heads, room, tokens = kv_heads * groups, 190, 150
    keys = torch.full((kv_heads, room, dim), float("nan"), dtype=dtype)  # memory behind the last query is unwritten
    keys[:, :tokens] = torch.randn(kv_heads, tokens, dim, generator=generator)
    positions = scattered(tokens, 40)
    positions[-1] = tokens - 1
    query = 2 * torch.randn(len(positions), heads, dim, generator=generator).to(dtype)
    shares = torch.rand(len(positions), generator=generator) * (positions > 50)
    behind = positions[:, None] - torch.arange(tokens)
    hidden = (behind < 0) | (behind >= (window or tokens))
    scores = query.double().transpose(0, 1) @ keys[:, :tokens].double().repeat_interleave(groups, 0).mT * 0.2
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    want = torch.ones(kv_heads, room, dtype=torch.float64)  # the kernel adds to the present values
    want[:, :tokens] += torch.einsum("hqk,q->hk", weights, shares.double()).view(kv_heads, groups, -1).sum(1) / heads

    query, keys, positions, shares = (x.to(device) for x in (query, keys, positions, shares))
    lse, total = (torch.ones(shape, device=device) for shape in ((len(positions), heads), (kv_heads, room)))
    attend(query, keys[None], keys[None], positions, None, torch.empty_like(query), 0.2, window=window, lse=lse)
    add_shares(query, keys, positions, shares, lse, total, 0.2, window)
    assert (total.cpu() - want).abs().max() < TOLERANCE[dtype]
