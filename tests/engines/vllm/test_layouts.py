"""Tests that pages of vLLM's CPU kernels are read back as they were written, by its kernels and by the known tiles."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops as ops

from cacheblend_rag.engines.vllm.pages import TiledPages, pages_of, read_page

PAGES, HEADS = 3, 2


def filled(size: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random K and V of all tokens, ``[PAGES * size, HEADS, dim]``."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(PAGES * size, HEADS, dim, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize(("size", "dim"), [(32, 32), (128, 64), (64, 96)])
def test_tiles_are_read_token_by_token(size: int, dim: int) -> None:
    keys, values = filled(size, dim, torch.float32)
    cache = torch.empty(PAGES, HEADS, size, 2 * dim)
    for page, head in ((p, h) for p in range(PAGES) for h in range(HEADS)):
        memory = cache[page, head].view(-1)
        for token in range(size):
            row = page * size + token
            for at in range(dim):
                memory[token // 16 * 16 * dim + at // 2 * 32 + token % 16 * 2 + at % 2] = keys[row, head, at]
                memory[size * dim + at // 16 * 16 * size + token // 2 * 32 + at % 16 * 2 + token % 2] = values[
                    row, head, at
                ]
    pages = TiledPages(cache)
    for first, end in ((0, size), (0, 1), (5, 6), (15, 17), (size - 1, size), (3, size - 3)):
        for page in range(PAGES):
            rows = slice(page * size + first, page * size + end)
            got = pages.read(page, first, end)
            assert torch.equal(got.k, keys[rows].transpose(0, 1)) and torch.equal(got.v, values[rows].transpose(0, 1))


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
@pytest.mark.parametrize(("size", "dim"), [(32, 32), (128, 64), (128, 128)])
def test_kv_written_by_vllms_cpu_kernels_is_read_back(isa: str, size: int, dim: int) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    keys, values = filled(size, dim, torch.bfloat16)
    cache = torch.zeros(PAGES, HEADS, size, 2 * dim, dtype=torch.bfloat16)
    halves = cache.view(PAGES, HEADS, 2 * size, dim).chunk(2, dim=2)
    slots = torch.randperm(PAGES * size, generator=torch.Generator().manual_seed(1))
    given = keys[slots], values[slots]
    ops.cpu_attn_reshape_and_cache(*given, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    pages = pages_of(cache, True, isa)
    for first, end in ((0, size), (7, 8), (9, 30)):
        k, v = read_page(pages, 1, first, end)
        rows = slice(size + first, size + end)
        assert torch.equal(k, keys[rows].transpose(0, 1)) and torch.equal(v, values[rows].transpose(0, 1))
