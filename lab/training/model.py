"""Defines a minimal Llama for training on CPU, with a bf16 residual stream and one attention call per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from training.batches import BIND_LAYER


@dataclass(frozen=True)
class ModelShape:
    """Holds the sizes of the model."""

    vocabulary: int
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 512
    theta: float = 1e6
    eps: float = 1e-5
    context: int = 8192

    def llama_config(self) -> dict[str, Any]:
        """Return the keyword arguments of `transformers.LlamaConfig` for this shape."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
        }


def rope_table(positions: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each positions.shape + (head_dim,), fp32."""
    inverse = 1.0 / (shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    angles = positions.float()[..., None] * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` (..., tokens, head_dim) by the table of its positions."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class RMSNorm(nn.Module):
    """Divides by the root mean square and multiplies by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Holds the projections of grouped-query attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)


class MLP(nn.Module):
    """Computes the SwiGLU feed-forward block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Computes one decoder layer, in two parts that a blended prefill calls separately."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unrotated queries, keys and values, each (batch, heads, tokens, head_dim)."""
        batch, tokens, _ = x.shape
        h = self.input_layernorm(x)
        parts = (self.self_attn.q_proj(h), self.self_attn.k_proj(h), self.self_attn.v_proj(h))
        q, k, v = (p.view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2) for p in parts)
        return q, k, v

    def finish(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend (causally without a mask) and apply the MLP; return the layer's output, shaped like `x`."""
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.self_attn.o_proj(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)))


class DemoModel(nn.Module):
    """Computes a Llama with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = [Layer(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, ids: Tensor, positions: Tensor, keep: tuple[int, ...] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the model.

        Args:
            ids: Token ids, (batch, tokens).
            positions: Positions of the tokens, (batch, tokens).
            keep: Layers whose input is returned, too.

        Returns:
            The normalised hidden states (batch, tokens, hidden), and the inputs of the layers in `keep`.
        """
        x = self.embed_tokens(ids)
        cos, sin = rope_table(positions, self.shape)
        if torch.is_autocast_enabled("cpu"):
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        cos, sin = cos[:, None], sin[:, None]
        kept = {}
        for index, layer in enumerate(self.blocks):
            if index in keep:
                kept[index] = x
            q, k, v = layer.qkv(x)
            x = layer.finish(x, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.norm(x), kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits, (..., vocabulary), of normalised hidden states, (..., hidden)."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def _semi_orthogonal(rows: int, columns: int) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))[0]
    return q.T.contiguous() if rows < columns else q


@torch.no_grad()
def initialise(model: DemoModel) -> None:
    """Initialise the weights so that the model learns retrieval within a few million tokens.

    Layer 0 starts with heads that attend to the previous token and to the token before the previous one (through RoPE,
    keyed on a constant embedding channel). The later layers start with heads that match the previous tokens (induction)
    and heads that match equal tokens. Values pass nearly unchanged through value and output projections. With a
    standard initialisation, a model of this size does not learn the task.
    """
    shape = model.shape
    dim, half, groups = shape.head_dim, shape.head_dim // 2, shape.heads // shape.kv_heads
    std, constant, same, out_gain = 0.25, 2.0, 0.5, 0.15
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "proj" in name:
            gain = 0.3 if "o_proj" in name else 0.09 if "down_proj" in name else 1.0
            nn.init.normal_(parameter, 0.0, gain / math.sqrt(parameter.shape[1]))
    model.embed_tokens.weight.normal_(0, std)
    model.embed_tokens.weight[:, 0] = constant * std
    model.norm.weight.fill_(0.1)
    inverse = 1.0 / (shape.theta ** (torch.arange(0, dim, 2).float() / dim))
    fast = torch.tensor([5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 2.0, 1.5, 1.5])
    previous_value, previous_out = _semi_orthogonal(dim, shape.hidden), _semi_orthogonal(shape.hidden, dim)
    previous_value[:, 0] = 0
    for index, layer in enumerate(model.blocks):
        attention = layer.self_attn
        for kv in range(shape.kv_heads):
            rows = slice(kv * dim, (kv + 1) * dim)
            special = kv == 0
            value, match = _semi_orthogonal(dim, shape.hidden), _semi_orthogonal(dim, shape.hidden)
            key = match * same**0.5
            amplitude = torch.zeros(half)
            if special and index == 0:
                value = previous_value
                amplitude[: len(fast)] = fast
                key = 0.02 * torch.randn(dim, shape.hidden)
                key[:, 0] = torch.cat([amplitude, torch.zeros(half)]) / constant * 0.9
            elif special:
                key = previous_out.T
            attention.v_proj.weight[rows], attention.k_proj.weight[rows] = value, key
            for offset in range(groups):
                columns = slice((kv * groups + offset) * dim, (kv * groups + offset + 1) * dim)
                query, out = match * same**0.5, out_gain * value.T
                if special and index == 0:
                    turn = inverse * (offset + 1)
                    query = 0.02 * torch.randn(dim, shape.hidden)
                    query[:, 0] = torch.cat([amplitude * turn.cos(), -amplitude * turn.sin()]) / constant * 0.9
                    out = std * (previous_out if offset == 0 else _semi_orthogonal(shape.hidden, dim))
                elif special:
                    query = previous_value
                elif index == 0:
                    out = out_gain * _semi_orthogonal(shape.hidden, dim)
                if offset and index:
                    # Heads that share keys and values and begin equal would have equal gradients, and stay equal.
                    query = (query + query.std() * torch.randn_like(query)) / math.sqrt(2)
                attention.q_proj.weight[columns] = query
                attention.o_proj.weight[:, columns] = out


@torch.no_grad()
def grow(finished: DemoModel, layers: int) -> DemoModel:
    """Return a model with more layers and unchanged outputs.

    The new layers add nothing to the residual stream at first (their output projections are zero). The first new layer
    is directly behind layer `BIND_LAYER`, where a second look-up can happen; the others alternate with the next old
    layers.

    Raises:
        ValueError: `layers` is smaller than the model's number of layers, or larger than the number of places allows.
    """
    old, first = finished.shape.layers, BIND_LAYER + 1
    added = layers - old
    if not 0 <= added <= old - first:
        raise ValueError(f"A model of {old} layers grows to at most {2 * old - first} and not to {layers}.")
    model = DemoModel(replace(finished.shape, layers=layers))
    initialise(model)
    model.embed_tokens.load_state_dict(finished.embed_tokens.state_dict())
    model.norm.load_state_dict(finished.norm.state_dict())
    places = iter(model.blocks)
    for index, layer in enumerate(finished.blocks):
        if first <= index < first + added:
            new = next(places)
            new.self_attn.o_proj.weight.zero_()
            new.mlp.down_proj.weight.zero_()
        next(places).load_state_dict(layer.state_dict())
    return model
