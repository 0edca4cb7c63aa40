"""Small random models of every family named in docs/models.md. Weights are large enough for attention to matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from cacheblend_rag.engines.transformers.owner import usable_attention

_BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_HALF_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]

_DEEP_YARN = {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.7}
_MLA: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def llama4(base: dict[str, Any], head_dim: int, attention_chunk_size: int = 512) -> hf.Llama4TextConfig:
    """Cut attention into pieces longer than the tests' prompts; every fourth layer attends to all, without positions."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    return hf.Llama4TextConfig(**base, **experts, head_dim=head_dim, attention_chunk_size=attention_chunk_size)


BLENDED: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_BASE),
    "llama3_rope": lambda: hf.LlamaConfig(**_BASE, rope_parameters=_LLAMA3),
    "yarn_rope": lambda: hf.LlamaConfig(**_BASE, rope_parameters=_YARN),
    "mistral": lambda: hf.MistralConfig(**_BASE, sliding_window=None),
    "mistral_window": lambda: hf.MistralConfig(**_BASE, sliding_window=20),
    "qwen2": lambda: hf.Qwen2Config(**_BASE),
    "qwen3": lambda: hf.Qwen3Config(**_BASE, head_dim=32),
    "phi3": lambda: hf.Phi3Config(**_BASE),
    "phi3_partial": lambda: hf.Phi3Config(**_BASE, partial_rotary_factor=0.5),
    "gemma2": lambda: hf.Gemma2Config(**_BASE, head_dim=16, sliding_window=20),
    "gemma3": lambda: hf.Gemma3TextConfig(**_BASE, head_dim=16, sliding_window=20, layer_types=_HALF_WINDOWED),
    "mixtral": lambda: hf.MixtralConfig(**_BASE, num_local_experts=4),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=20
    ),
    "glm": lambda: hf.GlmConfig(**_BASE, head_dim=16),
    "llama4": lambda: llama4(_BASE, 16),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**_MLA, **_EXPERTS),
    "deepseek_v2_yarn": lambda: hf.DeepseekV2Config(
        **{**_MLA, "q_lora_rank": None}, **_EXPERTS, rope_parameters=_DEEP_YARN
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**_MLA, **_EXPERTS),
    "deepseek_v3_yarn": lambda: hf.DeepseekV3Config(**_MLA, **_EXPERTS, rope_parameters=_DEEP_YARN),
    "minicpm3": lambda: hf.MiniCPM3Config(**_MLA, dim_model_base=64, scale_depth=5.0),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**_MLA, **{k: v for k, v in _EXPERTS.items() if k[0] != "f"}),
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
    "factor": 8.0,
}
_RECURRENT: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3}
NOT_BLENDED: dict[str, tuple[Any, str]] = {
    "indexed attention": (
        lambda: hf.DeepseekV32Config(**_MLA, **_EXPERTS, index_topk=16, index_head_dim=16, index_n_heads=2),
        "indexed_attention",
    ),
    "learned positions": (lambda: hf.GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4), "rotation"),
    "alibi": (lambda: hf.BloomConfig(vocab_size=300, hidden_size=64, n_layer=3, n_head=4), "forward"),
    "length-dependent rope": (lambda: hf.Phi3Config(**_BASE, rope_parameters=_LONGROPE), "length"),
    "mamba": (lambda: hf.MambaConfig(**_RECURRENT, state_size=8), "linear_attention"),
    "mamba2": (
        lambda: hf.Mamba2Config(**_RECURRENT, num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=16),
        "linear_attention",
    ),
    "rwkv": (lambda: hf.RwkvConfig(**_RECURRENT, attention_hidden_size=64), "no keys and values"),
    "recurrent gemma": (
        lambda: hf.RecurrentGemmaConfig(
            **_RECURRENT, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, attention_window_size=32
        ),
        "no keys and values",
    ),
    # In transformers 5.19 its scan of several tokens begins without the state behind the tokens before them.
    "jamba": (lambda: hf.JambaConfig(**_BASE, num_experts=2, mamba_d_state=8), "linear_attention"),
    "one layer": (lambda: hf.LlamaConfig(**{**_BASE, "num_hidden_layers": 1}), "one layer"),
}


_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
EXACT_PREFIX: dict[str, Any] = {
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_BASE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_BASE, head_dim=16),
    "falcon_h1": lambda: hf.FalconH1Config(**_BASE, **_MAMBA2, mamba_d_ssm=128),
    "bamba": lambda: hf.BambaConfig(**_BASE, **_MAMBA2, attn_layer_indices=[1, 3]),
    "granite4": lambda: hf.GraniteMoeHybridConfig(
        **_BASE,
        **_MAMBA2,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "lfm2": lambda: hf.Lfm2Config(**_BASE, layer_types=[x.replace("linear_attention", "conv") for x in _MIXED]),
    "kimi_linear": lambda: hf.KimiLinearConfig(
        **{k: v for k, v in _MLA.items() if k != "q_lora_rank"},
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        linear_head_dim=16,
        linear_num_heads=4,
    ),
}


def make_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return the model of ``config`` with seeded weights, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return usable_attention(model)
