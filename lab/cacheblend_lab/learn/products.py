"""Multiplies with frozen weights at little memory and time, with a LoRA or without one.

Weights of a model that was published in bf16 are held in bf16 and widened block by block, which is exact. A LoRA is
added to each block before the product, so that the LoRA needs no products over all tokens of its own. For gradients, a
writer's layer keeps the results of its linear modules and of its attention; the rest of the layer is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cacheblend_rag.engines.transformers.attention import QUERIES

_BLOCK: Final = 1 << 22
"""Weights of a block: few enough for a CPU's cache."""


@torch.library.custom_op("cacheblend_lab::product", mutates_args=())
def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the output of a linear module, with a LoRA that adds ``scale * up @ down`` to the weight.

    Gradients reach ``x``, ``down`` and ``up`` only.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = flat.new_empty(len(flat), len(weight))
    for rows, block in _blocks(weight, down, up, scale, x.dtype):
        torch.mm(flat, block.T, out=out[:, rows])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


def _blocks(
    weight: torch.Tensor, down: torch.Tensor | None, up: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the sum of weight and LoRA in ``dtype``, block by block; the next block overwrites the last one."""
    if weight.dtype == dtype and down is None:
        yield slice(0, len(weight)), weight
        return
    height = max(1, _BLOCK // weight.shape[1])
    room = weight.new_empty(min(height, len(weight)), weight.shape[1], dtype=dtype)
    for begin in range(0, len(weight), height):
        rows = slice(begin, min(begin + height, len(weight)))
        block = room[: rows.stop - begin].copy_(weight[rows])
        if down is not None and up is not None:
            block.addmm_(up[rows], down, alpha=scale)
        yield rows, block


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, down, up, ctx.scale = inputs
    ctx.save_for_backward(None if down is None else x, weight, down, up)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, down, up = ctx.saved_tensors
    flat = grad.reshape(-1, grad.shape[-1])
    to_x = to_down = to_up = None
    if ctx.needs_input_grad[0]:
        to_x = flat.new_empty(len(flat), weight.shape[1])
        for rows, block in _blocks(weight, down, up, ctx.scale, grad.dtype):
            to_x.addmm_(flat[:, rows], block, beta=float(rows.start > 0))
        to_x = to_x.view(*grad.shape[:-1], -1)
    if down is not None:
        seen = x.reshape(-1, x.shape[-1])
        to_down = ctx.scale * ((flat @ up).T @ seen)
        to_up = ctx.scale * (flat.T @ (seen @ down.T))
    return to_x, None, None, to_down, to_up, None


product.register_autograd(_gradients, setup_context=_keep)


class NarrowLinear(nn.Linear):
    """Computes in its input's dtype with weights in bf16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        return product(input, self.weight, self.bias, None, None, 0.0)  # type: ignore[no-any-return]


def hold_narrow(model: nn.Module) -> None:
    """Hold the weights of a model's linear modules in bf16 where bf16 represents them exactly, and freeze these."""
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    others = [module for module in model.modules() if type(module) is not nn.Linear]
    shared = {id(tensor) for module in others for tensor in module.parameters(recurse=False)}
    for module in linear:
        narrow = module.weight.data.bfloat16()
        if id(module.weight) not in shared and torch.equal(narrow.to(module.weight.dtype), module.weight.data):
            module.weight.requires_grad_(False).data = narrow
            module.__class__ = NarrowLinear


def make_frugal(writing: Any) -> None:
    """Let a model with peft's LoRA multiply with :func:`product`, and compute parts of its layers again for gradients."""
    depth = writing.config.get_text_config().num_hidden_layers
    lists = (each for each in writing.modules() if isinstance(each, nn.ModuleList) and len(each) == depth)
    for layer in next(lists, ()):
        layer.forward = partial(_again, layer.forward)
    for module in writing.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            module.forward = partial(_with_lora, module)


def _with_lora(module: Any, x: torch.Tensor) -> torch.Tensor:
    base, (name,) = module.base_layer, module.active_adapters
    return product(  # type: ignore[no-any-return]
        x, base.weight, base.bias, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]
    )


_KEPT: Final = {
    torch.ops.cacheblend_lab.product.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _again(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    queries = QUERIES.get()

    def run(*given: Any, **named: Any) -> Any:
        token = QUERIES.set(queries)  # gradients are computed outside the pass
        try:
            return forward(*given, **named)
        finally:
            QUERIES.reset(token)

    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)
