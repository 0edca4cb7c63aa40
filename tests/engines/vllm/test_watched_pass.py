"""Compare the watched attention with its definition: windows, soft caps, sinks, several segments."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.engines.vllm.attention import Kernels
from cacheblend_rag.engines.vllm.graphs import Gave
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import PageGroup, Pages
from cacheblend_rag.engines.vllm.target import PagedTarget, PagedWatch
from cacheblend_rag.store.kv import LayerKV
from tests.engines.kernels.interpreter import interpret

HEADS, KV_HEADS, DIM, PROMPT, IN_PAGES, ASKED = 6, 2, 8, 100, 80, 70


class Paged:
    """A model of one layer whose pages hold the first positions; its layer's attention is watched.

    Attributes:
        fresh: Queries, keys and values of every position, as the model computes them.
        gave: The results of the last pass, with its attention as hidden states.
    """

    fresh: tuple[torch.Tensor, ...]
    gave: Gave

    block_size, groups, group_of, device = 10, (PageGroup(10, None),), (0,), torch.device("cpu")

    def __init__(self, kv: LayerKV, window: int | None, **impl: Any):
        self.kv, self._window, self.graphs = kv, window, None
        impl = {"scale": 0.3, "sinks": None, "logits_soft_cap": None, **impl}
        layer = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": DIM, "sliding_window": window}
        self.attention = [SimpleNamespace(impl=SimpleNamespace(**impl), **layer)]
        self.kernels: Kernels | None = None

    def run_unwritten(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the layer's attention alone, as vLLM calls it."""
        layer = self.attention[0]
        query, k, v = (t[positions] for t in self.fresh)
        return layer.impl.forward(layer, query, k, v, None, None, output=torch.empty_like(query))  # type: ignore[no-any-return]

    def look(self, *given: Any) -> Gave:
        self.gave = PagedModel.look(self, *given)  # type: ignore[arg-type]
        return self.gave

    def read(self, layer: int, slots: torch.Tensor) -> LayerKV:
        return LayerKV(*(t[:, slots - self.block_size] for t in self.kv))  # page 0 stands for missing pages


def defined(q: torch.Tensor, kv: LayerKV, at: int, paged: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention ``[heads, dim]`` of a token at position ``at`` and its weights ``[heads, prompt]``, one by one."""
    out, weights = torch.zeros(HEADS, DIM), torch.zeros(HEADS, PROMPT)
    impl = paged.attention[0].impl
    for head in range(HEADS):
        keys, values = (t[head // (HEADS // KV_HEADS)] for t in kv)
        seen = [p for p in range(at + 1) if paged._window is None or p > at - paged._window]
        scores = [float(q[head] @ keys[p]) * impl.scale for p in seen]
        if impl.logits_soft_cap:
            scores = [math.tanh(s / impl.logits_soft_cap) * impl.logits_soft_cap for s in scores]
        total = sum(math.exp(s) for s in scores)
        if impl.sinks is not None:
            total += math.exp(float(impl.sinks[head]))
        for p, score in zip(seen, scores, strict=True):
            weights[head, p] = math.exp(score) / total
            out[head] += weights[head, p] * values[p]
    return out, weights


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize(
    ("window", "impl"),
    [
        (None, {}),
        (7, {}),
        (30, {"logits_soft_cap": 1.5}),
        (None, {"sinks": torch.linspace(-1, 3, HEADS)}),
        (17, {"sinks": torch.linspace(-1, 3, HEADS)}),
        (500, {}),
    ],
)
def test_watched_attention_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch, window: int | None, impl: dict[str, Any], with_kernels: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = LayerKV(*(torch.randn(KV_HEADS, PROMPT, DIM, generator=generator) for _ in range(2)))
    queries = torch.randn(PROMPT, HEADS, DIM, generator=generator)
    stored = LayerKV(*(t.clone() for t in kv))
    segments = [torch.tensor([15, 16, 40, 41, 42]), torch.arange(ASKED, 95), torch.arange(95, PROMPT)]
    for segment in segments:  # the pass must not read stored KV of these positions
        for tensor in stored:
            tensor[:, segment] = torch.nan
    paged = Paged(stored, window, **impl)
    if with_kernels:
        interpret(monkeypatch)
        paged.kernels = Kernels(paged.attention, [stored])
        assert paged.kernels.can_watch is ("logits_soft_cap" not in impl)
    pages = Pages(paged, [range(1, 1 + IN_PAGES // 10)], PROMPT)  # type: ignore[arg-type]
    paged.fresh = queries, *(t.transpose(0, 1) for t in kv)
    target = SimpleNamespace(ids=torch.arange(PROMPT), pages=pages, placed=False, due=None)
    watched = PagedWatch(target, paged, ASKED, lambda layer: None)  # type: ignore[arg-type]
    total, count = torch.zeros(PROMPT), 0
    for segment in segments:
        watched.run(segment)
        got = paged.gave.hidden[-len(segment) :]
        for row, position in zip(got, segment.tolist(), strict=True):
            want, weights = defined(queries[position], kv, position, paged)
            torch.testing.assert_close(row, want, atol=1e-5, rtol=0)
            if position >= ASKED:
                total, count = total + weights.sum(0), count + 1
    torch.testing.assert_close(watched.mean(), total / (HEADS * count), atol=1e-6, rtol=0)


def test_attention_with_alibi_slopes_is_not_watched() -> None:
    for slopes, shown in ((None, True), ([0.5], False)):
        layer = SimpleNamespace(impl=SimpleNamespace(alibi_slopes=slopes))
        paged = SimpleNamespace(attention=[layer], num_layers=1, device=torch.device("cpu"))
        assert PagedTarget(paged, Rope([], [0], ["none"]), [1], []).shows_attention == shown  # type: ignore[arg-type]


def test_tokens_that_see_no_pages_read_nothing() -> None:
    """Tokens far inside a question that is longer than a window see no pages."""
    paged = object.__new__(PagedModel)
    paged.names, paged._caches = ["layer"], {"layer": torch.ones(3, KV_HEADS, 4, 2 * DIM)}
    vars(paged)["_pages"] = [LayerKV(*(torch.ones(3, KV_HEADS, 4, DIM) for _ in range(2)))]
    assert [t.shape for t in paged.read(0, torch.arange(0))] == [(KV_HEADS, 0, DIM)] * 2
    assert [t.shape for t in paged.read(0, torch.arange(2, 9))] == [(KV_HEADS, 7, DIM)] * 2
