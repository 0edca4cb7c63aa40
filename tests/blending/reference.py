"""An independent CacheBlend: the model's full forward over every token, with K and V overridden inside attention.

It shares nothing with the library but the definition of the method: no scattered queries, no cache, no placement, no re-rotation
(stale KV is computed directly at its position in the prompt, which relative attention allows) and its own masks. It works for
every family, because the model itself computes q, k and v of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface


@dataclass
class Part:
    """A piece of a prompt: ``kind`` is text, exact (computed in place), stale (computed alone) or missing."""

    ids: list[int]
    kind: str


@dataclass
class _Run:
    stale: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    keep: torch.Tensor | None = None  # [tokens]: stale tokens still recomputed
    is_stale: torch.Tensor | None = None
    checks: dict[int, int] = field(default_factory=dict)  # layer -> how many tokens to keep
    fresh_below: int = 0
    captured: dict[int, tuple[torch.Tensor, ...]] | None = None
    weights: list[torch.Tensor] = field(default_factory=list)  # per layer, [heads, tokens, tokens]
    deviation: dict[int, torch.Tensor] = field(default_factory=dict)


_active: list[_Run] = []


def _attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    run = _active[-1]
    layer = module.layer_idx
    cached = _cached(module, k[0], v[0])
    if run.captured is not None:
        run.captured[layer] = tuple(x.clone() for x in (k[0], v[0], *cached))
    if run.is_stale is not None and layer >= run.fresh_below:
        stale_k, stale_v, *stale_cached = run.stale[layer]
        if layer in run.checks:
            deviation = sum(((a - b) ** 2).sum((0, 2)) for a, b in zip(cached, stale_cached, strict=True))
            run.deviation[layer] = deviation
            deviation = deviation.masked_fill(~run.keep, -1)
            best = sorted(range(len(deviation)), key=lambda i: (-float(deviation[i]), i))[: run.checks[layer]]
            run.keep = torch.zeros_like(run.keep)
            run.keep[best] = True
        frozen = (run.is_stale & ~run.keep)[None, :, None]
        k, v = torch.where(frozen, stale_k, k[0])[None], torch.where(frozen, stale_v, v[0])[None]
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
    if kwargs.get("softcap"):
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None]
    hidden = column > row
    window = kwargs.get("sliding_window")
    if window:
        hidden = hidden | (column <= row - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if kwargs.get("s_aux") is not None:  # gpt-oss: one more key for each head, whose value is 0
        sinks = kwargs["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    run.weights.append(weights[0])
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("reference_blend", _attention)


def _cached(module: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of a layer that the model caches: keys and values, or with MLA every head's rotary key, and the
    latent."""
    latent = getattr(module, "reference_latent", None)
    return (k, v) if latent is None else (k[:1, :, -module.qk_rope_head_dim :], latent)


def _keep_latent(attention: Any, _norm: Any, _inputs: Any, latent: torch.Tensor) -> None:
    attention.reference_latent = latent.view(1, -1, latent.shape[-1])


@contextmanager
def _reference_attention(model: Any, run: _Run) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("reference_blend")
    _active.append(run)
    hooks = []
    for module in model.modules():
        if (norm := getattr(module, "kv_a_layernorm", None)) is not None:
            hooks.append(norm.register_forward_hook(partial(_keep_latent, module)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _active.pop()
        model.set_attn_implementation(before)


def _forward(model: Any, ids: Sequence[int], first_position: int = 0) -> torch.Tensor:
    positions = torch.arange(first_position, first_position + len(ids))[None]
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), position_ids=positions, use_cache=False).logits[0, -1]


_found: WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[int, tuple[torch.Tensor, ...]]]] = WeakKeyDictionary()


def _alone(model: Any, before: list[int], ids: list[int], start: int) -> dict[int, tuple[torch.Tensor, ...]]:
    """Each layer's KV of ``ids`` at position ``start`` behind ``before`` alone; found once for all blends of a model."""
    key = tuple(before), tuple(ids), start
    found = _found.setdefault(model, {})
    if key not in found:
        run = _Run(captured={})
        with _reference_attention(model, run):
            _forward(model, before + ids, start - len(before))
        found[key] = run.captured
    return found[key]


@dataclass
class Result:
    logits: torch.Tensor
    recomputed: list[int]
    deviation: dict[int, torch.Tensor]
    weights: list[torch.Tensor]


