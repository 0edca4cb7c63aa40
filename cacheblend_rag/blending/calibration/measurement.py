"""What calibration measures on one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from cacheblend_rag.blending.fusor import BlendSchedule, fuse, kv_deviation
from cacheblend_rag.blending.gate import GateSubject, first_token_kl
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import static_deviation
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV, LayerKV

ANSWER_TOKENS: Final = 8
"""Most tokens of an answer whose distributions are compared."""


class PromptMeasurement:
    """One prompt: its answer by full prefill, its chunks' KV, and the deviation of every token at every layer.

    Attributes:
        usable: Whether the prompt has tokens with stale KV at all; the rest is there only if so.
        deviation: KV deviation ``[layers, candidates]``.
        oracle: ``[candidates]``, the deviation of all layers.
    """

    def __init__(
        self,
        subject: GateSubject,
        rope: Rope,
        header: Sequence[int],
        prompt: TokenizedPrompt,
        end_token: int | None,
        probe: Sequence[int] = (),
    ):
        """Run the full prefill and every chunk alone, and behind ``probe`` if there is one; ``end_token`` ends the answer."""
        self._subject, self._rope, self._prompt = subject, rope, prompt
        alone: dict[tuple[int, ...], ChunkKV] = {}
        for ids in {tuple(span.chunk.token_ids) for span in prompt.spans} | ({()} if header else set()):
            _, kv = subject.full_prefill([*header, *ids])
            alone[ids] = _from(kv, len(header) if ids else 0)
            if ids and probe:
                alone[ids] = self._ranked(alone[ids], [*header, *probe], ids)
        self._plan = make_plan(prompt, header, lambda ids: alone[tuple(ids)])
        self.usable = bool(self._plan.stale)
        if not self.usable:
            return
        self._answer: list[int] = []
        self._truth = self._logits(policy("full-recompute"), 1.0, BlendSchedule(), end_token)
        self.deviation = self._deviation()
        normed = self.deviation[1:] / self.deviation[1:].mean(1, keepdim=True).clamp_min(1e-30)
        self.oracle = normed.sum(0)

    def _ranked(self, alone: ChunkKV, before: Sequence[int], ids: Sequence[int]) -> ChunkKV:
        """Return a chunk's KV with its static deviation, as an index holds it."""
        _, whole = self._subject.full_prefill([*before, *ids])
        behind = [LayerKV(k[:, len(before) :], v[:, len(before) :]) for k, v in whole.layers]
        return ChunkKV(alone.layers, alone.start, static=static_deviation(alone, behind, len(before), self._rope))

    def kl(self, chosen: SelectionPolicy, ratio: float, schedule: BlendSchedule) -> float:
        """Return the mean KL, in nats, of a blend against the full prefill, over the answer's first tokens."""
        blended = self._logits(chosen, ratio, schedule, None)
        return float(np.mean([first_token_kl(p, q) for p, q in zip(self._truth, blended, strict=True)]))

    def compare(self, chosen: SelectionPolicy, ratio: float, schedule: BlendSchedule) -> tuple[float, float]:
        """Return :meth:`kl`, and the share of the answer's first tokens that the blend finds likeliest, too."""
        blended = self._logits(chosen, ratio, schedule, None)
        kl = np.mean([first_token_kl(p, q) for p, q in zip(self._truth, blended, strict=True)])
        same = [int(p.argmax()) == int(q.argmax()) for p, q in zip(self._truth, blended, strict=True)]
        return float(kl), float(np.mean(same))

    @property
    def stale(self) -> list[tuple[int, int]]:
        """Where each chunk with stale KV begins and ends: the candidates, in order."""
        return [(span.start, span.end) for span in self._plan.stale]

    def _logits(
        self, chosen: SelectionPolicy, ratio: float, schedule: BlendSchedule, end_token: int | None
    ) -> list[torch.Tensor]:
        """Return the logits of the answer's tokens; the first call answers greedily, later ones are forced to that answer."""
        target = self._subject.target(self._prompt.token_ids, self._rope)
        fuse(self._plan, target, chosen, ratio, schedule)
        found = [self._subject.logits(target)]
        if not self._answer:
            while True:
                token = int(found[-1].argmax())
                self._answer.append(token)
                if token == end_token or len(self._answer) == ANSWER_TOKENS:
                    return found
                found.append(self._subject.decode(target, token))
        found += [self._subject.decode(target, token) for token in self._answer[:-1]]
        return found

    def _deviation(self) -> torch.Tensor:
        """Return ``[layers, candidates]``: stored KV at its place against the full prefill's."""
        _, full = self._subject.full_prefill(self._prompt.token_ids)
        device = full.layers[0].k.device
        rows = []
        with LayerLoader((), self._plan.stale, self._rope, self._subject.num_layers, device) as loader:
            for layer, true in enumerate(full.layers):
                placed = loader.layer(layer)
                assert placed is not None
                fresh = LayerKV(true.k[:, placed.positions], true.v[:, placed.positions])
                rows.append(kv_deviation(fresh, placed.kv))
        return torch.stack(rows).cpu()


class Scored(SelectionPolicy):
    """Takes the tokens of highest given score."""

    name = "scored"

    def __init__(self, scores: torch.Tensor):
        """Score the candidates, ``[candidates]``."""
        self._scores = scores

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the ``count`` tokens of highest score."""
        mask = torch.zeros_like(candidates.positions, dtype=torch.bool)
        mask[top(self._scores, count).to(mask.device)] = True
        return mask


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` highest scores, the earlier of two equal ones first."""
    return torch.argsort(scores, descending=True, stable=True)[:count]


def _from(kv: ChunkKV, start: int) -> ChunkKV:
    # In host memory, as a store hands it out.
    return ChunkKV([LayerKV(k[:, start:].cpu(), v[:, start:].cpu()) for k, v in kv.layers], start)
