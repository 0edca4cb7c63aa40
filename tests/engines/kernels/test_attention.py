"""Compare the kernel for scattered queries with plain masked attention in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.engines.kernels.pages import ORDERS, columns_first, paged_cache, scattered

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute masked attention ``[queries, heads, head_dim]`` by its definition; keys are ``[kv_heads, tokens, head_dim]``."""
    groups = query.shape[1] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(groups, 0) for x in (keys, values))
    scores = query.double().transpose(0, 1) @ keys.mT * scale
    if soft_cap:
        scores = (scores / soft_cap).tanh() * soft_cap
    behind = positions[:, None] - torch.arange(keys.shape[1])
    hidden = (behind < 0) | (behind >= (window or keys.shape[1]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.cpu().double()[:, None, None].expand(-1, len(positions), 1)], -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values).transpose(0, 1)


class Sequence:
    """A sequence of ``tokens`` in shuffled pages among pages of NaN, and queries at some of its positions."""

    size = 16

    def __init__(self, device: str, tokens: int, kv_heads: int, groups: int, dim: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(tokens)
        self.device = device
        self.keys, self.values = torch.randn(2, kv_heads, tokens, dim, generator=generator).to(dtype)
        self.positions = scattered(tokens, max(3, tokens // 5))
        self.query = 2 * torch.randn(len(self.positions), kv_heads * groups, dim, generator=generator).to(dtype)
        used = -(-tokens // self.size)
        self.table = torch.randperm(used + 3, generator=generator)[:used].int()
        self.pages = used + 3

    def write(self, cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(self.keys.shape[1])
        pages, rows = self.table[at // self.size].long(), at % self.size
        for memory, x in zip(cache, (self.keys, self.values), strict=True):
            memory[pages, :, rows] = x.transpose(0, 1).to(memory.device)
        return cache

    def check(self, cache: tuple[torch.Tensor, torch.Tensor], paged: bool = True, **options: Any) -> None:
        from cacheblend_rag.engines.kernels.attention import attend

        query, positions, table = (x.to(self.device) for x in (self.query, self.positions, self.table))
        # A model's queries are a part of a wider projection.
        query = torch.cat([query, query], 1)[:, : query.shape[1]]
        out = torch.full_like(self.query, float("nan"), device=self.device)
        attend(query, *cache, positions, table if paged else None, out, 0.2, **options)
        want = dense(self.query, self.keys, self.values, self.positions, 0.2, **options)
        assert (out.cpu() - want).abs().max() < TOLERANCE[self.query.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads,groups,dim", [(2, 4, 32), (1, 7, 16), (3, 1, 24), (1, 2, 128)])
def test_the_attention_kernel_equals_masked_attention(
    device: str, dtype: torch.dtype, kv_heads: int, groups: int, dim: int
) -> None:
    sequence = Sequence(device, 150, kv_heads, groups, dim, dtype)
    sequence.check(sequence.write(paged_cache("NHD", sequence.pages, kv_heads, 16, dim, dtype, device)))


@pytest.mark.parametrize("order", [*ORDERS, "columns first"])
def test_the_attention_kernel_reads_every_memory_order_of_the_cache(device: str, order: str) -> None:
    sequence = Sequence(device, 100, 2, 2, 16, torch.float32)
    if order == "columns first":
        keys, values = (x.to(device) for x in columns_first(sequence.pages, 2, 16, 16))
        cache = keys, values
    else:
        cache = paged_cache(order, sequence.pages, 2, 16, 16, torch.float32, device)
    sequence.check(sequence.write(cache))


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_a_window_hides_old_keys(device: str, window: int) -> None:
    sequence = Sequence(device, 230, 1, 2, 16, torch.float32)
    cache = paged_cache("NHD", sequence.pages, 1, 16, 16, torch.float32, device)
    sequence.check(sequence.write(cache), window=window)


def test_pages_before_every_window_may_be_freed(device: str) -> None:
    sequence = Sequence(device, 230, 1, 2, 16, torch.float32)
    cache = sequence.write(paged_cache("NHD", sequence.pages, 1, 16, 16, torch.float32, device))
    late = sequence.positions >= 120
    sequence.positions, sequence.query = sequence.positions[late], sequence.query[late]
    sequence.table[: (120 + 1 - 20) // 16] = 1_000_000
    sequence.check(cache, window=20)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("level", [-40.0, 0.0, 3.0, 300.0])
def test_the_attention_kernel_counts_sinks(device: str, dtype: torch.dtype, window: int | None, level: float) -> None:
    sequence = Sequence(device, 150, 2, 3, 16, dtype)
    cache = sequence.write(paged_cache("NHD", sequence.pages, 2, 16, 16, dtype, device))
    sinks = (level + torch.randn(6, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    sequence.check(cache, window=window, sinks=sinks)


def test_sinks_have_the_meaning_that_transformers_gives_them() -> None:
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.training = 3, torch.randn(6), False
    query, keys, values = torch.randn(1, 6, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    hidden = torch.full((40, 40), float("-inf")).triu(1)[None, None]
    want = eager_attention_forward(module, query, keys, values, hidden, 0.2)[0][0]
    got = dense(query[0].transpose(0, 1), keys[0], values[0], torch.arange(40), 0.2, sinks=module.sinks)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("soft_cap", [2.0, 50.0])
def test_the_attention_kernel_caps_scores(device: str, soft_cap: float) -> None:
    sequence = Sequence(device, 90, 1, 2, 16, torch.float32)
    cache = paged_cache("NHD", sequence.pages, 1, 16, 16, torch.float32, device)
    sequence.check(sequence.write(cache), soft_cap=soft_cap)


def test_one_page_needs_no_table_and_may_extend_behind_the_last_query(device: str) -> None:
    sequence = Sequence(device, 130, 2, 2, 16, torch.float32)
    cache = paged_cache("HND", 1, 2, 200, 16, torch.float32, device)
    for memory, x in zip(cache, (sequence.keys, sequence.values), strict=True):
        memory[0, :, :130] = x.to(device)
    sequence.check(cache, paged=False)


def test_the_attention_kernel_handles_consecutive_queries_and_a_single_query(device: str) -> None:
    sequence = Sequence(device, 70, 1, 2, 16, torch.float32)
    cache = sequence.write(paged_cache("NHD", sequence.pages, 1, 16, 16, torch.float32, device))
    for positions in (torch.arange(40), torch.tensor([0]), torch.tensor([69])):
        sequence.positions, sequence.query = positions, torch.randn(len(positions), 2, 16)
        sequence.check(cache)
