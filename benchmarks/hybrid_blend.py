"""Blends a model with recurrent layers on random weights: the way called ``attention`` in ``hybrid_cost.py``.

python benchmarks/hybrid_blend.py [--hidden N] [--blocks N] [--chunks N] [--tokens N] [--ratios R ...] [--threads N] [--repeat N]

The model has Qwen3-Next's proportions: blocks of three gated-delta-net layers and one attention layer. Behind the exact prefix,
which is not timed, recurrent layers see every token; attention layers, with their MLPs, see tokens chosen at random and the
question, over stored KV, and add to every other token what they added to it when its chunk was indexed. ``off`` is the largest
difference of the last logits from the full prefill's, in their standard deviations; ``time`` the share of its seconds. On a CPU
transformers computes recurrent layers by a reference implementation: they take more of the time than of the operations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, DynamicCache

from cacheblend_rag.engines.transformers.attention import scattered
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.engines.transformers.owner import usable_attention
from cacheblend_rag.store.kv import LayerKV

HEADER, QUESTION = 8, 32


class MixedCache(DynamicCache):
    """Recurrent states as transformers keeps them, keys and values at given positions."""

    def __init__(self, config: Any, capacity: int):
        super().__init__(config=config)
        self.kv = PositionedCache(config.num_hidden_layers, capacity)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.update(*args, **kwargs)


def new_model(hidden: int, blocks: int) -> Any:
    config = hf.Qwen3NextConfig(
        vocab_size=512,
        hidden_size=hidden,
        num_hidden_layers=4 * blocks,
        num_attention_heads=max(1, hidden // 128),
        num_key_value_heads=max(1, hidden // 1024),
        linear_num_key_heads=max(1, hidden // 128),
        linear_num_value_heads=max(1, hidden // 64),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
        initializer_range=0.06,
    )
    torch.manual_seed(0)
    return usable_attention(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


class Trial:
    """One prompt, header, chunks and question of random tokens, on one model."""

    def __init__(self, model: Any, chunks: int, tokens: int):
        self.model, self.tokens = model, tokens
        self.attending = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
        self.ids = torch.randint(0, 512, (HEADER + chunks * tokens + QUESTION,))
        self.prefix, self.stale_end = HEADER + tokens, HEADER + chunks * tokens
        self.stored: dict[int, LayerKV] = {}
        self.added: dict[int, torch.Tensor] = {}
        self._index()

    @contextmanager
    def _wrapped(self, wrapper: Any) -> Iterator[None]:
        layers = {i: self.model.model.layers[i] for i in self.attending}
        for index, layer in layers.items():
            layer.forward = partial(wrapper, index, layer.forward)
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.forward

    def _run(self, ids: torch.Tensor, first: int, cache: MixedCache) -> torch.Tensor:
        positions = torch.arange(first, first + len(ids))[None]
        out = self.model(input_ids=ids[None], position_ids=positions, past_key_values=cache, logits_to_keep=1)
        return out.logits[0, -1]

    def _index(self) -> None:
        """Run every stale chunk behind the header alone; keep its KV and what attention layers add to its tokens."""

        def keep(index: int, forward: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = forward(hidden, *args, **kwargs)
            parts.setdefault(index, []).append((out - hidden)[0, HEADER:])
            return out

        parts: dict[int, list[torch.Tensor]] = {}
        kvs: dict[int, list[LayerKV]] = {}
        for start in range(self.prefix, self.stale_end, self.tokens):
            cache = MixedCache(self.model.config, HEADER + self.tokens)
            cache.kv.append(HEADER + self.tokens)
            ids = torch.cat([self.ids[:HEADER], self.ids[start : start + self.tokens]])
            with self._wrapped(keep):
                self._run(ids, start - HEADER, cache)  # keys as they stand in the prompt: nothing to rotate
            for index in self.attending:
                kvs.setdefault(index, []).append(cache.kv.read(index, 0, HEADER, HEADER + self.tokens))
        for index in self.attending:
            self.added[index] = torch.cat(parts[index])
            self.stored[index] = LayerKV(*(torch.cat(side, 1) for side in zip(*kvs[index], strict=True)))

    def full(self) -> torch.Tensor:
        cache = MixedCache(self.model.config, len(self.ids))
        cache.kv.append(len(self.ids))
        return self._run(self.ids, 0, cache)

    def after_prefix(self) -> MixedCache:
        """Return the exact prefix's state and KV, and all stored KV in its place."""
        cache = MixedCache(self.model.config, len(self.ids))
        cache.kv.append(self.prefix)
        self._run(self.ids[: self.prefix], 0, cache)
        for index in self.attending:
            cache.kv.write(index, self.stored[index], torch.arange(self.prefix, self.stale_end))
        return cache

    def blend(self, cache: MixedCache, ratio: float) -> torch.Tensor:
        stale = self.stale_end - self.prefix
        chosen = torch.randperm(stale, generator=torch.Generator().manual_seed(1))[: round(ratio * stale)].sort().values
        rows = torch.cat([chosen, torch.arange(stale, stale + QUESTION)])

        def sparse(index: int, forward: Any, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            kwargs["position_embeddings"] = tuple(x[:, rows] for x in kwargs["position_embeddings"])
            kwargs["position_ids"] = kwargs["position_ids"][:, rows]
            out = hidden.clone()
            out[0, :stale] += self.added[index]
            out[:, rows] = forward(hidden[:, rows], **kwargs)
            return out

        positions = rows + self.prefix
        cache.kv.scatter(positions, len(self.ids), None, None)
        with self._wrapped(sparse), scattered(positions):
            return self._run(self.ids[self.prefix :], self.prefix, cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.5, 0.15, 0.05, 0.0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        trial = Trial(new_model(options.hidden, options.blocks), options.chunks, options.tokens)
        seconds: dict[float | None, list[float]] = {how: [] for how in (None, *options.ratios)}
        got: dict[float | None, torch.Tensor] = {}
        for number in range(options.repeat + 1):
            for how, taken in seconds.items():
                cache = None if how is None else trial.after_prefix()
                begin = time.process_time()
                got[how] = trial.full() if how is None else trial.blend(cache, how)
                if number:  # the first round warms up
                    taken.append(time.process_time() - begin)
    want, base = got[None], median(seconds[None])
    for ratio in options.ratios:
        off = float((got[ratio] - want).abs().max() / want.std())
        kl = torch.nn.functional.kl_div(
            got[ratio].log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="sum"
        )
        print(f"ratio {ratio:4.0%}: off {off:.1e}, KL {float(kl):.1e}, time {median(seconds[ratio]) / base:.1%}")


if __name__ == "__main__":
    main()
