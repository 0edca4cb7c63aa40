"""Makes models with random weights of a known shape, to measure speed without published weights."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any, Final

import torch

from cacheblend_rag.errors import InputError

# Shapes of published models.
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

# Gains of queries and keys concentrate attention on few tokens, as in trained models, instead of the mean of all
# tokens. Gains of the output branches are small, so that rounding does not grow from layer to layer.
_GAINS: Final = {"q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.4, "qkv_proj": 1.4, "o_proj": 0.4, "down_proj": 0.3}


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
    """Return a model with random weights; ``spec`` is that of :func:`random_config`, and :func:`spread` fills the weights."""
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = random_config(spec)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    spread(model.named_parameters(), seed)
    model.config._name_or_path = f"random:{spec}:{seed}"
    return model.eval()


@torch.no_grad()
def spread(parameters: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Fill weights in place, so that logits are spread and every layer's attention matters.

    Uniform weights near 0, as engines generate them, give the same output with any KV, so that no parity gate could
    detect wrong KV. Names are those of Llama in transformers, or in vLLM, which joins some (``qkv_proj``,
    ``gate_up_proj``).
    """
    for name, weights in parameters:
        if weights.ndim < 2:
            weights.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        # A parameter gets the same numbers for its name, whatever parameters come before it.
        generator = torch.Generator(weights.device).manual_seed(seed + zlib.crc32(name.encode()))
        gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
        weights.normal_(0.0, gain * (1.0 if "embed" in name else weights.shape[1] ** -0.5), generator=generator)
