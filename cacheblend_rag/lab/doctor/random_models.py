"""Makes models with random weights of a known shape, for measuring speed without the weights of published ones."""

from __future__ import annotations

import re
from typing import Any

import torch

from cacheblend_rag.errors import InputError

# Shapes of published models, for measuring without their weights.
_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "mistral-7b": {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def random_config(spec: str) -> Any:
    """Return the config of a Llama of a given shape, for measuring speed.

    Args:
        spec: ``llama:LAYERSxHIDDEN`` (64-dimensional heads, four to a KV head) or a published shape's name.

    Raises:
        InputError: The spec is not understood.
    """
    from transformers import LlamaConfig

    match = re.fullmatch(r"llama:(\d+)x(\d+)", spec)
    if match:
        layers, hidden = int(match[1]), int(match[2])
        if hidden % 256 or not layers:
            raise InputError(
                f"--random-weights {spec}: the hidden size must be a multiple of 256 and the layers at least 1."
            )
        shape: dict[str, Any] = {
            "vocab_size": 512,
            "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 256,
        }
    elif spec in _SHAPES:
        shape = _SHAPES[spec]
    else:
        raise InputError(
            f"--random-weights {spec!r} is unknown; give llama:LAYERSxHIDDEN or one of {', '.join(_SHAPES)}."
        )
    return LlamaConfig(max_position_embeddings=32768, architectures=["LlamaForCausalLM"], **shape)


def random_model(spec: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Return a model with random weights; ``spec`` is that of :func:`random_config`."""
    from transformers import LlamaForCausalLM

    config = random_config(spec)
    torch.manual_seed(seed)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    model.config._name_or_path = f"random:{spec}:{seed}"
    return model.eval()
