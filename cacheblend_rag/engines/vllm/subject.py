"""The model in vLLM's worker as the parity gate drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.blending.rope import Rope, detect_rope
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.engines.vllm.target import PagedTarget
from cacheblend_rag.store.kv import ChunkKV

_ROTATED_TOKENS, _ROTATED_BY = 16, 29


class PagedSubject:
    """See :class:`~cacheblend_rag.blending.gate.GateSubject`. Uses the cache's first blocks: only while no request runs."""

    def __init__(self, paged: PagedModel):
        """Wrap the worker's model."""
        self._paged = paged
        self.num_layers, self.vocab_size, self.dtype = paged.num_layers, paged.vocab_size, paged.dtype

    def _blocks(self, tokens: int) -> range:
        return range(1, 2 + -(-tokens // self._paged.block_size))

    def detect_rope(self) -> Rope:
        """Run the same tokens at two offsets and see how their keys moved."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (_ROTATED_TOKENS,), generator=generator).tolist()
        source = torch.arange(_ROTATED_TOKENS, device=self._paged.device)
        keys = [[x.k for x in self.full_prefill(ids, offset)[1].layers] for offset in (0, _ROTATED_BY)]
        return detect_rope(self._paged.rope_tables(), keys[0], keys[1], source, source + _ROTATED_BY)

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        positions = torch.arange(len(token_ids))
        pages = Pages(self._paged, self._blocks(len(token_ids)), len(token_ids))
        hidden = self._paged.forward(torch.tensor(token_ids), positions, pages, _nothing, rotate_by=offset)
        assert isinstance(hidden, torch.Tensor)
        kv = ChunkKV([self._paged.read(layer, pages.slots) for layer in range(self.num_layers)], offset)
        return self._paged.logits(hidden), kv

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        return PagedTarget(self._paged, rope, token_ids, self._blocks(len(token_ids)))

    def logits(self, target: Any) -> torch.Tensor:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        assert isinstance(target, PagedTarget)
        assert target.hidden is not None
        return self._paged.logits(target.hidden)

    def decode(self, target: Any, tokens: Sequence[int]) -> torch.Tensor:
        """Not needed here: the gate does not decode, and calibration runs on the transformers engine."""
        raise NotImplementedError("Calibrate with the transformers engine; its profile serves every engine.")


def _nothing(layer: int) -> None:
    return
