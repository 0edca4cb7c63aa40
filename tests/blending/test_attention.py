"""Attention in parts against plain masked attention, and the memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend_rag.blending.settings import FULL_REUSE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine, attention
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from tests.blending.families import make_model
from tests.blending.prompts import Scene, engine_for
from tests.engines.kernels.interpreter import interpret

HEADER, CHUNK, CHUNKS, QUESTION = 4, 1018, 4, 20
_WITH_WINDOW: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}


def masked_attention(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Compute attention by its definition, ``[queries, heads, head_dim]``: all scores, one mask."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query.double() @ key.double().mT * (scale or query.shape[-1] ** -0.5)
    ahead = torch.arange(key.shape[1]) - positions[:, None]
    hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ value.double()).transpose(0, 1)


def inputs(seed: int, kv_heads: int, groups: int, queries: int, keys: int, dim: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    # Queries as a model leaves them: heads in front, tokens in front of heads in memory.
    query = torch.randn(queries, kv_heads * groups, dim, generator=generator).transpose(0, 1)
    key, value = torch.randn(2, kv_heads, keys, dim, generator=generator)
    return 2 * query, key, value


@settings(max_examples=150)
@given(data=st.data())
def test_attention_in_parts_equals_masked_attention(data: Any) -> None:
    runs = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6), "gaps and runs"
    )
    positions, at = [], 0
    for gap, run in runs:
        positions += range(at + gap, at + gap + run)
        at += gap + run
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (4, 2)]), "kv heads, groups")
    keys = at + data.draw(st.integers(0, 9), "keys behind the last query")
    window = data.draw(st.none() | st.integers(1, at + 5), "window")
    scale = data.draw(st.none() | st.just(0.3), "scale")
    block = data.draw(st.sampled_from([1, 2, 7, 16, None]), "block")
    query, key, value = inputs(at, kv_heads, groups, len(positions), keys, 16)
    given_inputs = query, key, value[..., : data.draw(st.sampled_from([16, 16, 12]), "value dim")]
    where = torch.tensor(positions)
    want = masked_attention(where, *given_inputs, scale, window)
    queries = attention.Queries(where, block=block)
    for _ in range(2):  # the second layer takes the first one's masks
        got = queries.attend(*given_inputs, scale, window)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 2e-5


def test_a_window_as_long_as_the_last_position_hides_the_first_key_from_it() -> None:
    where, parts = torch.arange(9), inputs(0, 1, 1, 9, 9, 16)
    got = attention.Queries(where).attend(*parts, None, 8)
    assert (got - masked_attention(where, *parts, None, 8)).abs().max() < 2e-5
    assert (got - masked_attention(where, *parts, None, None)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-6)])
def test_joining_parts_is_as_exact_as_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    where = torch.randperm(900, generator=torch.Generator().manual_seed(0))[:300].sort().values
    parts = [x.to(dtype) for x in inputs(1, 2, 2, 300, 900, 32)]
    want = masked_attention(where, *parts, None, None)
    got = attention.Queries(where).attend(*parts)
    assert got.dtype == dtype
    assert (got - want).abs().max() < tolerance


def test_other_devices_and_values_wider_than_keys_are_masked_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:90].sort().values
    query, key, value = inputs(2, 2, 2, 90, 300, 16)
    for values in (value, torch.cat([value, -value], 2)):
        queries = attention.Queries(where, block=16)
        monkeypatch.setattr(queries, "_on_cpu", values is not value)
        want = masked_attention(where, query, key, values, None, None)
        assert (queries.attend(query, key, values) - want).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_and_masked_attention_give_the_same_values(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    interpret(monkeypatch)
    where = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:90].sort().values
    given_inputs = inputs(2, 2, 2, 90, 300, 16)
    launched = []
    monkeypatch.setattr(attention, "_kernel_serves", lambda *_: not launched.append(1))
    for scale in (None, 0.3):
        want = masked_attention(where, *given_inputs, scale, window)
        got = attention.Queries(where).attend(*given_inputs, scale, window)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 2e-5
    assert len(launched) == 2


def test_the_window_is_applied_although_the_model_does_not_report_its_attention() -> None:
    config = hf.Qwen2MoeConfig(**_WITH_WINDOW, moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1)
    model, scene = make_model(config), Scene()
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    seen: list[torch.Tensor] = []
    engine.on_first_logits = seen.append
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=1), BlendSettings(1.0))
    assert answer.mode == "blend"
    with torch.no_grad():
        ids = torch.tensor([scene.prompt.token_ids])
        want = model(input_ids=ids, use_cache=False).logits[0, -1]
        unwindowed = make_model(type(config)(**{**config.to_dict(), "use_sliding_window": False, "layer_types": None}))
        assert (unwindowed(input_ids=ids, use_cache=False).logits[0, -1] - want).abs().max() > 1e-2
    assert (seen[0] - want).abs().max() < 1e-4


class _Largest(TorchDispatchMode):
    """Notes the largest number of elements in any tensor that an operation allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given_storages:
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.itemsize)
        return out


@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("how", [BlendSettings(0.15), BlendSettings(1.0), FULL_REUSE, PREFIX_CACHING])
def test_no_pass_makes_a_tensor_of_queries_by_keys(how: BlendSettings, window: int | None) -> None:
    config = hf.MistralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        sliding_window=window,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (HEADER + CHUNKS * CHUNK + QUESTION,), generator=generator).tolist()
    spans = [(HEADER + i * CHUNK, HEADER + (i + 1) * CHUNK) for i in range(CHUNKS)]
    chunks = [Chunk(f"c{i}", "", tuple(ids[a:b])) for i, (a, b) in enumerate(spans)]
    prompt = TokenizedPrompt(tuple(ids), tuple(ChunkSpan(c, a, b) for c, (a, b) in zip(chunks, spans, strict=True)))
    with TransformersEngine(make_model(config), header=ids[:HEADER]) as engine:
        engine.precompute(chunks)
        with _Largest() as largest:
            answer = engine.generate(prompt, SamplingParams(max_tokens=1), how)
    assert answer.usage.reused_tokens > 0
    assert len(ids) == 4096
    # A block of masked queries by all keys; the least share of queries here, 15%, by all keys would be 2.5 million.
    assert largest.elements <= attention._BLOCK * len(ids)
