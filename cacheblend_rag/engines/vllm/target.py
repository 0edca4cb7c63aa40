"""A request in vLLM's paged cache as the fusor drives it, and the model as the parity gate drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

from cacheblend_rag.blending.rope import Move, Rope
from cacheblend_rag.engines.vllm.attention import WatchedPass
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.store.kv import LayerKV


def all_ranks(ok: bool) -> bool:
    """Return whether ``ok`` holds on every tensor-parallel rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return ok
    votes = torch.tensor([int(ok)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over all tensor-parallel ranks."""
    total: torch.Tensor = tensor_model_parallel_all_reduce(values)
    return total


class PagedTarget:
    """One prompt being blended into its blocks; a :class:`~cacheblend_rag.blending.target.BlendTarget`."""

    def __init__(self, paged: PagedModel, rope: Rope, token_ids: Sequence[int], pages: Pages):
        """Fill ``pages`` with the KV of ``token_ids``."""
        self._paged, self.rope, self._pages = paged, rope, pages
        self._ids = torch.tensor(token_ids)
        self.num_layers, self.device = paged.num_layers, paged.device
        self.hidden: torch.Tensor | None = None

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`."""
        slots = self._pages.on_device[self._paged.group_of[layer]]
        self._paged.place(layer, kv, move, slots[positions])

    def forward(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], stop_layer: int | None = None
    ) -> LayerKV | None:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`."""
        result = self._paged.forward(self._ids[positions], positions, self._pages, before_layer, stop_layer)
        if isinstance(result, LayerKV):
            return result
        self.hidden = result
        return None

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> WatchedPass:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`. Nothing is written: positions without blocks may be run."""
        return WatchedPass(self._paged, self._ids, self._pages, before_layer, watch_from)

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`."""
        return self._paged.segment(positions, most)

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; each holds its own KV heads."""
        return sum_over_ranks(deviation)

    def agree(self, ok: bool) -> bool:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`."""
        return all_ranks(ok)
