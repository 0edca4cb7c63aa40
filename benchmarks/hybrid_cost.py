"""Counts what blending would save with recurrent layers, and what MLA's latent costs, on published shapes.

python benchmarks/hybrid_cost.py [--chunks N ...] [--tokens N] [--question N] [--ratios R ...]

Nothing is run: parameters are counted on models without memory (``torch.device("meta")``), in multiply-adds times 2.
``saved`` is the share of a full prefill's operations, ``read`` what must be read for it, in bf16 (recurrent states in fp32).
Three ways to go on behind the exact prefix, which is the first chunk:

prefix     every token goes through every layer
attention  recurrent layers and their MLPs see every token; attention layers with their MLPs (where both stand side by side
           in a layer: attention alone) only the chosen tokens and the question. A token that is not chosen takes what such
           a layer adds to it from the store, as it was when its chunk was indexed
scan       a token that is not chosen is in no layer at all: the recurrence of every layer still runs over it, on keys, values and
           gates from the store
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM

_BF16, _FP32 = 2, 4
_SCAN = 6  # operations per element of a recurrent state and token: decay, update and read-out, each a multiply-add

# Published shapes: a config's class, what differs from its defaults, and how many layers there are of each kind.
_LINEAR, _FULL, _BOTH = "linear_attention", "full_attention", "hybrid"
_HYBRIDS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "Qwen3-Next-80B-A3B": (hf.Qwen3NextConfig, {}, {_LINEAR: 36, _FULL: 12}),
    "Qwen3.5-9B": (hf.Qwen3_5TextConfig, {}, {_LINEAR: 24, _FULL: 8}),
    "Falcon-H1-7B": (
        hf.FalconH1Config,
        {
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
        },
        {_BOTH: 44},
    ),
    "Granite-4.0-H-Small": (
        hf.GraniteMoeHybridConfig,
        {
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "mamba_d_state": 128,
        },
        {_LINEAR: 36, _FULL: 4},
    ),
}
_MLA: dict[str, tuple[Any, dict[str, Any], int]] = {
    "DeepSeek-V2-Lite": (
        hf.DeepseekV2Config,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
        },
        27,
    ),
    "DeepSeek-V3": (hf.DeepseekV3Config, {"first_k_dense_replace": 0}, 61),
}


@dataclass
class Kind:
    """A kind of layer: active parameters of its parts, and what it keeps. Sizes in elements, ``kv`` and ``inputs`` per token."""

    count: int
    attention: int = 0
    recurrent: int = 0
    mlp: int = 0
    score: int = 0  # operations per query and key
    kv: int = 0
    state: int = 0
    conv: int = 0
    inputs: int = 0


@dataclass
class Shape:
    """A model as a list of kinds of layers."""

    hidden: int
    kinds: list[Kind] = field(default_factory=list)

    def operations(self, tokens: float, pairs: float, part: str = "all") -> float:
        """Operations of ``tokens`` that attend to ``pairs`` keys together, in attention layers, in the others, or in all."""
        total = 0.0
        for kind in self.kinds:
            parallel = kind.attention and kind.recurrent
            in_attention = kind.attention + (0 if parallel or not kind.attention else kind.mlp)
            rest = kind.attention + kind.recurrent + kind.mlp - in_attention
            if part != "rest":
                total += kind.count * (2 * in_attention * tokens + kind.score * pairs)
            if part != "attention":
                total += kind.count * (2 * rest + self._scan(kind)) * tokens
        return total

    @staticmethod
    def _scan(kind: Kind) -> int:
        return _SCAN * kind.state

    def scans(self, tokens: float) -> float:
        """Operations of the recurrences alone."""
        return sum(kind.count * self._scan(kind) for kind in self.kinds) * tokens

    def total(self, what: str) -> int:
        """Sum of a field over all layers."""
        return sum(kind.count * getattr(kind, what) for kind in self.kinds)


def active(module: torch.nn.Module, config: Any) -> int:
    """Parameters that one token meets: of experts only those it is sent to."""
    experts = {getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")} - {
        None
    }
    total = 0
    for parameter in module.parameters():
        routed = parameter.ndim == 3 and parameter.shape[0] in experts
        total += parameter.numel() * config.num_experts_per_tok // parameter.shape[0] if routed else parameter.numel()
    return total


def layers_of(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).model.layers


def hybrid_shape(make: Any, given: dict[str, Any], counts: dict[str, int]) -> Shape:
    kinds = {} if _BOTH in counts else {"layer_types": list(counts)}
    config = make(**given, **kinds, num_hidden_layers=len(counts))
    shape = Shape(config.hidden_size)
    for layer, (name, count) in zip(layers_of(config), counts.items(), strict=True):
        kind = Kind(count)
        if name != _LINEAR:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            kind.attention = active(layer.self_attn, config)
            kind.score = 4 * config.num_attention_heads * head_dim
            kind.kv = 2 * config.num_key_value_heads * head_dim
        if name != _FULL:
            mixer = getattr(layer, "linear_attn", None) or layer.mamba
            kind.recurrent = active(mixer, config)
            kind.conv = mixer.conv1d.weight.shape[0] * mixer.conv1d.weight.shape[2]
            if hasattr(config, "linear_num_value_heads"):  # gated delta net
                keys = config.linear_num_key_heads * config.linear_key_head_dim
                values = config.linear_num_value_heads * config.linear_value_head_dim
                kind.state = values * config.linear_key_head_dim
                kind.inputs = keys + values + 2 * config.linear_num_value_heads
            else:  # Mamba-2
                values = config.mamba_n_heads * config.mamba_d_head
                kind.state = values * config.mamba_d_state
                kind.inputs = values + config.mamba_n_groups * config.mamba_d_state + config.mamba_n_heads
        kind.mlp = active(layer, config) - kind.attention - kind.recurrent
        shape.kinds.append(kind)
    return shape


def print_hybrid(name: str, shape: Shape, chunks: int, options: argparse.Namespace) -> None:
    chunk, tokens = options.tokens, chunks * options.tokens + options.question
    pairs = tokens * (tokens + 1) / 2
    behind, pairs_behind = tokens - chunk, pairs - chunk * (chunk + 1) / 2
    stale_end = tokens - options.question
    pairs_stale = stale_end * (stale_end + 1) / 2 - chunk * (chunk + 1) / 2
    full = shape.operations(tokens, pairs)
    state = shape.total("state") * _FP32 + shape.total("conv") * _BF16
    kv = shape.total("kv") * _BF16
    prefix_bytes = state + kv * chunk
    # What an attention layer adds to the residual stream, for each token.
    increments = sum(k.count for k in shape.kinds if k.attention) * shape.hidden * _BF16
    print(f"{name}, {chunks} x {chunk}: prefill {full / 1e12:.1f} TFLOP")

    def show(way: str, ratio: str, cost: float, nbytes: float) -> None:
        print(f"  {way:<9} {ratio:>4}  saved {1 - cost / full:6.1%}  read {nbytes / 1e9:7.3f} GB")

    show("prefix", "", shape.operations(behind, pairs_behind), prefix_bytes)
    for ratio in options.ratios:
        stale = stale_end - chunk
        computed, left = ratio * stale + options.question, (1 - ratio) * stale
        pairs_computed = pairs_behind - (1 - ratio) * pairs_stale
        sparse = shape.operations(computed, pairs_computed, "attention") + shape.operations(behind, 0, "rest")
        show("attention", f"{ratio:.0%}", sparse, prefix_bytes + left * (kv + increments))
        scan = shape.operations(computed, pairs_computed) + shape.scans(left)
        inputs = shape.total("inputs") * _BF16
        show("scan", f"{ratio:.0%}", scan, prefix_bytes + left * (kv + inputs))


def print_entry(name: str, shape: Shape, tokens: int) -> None:
    state, conv, kv = shape.total("state") * _FP32, shape.total("conv") * _BF16, shape.total("kv") * _BF16 * tokens
    print(f"{name}: KV of {tokens} tokens {kv / 1e6:.1f} MB, state {(state + conv) / 1e6:.1f} MB")


def print_mla(name: str, make: Any, given: dict[str, Any], count: int) -> None:
    config = make(**given, num_hidden_layers=1)
    (layer,) = layers_of(config)
    attention, heads = layer.self_attn, config.num_attention_heads
    share = attention.kv_b_proj.weight.numel() / active(layer, config)
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    print(
        f"{name}: {kept * count * _BF16 / 1024:.0f} KiB a token as latent and rotary key, "
        f"{expanded * count * _BF16 / 1024:.0f} KiB as keys and values; expanding the latents of all tokens, which every pass "
        f"does, is {share:.1%} of a prefill's parameters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[6, 64, 256])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--question", type=int, default=32)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15, 0.05])
    options = parser.parse_args()
    shapes = {name: hybrid_shape(*described) for name, described in _HYBRIDS.items()}
    for name, shape in shapes.items():
        print_entry(name, shape, options.tokens)
        for chunks in options.chunks:
            print_hybrid(name, shape, chunks, options)
    for name, described in _MLA.items():
        print_mla(name, *described)


if __name__ == "__main__":
    main()