def blend(
    model: Any,
    header: list[int],
    parts: Sequence[Part],
    ratio: float,
    check_layers: Sequence[int] = (1,),
    widths: Sequence[float] = (1.0,),
    chosen: Sequence[int] | None = None,
    writer: Any = None,
    behind: Sequence[int] = (),
) -> Result:
    """Blend the prompt made of ``parts``; ``chosen`` fixes the recomputed positions instead of choosing by deviation.

    With a ``writer``, another model, stale KV is what that computes, and with others it is computed ``behind`` them, too.
    """
    ids = [i for part in parts for i in part.ids]
    layers = model.config.get_text_config().num_hidden_layers
    is_stale = torch.zeros(len(ids), dtype=torch.bool)
    stale: dict[int, list[torch.Tensor]] = {}
    start = 0
    for part in parts:
        end = start + len(part.ids)
        if part.kind == "stale":
            is_stale[start:end] = True
            before = [*header, *behind]
            for layer, tensors in _alone(writer or model, before, part.ids, start).items():
                if layer not in stale:
                    stale[layer] = [x.new_zeros(x.shape[0], len(ids), x.shape[2]) for x in tensors]
                for whole, alone in zip(stale[layer], tensors, strict=True):
                    whole[:, start:end] = alone[:, len(before) :]
        start = end
    is_stale[-1] = False  # the last token's logits are wanted: it is always computed
    total = int(is_stale.sum())
    count = round(ratio * total)
    run = _Run(stale=stale, is_stale=is_stale, keep=is_stale.clone())
    if chosen is not None:
        run.keep = torch.zeros_like(is_stale)
        run.keep[list(chosen)] = True
    elif count == 0:
        run.keep = torch.zeros_like(is_stale)
    elif count < total:
        sizes, size = {}, total
        for layer, width in zip(check_layers, widths, strict=True):
            sizes[layer] = size = min(round(ratio * width * total), size)
        run.checks, run.fresh_below = sizes, min(check_layers)
    assert layers == len(stale) or not total
    with _reference_attention(model, run):
        logits = _forward(model, ids)
    return Result(logits, run.keep.nonzero().squeeze(1).tolist(), run.deviation, run.weights)


def static_deviation(
    model: Any, header: list[int], probe: list[int], ids: list[int], behind: Sequence[int] = ()
) -> torch.Tensor:
    """[tokens]: the KV of ``ids`` behind header and probe against that behind the header, or ``behind`` others, at one place."""
    runs = _Run(captured={}), _Run(captured={})
    for run, before in zip(runs, (header + probe, [*header, *behind]), strict=True):
        with _reference_attention(model, run):
            _forward(model, before + ids, len(header) + len(probe) + len(behind) - len(before))
    fresh, alone = (run.captured for run in runs)
    total = torch.zeros(len(ids), dtype=torch.float64)
    for layer in range(1, len(fresh)):
        for both in zip(fresh[layer][2:], alone[layer][2:], strict=True):
            a, b = (side[:, -len(ids) :].double() for side in both)
            total += ((a - b) ** 2).sum((0, 2)) / (a**2).mean()
    return total / (len(fresh) - 1)


def question_attention(
    model: Any, header: list[int], parts: Sequence[Part], writer: Any = None, behind: Sequence[int] = ()
) -> torch.Tensor:
    """[tokens]: how much the tokens behind the last stale one attend to each, over stored KV; mean over layers, heads, tokens."""
    reused = blend(model, header, parts, 0.0, writer=writer, behind=behind)
    last, start = 0, 0
    for part in parts:
        start += len(part.ids)
        last = start if part.kind == "stale" else last
    return torch.stack([weights[:, last:].mean((0, 1)) for weights in reused.weights]).mean(0)


def int8(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers as they are read back from int8, each row of the last dimension scaled by a power of two."""
    largest = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-300)
    scale = 2.0 ** (largest / 127).log2().ceil()
    return ((x.double() / scale).round() * scale).to(x.dtype)


def reuse_int8(model: Any, parts: Sequence[Part], exact: Sequence[Any]) -> torch.Tensor:
    """Full reuse of header and chunks whose KV, given as it was computed, was stored as :func:`int8`; logits ``[vocab]``.

    Keys are then rotated on by the formula of plain RoPE over halves.
    """
    ids = [i for part in parts for i in part.ids]
    stored = torch.zeros(len(ids), dtype=torch.bool)
    found: dict[int, list[torch.Tensor]] = {}
    start, given = 0, iter(exact)
    for part in parts:
        end = start + len(part.ids)
        if part.kind != "text":
            stored[start:end] = True
            kv = next(given)
            for layer in range(kv.num_layers):
                k, v = kv.layer(layer)
                whole = found.setdefault(layer, [x.new_zeros(x.shape[0], len(ids), x.shape[2]) for x in (k, v)])
                whole[0][:, start:end] = _rotated(model, int8(k), start - kv.start)
                whole[1][:, start:end] = int8(v)
        start = end
    run = _Run(stale=found, is_stale=stored, keep=torch.zeros_like(stored))
    with _reference_attention(model, run):
        return _forward(model, ids)


def _rotated(model: Any, k: torch.Tensor, by: int) -> torch.Tensor:
    half = k.shape[-1] // 2
    theta = model.config.get_text_config().rope_parameters["rope_theta"]
    angle = by * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = k[..., :half].double(), k[..., half:].double()
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(k.dtype)
