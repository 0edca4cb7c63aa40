"""How much memory vLLM's paged KV cache takes on a CPU, where the user has not said.

vLLM takes 92% of all memory there, and does not start where less is free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch

_CONTEXTS: Final = 4
"""Prompts of full length that fit at a time."""
_SHARE: Final = 0.5
"""Most of the free memory; weights and activations need the rest."""
_LEAST: Final = 64 << 20
_CHOSEN_BY: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


def cpu_kv_memory(directory: Path, dtype: torch.dtype, arguments: Mapping[str, Any]) -> int | None:
    """Return the bytes to reserve for the KV cache: four prompts of full length, at most half of the free memory.

    Args:
        directory: The model's files.
        dtype: Of its KV.
        arguments: vLLM's, as the user gave them.

    Returns:
        None where the user has chosen already, by an argument or by ``VLLM_CPU_KVCACHE_SPACE``, and for models without attention.
    """
    if any(arguments.get(name) is not None for name in _CHOSEN_BY) or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory).get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0))
    if not heads:
        return None
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    token = 2 * int(config.num_hidden_layers) * kv_heads * head_dim * dtype.itemsize
    context = int(arguments.get("max_model_len") or config.max_position_embeddings)
    room = int(_SHARE * psutil.virtual_memory().available)
    return max(_LEAST, min(_CONTEXTS * context * token, room))
