"""Measures static deviation, when a chunk is indexed: how much its tokens depend on the text before them.

A chunk is computed again behind a *probe*, a text unrelated to the chunk, and its KV is compared with the KV of the
chunk alone. Tokens whose KV hardly changes do not need their context; tokens whose KV changes most are the ones to
recompute in any prompt. If the ranking is stored, a blend needs no dense pass: its selection is known before the first
layer runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.prompts.chunk import encoder_for
from cacheblend_rag.store.kv import LayerKV, StoredKV

_TEXT = files("cacheblend_rag.blending") / "probe.txt"
_MOST_PROBE_TOKENS = 512
# Divisor of the context window: chunks must fit behind the probe, so a small window needs a short probe.
_SHARE_OF_WINDOW = 4


def probe_ids(tokenizer: Any, vocab_size: int, context_window: int) -> tuple[int, ...]:
    """Return the probe's token ids: the bundled text, or without a tokenizer random tokens (always the same).

    Args:
        tokenizer: The model's Hugging Face tokenizer, or None.
        vocab_size: Number of token ids.
        context_window: Most tokens the model takes; the probe is at most a quarter of it, and 512 tokens.
    """
    most = min(_MOST_PROBE_TOKENS, context_window // _SHARE_OF_WINDOW)
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randint(0, vocab_size, (most,), generator=generator).tolist())
    return tuple(encoder_for(tokenizer).document(_TEXT.read_text("utf-8"))[:most])


def probe_digest() -> str:
    """Return a hash of everything that the probe's tokens depend on besides the model."""
    told = f"{_MOST_PROBE_TOKENS} {_SHARE_OF_WINDOW} {_TEXT.read_text('utf-8')}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def static_deviation(alone: StoredKV, behind: Sequence[LayerKV], start: int, rope: Rope) -> torch.Tensor:
    """Return each token's static deviation ``[tokens]``, fp32, on the CPU; see :func:`static_parts`."""
    return mean_deviation(static_parts(alone, behind, start, rope))


def static_parts(alone: StoredKV, behind: Sequence[LayerKV], start: int, rope: Rope) -> torch.Tensor:
    """Compare a chunk's KV behind the header (``alone``) with its KV ``behind`` header and probe, from ``start`` on.

    Returns:
        Input of :func:`mean_deviation`, ``[2 * (layers - 1), tokens + 2]`` on the device of ``behind``. Each layer from
        layer 1 on has a row for its keys and a row for its values (layer 0 depends only on the token). A row holds each
        token's squared L2 distance, the sum of squares, and the number of elements.
    """
    device = behind[0].k.device
    offsets = torch.arange(alone.num_tokens, device=device)
    rotations = rope.rotations(offsets + alone.start, offsets + start)
    parts = []
    for layer in range(1, alone.num_layers):
        stored = alone.layer(layer)
        moved = rope.rotate(layer, stored.k.to(device), rotations)
        for fresh, stale in ((behind[layer].k, moved), (behind[layer].v, stored.v.to(device))):
            distance = (fresh.float() - stale.float()).square().sum((0, 2))
            square = fresh.float().square()
            parts.append(torch.cat([distance, square.sum()[None], square.new_tensor([square.numel()])]))
    return torch.stack(parts)


def mean_deviation(parts: torch.Tensor) -> torch.Tensor:
    """Return the static deviation ``[tokens]``: distances by their layer's mean square, K plus V, mean over layers.

    Args:
        parts: Result of :func:`static_parts`. Tensor-parallel ranks hold different heads of the same tokens: the sum of
            their parts equals the whole model's.
    """
    total = parts.cpu().view(len(parts) // 2, 2, -1)
    scaled = total[..., :-2] / (total[..., -2] / total[..., -1]).clamp_min(1e-30)[..., None]
    return scaled.sum(1).mean(0)
