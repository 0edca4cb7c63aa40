"""Measuring static deviations: chunks once more, behind a probe whose KV is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import static_deviation
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.store.kv import LayerKV, StoredKV


class Ranker:
    """Ranks the tokens of chunks that are computed behind one header; see :mod:`cacheblend_rag.blending.static`."""

    def __init__(self, runner: ModelRunner, rope: Rope, header: Sequence[int], probe: Sequence[int]):
        """Compute nothing yet: the probe's KV is made when it is first needed."""
        self._runner, self._rope = runner, rope
        self.prefix = (*header, *probe)
        self._prefix_kv: list[LayerKV] = []

    def rank(self, batch: Sequence[tuple[int, ...]], alone: Sequence[StoredKV]) -> list[torch.Tensor]:
        """Return each chunk's static deviation ``[tokens]``.

        Args:
            batch: Token ids of chunks of like length.
            alone: Their KV, computed behind the header.
        """
        start, width = len(self.prefix), max(map(len, batch))
        # Padding stands behind each row, where causal attention never looks from: no mask is needed.
        ids = torch.tensor([row + (0,) * (width - len(row)) for row in batch], device=self._runner.device)
        cache = self._runner.new_cache(start + width, room=0)
        cache.begin(self._kv_of_prefix(), len(batch))
        self._runner.append(ids, cache)
        found = []
        for index, (row, kv) in enumerate(zip(batch, alone, strict=True)):
            behind = [cache.read(i, index, start, start + len(row)) for i in range(self._runner.num_layers)]
            found.append(static_deviation(kv, behind, start, self._rope))
        return found

    def _kv_of_prefix(self) -> list[LayerKV]:
        if not self._prefix_kv:
            count = len(self.prefix)
            cache = self._runner.new_cache(count, room=0)
            self._runner.append(torch.tensor([self.prefix], device=self._runner.device), cache)
            self._prefix_kv = [cache.read(layer, 0, 0, count) for layer in range(self._runner.num_layers)]
        return self._prefix_kv
