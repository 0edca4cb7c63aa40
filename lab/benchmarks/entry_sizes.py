"""Counts the bytes of an entry for models with recurrent layers, and the cost of MLA's latent, on published shapes.

python lab/benchmarks/entry_sizes.py [--tokens N]

No model runs: the shapes come from models without memory (``torch.device("meta")``). KV is in bf16, recurrent states in
fp32.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM

_BF16, _FP32 = 2, 4

# Published shapes: a config's class, values that differ from its defaults, and the number of layers of each kind.
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


def active(module: torch.nn.Module, config: Any) -> int:
    """Return the number of parameters that compute one token; only the token's experts count."""
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


def print_entry(name: str, tokens: int, make: Any, given: dict[str, Any], counts: dict[str, int]) -> None:
    kinds = {} if _BOTH in counts else {"layer_types": list(counts)}
    config = make(**given, **kinds, num_hidden_layers=len(counts))
    kv = state = 0
    for layer, (kind, count) in zip(layers_of(config), counts.items(), strict=True):
        if kind != _LINEAR:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            kv += count * 2 * config.num_key_value_heads * head_dim * _BF16 * tokens
        if kind != _FULL:
            conv = (getattr(layer, "linear_attn", None) or layer.mamba).conv1d.weight
            if hasattr(config, "linear_num_value_heads"):  # gated delta net
                each = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
            else:  # Mamba-2
                each = config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
            state += count * (each * _FP32 + conv.shape[0] * conv.shape[2] * _BF16)
    print(f"{name}: KV of {tokens} tokens {kv / 1e6:.1f} MB, state {state / 1e6:.1f} MB")


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
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    for name, described in _HYBRIDS.items():
        print_entry(name, options.tokens, *described)
    for name, described in _MLA.items():
        print_mla(name, *described)


if __name__ == "__main__":
    main()
