"""Applies a KV writer to vLLM's modules, each of which joins a rank's shares of several linear modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear

from cacheblend_rag.engines.vllm.target import sum_over_ranks
from cacheblend_rag.engines.writer import KVWriter, Part, Writing, add, unusable
from cacheblend_rag.store.kv import WrittenBy


@dataclass(frozen=True)
class _Rows:
    """Holds which of the ``total`` output rows of a linear module a rank computes: ``count`` rows from ``first`` on."""

    total: int
    first: int
    count: int


def writing_on(model: Any, name: WrittenBy, dtype: torch.dtype, device: torch.device) -> Writing:
    """Return the context manager that applies the KV writer ``name`` to this rank's share of a model.

    Raises:
        InputError: The writer cannot be read, has changed, or adds to a module that the model lacks.
    """
    writer = KVWriter.read(name.directory)
    if writer.name != name:
        raise unusable(name.directory, "it has changed since this engine was started; start it again")
    left = dict(writer.parts)
    together = getattr(model, "packed_modules_mapping", {})
    hooks: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
    for path, module in model.named_modules():
        above, _, last = path.rpartition(".")
        if not isinstance(module, LinearBase):
            continue
        parts = [left.pop(f"{above}.{each}", None) for each in together.get(last, [last])]
        if any(part is not None for part in parts):
            if (joined := _joined(module, parts)) is None:
                raise unusable(name.directory, f"vLLM's {path} is of another size")
            a, b = (each.to(device, dtype) for each in joined)
            hooks.append((module, partial(add, a, b, over_ranks=_over_ranks(module))))
    if left:
        raise unusable(name.directory, f"vLLM's model has no linear module for {min(left)}")
    return Writing(hooks)


def _joined(module: Any, parts: Sequence[Part | None]) -> Part | None:
    """Return the part to add to this rank's share of vLLM's module, with ``b`` transposed; None if sizes do not fit.

    ``parts`` holds a part, or None, for each of the joined modules; one module in transformers may be several modules
    here.
    """
    rows = _rows(module)
    if len(parts) == 1 and len(rows) > 1 and parts[0] is not None and len(parts[0].b) == sum(r.total for r in rows):
        parts = [Part(parts[0].a, b) for b in torch.split(parts[0].b, [r.total for r in rows])]
    if len(parts) != len(rows):
        return None
    share = module.input_size // (module.tp_size if isinstance(module, RowParallelLinear) else 1)
    lower, upper = [], []
    for part, mine in zip(parts, rows, strict=True):
        if part is None:
            upper.append(torch.zeros(0, mine.count))
        elif (len(part.b), part.a.shape[1]) == (mine.total, module.input_size):
            begin = module.tp_rank * share if share < module.input_size else 0
            lower.append(part.a[:, begin : begin + share])
            upper.append(part.b[mine.first : mine.first + mine.count].T)
        else:
            return None
    return Part(torch.cat(lower), torch.block_diag(*upper))  # type: ignore[no-untyped-call]


def _rows(module: Any) -> list[_Rows]:
    """Return this rank's rows of each linear module that vLLM's module joins."""
    rank, ranks = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        key_rank = rank // module.num_kv_head_replicas  # with fewer KV heads than ranks, neighbours share one
        heads, keys, size = module.num_heads, module.num_kv_heads, module.head_size
        sections = [(module.total_num_heads, heads, rank, size)]
        sections += [(module.total_num_kv_heads, keys, key_rank, each) for each in (size, module.v_head_size)]
        return [_Rows(total * size, at * count * size, count * size) for total, count, at, size in sections]
    if isinstance(module, (ReplicatedLinear, RowParallelLinear)):
        return [_Rows(module.output_size, 0, module.output_size)]
    sizes = getattr(module, "output_sizes", [module.output_size])
    return [_Rows(size, rank * (size // ranks), size // ranks) for size in sizes]


def _over_ranks(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the sum over ranks if each rank has a share of the input and the output is already summed; else None."""
    adds_up = isinstance(module, RowParallelLinear) and module.tp_size > 1 and module.reduce_results
    return sum_over_ranks if adds_up else None
