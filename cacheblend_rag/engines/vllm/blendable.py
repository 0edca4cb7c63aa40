"""What cannot be blended inside vLLM and is served by ordinary prefill; the parity gate judges the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag.engines.blendable import why_not_blendable
from cacheblend_rag.engines.vllm.groups import page_groups, unknown_kinds

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def why_not_in_vllm(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this model, run this way, cannot be blended, in words for a user; None if nothing speaks against it."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    kinds = unknown_kinds(kv_cache_config)
    sizes = {group.block_size for group in page_groups(kv_cache_config)} if not kinds else set()
    reasons = {
        "pipeline parallelism is on": parallel.pipeline_parallel_size > 1,
        "context parallelism is on": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        # All ranks of such a model must run every pass; a blend runs on one.
        "it is a mixture of experts and data parallelism is on": parallel.data_parallel_size > 1 and bool(model.is_moe),
        "LoRA adapters are enabled": config.lora_config is not None,
        "speculative decoding is on": config.speculative_config is not None,
        "it uses multi-dimensional RoPE": bool(getattr(model, "uses_mrope", False)),
        "its multi-head latent attention (MLA) keeps no per-head keys": bool(model.use_mla),
        "its KV cache is quantised": config.cache_config.cache_dtype not in {"auto", str(model.dtype).split(".")[-1]},
        "it has no KV cache": not kv_cache_config.kv_cache_groups,
        f"its KV cache is of a kind that is not blended ({', '.join(kinds)})": bool(kinds),
        "the groups of its KV cache have blocks of different sizes": bool(sizes - {config.cache_config.block_size}),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or why_not_blendable(text)
