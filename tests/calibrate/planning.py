"""Plans prompts from KV computed on the spot, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.blending.gate import cut
from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.static import static_deviation
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV


class ChunksAlone:
    """Computes each chunk's KV behind a header once, and ranks the chunk behind a probe if there is one."""

    def __init__(self, subject: Any, rope: Any, header: Sequence[int], probe: Sequence[int] = ()):
        self._subject, self._rope, self._header, self._probe = subject, rope, list(header), list(probe)
        self._kv: dict[tuple[int, ...], ChunkKV] = {}

    def __call__(self, prompt: TokenizedPrompt) -> BlendPlan:
        return make_plan(prompt, self._header, lambda ids: self._alone(tuple(ids)))

    def _alone(self, ids: tuple[int, ...]) -> ChunkKV:
        if ids not in self._kv:
            alone = cut(self._subject.full_prefill([*self._header, *ids])[1], len(self._header) if ids else 0)
            if ids and self._probe:
                before = [*self._header, *self._probe]
                behind = cut(self._subject.full_prefill([*before, *ids])[1], len(before))
                alone = alone.ranked(static_deviation(alone, behind.layers, behind.start, self._rope))
            self._kv[ids] = alone
        return self._kv[ids]
