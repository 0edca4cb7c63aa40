"""A request in vLLM's paged cache as the fusor drives it, and the model as the parity gate drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.fusor import BlendTarget
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.rope import Rope, detect_rope

_PROBE_TOKENS, _PROBE_OFFSET = 16, 29


def all_ranks(ok: bool) -> bool:
    """Return whether ``ok`` holds on every tensor-parallel rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return ok
    votes = torch.tensor([int(ok)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)


class PagedTarget:
    """One prompt being blended into its blocks; a :class:`~cacheblend_rag.fusor.BlendTarget`."""

    def __init__(self, paged: PagedModel, rope: Rope, token_ids: Sequence[int], block_ids: Sequence[int]):
        """Fill ``block_ids`` with the KV of ``token_ids``."""
        self._paged, self.rope, self._blocks = paged, rope, tuple(block_ids)
        self._ids = torch.tensor(token_ids, device=paged.device)
        self.num_layers, self.device = paged.num_layers, paged.device
        self._slots: dict[int, torch.Tensor] = {}
        self.hidden: torch.Tensor | None = None

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor) -> None:
        """See :class:`~cacheblend_rag.fusor.BlendTarget`."""
        slots = self._slots.get(len(positions))  # the exact part alone, or all: the same positions in every layer
        if slots is None:
            slots = self._slots[len(positions)] = self._paged.slots(self._blocks, positions).to(self.device)
        self._paged.write(layer, kv, slots)

    def forward(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], stop_layer: int | None = None
    ) -> LayerKV | None:
        """See :class:`~cacheblend_rag.fusor.BlendTarget`."""
        result = self._paged.forward(self._ids[positions], positions, self._blocks, before_layer, stop_layer)
        if isinstance(result, LayerKV):
            return result
        self.hidden = result
        return None

    def segments(self, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :class:`~cacheblend_rag.fusor.BlendTarget`."""
        return self._paged.segments(positions)

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; each holds its own KV heads."""
        total: torch.Tensor = tensor_model_parallel_all_reduce(deviation)
        return total

    def agree(self, ok: bool) -> bool:
        """See :class:`~cacheblend_rag.fusor.BlendTarget`."""
        return all_ranks(ok)


class PagedSubject:
    """See :class:`~cacheblend_rag.gate.GateSubject`. Uses the cache's first blocks: only while no request runs."""

    def __init__(self, paged: PagedModel):
        """Wrap the worker's model."""
        self._paged = paged
        self.num_layers, self.vocab_size, self.dtype = paged.num_layers, paged.vocab_size, paged.dtype

    def _blocks(self, tokens: int) -> range:
        return range(1, 2 + -(-tokens // self._paged.block_size))

    def detect_rope(self) -> Rope:
        """Run the same tokens at two offsets and see how their keys moved."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (_PROBE_TOKENS,), generator=generator).tolist()
        source = torch.arange(_PROBE_TOKENS, device=self._paged.device)
        keys = [[x.k for x in self.full_prefill(ids, offset)[1].layers] for offset in (0, _PROBE_OFFSET)]
        return detect_rope(self._paged.rope_tables(), keys[0], keys[1], source, source + _PROBE_OFFSET)

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        """See :class:`~cacheblend_rag.gate.GateSubject`."""
        positions = torch.arange(len(token_ids))
        blocks = self._blocks(len(token_ids))
        hidden = self._paged.forward(torch.tensor(token_ids), positions, blocks, _nothing, rotate_by=offset)
        assert isinstance(hidden, torch.Tensor)
        slots = self._paged.slots(blocks, positions)
        kv = ChunkKV([self._paged.read(layer, slots) for layer in range(self.num_layers)], offset)
        return self._paged.logits(hidden), kv

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        """See :class:`~cacheblend_rag.gate.GateSubject`."""
        return PagedTarget(self._paged, rope, token_ids, self._blocks(len(token_ids)))

    def logits(self, target: Any) -> torch.Tensor:
        """See :class:`~cacheblend_rag.gate.GateSubject`."""
        assert isinstance(target, PagedTarget)
        assert target.hidden is not None
        return self._paged.logits(target.hidden)

    def decode(self, target: Any, token: int) -> torch.Tensor:
        """Not needed here: the gate does not decode, and calibration runs on the transformers engine."""
        raise NotImplementedError("Calibrate with the transformers engine; its profile serves every engine.")


def _nothing(layer: int) -> None:
    return
