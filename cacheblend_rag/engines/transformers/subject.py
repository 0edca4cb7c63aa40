"""A transformers model as the parity gate and calibration drive it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.blending.rope import Rope, detect_rope, differ
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersTarget
from cacheblend_rag.store.kv import ChunkKV, LayerKV

_ROTATED_TOKENS, _ROTATED_BY = 16, 29


class TransformersSubject:
    """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""

    def __init__(self, runner: ModelRunner):
        """Wrap a runner."""
        self._runner = runner
        self.num_layers, self.dtype, self.window = runner.num_layers, runner.dtype, runner.window
        self.vocab_size = int(runner.model.config.get_text_config().vocab_size)

    def detect_rope(self) -> Rope:
        """Run the same tokens at two offsets and see how their keys moved, and which of the two cached tensors is the key."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (_ROTATED_TOKENS,), generator=generator).tolist()
        source = torch.arange(_ROTATED_TOKENS, device=self._runner.device)
        old, new = (self.full_prefill(ids, offset)[1].layers for offset in (0, _ROTATED_BY))
        # Layer 0's depend on token and position alone. Where only the second moves, the first is MLA's latent.
        if not differ(old[0].k, new[0].k) and differ(old[0].v, new[0].v):
            self._runner.latent_first = True
            old, new = (tuple(LayerKV(x.v, x.k) for x in side) for side in (old, new))
        keys = [[x.k for x in side] for side in (old, new)]
        return detect_rope(self._runner.rope_tables(), keys[0], keys[1], source, source + _ROTATED_BY)

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        cache = self._runner.new_cache(len(token_ids))
        logits = self._runner.append(torch.tensor([token_ids], device=self._runner.device), cache, offset)[0]
        return logits, ChunkKV([cache.read(i, 0, 0, len(token_ids)) for i in range(self.num_layers)], offset)

    def fits(self, tokens: int) -> bool:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        return True

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        return TransformersTarget(self._runner, rope, token_ids)

    def logits(self, target: BlendTarget) -> torch.Tensor:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        assert isinstance(target, TransformersTarget)
        assert target.logits is not None
        return target.logits

    def decode(self, target: BlendTarget, tokens: Sequence[int]) -> torch.Tensor:
        """See :class:`~cacheblend_rag.blending.gate.GateSubject`."""
        assert isinstance(target, TransformersTarget)
        return self._runner.follow(torch.tensor([list(tokens)], device=self._runner.device), target.cache)[0]
